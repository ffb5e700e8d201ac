"""
How many candidates a server holds at once: late binding. What is beyond that waits with the scheduler, and goes to
whichever server is free first; what a server has taken, it keeps.

Invariants (`tests/scheduling/test_concurrency.py` checks each under its name, over random loads):

- bounded: the limit is at least 1 and at most the server's slots and a few more.
- only_under_pressure: it falls where the server has preempted requests, or queues them with a full KV cache.
- recovers: without pressure, a server that is at its limit gets back to all of its slots.
"""

from dataclasses import dataclass


# Requests beyond the slots: where one ends, the next is there already, and no step waits for the round trip. A
# sixteenth ends within a step only where answers have a handful of tokens.
HEADROOM, HEADROOM_SHARE = 2, 16
# Multiplicative down, additive up, as prime-rl's `ConcurrencyController`: a preempted request is computed anew, which
# costs more than an empty slot.
DECREASE = 0.8
INCREASE_SHARE = 16
FULL_CACHE = 0.95


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server tells of itself, of all of its engines together."""

    num_running: float
    num_waiting: float  # those that were preempted included
    num_preemptions: float  # since it started
    kv_cache_usage: float  # of 1, where it is highest
    num_tokens: float  # generated since it started


class ConcurrencyLimit:
    """
    The most candidates of one server, which decodes `slots` sequences at once. Where it does not say (`None`), only
    `most` bounds them, the connections that there can be.
    """

    def __init__(self, slots: int | None, most: int) -> None:
        self.slots = slots
        self.most = most
        self._limit: float = self.highest
        self._load: ServerLoad | None = None

    def __int__(self) -> int:
        return max(1, min(int(self._limit), self.highest))

    @property
    def highest(self) -> int:
        """Without pressure."""
        return self.most if self.slots is None else min(self.most, self.slots + self._headroom)

    @property
    def _headroom(self) -> int:
        return HEADROOM + (self.slots or 0) // HEADROOM_SHARE

    def observe(self, load: ServerLoad, num_held: int) -> None:
        """Takes note of a server's load while it holds so many candidates of ours."""
        before, self._load = self._load, load
        preempted = before is not None and load.num_preemptions > before.num_preemptions
        queues = load.kv_cache_usage >= FULL_CACHE and load.num_waiting > self._headroom
        if not (preempted or queues):
            if num_held >= int(self):
                self._limit = min(self.highest, int(self) + max(1, self.highest // INCREASE_SHARE))
        elif num_held <= int(self):  # else the last cut has not had its effect yet
            self._limit = max(1.0, DECREASE * min(load.num_running, num_held))
