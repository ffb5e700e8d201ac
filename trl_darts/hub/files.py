"""A config as a file: read as data, checked field by field, and written with its checksum on the card beside it."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import Field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.dataclasses import type_validator

from ..errors import ConfigurationError
from .fields import PUBLIC, WITHHELD, default_of, known_fields
from .values import HUB_NAMES, check_value


CONFIG_NAME = "darts_config.yaml"
CARD_NAME = "README.md"
CHECKSUM = "darts_config_sha256"
MAX_BYTES = 65_536  # a config with every field is a tenth of it


def read_yaml(path: Path) -> dict[str, Any]:
    """
    The fields of a YAML file. Nothing in it is executed.

    Args:
        path (`Path`):
            Of the file.

    Returns:
        `dict[str, Any]`: Values by name, in the file's order, unchecked.

    Raises:
        [`ConfigurationError`]: If it can't be read, is too large, or is no YAML mapping of names.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"`{path}` must be a file that can be read: {error.strerror}.") from error
    if len(content) > MAX_BYTES:
        raise ConfigurationError(f"`{path}` ({len(content)} bytes) must be a config of at most {MAX_BYTES} bytes.")
    try:
        data = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        words = " ".join(str(error).split())
        raise ConfigurationError(f"`{path}` must be YAML without tags of Python: {words}.") from error
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ConfigurationError(f"`{path}` must be a YAML mapping of field names to values.")
    return data


def check_published(data: dict[str, Any]) -> dict[str, Any]:
    """
    What a published config says, if it may say so.

    Args:
        data (`dict[str, Any]`):
            Values by field name.

    Returns:
        `dict[str, Any]`: The same with numbers as numbers: YAML takes `1e-6` for a string.

    Raises:
        [`ConfigurationError`]: If a field is unknown, must not stand in a published config, or has a value of a wrong
            type or one that must not.
    """
    checked = {}
    for name, value in data.items():
        if name in WITHHELD:
            raise ConfigurationError(
                f"`{name}` must not stand in a published config: it is {WITHHELD[name]}. Set it where the training is "
                "started, and take the config from someone who leaves it out."
            )
        field = _known(name)
        checked[name] = _typed(field, value)
        check_value(name, checked[name])
    return checked


def publishable(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """
    What of a training's fields a published config says.

    Args:
        data (`dict[str, Any]`):
            Values by field name, such as a recipe's.

    Returns:
        `tuple[dict[str, Any], list[str]]`: Fields that are not as by default, and the names of those of them that stay
        here.

    Raises:
        [`ConfigurationError`]: If a field is unknown, or has a value of a wrong type, or one that must not leave.
    """
    withheld = {name: known_fields().get(name) for name in data if name in WITHHELD}
    left_out = [name for name, field in withheld.items() if field is None or data[name] != default_of(field)]
    public = check_published({name: value for name, value in data.items() if name not in WITHHELD})
    for name in HUB_NAMES:
        if name in public and Path(str(public[name])).exists():
            raise ConfigurationError(
                f"`{name}` ({public[name]!r}) must be a name on the Hub in a published config, and is a path here. "
                "Push it there, or leave the field out."
            )
    return {name: value for name, value in public.items() if value != default_of(known_fields()[name])}, left_out


def dump(data: dict[str, Any]) -> str:
    """The text of the file."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=119)


def checksum(content: bytes) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def recorded_checksum(card: str) -> str | None:
    """The checksum that a card records; `None` on a card that is not a config's."""
    try:
        found = ModelCard(card, ignore_metadata_errors=True).data.get(CHECKSUM)
        return None if found is None else str(found)
    except (ValueError, TypeError, yaml.YAMLError):  # a card of whatever else
        return None


def read_published(directory: Path, source: str) -> dict[str, Any]:
    """
    The config of a directory that [`save_pretrained`] wrote, or that was pulled.

    Args:
        directory (`Path`):
            With the config and its card.
        source (`str`):
            What to call it in messages.

    Returns:
        `dict[str, Any]`: Checked values by field name.

    Raises:
        [`ConfigurationError`]: If it is missing, is not what its card was written for, or is refused.
    """
    path, card = directory / CONFIG_NAME, directory / CARD_NAME
    if not path.is_file():
        raise ConfigurationError(
            f"`{source}` has no {CONFIG_NAME}. Name another, or publish one with `trl-darts config push`."
        )
    expected = recorded_checksum(card.read_text(errors="replace")) if card.is_file() else None
    actual = checksum(path.read_bytes())
    if actual != expected:
        words = "none" if expected is None else f"{str(expected)[:12]}…"
        raise ConfigurationError(
            f"`{source}`: {CONFIG_NAME} (SHA-256 {actual[:12]}…) is not the file that its card was written for "
            f"({words}): one of the two was changed by other means. Name an earlier revision, or have it pushed anew "
            "with `trl-darts config push`."
        )
    try:
        return check_published(read_yaml(path))
    except ConfigurationError as error:
        raise ConfigurationError(f"`{source}` is refused: {error}") from error


def _known(name: str) -> Field[Any]:
    field = known_fields().get(name)
    if field is not None and name in PUBLIC:
        return field
    close = get_close_matches(name, known_fields(), n=3)
    words = f" Did you mean {' or '.join(f'`{other}`' for other in close)}?" if close and field is None else ""
    raise ConfigurationError(
        f"`{name}` is no field that a published config has with these versions of trl_darts and TRL.{words}"
    )


def _typed(field: Field[Any], value: Any) -> Any:
    if "float" in str(field.type) and not isinstance(value, bool):
        with suppress(ValueError):  # a word, such as "auto"
            value = float(value) if isinstance(value, str | int) else value
    try:
        type_validator(field.name, value, field.type)
    except TypeError as error:
        expected = getattr(field.type, "__name__", str(field.type))
        raise ConfigurationError(
            f"`{field.name}` ({str(value)[:60]!r}) must be of type {expected}, not {type(value).__name__}."
        ) from error
    return value
