"""
Weights from the trainer to vLLM servers: over NCCL (TRL's way), or through files where there is no CUDA.

`plugin` and `reload` run in the servers' processes, the rest in the trainer. Every vLLM process imports this package,
so nothing is loaded here.
"""

from typing import NamedTuple


# The settings of `weight_sync`.
WEIGHT_SYNCS = ("auto", "nccl", "filesystem")


class SyncRecord(NamedTuple):
    """What a weight sync took."""

    seconds: float
    num_bytes: int | None  # sent to all servers together, or written; unknown for vLLM in the trainer's process
