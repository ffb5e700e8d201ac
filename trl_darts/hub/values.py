"""Values that no published config has, in whatever field: secrets, paths, and what would load code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..errors import ConfigurationError
from .fields import KEYS


# Forms that the issuers document. What stands here is shown in the message, never the value.
SECRETS = {
    "hf_…": r"\bhf_[A-Za-z0-9]{16,}",
    "api_org_…": r"\bapi_org_[A-Za-z0-9]{16,}",
    "sk-…": r"\bsk-[\w-]{16,}",
    "gh…_…": r"\b(?:gh[pousr]|github_pat)_\w{16,}",
    "glpat-…": r"\bglpat-[\w-]{16,}",
    "xox…-…": r"\bxox[abeoprs]-[\w-]{10,}",
    "AKIA…": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "AIza…": r"\bAIza[\w-]{30,}",
    "a JSON web token": r"\beyJ[\w-]{8,}\.[\w-]{8,}\.",
    "a bearer token": r"(?i)\bbearer\s+[\w.~+/-]{12,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a URL with a password": r"://[^/\s:@]*:[^/\s@]+@",
}
# At the beginning; `/no_think` is a word to some models.
PATH = re.compile(r"\s*(?:/[\w.-]+/|~[\w.-]*/|~$|\.\.?/|file:|[A-Za-z]:[\\/]|\\\\)")
HOMES = ("/home/", "/Users/", "/root/", "/mnt/", "/tmp/")  # anywhere
HUB_NAME = re.compile(r"\w[\w.-]{0,95}(?:/\w[\w.-]{0,95})?")
HUB_NAMES = ("model_name_or_path", "reward_model_name_or_path", "dataset_name")
# An attention of the Hub is compiled code; transformers itself trusts that of this organisation.
ATTENTION = re.compile(r"(?:paged\|)?(?:kernels-community/)?[\w.@:-]+")


def check_value(name: str, value: Any) -> None:
    """
    Refuses what a published config must not have.

    Args:
        name (`str`):
            A field that is public as such.
        value (`Any`):
            As it is in the file.

    Raises:
        [`ConfigurationError`]: Names the field, the rule and a remedy; and the value, but for secrets.
    """
    if isinstance(value, dict):
        _check_keys(name, value)
    elif name in KEYS and value is not None:  # transformers reads JSON from a string, whose keys nobody would look at
        raise ConfigurationError(f"`{name}` ({_shortened(str(value))!r}) must be a mapping in a published config.")
    for text in _texts(name, value):
        check_text(name, text)
        _check_meaning(name, text)


def check_text(name: str, text: str) -> None:
    """The same for free text, which means nothing to a program."""
    for form, pattern in SECRETS.items():
        if re.search(pattern, text):
            raise ConfigurationError(
                f"`{name}` holds what looks like a secret ({form}), which a published config never has. Take it out, "
                "and revoke it if others may have seen it."
            )
    if PATH.match(text) or any(root in text for root in HOMES):
        raise ConfigurationError(
            f"`{name}` ({_shortened(text)!r}) names a path, which a published config never does: it means nothing on "
            "another machine. Take it out, or name something of the Hub."
        )


def _check_keys(name: str, value: dict[Any, Any]) -> None:
    allowed = KEYS.get(name, "").split()
    for key in value:
        if key not in allowed:
            raise ConfigurationError(
                f"`{name}[{key!r}]` must not stand in a published config, whose keys there are {', '.join(allowed)}. "
                "Take it out, and set it where the training is started."
            )


def _texts(name: str, value: Any) -> Iterator[str]:
    """All strings of a value that is no deeper than a list in a dictionary."""
    for item in value.values() if isinstance(value, dict) else [value]:
        for leaf in item if isinstance(item, list) else [item]:
            if isinstance(leaf, str):
                yield leaf
            elif not isinstance(leaf, bool | int | float | None):
                raise ConfigurationError(
                    f"`{name}` must be a plain value, a list or a dictionary of such, not hold a "
                    f"{type(leaf).__name__} inside. Take it out."
                )


def _check_meaning(name: str, text: str) -> None:
    if name in HUB_NAMES and not HUB_NAME.fullmatch(text):
        raise ConfigurationError(
            f"`{name}` ({text!r}) must be a name on the Hub, such as 'org/name', in a published config. Push it "
            "there, or leave the field out and set it where the training is started."
        )
    if name == "reward_funcs" and not text.isidentifier():
        raise ConfigurationError(
            f"`reward_funcs` ({text!r}) must be a name of `trl.rewards`, such as 'accuracy_reward', in a published "
            "config: importing a module runs its code. Leave the field out, and set it where the training is started."
        )
    if name == "attn_implementation" and not ATTENTION.fullmatch(text):
        raise ConfigurationError(
            f"`attn_implementation` ({text!r}) must be one of transformers, or of 'kernels-community', in a published "
            "config: others are code of the Hub. Leave the field out, and set it where the training is started."
        )


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"
