"""What `trl-darts serve` is asked for, and what it refuses before a process exists."""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from ..engines.addresses import API_KEY_VARIABLE
from ..errors import ConfigurationError
from ..policy import Layout
from ..policy.drafts import MAX_DRAFT
from ..scheduling.policies import check_choice
from ..weights import WEIGHT_SYNCS
from .build import VLLMBuild, split_devices


DRAFTER = "trl_darts.speculation.drafter.SuffixDrafter"
# Methods without a draft model, which would go stale with every weight update. The numbers of `ngram` are those of
# vLLM's documentation.
SPECULATIVE = {
    "suffix": {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": MAX_DRAFT},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
}
HUB_TIMEOUT_S = 5.0
CONFIG_FILES = ("config.json", "params.json")  # transformers' and Mistral's
# What to do instead of handing these flags to vLLM: they decide something that we decide.
_REMEDIES = {
    "the model is the argument before `--`": ("--model",),
    "use `--host` before `--`": ("--host",),
    "use `--port` before `--`": ("--port",),
    "use `--tensor-parallel-size` before `--`": ("--tensor-parallel-size", "-tp"),
    "use `--devices` before `--`": ("--device-ids",),
    "use `--max-model-len` before `--`": ("--max-model-len",),
    f"use `--api-key` before `--`, or the environment variable {API_KEY_VARIABLE}": ("--api-key",),
    "use `--speculative` before `--`": (
        *("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"),
    ),
    "use `--weight-sync` before `--`": ("--weight-transfer-config",),
    "the trainer needs the value that is set here. Leave it out": (
        *("--logprobs-mode", "--max-logprobs", "--enable-prefix-caching"),
    ),
    "of several API processes, one that is asked to abort a request knows its own alone. Leave it out": (
        *("--api-server-count", "-asc"),
    ),
    "everyone on the machine can read a command line. Set HF_TOKEN in the environment": ("--hf-token",),
    "answers would not be the model's own. Leave it out": ("--watermark-config",),
    "the trainer's resumed candidates need the prefix cache. Leave it out": ("--no-enable-prefix-caching",),
    "the trainer connects to host and port. Leave it out": ("--uds", "--headless", "--grpc"),
    "the servers speak plain HTTP. Put a proxy that ends TLS in front of them": ("--ssl-certfile", "--ssl-keyfile"),
    "a file could contradict what is set here. Give its flags one by one": ("--config",),
}
_REMEDY = {flag: remedy for remedy, flags in _REMEDIES.items() for flag in flags}
_FLAG = re.compile(r"-(?!\d)")


@dataclass(frozen=True)
class ServeOptions:
    """The parameters of `trl-darts serve`, whose help documents each. Nothing is checked before `check_options`."""

    model: str
    vllm_flags: Sequence[str] | None = None
    num_servers: int = 1
    tensor_parallel_size: int = 1
    layout: str | None = None
    devices: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    speculative: str | None = None
    draft_history: Path | None = None
    max_model_len: int | None = None
    weight_sync: str = "auto"
    restart: bool = False
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    log_dir: Path | None = None

    @property
    def ports(self) -> range:
        return range(self.port, self.port + sum(own.num_servers for own in self.sets))

    @property
    def sets(self) -> list[ServeOptions]:
        """Those of the main servers and, with a `layout`, those of the tail's, for each by itself."""
        if self.layout is None:
            return [self]
        main, tail = (
            replace(self, layout=None, num_servers=own.num_engines, tensor_parallel_size=own.size)
            for own in Layout.parse("layout", self.layout)
        )
        return [main, replace(tail, port=self.port + main.num_servers)]

    def takes_turns(self, build: VLLMBuild) -> bool:
        """Whether main and tail servers are on the same GPUs. On a CPU the numbers of a layout are threads."""
        return self.layout is not None and not build.cpu

    @property
    def flags(self) -> dict[str, str]:
        """vLLM's flags with their values, under the names that its parser reads: `--a_b.c=1` is `--a-b`."""
        values = {}
        for word, following in pairwise([*(self.vllm_flags or ()), "-"]):
            if _FLAG.match(word):
                value = word.partition("=")[2] or ("" if _FLAG.match(following) else following)
                values[re.split("[=.]", word, maxsplit=1)[0].replace("_", "-")] = value
        return values

    @property
    def gpus_per_copy(self) -> int:
        """GPUs that share one copy of the model."""
        return self.tensor_parallel_size * self._size("--pipeline-parallel-size", "-pp")

    def split_devices(self, build: VLLMBuild) -> list[tuple[str, ...]]:
        devices = None if self.devices is None else tuple(name.strip() for name in self.devices.split(","))
        per_server = self.gpus_per_copy * self._size("--data-parallel-size", "-dp")
        return split_devices(build, devices, self.num_servers, per_server)

    def _size(self, *spellings: str) -> int:
        name = next((name for name in spellings if name in self.flags), spellings[0])
        value = self.flags.get(name, "1")
        if not value.isdigit() or int(value) < 1:
            raise ConfigurationError(f"`{name}` ({value!r}) must be a positive number.")
        return int(value)


def check_options(options: ServeOptions, build: VLLMBuild) -> None:
    """Refuses what can't work with this vLLM, naming the argument, its value, the rule and the remedy."""
    for name in ("num_servers", "tensor_parallel_size", "max_model_len", "timeout"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigurationError(f"`{name}` ({value:g}) must be positive.")
    _check_flags(options)
    _check_layout(options, build)
    check_choice("weight_sync", options.weight_sync, WEIGHT_SYNCS)
    if options.weight_sync == "nccl" and build.cpu:
        raise ConfigurationError(
            "`weight_sync` ('nccl') needs CUDA, and the vLLM here is a CPU build. Use 'filesystem'."
        )
    if options.speculative is not None:
        _check_speculative(options.speculative, build)
    if options.draft_history is not None and options.speculative != "suffix":
        raise ConfigurationError(
            f"`draft_history` ({str(options.draft_history)!r}) needs `speculative='suffix'`: nothing else drafts from "
            "it. Add `--speculative suffix`, or leave it out."
        )
    _check_key(options)
    check_ports(options.host, options.ports)
    check_model(options.model)
    if options.draft_history is not None:
        from ..speculation.store import Store  # loads transformers

        Store(options.draft_history, options.flags.get("--tokenizer", options.model))
    for own in options.sets:
        own.split_devices(build)


def _check_layout(options: ServeOptions, build: VLLMBuild) -> None:
    if options.layout is None:
        return
    for name in ("num_servers", "tensor_parallel_size"):
        if getattr(options, name) != 1:
            raise ConfigurationError(
                f"`{name}` ({getattr(options, name)}) does not go with `layout` ({options.layout!r}), which has it "
                "for both kinds of servers. Leave it out."
            )
    main, tail = (own.num_servers * own.tensor_parallel_size for own in options.sets)
    if options.takes_turns(build) and main != tail:
        raise ConfigurationError(
            f"`layout` ({options.layout!r}) must have the same GPUs for both kinds of servers, which take turns on "
            f"them, and has {main} and {tail}. Change it, or start two commands with `--devices` of their own."
        )
    if options.takes_turns(build) and options.restart:
        raise ConfigurationError(
            f"`restart` (True) does not go with `layout` ({options.layout!r}): a server that is started again finds "
            "its GPUs in use. Leave it out."
        )


def _check_flags(options: ServeOptions) -> None:
    """A message never has a flag's value: it could be a key."""
    if options.vllm_flags and not _FLAG.match(options.vllm_flags[0]):
        raise ConfigurationError(
            f"`{options.vllm_flags[0]}` is one argument too many: there is one model. Flags of vLLM follow `--` and "
            "begin with a dash."
        )
    for name in options.flags:
        # vLLM's parser completes a flag from its beginning, so `--weight` would be one of ours too.
        completes = len(name) > 2 and name.startswith("--")
        ours = next((flag for flag in _REMEDY if flag == name or (completes and flag.startswith(name))), None)
        if ours is not None:
            raise ConfigurationError(f"`{name}` can't follow `--`: {_REMEDY[ours]}.")


def _check_speculative(method: str, build: VLLMBuild) -> None:
    check_choice("speculative", method, SPECULATIVE)
    if method == "suffix" and not _takes_a_drafter():
        raise ConfigurationError(
            f"`speculative` ('suffix') needs a vLLM that takes a class for its drafts, and {build.version} does not. "
            "Install vLLM 0.31, or use 'ngram'."
        )


def _takes_a_drafter() -> bool:
    vllm = importlib.util.find_spec("vllm")  # not imported
    proposer = Path("v1", "spec_decode", "custom_class_proposer.py")
    return vllm is not None and (Path(vllm.origin or "").parent / proposer).is_file()


def _check_key(options: ServeOptions) -> None:
    if options.api_key is not None and (not options.api_key.isascii() or not options.api_key.strip()):
        raise ConfigurationError(
            f"`api_key` must be one or more ASCII characters: it travels in an HTTP header. Set {API_KEY_VARIABLE}, "
            "or leave it out."
        )
    if options.api_key is None and not is_loopback(options.host):
        raise ConfigurationError(
            f"`host` ({options.host!r}) must be a loopback address without `api_key`: others could reach servers "
            f"whose development endpoints replace weights. Use `--host 127.0.0.1`, or set {API_KEY_VARIABLE}."
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A name counts if all its addresses are."""
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return False
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)


def check_ports(host: str, ports: range) -> None:
    """Refuses ports that are taken, and an address that is not one of this machine."""
    if ports[0] < 1 or ports[-1] > 65535:
        raise ConfigurationError(
            f"`port` ({ports[0]}) must leave {len(ports)} port(s), one per server, between 1 and 65535."
        )
    try:
        taken = [str(port) for port in ports if not _is_free(host, port)]
    except OSError as error:
        raise ConfigurationError(
            f"`host` ({host!r}) must be an address of this machine, and `port` ({ports[0]}) one that this user may "
            f"open: {error.strerror}. Use 127.0.0.1 for trainers here, and a port of 1024 or more."
        ) from error
    if taken:
        raise ConfigurationError(
            f"`port` ({ports[0]}) must be the first of {len(ports)} free port(s), one per server, and something "
            f"listens on {', '.join(taken)} already. Choose another `--port`, or end what runs there."
        )


def _is_free(host: str, port: int) -> bool:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        # As vLLM does, so that a server which ended a moment ago does not count. vLLM also sets SO_REUSEPORT: two
        # servers would then share one port without an error, which is why nobody but us finds a port that is taken.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def check_model(model: str) -> None:
    """Refuses what is neither a checkpoint's directory nor in the Hub's cache nor, unless offline, on the Hub."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        if not any((path / name).is_file() for name in CONFIG_FILES):
            raise ConfigurationError(
                f"`model` ({model!r}) must be the directory of a checkpoint, and it has no {CONFIG_FILES[0]}. Save "
                "the model there with `save_pretrained`, or name the directory that has it."
            )
        return
    if path.is_file() or "://" in model:
        return  # a GGUF file, or an object store: vLLM's own message is the best
    # Here, because they load an HTTP client, for which errors of other arguments should not wait.
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
    if cached or os.environ.get("VLLM_USE_MODELSCOPE"):  # vLLM then asks another hub
        return
    if constants.HF_HUB_OFFLINE:
        raise ConfigurationError(
            f"`model` ({model!r}) must be a directory that exists, or a model that the Hub's cache holds: "
            "HF_HUB_OFFLINE is set. Correct the path, or unset HF_HUB_OFFLINE to download a model of that name."
        )
    start = f"`model` ({model!r}) must be a directory that exists, or a model of the Hub"
    try:
        HfApi().model_info(model, timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"{start}, which shows no such model. Correct the name, or log in (`hf auth login`) if it is private."
        ) from error
    except (HTTPError, OSError) as error:
        words = " ".join(str(error).split()).rstrip(".")
        raise ConfigurationError(
            f"{start}: there is no such directory, and {constants.ENDPOINT} can't be asked ({words}). Correct the "
            "path, or check the network."
        ) from error
