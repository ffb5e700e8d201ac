"""
How many candidates a server takes at once: as many as it likes until its KV cache runs full, then additive increase
and multiplicative decrease.

A server whose cache is full preempts requests and computes them again later, which costs more than letting them wait.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


FULL = 0.95  # share of the KV cache in use from which a queue means that it is full
ROOM = 0.85  # share below which more may be tried
DECREASE = 0.75
INCREASE = 0.05

USAGE = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions"


@dataclass(frozen=True, slots=True)
class LoadSample:
    """
    What a server says of its load.

    Args:
        kv_usage (`float`):
            Share of its KV cache that is in use, between 0 and 1.
        num_running (`int`):
            Requests that it decodes.
        num_waiting (`int`):
            Requests in its queue.
        num_preemptions (`int`):
            Preemptions since it started.
    """

    kv_usage: float
    num_running: int
    num_waiting: int
    num_preemptions: int

    @classmethod
    def parse(cls, text: str) -> "LoadSample":
        """
        From the text of `/metrics`; the engines of one server (data parallel) are added up, their usage averaged.

        Raises:
            `ValueError`: If it is not in Prometheus' format, or lacks one of the four.
        """
        names = (USAGE, RUNNING, WAITING, PREEMPTIONS)
        lines = [line for line in text.splitlines() if line.startswith(names)]  # of a thousand
        values: dict[str, list[float]] = {name: [] for name in names}
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if name in values:
                    values[name].append(sample.value)
        if missing := [name for name in names if not values[name]]:  # 0 would say that there is room
            raise ValueError(f"The server's metrics have no {', '.join(f'`{name}`' for name in missing)}.")
        usage = values[USAGE]
        return cls(sum(usage) / len(usage), *(_total(values[name]) for name in names[1:]))


def _total(values: Iterable[float]) -> int:
    return int(sum(value for value in values if math.isfinite(value)))


class AdaptiveCapacity:
    """
    The cap of one server.

    Args:
        limit (`int`):
            The most candidates whatever the server says: our open files.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.capacity = limit
        self._num_preemptions: int | None = None

    def set_limit(self, limit: int) -> None:
        """Another number of servers shares the open files."""
        self.capacity = limit if self.capacity == self.limit else min(self.capacity, limit)
        self.limit = limit

    def update(self, sample: LoadSample) -> int:
        """
        The cap after one more look at the server. Preempted requests are in its queue, and count as too many.

        Returns:
            `int`: Between 1 and the limit.
        """
        known, self._num_preemptions = self._num_preemptions, sample.num_preemptions
        preempted = known is not None and sample.num_preemptions > known
        if preempted or (sample.kv_usage >= FULL and sample.num_waiting > 0):
            self.capacity = max(1, min(self.capacity, math.floor(max(1, sample.num_running) * DECREASE)))
        elif self.capacity < self.limit and sample.kv_usage < ROOM:
            self.capacity = min(self.limit, self.capacity + max(1, math.ceil(self.capacity * INCREASE)))
        return self.capacity
