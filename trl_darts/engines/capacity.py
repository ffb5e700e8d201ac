"""What a server says of its load on `/metrics`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


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
