"""Where the seconds of a step go."""

import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback


PARTS = {
    "rollout": "darts/step/rollout",
    "scoring": "darts/step/scoring",
    "passes": "darts/step/passes",
    "optimizer": "darts/step/optimizer",
    "weights": "darts/step/weights",
}
REST = "rest"


class Stopwatch:
    """Sums the seconds that are spent on each part of a step. Blocks nest, and the innermost decides."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)  # of what has ended
        self._popped: defaultdict[str, float] = defaultdict(float)
        self._part, self._since = REST, time.perf_counter()

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Seconds inside this context are spent on `part`."""
        before = self.switch(part)
        try:
            yield
        finally:
            self.switch(before)

    def switch(self, part: str) -> str:
        """Seconds from now on are spent on `part`. Returns what they were spent on before."""
        now = time.perf_counter()
        self.seconds[self._part] += now - self._since
        before, self._part, self._since = self._part, part, now
        return before

    def pop(self, part: str) -> float:
        """Returns the seconds that were spent on `part` since the last call."""
        since = self.seconds[part] - self._popped[part]
        self._popped[part] = self.seconds[part]
        return since


class StepParts(TrainerCallback):
    """Logs where the seconds of each optimizer step went. Their sum is that of the step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)  # no cycle: a deleted trainer is freed at once
        self._begin = 0.0
        self._before: dict[str, float] = {}  # seconds of the parts in earlier steps

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begins to measure."""
        self._begin, seconds = time.perf_counter(), self._trainer._clock.seconds
        self._before = {part: seconds[part] for part in PARTS}

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Logs the step."""
        clock = self._trainer._clock
        clock.switch(REST)  # after the optimizer
        total = time.perf_counter() - self._begin
        parts = {PARTS[part]: clock.seconds[part] - before for part, before in self._before.items()}
        rest = total - sum(parts.values())
        self._trainer._log_all({"darts/step/seconds": total, **parts, "darts/step/rest": rest})


def step_line(logs: Mapping[str, float]) -> str | None:
    """Returns a step's seconds and its parts for the console, the largest first. `None` if they were not logged."""
    total = logs.get("darts/step/seconds")
    if not total:
        return None
    shares = {part: logs[name] / total for part, name in {**PARTS, REST: "darts/step/rest"}.items()}
    order = sorted(shares, key=lambda part: -shares[part])
    return f"{total:.4g} s: {', '.join(f'{part} {shares[part]:.0%}' for part in order if shares[part] >= 0.005)}"
