"""Processes that decode one batch together (tensor parallelism) abort in the same step, and fail in the same step."""

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.engines.processes import NEVER, Decoder, make_main_link
from tests.engines.threads import in_threads
from trl_darts.engines.in_process.share import GroupLink, Link, Report, Share
from trl_darts.errors import GenerationError


class FakeGroup:
    """A process group of threads, which meet at each broadcast as ranks do, within a second."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = threading.local()
        self.num_broadcasts = 0
        self._payload: Any = None
        self._barrier = threading.Barrier(size, timeout=1)
        monkeypatch.setattr(torch.distributed, "broadcast_object_list", self.broadcast)

    def broadcast(self, box: list[Any], src: int, group: "FakeGroup") -> None:
        assert group is self
        if self.rank.value == src:
            self._payload = pickle.dumps(box)
            self.num_broadcasts += 1
        self._barrier.wait()
        if self.rank.value != src:
            box[:] = pickle.loads(self._payload)
        self._barrier.wait()


LEADER, TP_SIZE = 4, 3


def follow(inner: Link, group: FakeGroup, act: Callable[[GroupLink], Any]) -> tuple[list[Any], dict]:
    """Runs `act` on ranks 4, 5 and 6, of which the first is the leader."""

    def process(rank: int) -> Any:
        group.rank.value = rank
        return act(GroupLink(inner if rank == LEADER else None, LEADER, group))

    return in_threads(*(lambda rank=rank: process(rank) for rank in range(LEADER, LEADER + TP_SIZE)))


class Scripted:
    """A link that returns the n-th entry at its n-th call, and records the reports."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers = answers
        self.calls = 0
        self.reports: list[Report] = []

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        self.reports += reports
        self.calls += 1
        return self.answers.get(self.calls, [])


def test_followers_abort_at_the_same_call_as_the_leader(monkeypatch):
    group = FakeGroup(TP_SIZE, monkeypatch)
    inner = Scripted({1: [10], 3: [11, 12], 8: [13], 9: [14], 17: [15]})

    def act(link: GroupLink) -> list[tuple[int, list[int]]]:
        received = [(call, link.exchange([Report(call, 1)])) for call in range(1, 31)]
        return [(call, list(aborts)) for call, aborts in received if aborts]

    results, errors = follow(inner, group, act)
    assert not errors
    assert results == [[(8, [10, 11, 12, 13]), (16, [14]), (24, [15])]] * TP_SIZE  # all of them, once
    assert group.num_broadcasts == 3
    assert [report.candidate_id for report in inner.reports] == list(range(1, 31))  # the leader's alone, in time


def test_a_group_decodes_one_share(monkeypatch):
    """All ranks end with the same rows, and the scheduler gets one end of each candidate."""
    group = FakeGroup(TP_SIZE, monkeypatch)
    lengths = [[3, 5, 9, NEVER, NEVER, NEVER], [4, 20, 7]]
    main = make_main_link(lengths, num_engines=1)

    def act(link: GroupLink) -> dict[int, int]:
        share = Share(main.slots[0], link, needs_progress=False)
        Decoder(share, lengths).decode()
        return {number: len(tokens) for number, (tokens, _) in share.rows.items()}

    results, errors = follow(main, group, act)
    assert not errors
    assert results[0] == results[1] == results[2]
    ends = Counter(report.candidate_id for report in main.reports if report.finish_reason is not None)
    assert ends == Counter(range(9))
    assert main.scheduler.done
    assert [g.selected for g in main.result().groups] == [[0, 1, 2], [0, 1, 2]]
    assert [c.length for c in main.scheduler.ledger.candidates[3:6]] == [16] * 3  # decided at 9, broadcast at 16


def test_an_error_reaches_followers_with_the_next_broadcast(monkeypatch):
    """Only the leader gets the error of another process."""
    group = FakeGroup(TP_SIZE, monkeypatch)

    class Broken(Scripted):
        def exchange(self, reports: Sequence[Report]) -> list[int]:
            super().exchange(reports)
            if self.calls == 3:
                raise GenerationError("Generation failed on process 0: boom")
            return []

    def act(link: GroupLink) -> None:
        for _ in range(8):
            link.exchange([])

    _, errors = follow(Broken({}), group, act)
    assert {rank: (type(error), str(error)) for rank, error in errors.items()} == dict.fromkeys(
        range(TP_SIZE), (GenerationError, "Generation failed on process 0: boom")
    )
