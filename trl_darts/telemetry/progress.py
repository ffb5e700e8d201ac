"""Shows the progress of a rollout in the training's progress bar."""

import sys
import time
from collections.abc import Iterable
from typing import Any

from transformers import ProgressCallback, TrainerCallback

from ..scheduling.ledger import ABORT, Ledger
from ..scheduling.types import FINAL_STATES


REFRESH_S = 0.5
PIPED_REFRESH_S = 10.0  # in a file, each refresh adds a line


class RolloutProgress:
    """
    Shows the numbers of running, complete and aborted candidates if one of the callbacks has a progress bar. The last
    numbers stay until the next rollout. Set `carries_over` if deferred prompts keep their tokens.
    """

    def __init__(self, callbacks: Iterable[TrainerCallback], carries_over: bool = False) -> None:
        self._bar = training_bar(callbacks)
        self._interval_s = REFRESH_S if sys.stderr.isatty() else PIPED_REFRESH_S
        self._carries_over = carries_over
        self._ledger: Ledger | None = None
        self._last = time.monotonic()

    def __enter__(self) -> "RolloutProgress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None and self._ledger is not None:
            self._bar.set_postfix_str(describe(self._ledger, self._carries_over), refresh=sys.stderr.isatty())

    def __call__(self, ledger: Ledger) -> None:
        """Shows the ledger's counters, at most twice a second."""
        now = time.monotonic()
        self._ledger = ledger
        if self._bar is not None and now - self._last >= self._interval_s:
            self._last = now
            self._bar.set_postfix_str(describe(ledger, self._carries_over))


def training_bar(callbacks: Iterable[TrainerCallback]) -> Any:
    """Returns the bar of transformers' callback, or `None`."""
    bars = (callback.training_bar for callback in callbacks if isinstance(callback, ProgressCallback))
    return next(bars, None)


def close_bar(callbacks: Iterable[TrainerCallback]) -> None:
    """Ends the bar's line, which an interrupted run leaves open."""
    if (bar := training_bar(callbacks)) is not None:
        bar.close()


def describe(ledger: Ledger, carries_over: bool) -> str:
    """Formats the counters. Aborted candidates exclude those of dropped prompts and of prompts that continue later."""
    aborted = carried = 0
    for group in ledger.groups.values():
        count = sum(c.state in FINAL_STATES and (c.finish_reason or ABORT) is ABORT for c in group.candidates)
        if carries_over and not group.closed:
            carried += count
        elif group.error is None:
            aborted += count
    deferred = f", {carried} carried over" if carries_over else ""
    return (
        f"{ledger.num_running} running, {ledger.num_complete} complete, {aborted} aborted{deferred} of "
        f"{len(ledger.candidates)} candidates"
    )
