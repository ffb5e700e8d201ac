"""`--config hf://org/name[@revision]` on a script's command line."""

from __future__ import annotations

import logging
import os
import re

from .names import SCHEME
from .origin import announce, withdraw
from .transfer import Pulled, pull_config


logger = logging.getLogger(__name__)  # not accelerate's, whose state does not exist yet
OPTION = "--config"


def resolve_config_arguments(args: list[str]) -> list[str]:
    """
    Pulls the config that `--config hf://org/name[@revision]` names, and puts the local file in its place. A warning
    says which commit it is, and on several processes also if another push could give them different ones. The
    [`DARTSGRPOConfig`] that is parsed from the words remembers it as its `origin`, for the trained model's card.

    Args:
        args (`list[str]`):
            Words of a command line, such as `sys.argv[1:]`.

    Returns:
        `list[str]`: The same words, but for `--config` and the path of the file as two words where one named the Hub.

    Raises:
        [`ConfigurationError`]: If the config is refused, see [`pull_config`], or the name is malformed.
        [`HubError`]: If the Hub can't be reached, or knows no such config.
    """
    withdraw()  # of a command line that was never parsed
    resolved: list[str] = []
    for word in args:
        if word.startswith(f"{OPTION}={SCHEME}"):
            resolved += [OPTION, _pull(word.partition("=")[2], args)]  # `TrlParser` takes no `=` here
        elif word.startswith(SCHEME) and resolved and resolved[-1] == OPTION:
            resolved.append(_pull(word, args))
        else:
            resolved.append(word)
    return resolved


def _pull(address: str, args: list[str]) -> str:
    pulled = pull_config(address)
    _log(address, pulled)
    announce(pulled.address, pulled.data, args)
    return str(pulled.path)


def _log(address: str, pulled: Pulled) -> None:
    words = f"`{OPTION} {address}` is {pulled.address}."
    is_loose = os.environ.get("WORLD_SIZE", "1") != "1" and not re.search(r"@[0-9a-f]{40}$", address)
    if is_loose:
        words += " Each process asks for itself, and a push in between would divide them: name that commit instead."
    if is_loose or os.environ.get("RANK", "0") == "0":
        logger.warning(words)  # what a run trained with should be seen, and `info` is not by default
