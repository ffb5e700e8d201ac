"""Builds the command line and environment of each server, and the matching arguments of the trainer."""

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..engines.addresses import API_KEY_VARIABLE, key_path
from ..engines.server_list import RAY_PREFIX
from ..scheduling.schedule_fields import STALE_BATCHES
from ..weights import ADAPTER_RANKS
from .build import VISIBLE_DEVICES, VLLMBuild
from .memory import FLAG, shared_utilization
from .options import SPECULATIVE, ServeOptions, is_loopback


# The `vllm` command of this environment, independent of PATH.
_VLLM_SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")
# The CPU build's `vllm` command does not start: it looks up its version under the name `vllm`.
_API_SERVER = ("-m", "vllm.entrypoints.openai.api_server", "--model")
# Wildcard addresses, and the loopback address that this process uses for health checks instead.
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# Not imported here: they need a server's packages.
MIDDLEWARE, ADAPTERS = "trl_darts.serving.middleware.RequireKey", "trl_darts.serving.adapters.TakeAdapters"
MAX_LORAS = 1 + STALE_BATCHES  # versions in use at once, with the default `max_staleness`
TAIL_SWITCH_AT = 8  # unfinished candidates; a guess that a latency profile replaces
_PARALLEL_FLAGS = {"--data-parallel-size", "-dp", "--pipeline-parallel-size", "-pp", "--distributed-executor-backend"}


@dataclass(frozen=True)
class ServerCommand:
    """Command of one server. The key is in `env` only, which is never printed: every user can read `argv`."""

    health_url: str  # for this process
    base_url: str  # for the trainer
    argv: tuple[str, ...]
    tail: bool = False  # whether it is a tail server, which takes over the last candidates
    env: dict[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        shown = {name: value for name, value in self.env.items() if name != API_KEY_VARIABLE}
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in shown.items()), shlex.join(self.argv)])


def make_commands(
    options: ServeOptions, build: VLLMBuild, environ: Mapping[str, str] = os.environ, first: int = 0
) -> list[ServerCommand]:
    """
    Returns one command per server. Variables in `environ` are inherited and take precedence over our defaults. `first`
    is the number of the first server.
    """
    commands: list[ServerCommand] = []
    for kind, part in enumerate(options.sets):
        flags = _turn_flags(options) if options.takes_turns(build) else {}
        threads = {}
        if build.cpu and options.layout is not None:
            threads = {"OMP_NUM_THREADS": str(part.tensor_parallel_size), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            part = replace(part, tensor_parallel_size=1)
        for port, devices in zip(part.ports, part.split_devices(build), strict=True):
            argv = [sys.executable, *(_API_SERVER if build.cpu else _VLLM_SERVE), part.model]
            for name, value in {**_flags(part, build), **flags, "--port": str(port)}.items():
                argv += [name] if value is None else [name, value]
            commands.append(
                ServerCommand(
                    health_url=_url(_WILDCARDS.get(part.host, part.host), port),
                    # A server that listens on every address is reached by the machine's name.
                    base_url=_url(socket.gethostname() if part.host in _WILDCARDS else part.host, port),
                    # The last middleware runs first, before those of the user. The last seed is the one that counts.
                    argv=(*argv, *(part.vllm_flags or ()), *_last_flags(part, first + len(commands))),
                    tail=kind == 1,
                    env=_env(part, build, devices, environ) | threads,
                )
            )
    return commands


def trainer_arguments(
    options: ServeOptions, build: VLLMBuild, commands: Sequence[ServerCommand] = ()
) -> dict[str, object]:
    """Returns the arguments of `DARTSGRPOConfig` for these servers. Those on Ray are found by their list."""
    main, tail = (",".join(one.base_url for one in commands if one.tail == kind) for kind in (False, True))
    arguments: dict[str, object] = {"use_vllm": True, "vllm_mode": "server"}
    if options.on == "ray":
        arguments["vllm_server_list"] = RAY_PREFIX + options.name
    elif options.output is not None:
        arguments["vllm_server_list"] = str(options.output.absolute())
    else:
        arguments["vllm_server_base_url"] = main
    if tail:
        arguments |= {"vllm_tail_server_url": tail, "tail_switch_at": TAIL_SWITCH_AT}
    if options.takes_turns(build):
        arguments["vllm_tail_shares_gpus"] = True
    return {**arguments, "weight_sync": _weight_sync(options, build)}


def as_python(arguments: Mapping[str, object]) -> str:
    """Formats the arguments as a call of `DARTSGRPOConfig`."""
    # Double quotes, as formatters use. No value contains a quote or a backslash.
    shown = {name: f'"{value}"' if isinstance(value, str) else value for name, value in arguments.items()}
    return "\n".join(["DARTSGRPOConfig(", *(f"    {name}={value}," for name, value in shown.items()), ")"])


def as_flags(arguments: Mapping[str, object]) -> str:
    """Formats the arguments as flags for a script that uses `TrlParser`."""
    pairs = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in arguments.items()]
    return shlex.join(token for pair in pairs for token in pair)


def trainer_notes(options: ServeOptions, build: VLLMBuild, first_url: str = "") -> list[str]:
    """Returns notes for the user about what the arguments do not cover. They name the key's variable, not the key."""
    notes = []
    if options.own_key is not None:
        path = key_path(first_url)
        notes.append(
            f"The servers require a key, which your trainers on this machine find in {path}. For other clients: "
            f"export {API_KEY_VARIABLE}=$(cat {shlex.quote(str(path))}). `--no-api-key` starts servers without one."
        )
    elif options.api_key is not None:
        notes.append(f"The servers require a key: {API_KEY_VARIABLE} must be set in the trainer's environment too.")
    if options.on == "ray" and options.output is not None:
        notes.append(
            f"A trainer outside of the Ray cluster needs vllm_server_list={str(options.output.absolute())!r}."
        )
    if options.on == "ray" and _weight_sync(options, build) == "filesystem":
        notes.append("For servers on several machines, set `weight_sync_dir` to a directory that all of them share.")
    if options.host in _WILDCARDS and options.output is None:
        notes.append("The address is this machine's name. Replace it by 127.0.0.1 or another name where needed.")
    if options.layout is not None:
        notes.append(
            f"`tail_switch_at` ({TAIL_SWITCH_AT}) is a guess. To predict the switch instead, set `latency_curve` to a "
            "profile of main and tail servers (`trl-darts profile`, with `--tail-of` for the tail servers)."
        )
    if options.takes_turns(build) and FLAG not in options.flags and shared_utilization(options) is None:
        notes.append(
            f"The size of the weights is unknown. Choose `{FLAG}` such that the weights of main and tail servers fit "
            "next to the main servers' KV cache."
        )
    if _weight_sync(options, build) == "nccl" and options.on is None:
        used = {name for part in options.sets for devices in part.split_devices(build) for name in devices}
        left = ",".join(name for name in build.devices if name not in used)
        notes.append(
            f"The trainer needs other GPUs than the servers: {VISIBLE_DEVICES}={left}"
            if left
            else "The servers use every GPU, and with 'nccl' the trainer needs others. Run it on another machine."
        )
    if _weight_sync(options, build) == "nccl" and (options.on == "ray" or not is_loopback(options.host)):
        notes.append(
            "The servers connect to the trainer for its weights. If it has several network interfaces, set "
            "VLLM_HOST_IP to the address that the servers can reach, and NCCL_SOCKET_IFNAME to the interface "
            "(also for the servers)."
        )
    return notes


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _weight_sync(options: ServeOptions, build: VLLMBuild) -> str:
    if options.weight_sync == "auto" and options.lora_rank is not None:
        return "adapter"
    return _merged_sync(options, build)


def _merged_sync(options: ServeOptions, build: VLLMBuild) -> str:
    """Returns how whole weights reach the servers, also where adapters are expected, unless these alone are."""
    if options.weight_sync != "auto":
        return options.weight_sync
    return "filesystem" if build.cpu else "nccl"


def _flags(options: ServeOptions, build: VLLMBuild) -> dict[str, str | None]:
    flags: dict[str, str | None] = {
        "--host": options.host,
        "--logprobs-mode": "processed_logprobs",  # TRL's importance sampling correction compares these
        "--max-logprobs": "-1",
        "--enable-prefix-caching": None,
        # The default is one API process per data-parallel rank, and `/abort_requests` only aborts requests of its own.
        "--api-server-count": "1",
    }
    if options.tensor_parallel_size > 1:
        flags["--tensor-parallel-size"] = str(options.tensor_parallel_size)
    if options.max_model_len is not None:
        flags["--max-model-len"] = str(options.max_model_len)
    if _merged_sync(options, build) == "nccl":  # files need no transfer engine: the server reloads a directory
        flags["--weight-transfer-config"] = json.dumps({"backend": "nccl"})
    if options.lora_rank is not None:
        rank = next(rank for rank in ADAPTER_RANKS if rank >= options.lora_rank)
        flags |= {"--enable-lora": None, "--max-lora-rank": str(rank), "--max-loras": str(MAX_LORAS)}
    if options.speculative is not None:
        flags["--speculative-config"] = json.dumps(SPECULATIVE[options.speculative])
    return flags | (_cpu_flags(options) if build.cpu else {})


def _last_flags(options: ServeOptions, index: int) -> tuple[str, ...]:
    middleware = MIDDLEWARE if options.lora_rank is None else ADAPTERS
    return ("--seed", str(options.seed(index)), *(("--middleware", middleware) if options.api_key else ()))


def _turn_flags(options: ServeOptions) -> dict[str, str | None]:
    flags: dict[str, str | None] = {"--enable-sleep-mode": None}
    utilization = shared_utilization(options)
    if utilization is not None and FLAG not in options.flags:
        flags[FLAG] = f"{utilization:g}"
    return flags


def _cpu_flags(options: ServeOptions) -> dict[str, str | None]:
    flags: dict[str, str | None] = {
        "--dtype": "float32",
        "--enforce-eager": None,  # starts in a third of the time
        "--block-size": "32",  # the CPU's default of 128 excludes short prompts from the prefix cache
        "--distributed-executor-backend": "uni" if _in_one_process(options) else "mp",
    }
    if "--no-enforce-eager" in options.flags:
        del flags["--enforce-eager"]
    return {name: value for name, value in flags.items() if name not in options.flags}


def _env(
    options: ServeOptions, build: VLLMBuild, devices: tuple[str, ...], environ: Mapping[str, str]
) -> dict[str, str]:
    env = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONUNBUFFERED": "1"}  # unbuffered, so that the log has the last lines
    if devices:
        env[VISIBLE_DEVICES] = ",".join(devices)
    if options.lora_rank is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if options.api_key is not None:
        env |= {API_KEY_VARIABLE: options.api_key, "VLLM_USE_RUST_FRONTEND": "0"}  # it does not run middleware
    if build.cpu:
        defaults = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        if _in_one_process(options):
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # two processes would busy-wait for each other
        else:
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env |= {name: value for name, value in defaults.items() if name not in environ}
    return env


def _in_one_process(options: ServeOptions) -> bool:
    return options.tensor_parallel_size == 1 and not _PARALLEL_FLAGS & options.flags.keys()
