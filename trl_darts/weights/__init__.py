"""
Transfers weights from the trainer to vLLM servers: over NCCL (as TRL does), or through files without CUDA.

`plugin` and `reload` run in the servers' processes, the other modules in the trainer. Every vLLM process imports this
package, so it must stay empty of heavy imports.
"""

from typing import NamedTuple


# Values of `weight_sync`.
WEIGHT_SYNCS = ("auto", "nccl", "filesystem")


class SyncRecord(NamedTuple):
    """Duration and size of a weight sync."""

    seconds: float
    num_bytes: int | None  # sent to all servers in total, or written; `None` for colocated vLLM
