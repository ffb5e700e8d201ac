"""What the trainer must be told about the servers, ready to be copied."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from .build import VISIBLE_DEVICES, VLLMBuild
from .checks import split_devices
from .command import ServerCommand
from .options import API_KEY_VARIABLE, ServeOptions
from .ports import WILDCARDS


@dataclass(frozen=True)
class TrainerArguments:
    """
    Arguments of `DARTSGRPOConfig`, and what to know beside them.

    Args:
        values (`dict[str, object]`):
            Arguments by name.
        notes (`list[str]`):
            What no argument can say. The API key is never among it, only the variable that holds it.
    """

    values: dict[str, object]
    notes: list[str]

    @classmethod
    def of(cls, options: ServeOptions, build: VLLMBuild, commands: Sequence[ServerCommand]) -> TrainerArguments:
        """The arguments for these servers."""
        weight_sync = build.resolve_weight_sync(options.weight_sync)
        values: dict[str, object] = {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": ",".join(command.base_url for command in commands),
            "weight_sync": weight_sync,
        }
        notes = []
        if options.api_key is not None:
            notes.append(
                f"The servers ask for a key: {API_KEY_VARIABLE} must be set in the trainer's environment too."
            )
        if options.host in WILDCARDS:
            notes.append("The address is this machine's name. Put 127.0.0.1, or another name of it, in its place.")
        if weight_sync == "nccl":
            notes.append(_gpus_left(options, build))
        return cls(values, notes)

    def as_python(self) -> str:
        """A call of `DARTSGRPOConfig`."""
        # Double quotes, as formatters have them. None of these values has a quote or a backslash.
        shown = {name: f'"{value}"' if isinstance(value, str) else value for name, value in self.values.items()}
        return "\n".join(["DARTSGRPOConfig(", *(f"    {name}={value}," for name, value in shown.items()), ")"])

    def as_flags(self) -> str:
        """The same for a script that parses its arguments with `TrlParser`."""
        words = []
        for name, value in self.values.items():
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return shlex.join(words)


def _gpus_left(options: ServeOptions, build: VLLMBuild) -> str:
    used = {name for devices in split_devices(options, build) for name in devices}
    left = [name for name in build.devices if name not in used]
    if not left:
        return "The servers use every GPU here, and with 'nccl' the trainer needs others: run it on another machine."
    return f"The trainer needs other GPUs than the servers: {VISIBLE_DEVICES}={','.join(left)}"
