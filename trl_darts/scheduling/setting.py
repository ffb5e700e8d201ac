"""A field of a config, as TRL declares its own."""

from dataclasses import field
from typing import Any


def setting(default: Any, help: str) -> Any:
    """One with its help, which the command line and the documentation show."""
    return field(default=default, metadata={"help": help})
