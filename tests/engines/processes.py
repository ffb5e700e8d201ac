"""
A rollout over several processes. Each is a thread that decodes by a script; the key-value store is real.

Tokens can't be pickled, so a test fails if one leaves its process.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.engines.threads import TIMEOUT_S, at_once, open_mailboxes
from tests.policies import make_policies
from trl_darts.engines.in_process.share import Link, MainLink, RemoteLink, Report, Share
from trl_darts.engines.mailbox import Mailbox
from trl_darts.scheduling import AssignedPlacement, FinishReason, GroupPlan, RolloutResult, Scheduler


M, M_UP = 3, 6
NEVER = 10**9  # a length that only an abort ends
Lengths = list[list[int]]  # by group and index


class Token:
    """A token that must not leave its process."""

    def __reduce__(self) -> Any:
        raise AssertionError("a token left its process")


class Watched:
    """A link that counts the reports and records the aborts of another link."""

    def __init__(self, inner: Link) -> None:
        self.inner = inner
        self.num_sent = 0
        self.aborts: list[int] = []

    def exchange(self, reports: Sequence[Report]) -> Sequence[int]:
        self.num_sent += len(reports)
        aborts = self.inner.exchange(reports)
        self.aborts += aborts
        return aborts


class WatchedMainLink(MainLink):
    """A link that records its reports and decisions in order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reports: list[Report] = []
        self.decided: list[tuple[int, int]] = []

    def handle(self, reports: Sequence[Report]) -> list[tuple[int, int]]:
        aborts = super().handle(reports)
        self.decided += aborts
        self.reports += reports
        return aborts


class Decoder:
    """Decodes a share: each step adds a token to each running candidate, up to its scripted length."""

    def __init__(self, share: Share, lengths: Lengths) -> None:
        self.share = share
        self.lengths = lengths
        self.steps = 0

    def step(self) -> None:
        self.grow()
        self.exchange()

    def grow(self) -> None:
        self.steps += 1
        for slot in self.share.slots:
            if slot.candidate_id in self.share.running and self.lengths[slot.group_id][slot.index] == self.steps:
                self._end(slot.candidate_id, FinishReason.STOP)
        if self.share.needs_progress:
            for candidate_id in self.share.running:
                self.share.progress(candidate_id, self.steps)

    def exchange(self) -> None:
        for candidate_id in self.share.exchange():
            self._end(candidate_id, FinishReason.ABORT)

    def _end(self, candidate_id: int, reason: FinishReason) -> None:
        self.share.end(candidate_id, [Token() for _ in range(self.steps)], None, reason)

    def decode(self, pause: Callable[[], float] = lambda: 0.0) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.share.running:
            self.step()
            time.sleep(pause())
            assert time.monotonic() < deadline, f"{self.share.running} never end"
        self.share.exchange()


def make_main_link(
    lengths: Lengths, num_engines: int, mailbox: Mailbox | None = None, rollout: int = 1, **options: Any
) -> WatchedMainLink:
    """Assigns candidates to the engines in turn, so that every group has some on every engine."""
    policies = make_policies("darts", M, max_num_generations=M_UP, **options)
    numbers = iter(range(10**6))
    placement = AssignedPlacement(
        {place: [str(next(numbers) % num_engines) for _ in own] for place, own in enumerate(lengths)}
    )
    plans = [GroupPlan(index, len(group)) for index, group in enumerate(lengths)]
    scheduler = Scheduler(replace(policies, placement=placement), M)
    return WatchedMainLink(scheduler, plans, range(num_engines), mailbox, rollout)


class Processes:
    """A rollout on several processes. The first one decides, and each has a share."""

    def __init__(
        self,
        lengths: Lengths,
        num_processes: int,
        boxes: list[Mailbox] | None = None,
        rollout: int = 1,
        **options: Any,
    ) -> None:
        main, *others = boxes or open_mailboxes(num_processes)
        self.main = make_main_link(lengths, num_processes, main, rollout, **options)
        self.main.listen()
        self.links = [self.main, *(RemoteLink(box, rollout) for box in others)]
        self.watched = [Watched(link) for link in self.links]
        needs_progress = self.main.scheduler.needs_progress
        self.shares = [Share(*pair, needs_progress) for pair in zip(self.main.slots, self.watched, strict=True)]
        self.decoders = [Decoder(share, lengths) for share in self.shares]

    def run(self, pauses: Sequence[Callable[[], float]]) -> RolloutResult:
        """Decodes on all processes, each at its own pace."""
        at_once(*(lambda d=d, p=p: d.decode(p) for d, p in zip(self.decoders, pauses, strict=True)))
        return self.main.result()

    def run_in_step(self) -> RolloutResult:
        """All processes take each step together, and every decision arrives before the next."""
        while not self.main.scheduler.done:
            for decoder in self.decoders:
                decoder.grow()
            self._settle()
        return self.main.result()

    def _settle(self) -> None:
        """Waits until all reports and all decisions have arrived."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            for decoder in self.decoders:
                decoder.exchange()
            running = {number for share in self.shares for number in share.running}
            all_arrived = len(self.main.reports) == sum(link.num_sent for link in self.watched)
            if all_arrived and not running & {candidate_id for _, candidate_id in self.main.decided}:
                return
            assert time.monotonic() < deadline, "messages got lost"


def random_lengths(seed: int, highest: int = 60) -> Lengths:
    """Returns lengths without duplicates, so that the order of the processes' reports does not matter."""
    draw = random.Random(seed)
    counts = [draw.randint(M, M_UP) for _ in range(draw.randint(2, 5))]
    lengths = iter(draw.sample(range(1, highest), sum(counts)))
    return [[next(lengths) for _ in range(count)] for count in counts]


OPTIONS = {"darts": {}, "no pruning": {"tail_pruning": False}, "patience": {"long_end_patience": 1.5}}
