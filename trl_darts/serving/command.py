"""What runs: arguments and environment of each server."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from .build import VISIBLE_DEVICES, VLLMBuild
from .checks import split_devices
from .flags import names
from .options import API_KEY_VARIABLE, ServeOptions
from .ports import local_url, public_url


# The `vllm` command of this very environment, whatever PATH holds.
_VLLM_SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")
# The CPU build's `vllm` command does not start: it looks up its version under the name `vllm`.
_API_SERVER = ("-m", "vllm.entrypoints.openai.api_server", "--model")
# `suffix` needs no numbers. `ngram` needs the first one; both are those of vLLM's documentation.
_SPECULATIVE = {
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
}


@dataclass(frozen=True)
class ServerCommand:
    """
    One server that can be started.

    Args:
        port (`int`):
            Where it listens.
        health_url (`str`):
            Base URL for this process, to ask whether it is healthy.
        base_url (`str`):
            Base URL for the trainer.
        argv (`tuple[str, ...]`):
            Program and arguments. Everyone on the machine can read them, so no key is among them.
        env (`dict[str, str]`):
            Variables over those of this process. Not shown, since the key is one of them.
    """

    port: int
    health_url: str
    base_url: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        shown = {name: value for name, value in self.env.items() if name != API_KEY_VARIABLE}
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in shown.items()), shlex.join(self.argv)])


def make_commands(
    options: ServeOptions, build: VLLMBuild, environ: Mapping[str, str] = os.environ
) -> list[ServerCommand]:
    """
    One command per server. The options are taken for checked.

    Args:
        options ([`ServeOptions`]):
            What is asked for.
        build ([`VLLMBuild`]):
            The vLLM that runs it.
        environ (`Mapping[str, str]`, *optional*):
            The environment that the servers inherit: what it sets, we do not set by default.
    """
    flags = {**_flags(options, build), **(_cpu_flags(options) if build.cpu else {})}
    commands = []
    for port, devices in zip(options.ports, split_devices(options, build), strict=True):
        argv = [sys.executable, *(_API_SERVER if build.cpu else _VLLM_SERVE), options.model]
        for name, value in {**flags, "--port": str(port)}.items():
            argv += [name] if value is None else [name, value]
        commands.append(
            ServerCommand(
                port=port,
                health_url=local_url(options.host, port),
                base_url=public_url(options.host, port),
                argv=(*argv, *options.vllm_flags),
                env=_env(options, build, devices, environ),
            )
        )
    return commands


def _flags(options: ServeOptions, build: VLLMBuild) -> dict[str, str | None]:
    flags: dict[str, str | None] = {
        "--host": options.host,
        "--logprobs-mode": "processed_logprobs",  # TRL's importance sampling correction compares these
        "--max-logprobs": "-1",
        "--enable-prefix-caching": None,
    }
    if options.tensor_parallel_size > 1:
        flags["--tensor-parallel-size"] = str(options.tensor_parallel_size)
    if options.max_model_len is not None:
        flags["--max-model-len"] = str(options.max_model_len)
    backend = build.resolve_weight_sync(options.weight_sync)
    if backend != "filesystem":
        flags["--weight-transfer-config"] = json.dumps({"backend": backend})
    if options.speculative is not None:
        flags["--speculative-config"] = json.dumps(_SPECULATIVE[options.speculative])
    return flags


def _cpu_flags(options: ServeOptions) -> dict[str, str | None]:
    flags: dict[str, str | None] = {"--dtype": "float32"}
    if not names(options.vllm_flags) & {"--enforce-eager", "--no-enforce-eager"}:
        flags["--enforce-eager"] = None  # healthy in a third of the time
    flags["--block-size"] = "32"  # the CPU's 128 would keep short prompts out of the prefix cache
    flags["--distributed-executor-backend"] = "uni" if _in_one_process(options) else "mp"
    return {name: value for name, value in flags.items() if name not in names(options.vllm_flags)}


def _env(
    options: ServeOptions, build: VLLMBuild, devices: tuple[str, ...], environ: Mapping[str, str]
) -> dict[str, str]:
    env = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONUNBUFFERED": "1"}  # the last words of a dying server reach its log
    if devices:
        env[VISIBLE_DEVICES] = ",".join(devices)
    if options.api_key is not None:
        env[API_KEY_VARIABLE] = options.api_key
    if build.cpu:
        defaults = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        if _in_one_process(options):
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # two processes that wait for each other spin
        else:
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env |= {name: value for name, value in defaults.items() if name not in environ}
    return env


def _in_one_process(options: ServeOptions) -> bool:
    several = {"--data-parallel-size", "-dp", "--pipeline-parallel-size", "-pp", "--distributed-executor-backend"}
    return options.tensor_parallel_size == 1 and not names(options.vllm_flags) & several
