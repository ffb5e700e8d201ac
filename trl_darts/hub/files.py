"""A config as a file: read as data, checked field by field, and written with its checksum on the card beside it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigurationError
from ..field_types import default_of, known_fields, suggestions, typed
from ..yaml_files import parse_mapping, read_mapping, read_text
from .fields import PUBLIC, WITHHELD
from .values import check_secrets, check_value, shortened


CONFIG_NAME = "darts_config.yaml"
CARD_NAME = "README.md"
CHECKSUM = "darts_config_sha256"
MAX_BYTES = 65_536  # a config with every field is a tenth of it
MAX_CARD_BYTES = 4 * MAX_BYTES  # the card has the config's fields, and some text
FRONT_MATTER = re.compile(r"\s*---\r?\n(.*?)\r?\n---\s", re.DOTALL)


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
    return read_mapping(path, MAX_BYTES)


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
    for name in data:
        if name in WITHHELD:
            raise ConfigurationError(
                f"`{name}` must not stand in a published config: it is {WITHHELD[name]}. Set it where the training is "
                "started, and take the config from someone who leaves it out."
            )
    check_secrets(data)  # before any error that would show what it refuses
    checked = {}
    for name, value in data.items():
        _check_known(name)
        checked[name] = typed(name, value)
        check_value(name, checked[name])
    return checked


def publishable(data: dict[str, Any], without: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """
    What of a training's fields a published config says.

    Args:
        data (`dict[str, Any]`):
            Values by field name, such as a recipe's.
        without (`Sequence[str]`, *optional*):
            Names of those of them that stay here, beside those that always do.

    Returns:
        `tuple[dict[str, Any], list[str]]`: Fields that are not as by default, and the names of those of them that stay
        here. A name that no field has is not among these, so that it does not stand on a card.

    Raises:
        [`ConfigurationError`]: If a field is unknown, or has a value of a wrong type, or one that must not leave; or
            if `data` lacks one of `without`.
    """
    for name in without:
        if name not in data:
            raise ConfigurationError(
                f"`without` ({shortened(name)!r}) must be a field of the config, which does not set it. Leave it out."
            )
    kept = {name: known_fields().get(name) for name in data if name in WITHHELD or name in without}
    left_out = [
        name
        for name, field in kept.items()
        if (name in WITHHELD if field is None else data[name] != default_of(field))
    ]
    public = check_published({name: value for name, value in data.items() if name not in kept})
    return {name: value for name, value in public.items() if value != default_of(known_fields()[name])}, left_out


def dump(data: dict[str, Any]) -> str:
    """The text of the file."""
    return yaml.dump(data, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=119)


def checksum(content: bytes) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def recorded_checksum(card: Path) -> str | None:
    """The checksum that a card's file records; `None` if there is none, or if it is not a config's."""
    try:
        front = FRONT_MATTER.match(read_text(card, MAX_CARD_BYTES))
        found = parse_mapping(front[1], str(card)).get(CHECKSUM) if front else None
    except ConfigurationError:  # a card of whatever else
        return None
    return found if isinstance(found, str) else None


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
    try:
        content = read_text(path, MAX_BYTES)
        data = check_published(parse_mapping(content, str(path)))
    except ConfigurationError as error:
        raise ConfigurationError(f"`{source}` is refused: {error}") from error
    expected, actual = recorded_checksum(card), checksum(content.encode())
    if actual != expected:
        words = "none" if expected is None else f"{expected[:12]!r}…"
        raise ConfigurationError(
            f"`{source}`: {CONFIG_NAME} (SHA-256 {actual[:12]}…) is not the file that its card was written for "
            f"({words}): one of the two was changed by other means. Name an earlier revision, or have it pushed anew "
            "with `trl-darts config push`."
        )
    return data


class _PlainDumper(yaml.SafeDumper):
    """Without the aliases that [`read_mapping`] refuses, where a list is the value of two fields."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _check_known(name: str) -> None:
    field = known_fields().get(name)
    if field is not None and name in PUBLIC:
        return
    words = suggestions(name) if field is None else ""
    raise ConfigurationError(
        f"{shortened(name)!r} is no field that a published config has with these versions of trl_darts and TRL. "
        f"{words}".rstrip()
    )
