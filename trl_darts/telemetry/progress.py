"""The line that shows a rollout while it runs."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..scheduling.ledger import Ledger


REFRESH_S = 0.1


class RolloutProgress:
    """Shows how many candidates run, are complete and were aborted; disappears when the rollout ends."""

    def __init__(self, enabled: bool) -> None:
        self._live = None
        if enabled and sys.stderr.isatty():
            self._live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
        self._last = 0.0

    def __enter__(self) -> "RolloutProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, ledger: Ledger) -> None:
        """Shows the ledger's counters, at most ten times a second."""
        now = time.monotonic()
        if self._live is None or now - self._last < REFRESH_S:
            return
        self._last = now
        self._live.update(Text(describe(ledger), style="cyan"), refresh=True)


def describe(ledger: Ledger) -> str:
    """One line on a rollout's state."""
    return (
        f"rollout: {ledger.num_running} running, {ledger.num_complete} complete, {ledger.num_aborted} aborted "
        f"of {len(ledger.candidates)} candidates"
    )
