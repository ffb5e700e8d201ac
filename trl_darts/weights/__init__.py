"""
Weights from the trainer to vLLM servers: over NCCL (TRL's way), or through files where there is no CUDA.

`plugin` and `reload` run in the servers' processes, the rest in the trainer. Every vLLM process imports this package,
so nothing is loaded here.
"""

# The settings of `weight_sync`.
WEIGHT_SYNCS = ("auto", "nccl", "filesystem")
