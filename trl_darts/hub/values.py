"""Values that no published config has, in whatever field: secrets, paths, and what would load code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from ..errors import ConfigurationError
from .fields import KEYS


START = r"(?<![A-Za-z0-9])"  # `\b` is none after `_`
# Forms that the issuers document. What stands here is shown in the message, never the value.
SECRETS = {
    "hf_…": START + r"hf_[A-Za-z0-9]{16,}",
    "api_org_…": START + r"api_org_[A-Za-z0-9]{16,}",
    "sk-…": START + r"sk-[\w-]{16,}",
    "sk_live_…": START + r"[rs]k_(?:live|test)_\w{10,}",
    "nvapi-…": START + r"nvapi-[\w-]{16,}",
    "gh…_…": START + r"(?:gh[pousr]|github_pat)_\w{16,}",
    "glpat-…": START + r"glpat-[\w-]{16,}",
    "xox…-…": START + r"xox[abeoprs]-[\w-]{10,}",
    "AKIA…": START + r"(?:AKIA|ASIA)[0-9A-Z]{16}(?![A-Za-z0-9])",
    "AIza…": START + r"AIza[\w-]{30,}",
    "a JSON web token": START + r"eyJ[\w-]{8,}\.[\w-]{8,}\.",
    "a bearer token": r"(?i)(?<![a-z0-9])bearer\s+[\w.~+/-]{12,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a URL with an account": r"://[^/\s@]+@",
    # After a colon only with a digit, which "Answer key: photosynthesis" lacks; not `key=\d+`, `token=<yours>`.
    "a name and its value": (
        r"(?i)(?:key|token|secret|password)[\"']?\s*(?:=|:(?=\s*\S*\d))\s*[\"']?[^\s\"'\\[({<$]{8,}"
    ),
}
WORD = r"(?:^|(?<=[\s\"'`(\[=:,]))"
# `/no_think` is a word to some models, and `A:\frac` is LaTeX.
PATH = re.compile(
    rf"{WORD}/[\w.-]+/|{WORD}~(?:[A-Za-z_][\w.-]*)?/|^\s*~\S*\s*$|{WORD}\.\.?/|^\s*file:|file:/"
    rf"|^\s*[A-Za-z]:[\\/]|{WORD}[A-Za-z]:\\[\w.-]+[\\.]\w|{WORD}[A-Za-z]:/\w|^\s*\\\\"
)
HOMES = re.compile("/(?:home|Users|root|mnt|tmp)/")  # anywhere
IP = r"(?:\d{1,3}\.){3}\d{1,3}"
ADDRESS = re.compile(rf"://[^/\s]*:\d|://(?:{IP}|\[|localhost\b)|(?<![\d.]){IP}:\d")
HUB_NAME = re.compile(r"\w[\w.-]{0,95}(?:/\w[\w.-]{0,95})?")
HUB_NAMES = ("model_name_or_path", "reward_model_name_or_path", "dataset_name")
NO_SUBSET = frozenset("<>:/\\|?*")  # datasets refuses a subset of such a name, but reads files that it names
# An attention of the Hub is compiled code; transformers itself trusts that of this organisation.
ATTENTION = re.compile(r"(?:paged\|)?(?:kernels-community/)?[\w.@:-]+")


def check_secrets(data: dict[str, Any]) -> None:
    """
    Refuses a config with a secret anywhere, in names and keys as well.

    Args:
        data (`dict[str, Any]`):
            Values by name, unchecked.

    Raises:
        [`ConfigurationError`]: Names the field and the form, and shows no value.
    """
    for name, value in data.items():
        _check_secret("a field's name", name)
        for text in _all_texts(value):
            _check_secret(f"`{shortened(name)}`", text)


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
        raise ConfigurationError(f"`{name}` ({shortened(str(value))!r}) must be a mapping in a published config.")
    for text in _texts(name, value):
        check_text(name, text)
        _check_meaning(name, text)


def check_text(name: str, text: str) -> None:
    """The same for free text, which means nothing to a program."""
    _check_secret(f"`{name}`", text)
    if PATH.search(text) or HOMES.search(text):
        raise ConfigurationError(
            f"`{name}` ({shortened(text)!r}) names a path, which a published config never does: it means nothing on "
            "another machine. Take it out, or name something of the Hub."
        )
    if ADDRESS.search(text):
        raise ConfigurationError(
            f"`{name}` ({shortened(text)!r}) names a server's address, which a published config never does. Take it "
            "out."
        )


def shortened(text: str) -> str:
    """What of a text a message shows."""
    return text if len(text) <= 60 else f"{text[:60]}…"


def _all_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _all_texts(item)


def _check_secret(place: str, text: str) -> None:
    for form, pattern in SECRETS.items():
        if re.search(pattern, text):
            raise ConfigurationError(
                f"{place} holds what looks like a secret ({form}), which a published config never has. Take it out, "
                "and revoke it if others may have seen it."
            )


def _check_keys(name: str, value: dict[Any, Any]) -> None:
    allowed = KEYS.get(name, "").split()
    for key in value:
        if key not in allowed:
            raise ConfigurationError(
                f"`{name}[{shortened(str(key))!r}]` must not stand in a published config, whose keys there are "
                f"{', '.join(allowed)}. Take it out, and set it where the training is started."
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
    if name in HUB_NAMES:
        _check_hub_name(name, text)
    if name == "dataset_config" and not NO_SUBSET.isdisjoint(text):
        raise ConfigurationError(
            f"`dataset_config` ({shortened(text)!r}) must be the name of a subset, without "
            f"{' '.join(sorted(NO_SUBSET))}, in a published config. Leave it out, and set it where the training is "
            "started."
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


def _check_hub_name(name: str, text: str) -> None:
    remedy = "Push it there, or leave the field out and set it where the training is started."
    if not HUB_NAME.fullmatch(text):
        raise ConfigurationError(
            f"`{name}` ({shortened(text)!r}) must be a name on the Hub, such as 'org/name', in a published config. "
            f"{remedy}"
        )
    if name == "dataset_name" and text in file_readers():
        raise ConfigurationError(
            f"`dataset_name` ({text!r}) must be a name on the Hub in a published config: datasets reads local files "
            f"by this one. {remedy}"
        )
    if Path(text).exists():  # transformers and datasets would take it in place of the Hub's
        raise ConfigurationError(
            f"`{name}` ({text!r}) must be a name on the Hub in a published config, and is a path here. {remedy}"
        )


@cache
def file_readers() -> frozenset[str]:
    """Names that [`~datasets.load_dataset`] takes for formats of local files."""
    from datasets import packaged_modules

    return frozenset(module.name for module in iter_modules(packaged_modules.__path__))
