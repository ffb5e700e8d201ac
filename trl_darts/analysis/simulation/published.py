"""Lengths and latencies that others published, for those who have measured none of their own yet."""

from ...policy import LatencyCurve
from .engine import ClusterSpec
from .workload import LogNormalLengths


# Log-normals near the quantiles that were published. How much of the spread is within a prompt was not: half of the
# variance here.
WORKLOADS = {
    # LLaMA-3.1-8B on DeepScaleR: 10.85 % of the answers are longer than 8K tokens, 2.18 % than 16K (PAT, Figure 3b),
    # of a log-normal p50 2,748, p90 8,540 and p99 21,525.
    "llama_8b_deepscaler": LogNormalLengths(1_024, 2_748.0, 0.60, 0.50),
    # DeepSeek-R1 in production: p50 833, p90 4,541 and p99 13,915 (ServeGen). No log-normal has all three.
    "deepseek_r1": LogNormalLengths(1_024, 833.0, 0.84, 0.71),
}
# Seconds per token of Llama-3.1-8B behind NVIDIA NIM, as NVIDIA published them: 4.63 ms for one request, flat up to 5.
LLAMA_8B_NIM = LatencyCurve(
    [5, 25, 50, 100, 150, 200, 250],
    [0.00458, 0.00519, 0.00591, 0.00757, 0.00981, 0.01265, 0.01614],
    {"assumed": "Llama-3.1-8B as NVIDIA published it for NIM"},
)
# LLaMA-3.1-8B on eight A40, as four engines of two GPUs and as one of eight: 15.37 and 9.64 ms per token for one
# sequence of all engines together, 24.41 and 30.87 ms for 128 (PAT, Figure 4). To read tokens anew: 19.01 s for nine
# sequences of 12K (Section 5.4). A switch takes 5.52 s, without 2.36 s of them that move the cache.
PAT_LAYOUT = "4x2+1x8"
_READ_SECONDS_PER_TOKEN = 19.01 / (9 * 12_288)
_PAT = {"assumed": "LLaMA-3.1-8B on eight A40, as in PAT's Figure 4"}
PAT_CLUSTER = ClusterSpec(
    LatencyCurve([1, 32], [0.01537, 0.02441], _PAT),
    num_engines=4,
    prefill_seconds_per_token=_READ_SECONDS_PER_TOKEN,
    tail=ClusterSpec(
        LatencyCurve([1, 128], [0.00964, 0.03087], _PAT), prefill_seconds_per_token=_READ_SECONDS_PER_TOKEN
    ),
    switch_seconds=3.16,
)
ASSUMED_CLUSTER = ClusterSpec(LLAMA_8B_NIM, num_engines=8)
