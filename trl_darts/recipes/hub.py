"""
Configs and their cards on the Hub.

Others run a published config, so fields for secrets, for values of this machine and for code are neither published nor
accepted. Texts are not searched: a secret in a `system_prompt` is published.
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

from .. import __version__
from ..errors import ConfigurationError, HubError, TRLDARTSError
from .files import CONFIG_NAME, check_hub, read_yaml


logger = logging.get_logger(__name__)  # accelerate's needs a state, which does not exist when a script starts

Config = TypeVar("Config", bound="PublishedConfig")

SCHEME = "hf://"
CARD_NAME = "README.md"
CARD_TEMPLATE = Path(__file__).with_name("config_card.md")
CHECKSUM = "darts_config_sha256"  # metadata of the card: checksum of its config
MAX_BYTES = 65_536  # ten times the size of a config with every field

WITHHELD = (  # patterns of names of fields and of keys inside them
    *("*_dir", "resume_from_checkpoint", "latency_curve", "length_history", "data_files"),  # paths
    *("vllm_server_base_url", "vllm_server_list", "vllm_server_host", "*_port"),  # addresses
    *("vllm_tail_*", "tail_switch_at", "tail_share"),  # servers and their speed
    *("*token", "*api_key", "*password", "*secret"),
    *("*hub*", "report_to", "run_name", "project", "trackio_*"),  # accounts and reporting
    *("local_rank", "deepspeed", "fsdp*", "parallelism_config", "debug"),  # launch of one machine
    *("env", "trust_remote_code", "model_init_kwargs", "optim_args", "custom_generate"),  # ways to load code
)
HUB_NAMES = ("model_name_or_path", "reward_model_name_or_path", "dataset_name")
FOREIGN_CODE = {  # import paths, and attention kernels from repositories that transformers does not trust
    "reward_funcs": re.compile(r"\."),
    "attn_implementation": re.compile(r"^(?!(paged\|)?kernels-community/).*/"),
}


@dataclass(frozen=True)
class Pulled:
    """A config in the Hub's cache: its file, `hf://org/name@commit`, and its values by field name."""

    path: Path
    address: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Pushed:
    """The commit of a push, its URL, and the fields that were left out."""

    commit: str
    url: str
    left_out: list[str]


class PublishedConfig:
    """
    A config that can be saved, published and loaded from the Hub, with the methods of transformers. If it was loaded
    from the Hub, its `origin` is `hf://org/name@commit`. It is not a field, but is shown on the trained model's card.
    """

    origin: str | None = None
    _given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Before defaults are resolved, every value that differs from its default was set by the user.
        self._given = tuple(name for name, default in field_defaults(self).items() if getattr(self, name) != default)
        super().__post_init__()  # type: ignore[misc]  # of the dataclass that this mixin is used with

    @property
    def given_fields(self) -> dict[str, Any]:
        """Fields that were set when the config was created, with their current values for YAML."""
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
        Load a published config.

        Args:
            pretrained_name_or_path (`str` or `Path`):
                Name on the Hub, such as `"org/name"` or `"org/name@revision"`, a directory of [`save_pretrained`],
                or a file of `trl-darts config pull`.
            revision (`str`, *optional*):
                Branch, tag or commit on the Hub, if the name has none.
            token (`str` or `bool`, *optional*):
                Token of the Hub. Defaults to the one of `hf auth login` or `HF_TOKEN`.
            overrides:
                Fields that override the config's. Fields that are never published, such as `output_dir` and
                `vllm_server_base_url`, are set here.

        Returns:
            `PublishedConfig`: A config of this class. A warning lists the entries for the training script, such as
            the model and the data set.

        Raises:
            [`ConfigurationError`]: If the config is missing or rejected, see `docs/recipes.md`.
            [`HubError`]: If the Hub can't be reached or has no such config.
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
                    f"`{pretrained_name_or_path}`: `{name}` is not a field of {cls.__name__}. Did you mean "
                    f"`{close[0]}`?"
                )
        if others:
            logger.warning(f"`{pretrained_name_or_path}` also sets {others}, which is for the training script.")
        config = cls(**{**{name: value for name, value in data.items() if name in known}, **overrides})
        config.origin = origin
        return config

    def save_pretrained(self, save_directory: str | Path, *, measured: str | None = None) -> list[str]:
        """
        Save the config as `darts_config.yaml`, with a card.

        Args:
            save_directory (`str` or `Path`):
                Directory, created if it does not exist.
            measured (`str`, *optional*):
                Text about the measured effect, for the card.

        Returns:
            `list[str]`: Fields that are set but left out: those for secrets, and values of this machine.

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
        Publish this config, with the arguments of [`push_config`]. The name `push_to_hub` is taken by a field of
        [`~transformers.TrainingArguments`].
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
    Publish a config as `darts_config.yaml` with a card, in one commit. `docs/recipes.md` lists the fields that are
    never published.

    Args:
        data (`dict[str, Any]`):
            Values by field name, of the arguments of the trainer, the model and the script.
        repo_id (`str`):
            Repository, such as `"org/name"`. It is created if it does not exist.
        without (`Sequence[str]`, *optional*):
            Fields of `data` to leave out. The card lists them as fields to set.
        private (`bool`, *optional*):
            Whether a new repository is private. If `True`, an existing one must be. Defaults to the organization's
            rule.
        revision (`str`, *optional*):
            Branch to commit to, created if it does not exist. Defaults to `"main"`.
        token (`str` or `bool`, *optional*):
            Token of the Hub. Defaults to the one of `hf auth login` or `HF_TOKEN`.
        commit_message (`str`, *optional*, defaults to `"Upload config"`):
            Message of the commit.
        measured (`str`, *optional*):
            Text about the measured effect, for the card: hardware, data, figures.

    Returns:
        [`Pushed`]: The commit, and the fields that were left out.

    Raises:
        [`ConfigurationError`]: If a field has a value that must not be published. Nothing was sent then.
        [`HubError`]: If the Hub can't be reached or rejects the push, if the repository's card is not a config's, or
            if the repository is public although `private` is `True`.
    """
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
            parent_commit=state.sha,  # fails if the repository has changed since the checks
        )
    return Pushed(commit.oid, commit.commit_url, left_out)


def pull_config(repo_id: str, *, revision: str | None = None, token: str | bool | None = None) -> Pulled:
    """
    Download a config into the Hub's cache, and check it. `repo_id` may contain a revision, `"org/name@revision"`. Only
    a full commit hash always gives the same file. Warns if the config has changed since its card was written.
    """
    repo_id, _, suffix = repo_id.removeprefix(SCHEME).partition("@")
    if suffix and revision is not None:
        raise ConfigurationError(f"`revision` ({revision!r}) must be unset if the name has one (@{suffix}).")
    revision = revision or suffix or None
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
    Download the config of `--config hf://org/name[@revision]`, and replace the argument by the local file.

    Args:
        args (`Sequence[str]`):
            Arguments of a command line, such as `sys.argv[1:]`.

    Returns:
        `tuple[list[str], str | None]`: The arguments with a local path, and `hf://org/name@commit` for the config's
            `origin`, `None` if there is no config of the Hub.

    Raises:
        [`ConfigurationError`]: If the config is rejected, see [`pull_config`].
        [`HubError`]: If the Hub can't be reached or has no such config.
    """
    resolved, origin = list(args), None
    for i, value in enumerate(resolved):
        if resolved[i - 1 : i] == ["--config"] and value.startswith(SCHEME):
            pulled = pull_config(value)
            resolved[i], origin = str(pulled.path), pulled.address
            if os.environ.get("RANK", "0") == "0":
                logger.warning(f"`--config {value}` is {origin}. Use that commit to get the same one in each process.")
    return resolved, origin


def check_published(data: dict[str, Any]) -> None:
    """Raise for names and values that must not be published, also inside lists and dictionaries."""
    for name, text in _leaves(data):
        remedy = "in a published config. Leave it out, and set it where the run is started."
        if is_withheld(name):
            raise ConfigurationError(f"`{name}` is secret, of one machine or account, or loads code: not {remedy}")
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
    """Writes the config and its card. Returns the names of the fields that were left out."""
    if absent := [field for field in without if field not in data]:
        raise ConfigurationError(f"`without` ({absent[0]!r:.60}) must be a field that the config sets. Leave it out.")
    left_out = [field for field in data if is_withheld(field) or field in without]
    public = {field: value for field, value in data.items() if field not in left_out}
    check_published(public)
    config = yaml.safe_dump(public, sort_keys=False, allow_unicode=True, width=119)
    dataset = public.get("dataset_name") or ""
    card_data = ModelCardData(
        library_name="trl_darts",
        tags=["trl", "grpo", "darts", "config"],
        base_model=public.get("model_name_or_path"),
        datasets=dataset if "/" in dataset else None,  # other data sets are created by the script
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
        # A few lines with aliases can expand to gigabytes.
        tokens = yaml.scan(path.read_text(encoding="utf-8"))
        if path.stat().st_size > MAX_BYTES or any(isinstance(token, yaml.AliasToken) for token in tokens):
            raise ConfigurationError(f"{CONFIG_NAME} must have at most {MAX_BYTES} bytes, and no aliases (`*name`).")
        check_published(data)
    except ConfigurationError as error:
        raise ConfigurationError(f"`{source}` is rejected: {error}") from error
    return data


def _checksum_on(card: str | Path) -> str | None:
    """Returns the checksum on a config's card, `None` for any other card."""
    try:
        found = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict().get(CHECKSUM)
        return found if isinstance(found, str) else None
    except (ValueError, yaml.YAMLError, RecursionError):
        return None


@contextmanager
def _hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Inside this context, errors of the Hub's client become one line with the names and a remedy."""
    try:
        yield
    except TRLDARTSError:
        raise
    except HFValidationError as error:
        raise ConfigurationError(f"`repo_id` ({repo_id!r}) must be a name on the Hub such as 'org/name'.") from error
    except (HTTPError, OSError) as error:
        reason = " ".join(str(error).split())
        raise HubError(
            f"`repo_id` ({repo_id!r}), `revision` ({revision!r}): {reason} Check both names, your token (`hf auth "
            "login`, `HF_TOKEN`) and the network (`HF_ENDPOINT`, `HF_HUB_OFFLINE`)."
        ) from error


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields all names and keys with their text values, at any depth."""
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
    """Converts a value for YAML: enumerations to their values, configs of transformers to dictionaries."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value.to_dict() if hasattr(value, "to_dict") else value
