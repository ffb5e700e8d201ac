"""Options of `trl-darts serve`, and their checks before any process is started."""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from ..analysis.output_files import check_writable
from ..engines.addresses import API_KEY_VARIABLE
from ..errors import ConfigurationError
from ..policy import Layout
from ..recipes.files import unreachable
from ..scheduling.rules import one_of
from ..speculation.drafter import MAX_DRAFT
from ..weights import ADAPTER_RANKS, WEIGHT_SYNCS
from .build import VLLMBuild, split_devices


DRAFTER = "trl_darts.speculation.drafter.SuffixDrafter"
# No method with a draft model, which would be outdated after every weight update. The numbers of `ngram` are from
# vLLM's documentation.
SPECULATIVE = {
    "suffix": {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": MAX_DRAFT},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
}
HUB_TIMEOUT_S = 5.0
MAX_SEED = 1 << 32  # numpy's
PLACES = ("ray",)
PLACEMENTS = ("spread", "pack")
ON_ONE_MACHINE = ("layout", "devices", "host")
ON_RAY = ("name", "join", "placement", "ray_address")
CONFIG_FILES = ("config.json", "params.json")  # transformers' and Mistral's
# Flags of vLLM that can't be passed on because `trl-darts serve` sets them, by remedy.
_REMEDIES = {
    "the model is the argument before `--`": ("--model",),
    "use `--host` before `--`": ("--host",),
    "use `--port` before `--`": ("--port",),
    "use `--tensor-parallel-size` before `--`": ("--tensor-parallel-size", "-tp"),
    "use `--devices` before `--`": ("--device-ids",),
    "use `--max-model-len` before `--`": ("--max-model-len",),
    f"everyone on the machine can read a command line. Set {API_KEY_VARIABLE} in the environment": ("--api-key",),
    "use `--speculative` before `--`": (
        *("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"),
    ),
    "use `--weight-sync` before `--`": ("--weight-transfer-config",),
    "use `--lora-rank` before `--`": ("--enable-lora", "--max-lora-rank"),
    "the trainer needs the value that `trl-darts serve` sets. Leave it out": (
        *("--logprobs-mode", "--max-logprobs", "--enable-prefix-caching"),
    ),
    "with several API processes, each can only abort its own requests. Leave it out": (
        *("--api-server-count", "-asc"),
    ),
    "everyone on the machine can read a command line. Set HF_TOKEN in the environment": ("--hf-token",),
    "completions would not follow the model's distribution. Leave it out": ("--watermark-config",),
    "the trainer's resumed candidates need the prefix cache. Leave it out": ("--no-enable-prefix-caching",),
    "the trainer connects to host and port. Leave it out": ("--uds", "--headless", "--grpc"),
    "the servers use plain HTTP. Put a proxy that ends TLS in front of them": ("--ssl-certfile", "--ssl-keyfile"),
    "a file could contradict the flags set here. Pass its flags one by one": ("--config",),
}
_REMEDY = {flag: remedy for remedy, flags in _REMEDIES.items() for flag in flags}
_FLAG = re.compile(r"-(?!\d)")


@dataclass(frozen=True)
class ServeOptions:
    """Options of `trl-darts serve`, documented in its help. `check_options` checks them."""

    model: str
    vllm_flags: Sequence[str] | None = None
    num_servers: int = 1
    tensor_parallel_size: int = 1
    layout: str | None = None
    devices: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    speculative: str | None = None
    max_model_len: int | None = None
    weight_sync: str = "auto"
    lora_rank: int | None = None
    restart: bool = False
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 1800.0
    log_dir: Path | None = None
    output: Path | None = None
    on: str | None = None
    name: str = "trl-darts"
    join: bool = False
    placement: str = "spread"
    ray_address: str | None = None
    no_api_key: bool = False
    own_key: str | None = field(default=None, repr=False)  # `api_key` if it was made for these servers
    first_seed: int = field(default_factory=lambda: secrets.randbelow(1 << 31))

    @property
    def ports(self) -> range:
        return range(self.port, self.port + sum(one.num_servers for one in self.sets))

    @property
    def sets(self) -> list[ServeOptions]:
        """Returns separate options for the main servers and, with a `layout`, for the tail servers."""
        if self.layout is None:
            return [self]
        main, tail = (
            replace(self, layout=None, num_servers=engines.num_engines, tensor_parallel_size=engines.size)
            for engines in Layout.parse("layout", self.layout)
        )
        return [main, replace(tail, port=self.port + main.num_servers)]

    def takes_turns(self, build: VLLMBuild) -> bool:
        """Whether main and tail servers share GPUs. On a CPU, the sizes of a layout are numbers of threads."""
        return self.layout is not None and not build.cpu

    @property
    def flags(self) -> dict[str, str]:
        """Returns vLLM's flags with their values, by the names that its parser uses: `--a_b.c=1` is `--a-b`."""
        values = {}
        for token, following in pairwise([*(self.vllm_flags or ()), "-"]):
            if _FLAG.match(token):
                value = token.partition("=")[2] or ("" if _FLAG.match(following) else following)
                values[re.split("[=.]", token, maxsplit=1)[0].replace("_", "-")] = value
        return values

    def seed(self, index: int) -> int:
        """
        Returns the seed of a server. Servers with the same seed give equal answers to a prompt. A user's `--seed` is
        that of the first one.
        """
        given = next((value for name, value in self.flags.items() if name.startswith("--see")), None)
        if given is not None and not (given.isdecimal() and int(given) < MAX_SEED):
            raise ConfigurationError(f"`--seed` ({given!r}) must be a whole number from 0 to {MAX_SEED - 1}.")
        return ((self.first_seed if given is None else int(given)) + index) % MAX_SEED

    @property
    def gpus_per_copy(self) -> int:
        """Number of GPUs that share one copy of the model."""
        return self.tensor_parallel_size * self._size("--pipeline-parallel-size", "-pp")

    @property
    def gpus_per_server(self) -> int:
        return self.gpus_per_copy * self._size("--data-parallel-size", "-dp")

    @property
    def spans_nodes(self) -> bool:
        """Whether vLLM itself places the GPUs of each server on the nodes of a Ray cluster."""
        return self.flags.get("--distributed-executor-backend") == "ray"

    def split_devices(self, build: VLLMBuild) -> list[tuple[str, ...]]:
        if self.on == "ray" and self.spans_nodes:
            return [()] * self.num_servers
        devices = None if self.devices is None else tuple(name.strip() for name in self.devices.split(","))
        return split_devices(build, devices, self.num_servers, self.gpus_per_server)

    def _size(self, *spellings: str) -> int:
        name = next((name for name in spellings if name in self.flags), spellings[0])
        value = self.flags.get(name, "1")
        if not value.isdigit() or int(value) < 1:
            raise ConfigurationError(f"`{name}` ({value!r}) must be a positive number.")
        return int(value)


def check_place(options: ServeOptions) -> None:
    """Raises [`ConfigurationError`] for options that contradict where the servers run, and for flags."""
    if options.on is not None:
        one_of(PLACES).check("on", options.on)
    one_of(PLACEMENTS).check("placement", options.placement)
    names = ON_ONE_MACHINE if options.on is not None else ON_RAY
    for name in names:
        if (value := getattr(options, name)) != getattr(ServeOptions, name):
            rule, remedy = (
                ("must be unset with `--on ray`, which chooses it for each server", "Leave it out.")
                if options.on is not None
                else ("has no effect without a Ray cluster", "Add `--on ray`, or leave it out.")
            )
            raise ConfigurationError(f"`{name}` ({value!r}) {rule}. {remedy}")
    if options.output is not None:
        check_writable("output", options.output)
    _check_flags(options)


def check_options(options: ServeOptions, build: VLLMBuild) -> None:
    """Raises [`ConfigurationError`] for options that can't work with this vLLM."""
    for name in ("num_servers", "tensor_parallel_size", "max_model_len", "timeout"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigurationError(f"`{name}` ({value:g}) must be positive.")
    _check_flags(options)
    options.seed(0)
    _check_layout(options, build)
    if options.spans_nodes and build.cpu:
        raise ConfigurationError(
            "`--distributed-executor-backend` ('ray') needs GPUs: vLLM's Ray executor refuses CPUs, and the vLLM here "
            "is a CPU build. Leave it out."
        )
    one_of(WEIGHT_SYNCS).check("weight_sync", options.weight_sync)
    _check_lora(options)
    if options.weight_sync == "nccl" and build.cpu:
        raise ConfigurationError(
            "`weight_sync` ('nccl') needs CUDA, and the vLLM here is a CPU build. Use 'filesystem'."
        )
    if options.speculative is not None:
        _check_speculative(options.speculative, build)
    _check_key(options)
    check_ports(options.host, options.ports)
    check_model(options.model)
    for part in options.sets:
        part.split_devices(build)


def _check_lora(options: ServeOptions) -> None:
    if options.lora_rank is None:
        if options.weight_sync == "adapter":
            raise ConfigurationError(
                "`weight_sync` ('adapter') needs `lora_rank`, the largest rank of an adapter. Set `--lora-rank`."
            )
        return
    most = ADAPTER_RANKS[-1]
    if not 0 < options.lora_rank <= most:
        raise ConfigurationError(f"`lora_rank` ({options.lora_rank}) must be between 1 and {most}, vLLM's largest.")
    if "--data-parallel-size" in options.flags or "-dp" in options.flags:
        raise ConfigurationError(
            f"`lora_rank` ({options.lora_rank}) does not run with `--data-parallel-size`: only one engine of a server "
            "would load an adapter. Use `--num-servers`."
        )


def _check_layout(options: ServeOptions, build: VLLMBuild) -> None:
    if options.layout is None:
        return
    for name in ("num_servers", "tensor_parallel_size"):
        if getattr(options, name) != 1:
            raise ConfigurationError(
                f"`{name}` ({getattr(options, name)}) must be unset with `layout` ({options.layout!r}), which sets it "
                "for both kinds of servers. Leave it out."
            )
    main, tail = (part.num_servers * part.tensor_parallel_size for part in options.sets)
    if options.takes_turns(build) and main != tail:
        raise ConfigurationError(
            f"`layout` ({options.layout!r}) must have the same number of GPUs for both kinds of servers, which share "
            f"them, and has {main} and {tail}. Change it, or run two commands with different `--devices`."
        )
    if options.takes_turns(build) and options.restart:
        raise ConfigurationError(
            f"`restart` (True) must be unset with `layout` ({options.layout!r}): a restarted server would find its "
            "GPUs in use. Leave it out."
        )


def _check_flags(options: ServeOptions) -> None:
    # The messages do not show a flag's value, because it could be a key.
    if options.vllm_flags and not _FLAG.match(options.vllm_flags[0]):
        raise ConfigurationError(
            f"`{options.vllm_flags[0]}` is one argument too many: there is one model. Flags of vLLM follow `--` and "
            "start with a dash."
        )
    for name in options.flags:
        # vLLM's parser accepts abbreviations, so `--weight` would be one of ours too.
        completes = len(name) > 2 and name.startswith("--")
        ours = next((flag for flag in _REMEDY if flag == name or (completes and flag.startswith(name))), None)
        if ours is not None:
            raise ConfigurationError(f"`{name}` can't follow `--`: {_REMEDY[ours]}.")


def _check_speculative(method: str, build: VLLMBuild) -> None:
    one_of(SPECULATIVE).check("speculative", method)
    if method == "suffix" and not _takes_a_drafter():
        raise ConfigurationError(
            f"`speculative` ('suffix') needs a vLLM that supports custom draft classes, and {build.version} does not. "
            "Install vLLM 0.31, or use 'ngram'."
        )


def _takes_a_drafter() -> bool:
    vllm = importlib.util.find_spec("vllm")  # not imported
    proposer = Path("v1", "spec_decode", "custom_class_proposer.py")
    return vllm is not None and (Path(vllm.origin or "").parent / proposer).is_file()


def with_own_key(options: ServeOptions) -> ServeOptions:
    """Gives servers on loopback addresses, which all users of the machine can reach, a key unless they have one."""
    if options.api_key is not None or options.no_api_key or not is_loopback(options.host):
        return options
    key = secrets.token_hex(16)
    return replace(options, api_key=key, own_key=key)


def _check_key(options: ServeOptions) -> None:
    if options.no_api_key and options.api_key is not None:
        raise ConfigurationError(
            f"`no_api_key` (True) must be unset with a key. Leave `--no-api-key` out, or unset {API_KEY_VARIABLE}."
        )
    if options.api_key is not None and (not options.api_key.isascii() or not options.api_key.strip()):
        raise ConfigurationError(
            f"`api_key` must be one or more ASCII characters, because it is sent in an HTTP header. Set "
            f"{API_KEY_VARIABLE}, or leave it out."
        )
    if options.api_key is None and not is_loopback(options.host):
        raise ConfigurationError(
            f"`host` ({options.host!r}) must be a loopback address without `api_key`: anyone could reach the servers' "
            f"development endpoints, which replace weights. Use `--host 127.0.0.1`, or set {API_KEY_VARIABLE}."
        )


def log_directory(log_dir: Path | None) -> Path:
    """Creates and returns the directory for logs, a temporary one by default."""
    if log_dir is None:
        return Path(tempfile.mkdtemp(prefix="trl_darts_serve_"))
    log_dir.mkdir(parents=True, exist_ok=True)
    return log_dir


def is_loopback(host: str) -> bool:
    """Whether a host's addresses are all loopback addresses."""
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return False
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)


def check_ports(host: str, ports: range) -> None:
    """Raises if a port is in use, or if the host is not an address of this machine."""
    if ports[0] < 1 or ports[-1] > 65535:
        raise ConfigurationError(
            f"`port` ({ports[0]}) must leave {len(ports)} port(s), one per server, between 1 and 65535."
        )
    try:
        taken = [str(port) for port in ports if not is_free(host, port)]
    except OSError as error:
        raise ConfigurationError(
            f"`host` ({host!r}) must be an address of this machine, and `port` ({ports[0]}) one that this user may "
            f"open: {error.strerror}. Use 127.0.0.1 for trainers on this machine, and a port of 1024 or more."
        ) from error
    if taken:
        raise ConfigurationError(
            f"`port` ({ports[0]}) must be the first of {len(ports)} free port(s), one per server, and "
            f"{', '.join(taken)} is in use. Choose another `--port`, or stop the process that uses it."
        )


def is_free(host: str, port: int) -> bool:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        # As vLLM does, so that the port of a server that has just ended is free. vLLM also sets SO_REUSEPORT, with
        # which two servers share a port without an error, so only this check finds a port in use.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def check_model(model: str) -> None:
    """Raises unless the model is a checkpoint's directory, in the Hub's cache or (unless offline) on the Hub."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        if not any((path / name).is_file() for name in CONFIG_FILES):
            raise ConfigurationError(
                f"`model` ({model!r}) must be the directory of a checkpoint, and it has no {CONFIG_FILES[0]}. Save "
                "the model there with `save_pretrained`, or use the directory that has it."
            )
        return
    if path.is_file() and path.suffix != ".gguf":
        raise ConfigurationError(
            f"`model` ({model!r}) must be the directory of a checkpoint, and is a file. Correct it."
        )
    if path.is_file() or "://" in model:
        return  # an object store's: vLLM raises a better error
    # These load an HTTP client, and errors in other arguments should be raised first.
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
    )

    try:
        cached = any(isinstance(try_to_load_from_cache(model, name), str) for name in CONFIG_FILES)
    except HFValidationError as error:
        raise ConfigurationError(
            f"`model` ({model!r}) must be a directory that exists, or a model of the Hub. Correct the path."
        ) from error
    if cached or os.environ.get("VLLM_USE_MODELSCOPE"):  # vLLM then uses another hub
        return
    if constants.HF_HUB_OFFLINE:
        raise ConfigurationError(
            f"`model` ({model!r}) must be a directory that exists, or a model in the Hub's cache, because "
            "HF_HUB_OFFLINE is set. Correct the path, or unset HF_HUB_OFFLINE to download the model."
        )
    start = f"`model` ({model!r}) must be a directory that exists, or a model of the Hub"
    try:
        HfApi().model_info(model, timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"{start}, which has no such model. Correct the name, or log in (`hf auth login`) if it is private."
        ) from error
    except (HTTPError, OSError) as error:
        raise ConfigurationError(f"{start}. There is no such directory, and {unreachable(error)}") from error
