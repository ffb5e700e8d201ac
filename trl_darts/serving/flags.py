"""vLLM's own flags, those that follow `--`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import ConfigurationError


_SET_BY_US = "the trainer needs the value that is set here. Leave it out"
# Flag of vLLM that decides something which we decide, and what to do instead. Each also in its short and `no-` form.
OWNED = {
    "--model": "the model is the argument before `--`",
    "--host": "use `--host` before `--`",
    "--port": "use `--port` before `--`",
    "--tensor-parallel-size": "use `--tensor-parallel-size` before `--`",
    "-tp": "use `--tensor-parallel-size` before `--`",
    "--device-ids": "use `--devices` before `--`",
    "--max-model-len": "use `--max-model-len` before `--`",
    "--api-key": "use `--api-key` before `--`, or the environment variable VLLM_API_KEY",
    "--speculative-config": "use `--speculative` before `--`",
    "-sc": "use `--speculative` before `--`",
    "--spec-method": "use `--speculative` before `--`",
    "--spec-model": "use `--speculative` before `--`",
    "--spec-tokens": "use `--speculative` before `--`",
    "--weight-transfer-config": "use `--weight-sync` before `--`",
    "--logprobs-mode": _SET_BY_US,
    "--max-logprobs": _SET_BY_US,
    "--enable-prefix-caching": _SET_BY_US,
    "--no-enable-prefix-caching": "the trainer's resumed candidates need the prefix cache. Leave it out",
    "--uds": "the trainer connects to host and port. Leave it out",
    "--headless": "the trainer needs the HTTP endpoints. Leave it out",
    "--grpc": "the trainer needs the HTTP endpoints. Leave it out",
    "--ssl-certfile": "the servers speak plain HTTP. Put a proxy that ends TLS in front of them",
    "--ssl-keyfile": "the servers speak plain HTTP. Put a proxy that ends TLS in front of them",
    "--config": "a file could contradict what is set here. Give its flags one by one",
}


def name_of(flag: str) -> str:
    """The name that vLLM reads in a word: without a value or a key of a dictionary, and with dashes."""
    return re.split(r"[=.]", flag, maxsplit=1)[0].replace("_", "-")


def names(flags: Sequence[str]) -> set[str]:
    """The names of all flags."""
    return {name_of(word) for word in flags if _is_flag(word)}


def integer(flags: Sequence[str], *spellings: str) -> int:
    """The value of a flag that takes a number, `1` where it is not given."""
    for position, word in enumerate(flags):
        if name_of(word) in spellings and _is_flag(word):
            value = word.partition("=")[2] or next(iter(flags[position + 1 :]), "")
            if not value.isdigit() or int(value) < 1:
                raise ConfigurationError(f"`{name_of(word)}` ({value!r}) must be a positive number.")
            return int(value)
    return 1


def check_flags(flags: Sequence[str]) -> None:
    """
    Refuses what contradicts our own flags.

    Raises:
        [`ConfigurationError`]: Naming the flag and what to do. Never its value: it could be a key.
    """
    if flags and not _is_flag(flags[0]):
        raise ConfigurationError(
            f"`{flags[0]}` is one argument too many: there is one model. Flags of vLLM follow "
            "`--` and begin with a dash."
        )
    for name in (name_of(word) for word in flags if _is_flag(word)):
        # vLLM's parser completes a flag from its beginning, so `--weight` would be one of ours too.
        owner = name if name in OWNED else next((full for full in OWNED if _abbreviates(name, full)), None)
        if owner is not None:
            raise ConfigurationError(f"`{name}` after `--` contradicts `trl-darts serve`: {OWNED[owner]}.")


def _abbreviates(name: str, full: str) -> bool:
    return len(name) > 2 and name.startswith("--") and full.startswith(name)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d.*", word)
