"""
Configs and cards on the Hub.

A published config is data that others run: what is secret, names this machine or loads code neither leaves nor
comes in.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import transformers
import trl
import yaml
from huggingface_hub import HfApi, ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers.utils import logging

from . import __version__
from .errors import ConfigurationError, HubError, TRLDARTSError
from .fields import read_yaml
from .hub_connection import CONFIG_NAME, check_hub


logger = logging.get_logger(__name__)  # not accelerate's, whose state does not exist yet where a script begins

Config = TypeVar("Config", bound="PublishedConfig")

SCHEME = "hf://"
CARD_NAME = "README.md"
CARD_TEMPLATE = Path(__file__).with_name("config_card.md")
CHECKSUM = "darts_config_sha256"  # on the card, of the file that the card was written for
MAX_BYTES = 65_536  # a config with every field is a tenth of it

WITHHELD = (  # patterns of names: of fields, and of keys inside of them
    *("*_dir", "resume_from_checkpoint", "latency_curve", "length_history", "data_files"),  # paths
    *("vllm_server_base_url", "vllm_server_host", "*_port"),  # addresses
    *("vllm_tail_*", "tail_switch_at", "tail_share"),  # which servers there are, and how fast
    *("*token", "*api_key", "*password", "*secret"),
    *("*hub*", "report_to", "run_name", "project", "trackio_*"),  # accounts, and what is sent to them
    *("local_rank", "deepspeed", "fsdp*", "parallelism_config", "debug"),  # how one machine launches
    *("env", "trust_remote_code", "model_init_kwargs", "optim_args", "custom_generate"),  # ways to load code
)
HUB_NAMES = ("model_name_or_path", "reward_model_name_or_path", "dataset_name")
FOREIGN_CODE = {  # import paths, and attention kernels of others than transformers itself trusts
    "reward_funcs": re.compile(r"\."),
    "attn_implementation": re.compile(r"^(?!(paged\|)?kernels-community/).*/"),
}
SECRET = re.compile(  # tokens by the forms of their issuers, an account in a URL, and KEY=value
    r"(?<![A-Za-z0-9])(?:(?:hf|api_org|gh[pousr]|github_pat|[rs]k_live)_\w{16,}|(?:sk|nvapi|glpat|xox[bp])-[\w-]{16,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.)|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s@]+@"
    r"|(?i:bearer\s+[\w.~+/-]{12,}|(?:key|token|secret|password)[\"']?\s*(?:=|:(?=\s*\S*\d))\s*[\"']?[^\s\\(\[{<$]{8,})"
)
PATH = re.compile(  # `/no_think` is a word to some models, and `A:\frac` is LaTeX
    r"(?:^|(?<=[\s\"'`(=,]))(?:(?:~|\.\.?)/|/[\w.-]+/|[A-Za-z]:[\\/][\w.-]+[\\/])|/(?:home|Users|root)/|\bfile:/"
)


@dataclass(frozen=True)
class Pulled:
    """A config in the Hub's cache: its file, `hf://org/name@commit`, and its values by field name."""

    path: Path
    address: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Pushed:
    """The commit that a push made, where to look at it, and the fields that were set and stayed here."""

    commit: str
    url: str
    left_out: list[str]


class PublishedConfig:
    """
    A config that can be saved, published and taken from the Hub, in the manner of transformers. Its `origin` is
    `hf://org/name@commit` if it was made of a published one: no field, but named on the card of the trained model.
    """

    origin: str | None = None
    _given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Before anything is filled in: what differs from a default now was set by someone.
        self._given = tuple(name for name, default in field_defaults(self).items() if getattr(self, name) != default)
        super().__post_init__()  # type: ignore[misc]  # of the dataclasses that this one is mixed into

    @property
    def given_fields(self) -> dict[str, Any]:
        """Fields that were set when the config was made, with their values now, as YAML has them."""
        return {name: _plain(getattr(self, name)) for name in self._given}

    @classmethod
    def from_pretrained(
        cls: type[Config],
        pretrained_name_or_path: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        **overrides: Any,
    ) -> Config:
        """
        A published config.

        Args:
            pretrained_name_or_path (`str` or `Path`):
                Name on the Hub, such as `"org/name"` or `"org/name@revision"`, a directory of [`save_pretrained`],
                or a file of `trl-darts config pull`.
            revision (`str`, *optional*):
                Branch, tag or commit on the Hub, if the name has none.
            token (`str` or `bool`, *optional*):
                Of the Hub. Defaults to the one of `hf auth login` or `HF_TOKEN`.
            overrides:
                Fields that win over the config's. What never leaves a machine, such as `output_dir` and
                `vllm_server_base_url`, is set here.

        Returns:
            `PublishedConfig`: One of this class. What the config says of the model and the data set is not part of
            it, and is named in a warning.

        Raises:
            [`ConfigurationError`]: If it is missing, or refused; see `docs/recipes.md`.
            [`HubError`]: If the Hub can't be reached, or knows no such config.
        """
        path, origin = Path(pretrained_name_or_path), None
        if path.exists():
            data = _read_published(path / CONFIG_NAME if path.is_dir() else path, str(path))
        else:
            pulled = pull_config(str(pretrained_name_or_path), revision=revision, token=token)
            data, origin = pulled.data, pulled.address
        known = field_defaults(cls)
        others = {name: value for name, value in data.items() if name not in known}
        for name in others:
            if close := get_close_matches(name, known, n=1, cutoff=0.85):
                raise ConfigurationError(
                    f"`{pretrained_name_or_path}`: `{name}` is no field of {cls.__name__}. Did you mean `{close[0]}`?"
                )
        if others:
            logger.warning(f"`{pretrained_name_or_path}` also sets {others}, which is for the training script.")
        config = cls(**{**{name: value for name, value in data.items() if name in known}, **overrides})
        config.origin = origin
        return config

    def save_pretrained(self, save_directory: str | Path, *, measured: str | None = None) -> list[str]:
        """
        Writes `darts_config.yaml` and its card.

        Args:
            save_directory (`str` or `Path`):
                Made if there is none.
            measured (`str`, *optional*):
                What the card says of its effect.

        Returns:
            `list[str]`: Fields that are set and not in the file: secrets, and what names this machine.

        Raises:
            [`ConfigurationError`]: If a field has a value that must not be published.
            [`HubError`]: If the directory has a card that is not a config's.
        """
        directory = Path(save_directory)
        if (directory / CARD_NAME).exists() and _checksum_on(directory / CARD_NAME) is None:
            raise HubError(f"`save_directory` ({str(directory)!r}) has another {CARD_NAME}. Choose another directory.")
        return _write(directory, directory.name, CONFIG_NAME, self.given_fields, measured)

    def push_config_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload config",
        measured: str | None = None,
    ) -> Pushed:
        """
        Publishes this config, with the arguments of [`push_config`]. It is not called `push_to_hub` because that is a
        field of [`~transformers.TrainingArguments`], which trainers read.
        """
        options: dict[str, Any] = {"private": private, "revision": revision, "token": token, "measured": measured}
        return push_config(self.given_fields, repo_id, commit_message=commit_message, **options)


def push_config(
    data: dict[str, Any],
    repo_id: str,
    *,
    without: Sequence[str] = (),
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    commit_message: str = "Upload config",
    measured: str | None = None,
) -> Pushed:
    """
    Publishes a config as `darts_config.yaml` with a card, in one commit. See `docs/recipes.md` for what never leaves.

    Args:
        data (`dict[str, Any]`):
            Values by field name, of the trainer's, the model's and the script's arguments.
        repo_id (`str`):
            Repository, such as `"org/name"`. It is made if there is none.
        without (`Sequence[str]`, *optional*):
            Fields of `data` to leave out. The card says that they are to be set.
        private (`bool`, *optional*):
            Whether a new repository is private, and one that exists must be. Defaults to the organization's rule.
        revision (`str`, *optional*):
            Branch to commit to, made if there is none. Defaults to `"main"`.
        token (`str` or `bool`, *optional*):
            Of the Hub. Defaults to the one of `hf auth login` or `HF_TOKEN`.
        commit_message (`str`, *optional*, defaults to `"Upload config"`):
            Of the commit.
        measured (`str`, *optional*):
            What the card says of its effect: hardware, data, figures.

    Returns:
        [`Pushed`]: The commit, and which fields were left out.

    Raises:
        [`ConfigurationError`]: If a field has a value that must not leave. Nothing was sent then.
        [`HubError`]: If the Hub can't be reached or refuses, if the repository's card is not a config's, or if it is
            public and must not be.
    """
    check_published({"commit_message": commit_message, "revision": revision})
    api = HfApi(token=token)
    with TemporaryDirectory() as directory, _hub_errors(repo_id, revision):
        name = repo_id if revision is None else f"{repo_id}@{revision}"
        left_out = _write(Path(directory), name, SCHEME + name, data, measured, without)
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        state = api.repo_info(repo_id, revision=revision)
        if private and not state.private:
            raise HubError(f"`private` (True) must hold for {repo_id!r}, which exists and is public. Choose another.")
        has_card = api.file_exists(repo_id, CARD_NAME, revision=state.sha)
        if has_card and _checksum_on(api.hf_hub_download(repo_id, CARD_NAME, revision=state.sha)) is None:
            raise HubError(f"`repo_id` ({repo_id!r}) has another {CARD_NAME}, such as a model's. Choose another name.")
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=directory,
            commit_message=commit_message,
            revision=revision,
            parent_commit=state.sha,  # what was checked must still be there
        )
    return Pushed(commit.oid, commit.commit_url, left_out)


def pull_config(repo_id: str, *, revision: str | None = None, token: str | bool | None = None) -> Pulled:
    """
    Fetches a config into the Hub's cache, and checks it. `repo_id` may have its revision, `"org/name@revision"`; only
    a whole commit hash names the same file for good. A warning says if it is not the one its card was written for.
    """
    repo_id, _, own = repo_id.removeprefix(SCHEME).partition("@")
    if own and revision is not None:
        raise ConfigurationError(f"`revision` ({revision!r}) must be left out where the name has one (@{own}).")
    revision = revision or own or None
    check_hub(repo_id, revision, cached=True)
    with _hub_errors(repo_id, revision):
        path = Path(hf_hub_download(repo_id, CONFIG_NAME, revision=revision, token=token))
        commit = path.parent.name
        try:
            expected = _checksum_on(hf_hub_download(repo_id, CARD_NAME, revision=commit, token=token))
        except EntryNotFoundError:
            expected = None
    address = f"{SCHEME}{repo_id}@{commit}"
    data = _read_published(path, address)
    if expected != hashlib.sha256(path.read_bytes()).hexdigest():
        logger.warning(
            f"`{address}`: {CONFIG_NAME} is not the file that its card was written for. Read it before use."
        )
    return Pulled(path, address, data)


def resolve_config_arguments(args: Sequence[str]) -> tuple[list[str], str | None]:
    """
    Pulls the config that `--config hf://org/name[@revision]` names, and puts the local file in its place.

    Args:
        args (`Sequence[str]`):
            Words of a command line, such as `sys.argv[1:]`.

    Returns:
        `tuple[list[str], str | None]`: The same words with a local path, and `hf://org/name@commit`, to be set as the
            config's `origin`; `None` where no config of the Hub is named.

    Raises:
        [`ConfigurationError`]: If the config is refused, see [`pull_config`].
        [`HubError`]: If the Hub can't be reached, or knows no such config.
    """
    words, origin = list(args), None
    for i, word in enumerate(words):
        if words[i - 1 : i] == ["--config"] and word.startswith(SCHEME):
            pulled = pull_config(word)
            words[i], origin = str(pulled.path), pulled.address
            if os.environ.get("RANK", "0") == "0":
                logger.warning(f"`--config {word}` is {origin}. Name that commit to get the same one in each process.")
    return words, origin


def check_published(data: dict[str, Any]) -> None:
    """Refuses names and values that no published config has, also inside of lists and dictionaries."""
    for name, text in _leaves(data):
        if SECRET.search(name) or SECRET.search(text):
            place = "A field's name" if SECRET.search(name) else f"`{name}`"
            raise ConfigurationError(f"{place} holds what looks like a secret. Take it out, and revoke it if seen.")
        remedy = "in a published config. Leave it out, and set it where the training is started."
        if is_withheld(name):
            raise ConfigurationError(f"`{name}` is secret, of one machine or account, or loads code: not {remedy}")
        if PATH.search(text):
            raise ConfigurationError(f"`{name}` ({text!r:.60}) must not name a path {remedy}")
        if name in FOREIGN_CODE and FOREIGN_CODE[name].search(text):
            raise ConfigurationError(f"`{name}` ({text!r:.60}) must not load code {remedy}")
        if name in HUB_NAMES and text:
            try:
                validate_repo_id(text)
            except HFValidationError as error:
                raise ConfigurationError(f"`{name}` ({text!r:.60}) must be a name on the Hub {remedy}") from error


def _write(
    directory: Path, name: str, address: str, data: dict[str, Any], measured: str | None, without: Sequence[str] = ()
) -> list[str]:
    """Writes config and card; the names of the fields that are set and not in there."""
    if absent := [field for field in without if field not in data]:
        raise ConfigurationError(f"`without` ({absent[0]!r:.60}) must be a field that the config sets. Leave it out.")
    left_out = [field for field in data if is_withheld(field) or field in without]
    public = {field: value for field, value in data.items() if field not in left_out}
    check_published(public | {"measured": measured, "without": left_out})
    config = yaml.safe_dump(public, sort_keys=False, allow_unicode=True, width=119)
    dataset = public.get("dataset_name") or ""
    card_data = ModelCardData(
        library_name="trl_darts",
        tags=["trl", "grpo", "darts", "config"],
        base_model=public.get("model_name_or_path"),
        datasets=dataset if "/" in dataset else None,  # others are made by the script
    )
    card_data[CHECKSUM] = hashlib.sha256(config.encode()).hexdigest()
    needed = [field for field in ("model_name_or_path", "dataset_name", "reward_funcs") if field not in public]
    card = ModelCard.from_template(
        card_data,
        template_path=str(CARD_TEMPLATE),
        name=name,
        config=config,
        versions=f"trl_darts {__version__}, TRL {trl.__version__} and transformers {transformers.__version__}",
        left_out=left_out,
        measured=measured,
        address=shlex.quote(address),
        source=name,
        missing=dict.fromkeys([*needed, *without]),
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_NAME).write_text(config, encoding="utf-8")
    card.save(directory / CARD_NAME)
    return left_out


def _read_published(path: Path, source: str) -> dict[str, Any]:
    try:
        data = read_yaml(path)
        # A few lines of aliases stand for gigabytes once someone walks through them.
        tokens = yaml.scan(path.read_text(encoding="utf-8"))
        if path.stat().st_size > MAX_BYTES or any(isinstance(token, yaml.AliasToken) for token in tokens):
            raise ConfigurationError(f"{CONFIG_NAME} must have at most {MAX_BYTES} bytes, and no aliases (`*name`).")
        check_published(data)
    except ConfigurationError as error:
        raise ConfigurationError(f"`{source}` is refused: {error}") from error
    return data


def _checksum_on(card: str | Path) -> str | None:
    """What a card says of the config it was written for; `None` if it is no config's card."""
    try:
        found = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict().get(CHECKSUM)
        return found if isinstance(found, str) else None
    except (ValueError, yaml.YAMLError, RecursionError):
        return None


@contextmanager
def _hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Says in one line what the Hub's client says in several."""
    try:
        yield
    except TRLDARTSError:
        raise
    except HFValidationError as error:
        raise ConfigurationError(f"`repo_id` ({repo_id!r}) must be a name on the Hub such as 'org/name'.") from error
    except (HTTPError, OSError) as error:
        words = " ".join(str(error).split())
        raise HubError(
            f"`repo_id` ({repo_id!r}), `revision` ({revision!r}): {words} Check both names, your token (`hf auth "
            "login`, `HF_TOKEN`) and the network (`HF_ENDPOINT`, `HF_HUB_OFFLINE`)."
        ) from error


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Names, keys and texts, of whatever depth."""
    yield name, value if isinstance(value, str) else ""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner, name)


def is_withheld(name: str) -> bool:
    return any(fnmatch(name.lower(), pattern) for pattern in WITHHELD)


def field_defaults(config: Any) -> dict[str, Any]:
    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(config)}


def _plain(value: Any) -> Any:
    """As YAML has it: enumerations as their values, transformers' settings as dictionaries."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value.to_dict() if hasattr(value, "to_dict") else value
