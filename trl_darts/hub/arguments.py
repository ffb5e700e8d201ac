"""`--config hf://org/name[@revision]` on a script's command line."""

from __future__ import annotations

import logging
import os
import re

from ..errors import ConfigurationError
from .transfer import pull_config


logger = logging.getLogger(__name__)  # not accelerate's, whose state does not exist yet
OPTION = "--config"
SCHEME = "hf://"


def resolve_config_arguments(args: list[str]) -> list[str]:
    """
    Pulls the config that `--config hf://org/name[@revision]` names, and puts the local file in its place. A warning
    says which commit it is, and on several processes also if another push could give them different ones.

    Args:
        args (`list[str]`):
            Words of a command line, such as `sys.argv[1:]`.

    Returns:
        `list[str]`: The same words, but for `--config` and the path of the file as two words where one named the Hub.

    Raises:
        [`ConfigurationError`]: If the config is refused, see [`pull_config`], or the name is malformed.
        [`HubError`]: If the Hub can't be reached, or knows no such config.
    """
    resolved: list[str] = []
    for word in args:
        if word.startswith(f"{OPTION}={SCHEME}"):
            resolved += [OPTION, _pull(word.partition("=")[2])]  # `TrlParser` takes no `=` here
        elif word.startswith(SCHEME) and resolved and resolved[-1] == OPTION:
            resolved.append(_pull(word))
        else:
            resolved.append(word)
    return resolved


def split_revision(name: str) -> tuple[str, str | None]:
    """
    `org/name@revision` in its two parts; the revision is `None` without one.

    Raises:
        [`ConfigurationError`]: If there is nothing before or after the `@`.
    """
    repo_id, at, revision = name.partition("@")
    if not repo_id or (at and not revision):
        raise ConfigurationError(f"`repo_id` ({name!r}) must be of the form org/name or org/name@revision.")
    return repo_id, revision or None


def _pull(address: str) -> str:
    repo_id, revision = split_revision(address.removeprefix(SCHEME))
    pulled = pull_config(repo_id, revision=revision)
    words = f"`{OPTION} {address}` is {SCHEME}{repo_id}@{pulled.commit}."
    is_loose = os.environ.get("WORLD_SIZE", "1") != "1" and not re.fullmatch(r"[0-9a-f]{40}", revision or "")
    if is_loose:
        words += " Each process asks for itself, and a push in between would divide them: name that commit instead."
    if is_loose or os.environ.get("RANK", "0") == "0":
        logger.warning(words)  # what a run trained with should be seen, and `info` is not by default
    return str(pulled.path)
