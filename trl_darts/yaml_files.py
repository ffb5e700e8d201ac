"""Reads YAML of others: mappings of plain values, which take no more memory than their text suggests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigurationError


def read_mapping(path: str | Path, max_bytes: int | None = None) -> dict[str, Any]:
    """
    The mapping that a YAML file is. Nothing in it is executed, and an error never shows what stands in it.

    Args:
        path (`str` or `Path`):
            Of the file.
        max_bytes (`int`, *optional*):
            Largest size that is read. Defaults to any.

    Returns:
        `dict[str, Any]`: Values by name, in the file's order, unchecked.

    Raises:
        [`ConfigurationError`]: If it can't be read, is too large, or is not a YAML mapping of names without aliases
            and tags.
    """
    return parse_mapping(read_text(path, max_bytes), str(path))


def read_text(path: str | Path, max_bytes: int | None = None) -> str:
    """The same file's text."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(-1 if max_bytes is None else max_bytes + 1)
    except OSError as error:
        reason = error.strerror
        raise ConfigurationError(f"`file` ({str(path)!r}) must be a file that can be read: {reason}.") from error
    if max_bytes is not None and len(content) > max_bytes:
        raise ConfigurationError(f"`file` ({str(path)!r}) must have at most {max_bytes} bytes. Shorten it.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"`file` ({str(path)!r}) must be a file that can be read: it is no text in UTF-8. Convert it."
        ) from error


def parse_mapping(text: str, name: str) -> dict[str, Any]:
    """
    The mapping that a text is.

    Args:
        text (`str`):
            YAML.
        name (`str`):
            What to call it in messages.

    Returns:
        `dict[str, Any]`: Values by name, in the text's order.

    Raises:
        [`ConfigurationError`]: If it is no such mapping, see [`read_mapping`].
    """
    try:
        data = yaml.load(text, Loader=_PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        words = _words(error)
        raise ConfigurationError(f"`file` ({name!r}) must be plain YAML: {words}. Correct it there.") from error
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"`file` ({name!r}) must be a YAML mapping of names to values, not a {type(data).__name__}."
        )
    return data


class _PlainLoader(yaml.SafeLoader):
    """No aliases, of which a few lines stand for gigabytes once a value is printed; no tags; each name once."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _problem("it must have no aliases (`*name`)", event)
        if getattr(event, "tag", None) is not None:
            raise _problem("it must have no tags (`!name`)", event)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if key.tag != self.DEFAULT_SCALAR_TAG:
                raise _problem("each key must be a string", key)
            if key.value in names:
                raise _problem("each key must stand there once", key)
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_int(self, node: yaml.ScalarNode) -> int:
        value: int = self.construct_yaml_int(node)
        if value.bit_length() > 64:  # Python refuses to print those of thousands of digits
            raise _problem("an integer must have at most 64 bits", node)
        return value


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_int)


def _problem(words: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=words, problem_mark=place.start_mark)


def _words(error: Exception) -> str:
    """Without the excerpt that YAML's own message has: secrets are looked for after the parsing."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return "a number, a date or a character in it is none"
    return f"{error.problem} in line {error.problem_mark.line + 1}"
