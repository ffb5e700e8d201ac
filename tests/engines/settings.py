"""Settings of each engine, small enough for tests."""

from __future__ import annotations

import os
from functools import partial
from typing import Any


ENGINES = ("transformers", "continuous_batching", "vllm_colocated", "vllm_server")


def engine_settings(engine: str, url: str | None = None) -> dict[str, Any]:
    """Returns the config fields for an engine."""
    if engine == "transformers":
        return {}
    if engine == "continuous_batching":
        # Without limits the cache takes most of the machine's memory, which takes it ten seconds per rollout.
        limits = {"num_blocks": 256, "max_batch_tokens": 256, "max_memory_percent": 0.1}
        return {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": limits,
        }
    if engine == "vllm_colocated":
        return {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256}
    from benchmarks.vllm_server import free_port

    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_group_port": free_port()}


def prepare_colocated() -> None:
    """Sets what the CPU build needs and TRL has no setting for. Must be called before a trainer is made."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from trl.generation import vllm_generation

    # Compilation takes a minute, and bfloat16, its choice, would hide a wrong weight in its noise.
    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True, dtype="float32")
    _name_shared_memory()


def _name_shared_memory() -> None:
    """
    Gives vLLM's shared memory a name per job. With tensor parallelism in a launcher, the CPU build uses the same name
    in every job, so two can't run at once, and a killed one blocks the name.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    make_name = _CPUSHMDistributed.make_group_name
    job = f"{os.getppid()}-{os.environ.get('MASTER_PORT')}"  # the same for the processes of a launch
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: job + make_name(communicator).lstrip("/"))
