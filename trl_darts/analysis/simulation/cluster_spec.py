"""Describes the engines of a simulation, as measured by `trl-darts profile` or as published by others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigurationError
from ...policy import EngineTimes, LatencyCurve, PrefillCurve, TailTimes
from ...scheduling import TailServers


@dataclass(frozen=True)
class ClusterSpec:
    """
    The engines that decode a batch together.

    Args:
        latency ([`LatencyCurve`]):
            Seconds per token of one engine, at its tensor parallel size.
        num_engines (`int`, *optional*, defaults to `1`):
            Data parallel replicas.
        max_num_seqs (`int`, *optional*):
            Sequences that an engine decodes at once; the others wait in its queue. Defaults to no limit.
        kv_tokens (`int`, *optional*):
            Tokens that fit in an engine's KV cache. When it overflows, the last admitted sequence is preempted: it
            returns to the head of the queue and is prefilled again. Defaults to no limit.
        prefill_seconds_per_token (`float`, *optional*, defaults to `0.0`):
            Seconds in which the engine decodes nothing. A prompt is prefilled once per engine, for all candidates.
        seconds_per_request (`float`, *optional*, defaults to `0.0`):
            Seconds that each candidate occupies its engine before it decodes.
        report_interval (`int`, *optional*, defaults to `16`):
            Tokens between two reports of a sequence, if the schedule needs them. The default is the streaming
            interval of the vLLM engine.
        tail ([`ClusterSpec`], *optional*):
            Engines of another layout, to which the last sequences move.
        switch_seconds (`float`, *optional*, defaults to `0.0`):
            Seconds to wake `tail` if it shares the GPUs and sleeps until then. With 0 it has its own GPUs.

    Raises:
        [`ConfigurationError`]: If a number is not positive.
    """

    latency: LatencyCurve
    num_engines: int = 1
    max_num_seqs: int | None = None
    kv_tokens: int | None = None
    prefill_seconds_per_token: float = 0.0
    seconds_per_request: float = 0.0
    report_interval: int = 16
    tail: ClusterSpec | None = None
    switch_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_engines", "max_num_seqs", "kv_tokens", "report_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"`{name}` ({value}) must be at least 1.")
        for name in ("prefill_seconds_per_token", "seconds_per_request", "switch_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"`{name}` ({getattr(self, name)}) must be finite and not negative.")

    @classmethod
    def of(cls, curve: LatencyCurve, prefill: PrefillCurve | None, **fields: Any) -> ClusterSpec:
        """Builds the engines from a profile's curves, with the limits of its server; `fields` override them."""
        own: dict[str, Any] = {
            "max_num_seqs": curve.metadata.get("max_num_seqs"),
            "kv_tokens": curve.metadata.get("kv_cache_tokens"),
            "prefill_seconds_per_token": prefill.per_token_s if prefill is not None else 0.0,
        }
        return cls(curve, **own | fields)

    def tail_servers(self, max_completion_length: int) -> TailServers | None:
        """Returns the tail engines as the schedule describes them."""
        if self.tail is None:
            return None
        main, tail = (
            EngineTimes(spec.latency, PrefillCurve(0.0, spec.prefill_seconds_per_token), spec.max_num_seqs)
            for spec in (self, self.tail)
        )
        times = TailTimes(main, tail, self.switch_seconds)
        return TailServers(times, max_completion_length, takes_turns=self.switch_seconds > 0)


# Seconds per token of Llama-3.1-8B behind NVIDIA NIM, as NVIDIA published them: 4.63 ms for one request, flat up to 5.
LLAMA_8B_NIM = LatencyCurve(
    [5, 25, 50, 100, 150, 200, 250],
    [0.00458, 0.00519, 0.00591, 0.00757, 0.00981, 0.01265, 0.01614],
    {"assumed": "Llama-3.1-8B as NVIDIA published it for NIM"},
)
ASSUMED_CLUSTER = ClusterSpec(LLAMA_8B_NIM, num_engines=8)
# LLaMA-3.1-8B on eight A40, as four engines of two GPUs and as one of eight: 15.37 and 9.64 ms per token for one
# sequence of all engines together, 24.41 and 30.87 ms for 128 (PAT, Figure 4). Prefilling nine sequences of 12K tokens
# again takes 19.01 s (Section 5.4). A switch takes 5.52 s, or 3.16 s without moving the cache.
_PAT = {"assumed": "LLaMA-3.1-8B on eight A40, as in PAT's Figure 4"}
_PREFILL_SECONDS_PER_TOKEN = 19.01 / (9 * 12_288)
PAT_CLUSTER = ClusterSpec(
    LatencyCurve([1, 32], [0.01537, 0.02441], _PAT),
    num_engines=4,
    prefill_seconds_per_token=_PREFILL_SECONDS_PER_TOKEN,
    tail=ClusterSpec(
        LatencyCurve([1, 128], [0.00964, 0.03087], _PAT), prefill_seconds_per_token=_PREFILL_SECONDS_PER_TOKEN
    ),
    switch_seconds=3.16,
)
