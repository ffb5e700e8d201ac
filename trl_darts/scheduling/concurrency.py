"""
Limits the number of candidates that a server holds at once (late binding). Further candidates wait in the scheduler
and go to the first server with room. Candidates that a server holds stay there.

Invariants (`tests/scheduling/test_concurrency.py` checks each under its name, over random loads):

- bounded: the limit is at least 1 and at most the server's slots and a few more.
- only_under_pressure: it only falls if the server preempted requests, or queues them with a full KV cache, and not
  because of a weight sync, which preempts all requests.
- recovers: without pressure, a server at its limit returns to all of its slots.
"""

from dataclasses import dataclass


# Requests beyond the slots: when one ends, the next is already queued, so that no step waits for a round trip. Only
# completions of a few tokens end so often that a sixteenth of the slots does not suffice.
HEADROOM, HEADROOM_SHARE = 2, 16
# Multiplicative decrease, additive increase, as in prime-rl's `ConcurrencyController`: recomputing a preempted request
# costs more than an empty slot.
DECREASE = 0.8
INCREASE_SHARE = 16
FULL_CACHE = 0.95
# Readings after a weight sync that only set the base line: the first one may be older than the preemptions, which a
# server counts with its next step.
NUM_BASE_READINGS = 2


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Metrics of a server, over all of its engines."""

    num_running: float
    num_waiting: float  # includes preempted requests
    num_preemptions: float  # since the server started
    kv_cache_usage: float  # 0 to 1, the maximum over engines
    num_tokens: float  # generated since the server started


class ConcurrencyLimit:
    """
    Limits the candidates of one server with `slots` decoding slots. If `slots` is unknown (`None`), only `most`
    applies, the maximum number of connections.
    """

    def __init__(self, slots: int | None, most: int) -> None:
        self.slots = slots
        self.most = most
        self._limit: float = self.highest
        self._load: ServerLoad | None = None
        self._num_base = 0  # further readings that only set the base line

    def __int__(self) -> int:
        return max(1, min(int(self._limit), self.highest))

    @property
    def highest(self) -> int:
        """The limit without pressure."""
        return self.most if self.wanted is None else min(self.most, self.wanted)

    @property
    def wanted(self) -> int | None:
        """Candidates at once with which no slot stays empty, if the slots are known."""
        return None if self.slots is None else self.slots + self._headroom

    @property
    def _headroom(self) -> int:
        return HEADROOM + (self.slots or 0) // HEADROOM_SHARE

    def rebase(self) -> None:
        """Called after a weight sync, which preempts the server's requests."""
        self._num_base = NUM_BASE_READINGS

    def observe(self, load: ServerLoad, num_held: int) -> None:
        """Updates the limit from the server's load while it holds `num_held` of our candidates."""
        before, self._load = self._load, load
        if self._num_base:
            self._num_base -= 1
            return
        preempted = before is not None and load.num_preemptions > before.num_preemptions
        queues = load.kv_cache_usage >= FULL_CACHE and load.num_waiting > self._headroom
        if not (preempted or queues):
            if num_held >= int(self):
                self._limit = min(self.highest, int(self) + max(1, self.highest // INCREASE_SHARE))
        elif num_held <= int(self):  # otherwise the last decrease has not taken effect yet
            self._limit = max(1.0, DECREASE * min(load.num_running, num_held))
