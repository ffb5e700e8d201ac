"""How far a rollout is, behind the training's progress bar."""

import sys
import time
from collections.abc import Iterable
from typing import Any

from transformers import ProgressCallback, TrainerCallback

from ..scheduling.ledger import ABORT, Ledger
from ..scheduling.types import FINAL_STATES


REFRESH_S = 0.5
PIPED_REFRESH_S = 10.0  # each refresh stays in a file


class RolloutProgress:
    """
    Shows how many candidates run, are complete and were aborted, where one of the callbacks has a progress bar. What
    it showed last stays until the next rollout. `carries_over`: prompts that the rollout ends without keep their
    tokens.
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
    """The bar of transformers' callback, if there is one."""
    bars = (callback.training_bar for callback in callbacks if isinstance(callback, ProgressCallback))
    return next(bars, None)


def close_bar(callbacks: Iterable[TrainerCallback]) -> None:
    """Ends the bar's line, which a training that is interrupted leaves open."""
    if (bar := training_bar(callbacks)) is not None:
        bar.close()


def describe(ledger: Ledger, carries_over: bool) -> str:
    """Aborted are those of `darts/rollout/aborted_candidates`, without prompts that go on later or were dropped."""
    aborted = carried = 0
    for group in ledger.groups.values():
        count = sum(c.state in FINAL_STATES and (c.finish_reason or ABORT) is ABORT for c in group.candidates)
        if carries_over and not group.closed:
            carried += count
        elif group.error is None:
            aborted += count
    goes_on = f", {carried} carried over" if carries_over else ""
    return (
        f"{ledger.num_running} running, {ledger.num_complete} complete, {aborted} aborted{goes_on} of "
        f"{len(ledger.candidates)} candidates"
    )
