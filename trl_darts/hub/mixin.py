"""What [`DARTSGRPOConfig`] has of the Hub."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from accelerate.logging import get_logger
from transformers.trainer_pt_utils import AcceleratorConfig

from ..errors import ConfigurationError
from ..field_types import default_of
from ..scheduling import ScheduleSettings
from .errors import HubError
from .origin import claimed


logger = get_logger(__name__)

Config = TypeVar("Config", bound="PublishedConfig")


class PublishedConfig:
    """
    A config that can be saved, published and taken from the Hub, in the manner of transformers.

    The method that publishes is `push_config_to_hub`: `push_to_hub` is a field of
    [`~transformers.TrainingArguments`], which trainers read to decide whether to upload the model.
    """

    _origin: str | None = None  # no field: it is not of the settings, and is neither logged nor published with them

    def __post_init__(self) -> None:
        self._origin = claimed(vars(self))
        super().__post_init__()  # type: ignore[misc]  # of the dataclasses that this one is mixed into

    @property
    def origin(self) -> str | None:
        """`hf://org/name@commit` of the published config that this one was made of, if it was."""
        return self._origin

    @classmethod
    def from_pretrained(
        cls: type[Config],
        pretrained_name_or_path: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        **overrides: Any,
    ) -> Config:
        """
        A published config.

        Args:
            pretrained_name_or_path (`str` or `Path`):
                Name on the Hub, such as `"org/name"` or `"org/name@revision"`, a directory of [`save_pretrained`],
                or a file of `trl-darts config pull`.
            revision (`str`, *optional*):
                Branch, tag or commit on the Hub, if the name has none. Only a whole commit hash names the same
                config for good.
            token (`str` or `bool`, *optional*):
                Of the Hub. Defaults to the one of `hf auth login` or `HF_TOKEN`.
            cache_dir (`str` or `Path`, *optional*):
                Defaults to the Hub's cache.
            overrides:
                Further fields, and others in the place of the config's: what never leaves a machine, such as
                `output_dir` and `vllm_server_base_url`, is set here.

        Returns:
            `PublishedConfig`: One of this class. What a config says of the model and the data set is not part of it,
            and is named in a warning.

        Raises:
            [`ConfigurationError`]: If it is missing, or refused; see `docs/hub.md`.
            [`HubError`]: If the Hub can't be reached, or knows no such config.
        """
        data, origin = _read(pretrained_name_or_path, revision, token, cache_dir)
        own = {field.name for field in fields(cls)}  # type: ignore[arg-type]  # its subclasses are dataclasses
        config = cls(**{**{name: value for name, value in data.items() if name in own}, **overrides})
        config._origin = origin
        if others := {name: value for name, value in data.items() if name not in own}:
            logger.warning(
                f"`{pretrained_name_or_path}` also says {others}, which is for the script or the trainer to set."
            )
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
            `list[str]`: Fields that are set and are not in the file: secrets, and what is of this machine.

        Raises:
            [`ConfigurationError`]: If a field has a value that must not be published.
            [`HubError`]: If the directory has a card that is not a config's.
        """
        from .files import CARD_NAME, CONFIG_NAME, recorded_checksum
        from .transfer import Publication

        directory = Path(save_directory)
        card = directory / CARD_NAME
        publication = Publication.of(directory.name, CONFIG_NAME, published_fields(self), measured)
        if card.exists() and recorded_checksum(card) is None:
            raise HubError(
                f"`save_directory` ({str(directory)!r}) has a {CARD_NAME} of something else. Choose another."
            )
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG_NAME).write_text(publication.config)
        card.write_text(publication.card)
        return publication.left_out

    def push_config_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        commit_message: str | None = None,
        measured: str | None = None,
    ) -> Any:
        """
        Publishes this config as `darts_config.yaml` with a card, in one commit.

        It is not called `push_to_hub`, because that is a field: whether trainers upload the model.

        Args:
            repo_id (`str`):
                Repository, such as `"org/name"`. It is made if there is none.
            private (`bool`, *optional*):
                Whether a new repository is private. Defaults to the organization's rule.
            revision (`str`, *optional*):
                Branch to commit to, made if there is none. Defaults to `"main"`.
            token (`str` or `bool`, *optional*):
                Of the Hub. Defaults to the one of `hf auth login` or `HF_TOKEN`.
            commit_message (`str`, *optional*):
                Defaults to `"Upload config"`.
            measured (`str`, *optional*):
                What the card says of its effect: hardware, data, figures.

        Returns:
            [`Pushed`]: The commit, and which fields were left out.

        Raises:
            [`ConfigurationError`]: If a field has a value that must not leave. Nothing was sent then.
            [`HubError`]: If the Hub can't be reached or refuses, or if the repository's card is not a config's.
        """
        from .transfer import push_config

        return push_config(
            published_fields(self),
            repo_id,
            private=private,
            revision=revision,
            token=token,
            commit_message=commit_message,
            measured=measured,
        )


def published_fields(config: Any) -> dict[str, Any]:
    """
    Fields of a config that someone set: not those that are as by default, nor those that it fills in by itself.

    Args:
        config ([`DARTSGRPOConfig`]):
            Any.

    Returns:
        `dict[str, Any]`: Values by name, as YAML has them.
    """
    filled_in = _filled_in(config)
    data = {}
    for field in fields(config):
        value = _plain(getattr(config, field.name))
        if value != default_of(field) and value != filled_in.get(field.name, default_of(field)):
            data[field.name] = value
    return data


def _filled_in(config: Any) -> dict[str, Any]:
    """
    What TRL, transformers and the schedule make of fields that are not given. Nothing is built to find out: a second
    `TrainingArguments` would reset the state of a training that runs.
    """
    return vars(ScheduleSettings(config.schedule, config.num_generations)) | {
        "output_dir": "trainer_output",
        "report_to": [],
        "debug": [],
        "accelerator_config": AcceleratorConfig(),
        "bf16": not config.fp16,
        "dataloader_pin_memory": not config.use_cpu,
        "disable_tqdm": False,
        "do_eval": config.eval_strategy != "no",
        "eval_steps": config.logging_steps,
        "generation_batch_size": config.generation_batch_size,  # follows from the next one
        "steps_per_generation": config.gradient_accumulation_steps,
        "num_generations": default_of(config.__dataclass_fields__["num_generations"]),
        "schedule": default_of(config.__dataclass_fields__["schedule"]),
        "pad_to_multiple_of": None,
    }


def _read(
    name: str | Path, revision: str | None, token: str | bool | None, cache_dir: str | Path | None
) -> tuple[dict[str, Any], str | None]:
    """What a config says, and its name on the Hub, for good; a path of this machine is nobody's business."""
    from .files import check_published, read_published, read_yaml
    from .transfer import pull_config

    path = Path(name)
    if path.exists() and revision is not None:
        raise ConfigurationError(
            f"`revision` ({revision!r}) only means something on the Hub, and {str(name)!r} is a path here. Leave it "
            "out, or rename the path."
        )
    if path.is_dir():
        return read_published(path, str(name)), None
    if path.is_file():
        return check_published(read_yaml(path)), None
    pulled = pull_config(str(name), revision=revision, token=token, cache_dir=cache_dir)
    return pulled.data, pulled.address


def _plain(value: Any) -> Any:
    """Enumerations as their values."""
    if isinstance(value, Enum):
        return value.value
    return [_plain(item) for item in value] if isinstance(value, list) else value
