"""The fields that are not TRL's or transformers', under the headings of docs/settings.md, and their help."""

import inspect
import re
from argparse import ArgumentParser
from dataclasses import Field, fields
from typing import Any

from ..config import OWN_CLASSES, DARTSGRPOConfig
from .script import ScriptArguments


TITLES = ("Schedule", "What the trainer does", "vLLM servers")  # of the classes, where a field has no other heading
# Comments that are headings stand above a field, after an empty line, and are no sentences.
HEADING = re.compile(r"\n\n    # ([^\n]+[^.\n])\n    (\w+):")
USAGE = "%(prog)s --config FILE [--FIELD VALUE ...]"


def own_fields() -> dict[str, list[Field[Any]]]:
    """Returns the fields that `DARTSGRPOConfig` adds to TRL's, by heading."""
    own = {field.name: field for field in fields(DARTSGRPOConfig)}
    found: dict[str, list[Field[Any]]] = {}
    for cls, title in zip(OWN_CLASSES, TITLES, strict=True):
        headings, heading = {name: text for text, name in HEADING.findall(inspect.getsource(cls))}, title
        for name in (name for name in cls.__annotations__ if name in own):
            heading = headings.get(name, heading)
            found.setdefault(heading, []).append(own[name])
    return found


def print_own_fields(program: str, description: str) -> None:
    """Prints the help of our fields. TRL and transformers have over 300 others."""
    parser = ArgumentParser(prog=program, usage=USAGE, description=description, add_help=False)
    script = [own for own in fields(ScriptArguments) if own.name in ScriptArguments.__annotations__]
    for heading, group in {"Data and rewards": script, **own_fields()}.items():
        section = parser.add_argument_group(heading)
        for own in group:
            text = f"{own.metadata['help']} [{own.default!r}]".replace("%", "%%")
            section.add_argument(f"--{own.name}", help=text, metavar="")
    parser.print_help()
