"""
What is known about servers on a Ray cluster, in a named actor: `trl-darts serve --on ray` writes it, trainers read it.

Several commands can share a registry, in which each server has a number. A server that restarts on another node enters
again, and reports of its earlier process, which may only have been frozen, are rejected. If Ray restarts the registry,
for example because a node runs out of memory, the servers' reports fill it again within seconds.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .supervisor import ProcessState


LEASE_S = 10.0  # a trainer that has not read the list for so long no longer has it


@dataclass
class Entry:
    """One server."""

    node: str = "no node yet"
    url: str | None = None
    state: ProcessState = ProcessState.WAITING
    since: float = 0.0
    started: float = 0.0  # when its process entered, by the time of day
    exit_code: int = 0


class Registry:
    """The servers of one or more commands. Runs as an actor, so each call is complete before the next."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[int, Entry] = {}
        self._forgotten: set[int] = set()
        self._messages: list[tuple[int, str]] = []
        self._owner: str | None = None
        self._read_at = 0.0

    # Called by `trl-darts serve`

    def reserve(self, count: int) -> list[int]:
        """Returns the numbers of new servers."""
        first = max([*self._entries, *self._forgotten], default=-1) + 1
        numbers = list(range(first, first + count))
        self._entries |= {number: Entry(since=self._clock()) for number in numbers}
        return numbers

    def forget(self, numbers: Iterable[int]) -> None:
        """Removes servers whose command ends."""
        for number in numbers:
            self._entries.pop(number, None)
            self._forgotten.add(number)

    def look(self, numbers: Iterable[int], num_seen: int) -> tuple[dict[int, tuple[Entry, float]], list[str], int]:
        """Returns servers with the seconds in their state, messages after the first `num_seen`, and their number."""
        wanted, now = set(numbers), self._clock()
        num_seen = num_seen if num_seen <= len(self._messages) else 0  # a registry that was restarted
        entries = {n: (self._entries[n], now - self._entries[n].since) for n in wanted if n in self._entries}
        messages = [text for number, text in self._messages[num_seen:] if number in wanted]
        return entries, messages, len(self._messages)

    # Called by the servers

    def report(
        self,
        number: int,
        started: float,
        node: str,
        state: ProcessState,
        url: str | None = None,
        messages: Sequence[str] = (),
        exit_code: int = 0,
    ) -> bool:
        """Updates a server. Returns whether its process still counts. Otherwise, it should end."""
        entry = self._entries.get(number, Entry())
        if number in self._forgotten or started < entry.started:
            return False
        if entry.state is not state or started > entry.started:
            entry.since = self._clock()
        entry.started, entry.node, entry.state, entry.exit_code = started, node, state, exit_code
        entry.url = url if state is ProcessState.HEALTHY else None
        self._entries[number] = entry
        self._messages += [(number, message) for message in messages]
        return True

    # Called by trainers

    def read(self, owner: str) -> dict[str, Any]:
        """Returns the list for [`ServerList`], or the trainer that uses the servers already."""
        now = self._clock()
        if self._owner not in (None, owner) and now - self._read_at < LEASE_S:
            return {"taken": self._owner}
        self._owner, self._read_at = owner, now
        urls = [entry.url for entry in self._entries.values() if entry.url is not None]
        return {"servers": urls, "num_servers": len(self._entries)}

    def release(self, owner: str) -> None:
        """Gives up the claim of a trainer that ends."""
        if self._owner == owner:
            self._owner = None
