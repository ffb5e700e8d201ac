"""Everything that can be refused before a process is started."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigurationError
from .build import VISIBLE_DEVICES, VLLMBuild
from .flags import check_flags, integer
from .options import API_KEY_VARIABLE, SPECULATIVE_METHODS, WEIGHT_SYNCS, ServeOptions
from .ports import check_ports, is_loopback


CONFIG_FILES = ("config.json", "params.json")  # transformers' and Mistral's


def check_options(options: ServeOptions, build: VLLMBuild) -> None:
    """
    Refuses what can't work.

    Args:
        options ([`ServeOptions`]):
            What is asked for.
        build ([`VLLMBuild`]):
            The vLLM that would run it.

    Raises:
        [`ConfigurationError`]: Naming the argument, its value, the rule and the remedy.
    """
    for name in ("num_servers", "tensor_parallel_size", "max_model_len"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"`{name}` ({value}) must be at least 1.")
    check_flags(options.vllm_flags)
    _check_weight_sync(options.weight_sync, build)
    _check_speculative(options.speculative, build)
    _check_key(options)
    check_ports(options.host, options.ports)
    check_model(options.model)
    split_devices(options, build)


def _check_weight_sync(weight_sync: str, build: VLLMBuild) -> None:
    if weight_sync not in WEIGHT_SYNCS:
        raise ConfigurationError(
            f"`weight_sync` ({weight_sync!r}) must be one of {', '.join(map(repr, WEIGHT_SYNCS))}."
        )
    if weight_sync == "nccl" and build.cpu:
        raise ConfigurationError(
            "`weight_sync` ('nccl') needs CUDA, and the vLLM here is a CPU build. Use 'gloo' or 'filesystem'."
        )


def _check_speculative(method: str | None, build: VLLMBuild) -> None:
    if method is None:
        return
    if method not in SPECULATIVE_METHODS:
        raise ConfigurationError(
            f"`speculative` ({method!r}) must be one of {', '.join(map(repr, SPECULATIVE_METHODS))}: methods "
            "without a draft model, which would go stale with every weight update."
        )
    if build.cpu:
        raise ConfigurationError(
            f"`speculative` ({method!r}) must be unset with a CPU build of vLLM ({build.version}): at temperatures "
            "above 0 its samples and log-probs are wrong there, seen with 0.31.0. Leave it out."
        )
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise ConfigurationError(
            "`speculative` ('suffix') needs Arctic Inference: `pip install arctic-inference`, or use 'ngram'."
        )


def _check_key(options: ServeOptions) -> None:
    if options.api_key is not None and (not options.api_key.isascii() or not options.api_key.strip()):
        raise ConfigurationError(
            f"`api_key` must be one or more ASCII characters: it travels in an HTTP header. Set "
            f"{API_KEY_VARIABLE}, or leave it out."
        )
    if options.api_key is None and not is_loopback(options.host):
        raise ConfigurationError(
            f"`host` ({options.host!r}) must be a loopback address without `api_key`: others could reach servers "
            "whose development endpoints replace weights and run arbitrary reloads. Use `--host 127.0.0.1`, or set "
            f"{API_KEY_VARIABLE} and keep the address in a private network, since vLLM does not ask for the key on "
            "those endpoints."
        )


def check_model(model: str, environ: Mapping[str, str] = os.environ) -> None:
    """
    Whether a model is there: a checkpoint's directory, or a name of the Hub that can be downloaded or is cached.

    Raises:
        [`ConfigurationError`]: If not.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        if not any((path / name).is_file() for name in CONFIG_FILES):
            raise ConfigurationError(
                f"`model` ({model!r}) must be the directory of a checkpoint, and it has no {CONFIG_FILES[0]}. Save "
                "the model there with `save_pretrained`, or name the directory that has it."
            )
        return
    if path.is_file() or "://" in model:
        return  # a GGUF file, or an object store: vLLM's own words are the best
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1 or not model
    if looks_local:
        raise ConfigurationError(f"`model` ({model!r}) must be a directory that exists, or a model of the Hub.")
    if _offline(environ) and not _is_cached(model):
        raise ConfigurationError(
            f"`model` ({model!r}) must be a directory that exists, or a model that the Hub's cache holds: "
            "HF_HUB_OFFLINE is set. Correct the path, or unset HF_HUB_OFFLINE to download a model of that name."
        )


def _offline(environ: Mapping[str, str]) -> bool:
    values = (environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def _is_cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(model, name), str) for name in CONFIG_FILES)
    except HFValidationError:
        return False


def split_devices(options: ServeOptions, build: VLLMBuild) -> list[tuple[str, ...]]:
    """
    The GPUs of each server: as many as its parallel sizes need. Empty for a CPU build.

    Raises:
        [`ConfigurationError`]: If the devices can't be divided that way, or are not there.
    """
    if build.cpu:
        if options.devices is not None:
            raise ConfigurationError(
                f"`devices` ({','.join(options.devices)}) must be unset with a CPU build of vLLM. Leave it out, or "
                "install vLLM for CUDA."
            )
        return [()] * options.num_servers
    per_server = _devices_per_server(options)
    needed = per_server * options.num_servers
    rule = f"{options.num_servers} server(s) with {per_server} GPU(s) each, which is {needed}"
    # The last ones, because a trainer that is started without more ado takes the first.
    devices = options.devices if options.devices is not None else build.devices[-needed:]
    if len(devices) != needed:
        raise ConfigurationError(
            f"`devices` ({','.join(devices)}) must divide over {rule}. Change `--devices`, `--num-servers` or "
            "`--tensor-parallel-size`."
        )
    if len(set(devices)) != needed:
        raise ConfigurationError(
            f"`devices` ({','.join(devices)}) must name each GPU once. Each server needs its own."
        )
    # Names such as `GPU-3f…` and `MIG-…` can't be compared with numbers; CUDA knows them.
    missing = [name for name in devices if name.isdigit() and name not in build.devices]
    if missing and all(name.isdigit() for name in build.devices):
        raise ConfigurationError(
            f"`devices` ({','.join(devices)}) must be among the GPUs that are visible here "
            f"({','.join(build.devices)}); {','.join(missing)} is not. Change `--devices` or {VISIBLE_DEVICES}."
        )
    return [devices[start : start + per_server] for start in range(0, needed, per_server)]


def _devices_per_server(options: ServeOptions) -> int:
    data_parallel = integer(options.vllm_flags, "--data-parallel-size", "-dp")
    pipeline = integer(options.vllm_flags, "--pipeline-parallel-size", "-pp")
    return options.tensor_parallel_size * data_parallel * pipeline
