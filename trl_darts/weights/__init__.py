"""
Transfers weights from the trainer to vLLM servers: over NCCL (as TRL does), through files, or as LoRA adapters.

`plugin` and `reload` run in the servers' processes, the other modules in the trainer. Every vLLM process imports this
package, so it must stay empty of heavy imports.
"""

from typing import NamedTuple


# Values of `weight_sync`.
WEIGHT_SYNCS = ("auto", "nccl", "filesystem", "adapter")
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # files of PEFT
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes for `--max-lora-rank`


class SyncRecord(NamedTuple):
    """Duration and size of a weight sync."""

    seconds: float
    num_bytes: int | None  # sent to all servers in total, or written; `None` for colocated vLLM
