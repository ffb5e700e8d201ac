"""What `trl-darts serve` shows while it runs: a live table in a terminal, else lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from ..serving.supervisor import State, Watched


LINE_INTERVAL_S = 30.0
_STYLES = {State.WAITING: "yellow", State.STARTING: "cyan", State.HEALTHY: "green"}


class ServeDisplay:
    """
    Shows servers that are not healthy yet, and what happens. A [`Reporter`] of the supervisor.

    Args:
        console (`rich.console.Console`):
            Where to, standard error.
        on_ready (`Callable`):
            Called once, when all servers are healthy.
    """

    def __init__(self, console: Console, on_ready: Callable[[], None]) -> None:
        self.console = console
        self._on_ready = on_ready
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._next_line_at = 0.0

    def progress(self, servers: Sequence[Watched], now: float) -> None:
        """The table, or a line every half minute."""
        if self.console.is_terminal:
            if self._live is None:
                self._live = Live(console=self.console, transient=True, refresh_per_second=8)
                self._live.start()
            self._live.update(self._table(servers, now))
        elif now >= self._next_line_at:
            self._next_line_at = now + LINE_INTERVAL_S
            self.event("; ".join(_describe(watched, now) for watched in servers))

    def ready(self) -> None:
        """Ends the table."""
        self.close()
        self._on_ready()

    def event(self, text: str) -> None:
        """A line, above the table if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Takes the table away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self, servers: Sequence[Watched], now: float) -> Table:
        table = Table.grid(padding=(0, 2))
        for watched in servers:
            sign = "✓" if watched.state is State.HEALTHY else self._spinner
            row = watched.process.command.base_url, f"{watched.state.value}", f"{now - watched.since:.0f} s"
            table.add_row(sign, *row, style=_STYLES[watched.state])
        return table


def _describe(watched: Watched, now: float) -> str:
    return f"{watched.process.command.base_url} {watched.state.value} for {now - watched.since:.0f} s"
