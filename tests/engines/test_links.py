"""Rollouts over several processes decide as one engine does, and no process waits for one that failed."""

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tests.engines.processes import (
    M_UP,
    NEVER,
    OPTIONS,
    Decoder,
    M,
    Processes,
    Token,
    make_main_link,
    random_lengths,
)
from tests.engines.threads import in_threads, open_mailboxes
from tests.policies import make_policies
from tests.stub_engine import StubEngine
from trl_darts.engines.in_process import share as share_module
from trl_darts.engines.in_process.share import MainLink, RemoteLink, Report
from trl_darts.errors import GenerationError
from trl_darts.policy import select_dual_end
from trl_darts.scheduling import CandidateState, FinishReason, GroupPlan, Scheduler
from trl_darts.scheduling.types import FINAL_STATES


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr(share_module, "POLL_S", 0.0005)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("seed", range(2))
def test_processes_in_step_decide_what_one_engine_decides(options, seed):
    lengths = random_lengths(seed)
    processes = Processes(lengths, num_processes=2 + seed % 2, **options)
    result = processes.run_in_step()

    engine = StubEngine(lengths, progress_interval=1)
    scheduler = Scheduler(make_policies("darts", M, max_num_generations=M_UP, **options), M)
    expected = engine.run(scheduler, [GroupPlan(index, len(group)) for index, group in enumerate(lengths)])
    for group, wanted in zip(result.groups, expected.groups, strict=True):
        assert group.selected == wanted.selected
        assert [c.length for c in group.candidates] == [c.length for c in wanted.candidates]
        assert [c.finish_reason for c in group.candidates] == [c.finish_reason for c in wanted.candidates]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("seed", range(2))
def test_processes_at_their_own_pace(options, seed):
    lengths = random_lengths(seed)
    num_processes = 2 + seed % 2
    processes = Processes(lengths, num_processes, **options)
    draw = random.Random(seed)
    pace = [draw.uniform(0, 0.002) for _ in range(num_processes)]
    result = processes.run([lambda p=p: draw.uniform(0, p) for p in pace])
    main, ledger = processes.main, processes.main.scheduler.ledger

    # Every candidate ends once, on the process that has its slot, and the scheduler knows the number of its tokens.
    ends = Counter(report.candidate_id for report in main.reports if report.finish_reason is not None)
    assert ends == Counter(range(sum(map(len, lengths))))
    assert all(candidate.state in FINAL_STATES for candidate in ledger.candidates)
    for share, slots in zip(processes.shares, main.slots, strict=True):
        assert not share.running
        assert set(share.rows) == {slot.candidate_id for slot in slots}
        for number, (tokens, _) in share.rows.items():
            assert all(isinstance(token, Token) for token in tokens)
            assert ledger.candidates[number].tokens == [0] * len(tokens)

    # Aborts reach only the process that decodes the candidate, and once.
    for engine, watched in enumerate(processes.watched):
        decided = [number for owner, number in main.decided if owner == engine]
        assert Counter(watched.aborts) <= Counter(decided)
        for number in set(decided) - set(watched.aborts):  # it had ended by itself
            assert ledger.candidates[number].finish_reason is FinishReason.STOP

    for group, script in zip(result.groups, lengths, strict=True):
        stopped = [c.finish_reason is FinishReason.STOP for c in group.candidates]
        assert all(c.length == script[c.index] for c in group.candidates if stopped[c.index])
        complete = [c.complete for c in group.candidates]
        if len(script) == M_UP and options.get("tail_pruning", True):
            assert sum(complete) == M
            assert group.selected == [index for index, done in enumerate(complete) if done]
        else:
            assert group.selected == select_dual_end([c.length for c in group.candidates], complete, M - 1, 1)
        if options.get("long_end_patience") is None and len(script) < M_UP:
            assert all(complete)

    # One process that gets the same reports in the same order decides the same.
    again = make_main_link(lengths, num_processes, **options)
    aborts = [number for report in main.reports for _, number in again.handle([report])]
    assert Counter(aborts) == Counter(number for _, number in main.decided)
    assert [group.selected for group in again.result().groups] == [group.selected for group in result.groups]


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_an_abort_reaches_each_process(owner):
    """
    Candidates 0, 3 are on the main process, 1, 4 on the second, 2, 5 on the third. Those of one process never end.
    """
    lengths = [[4, 4, 4, 9, 9, 9]]
    lengths[0][owner] = lengths[0][owner + 3] = NEVER
    result = Processes(lengths, num_processes=3).run([lambda: 0.001] * 3)
    group = result.groups[0]
    assert not {owner, owner + 3} & set(group.selected)
    for index in (owner, owner + 3):
        assert group.candidates[index].state is CandidateState.ABORTED
        assert group.candidates[index].finish_reason is FinishReason.ABORT


def test_processes_without_candidates():
    result = Processes([[3, 5, 4]], num_processes=5).run([lambda: 0.001] * 5)
    assert result.groups[0].selected == [0, 1, 2]


# Errors


class OutOfMemory(Exception):
    """An engine's error."""


def play(processes: Processes, broken: int, error: Exception, at_step: int = 3) -> dict[int, BaseException]:
    """Process `broken` raises in a step. Returns the error of each process, as `InProcessEngine.run` raises it."""

    def decode(index: int) -> None:
        decoder, link = processes.decoders[index], processes.links[index]

        def grow() -> None:
            if index == broken and decoder.steps == at_step:
                raise error
            Decoder.grow(decoder)

        decoder.grow = grow
        try:
            decoder.decode(lambda: 0.001)
        except Exception as problem:
            link.fail(problem)
            raise
        if isinstance(link, MainLink):
            link.result()

    return in_threads(*(lambda index=index: decode(index) for index in range(len(processes.links))))[1]


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (2, OutOfMemory("no block left"), "Generation failed on process 2: no block left"),
        (0, OutOfMemory("no block left"), "no block left"),
        (2, OutOfMemory(), "Generation failed on process 2: OutOfMemory"),
    ],
)
def test_an_error_of_one_process_ends_the_rollout_everywhere(broken, error, message):
    errors = play(Processes([[NEVER] * 4], num_processes=4), broken, error)
    assert errors.pop(broken) is error
    assert {(type(other), str(other)) for other in errors.values()} == {(GenerationError, message)}
    assert len(errors) == 3


def test_only_one_thread_reads_the_mailbox_after_an_error():
    """The main thread reads it next."""
    processes = Processes([[NEVER] * 3], num_processes=3)
    link = processes.links[0]
    assert link._thread.is_alive()
    link.fail(OutOfMemory("boom"))
    assert not link._thread.is_alive()


def test_an_error_reaches_a_main_process_that_has_ended_its_share():
    processes = Processes([[2, NEVER, 2, 2]], num_processes=3)
    errors = play(processes, broken=1, error=OutOfMemory("gone"), at_step=40)
    assert str(errors[0]) == "Generation failed on process 1: gone"


def test_an_error_of_the_scheduler_ends_the_rollout_everywhere():
    """For example, a user's group stop that selects too few rows. It is raised in the thread that listens."""
    processes = Processes([[NEVER, 3, NEVER]], num_processes=3)
    handle = processes.main.handle

    def broken(reports: Sequence[Report]) -> list[tuple[int, int]]:
        handle(reports)
        raise ValueError("`select` returned 2 rows")

    processes.main.handle = broken
    errors = play(processes, broken=-1, error=OutOfMemory())
    assert isinstance(errors[0], ValueError)
    assert {str(error) for error in errors.values()} == {"`select` returned 2 rows"}
    assert set(errors) >= {0, 2}  # the others' candidates never end; the one of process 1 may have before


# Messages of earlier rollouts


def test_late_messages_of_an_earlier_rollout_are_ignored():
    """Reports, errors and aborts that arrive after the end of their rollout."""
    lengths = [[4, 9, 6, 7], [3, 8, 5]]
    *boxes, late = open_mailboxes(3)
    for message in ([Report(n, 1, FinishReason.STOP) for n in range(7)], [Report(0, 0, error="old")], "old"):
        late.post(0, (1, message))
    for message in (list(range(7)), "old"):
        late.post(1, (1, message))
    processes = Processes(lengths, 2, boxes, rollout=2)
    result = processes.run([lambda: 0.001] * 2)
    assert [[c.length for c in group.candidates] for group in result.groups] == lengths
    assert all(watched.aborts == [] for watched in processes.watched)


def test_a_rollout_after_one_that_failed():
    boxes = open_mailboxes(3)
    assert len(play(Processes([[NEVER] * 4], 3, boxes, rollout=1), broken=1, error=OutOfMemory("boom"))) == 3
    result = Processes([[5, 6, 7, 8]], 3, boxes, rollout=2).run([lambda: 0.001] * 3)
    assert [c.length for c in result.groups[0].candidates] == [5, 6, 7, 8]


def test_a_remote_link_checks_for_aborts_every_five_milliseconds_at_most(monkeypatch, clock):
    monkeypatch.undo()
    monkeypatch.setattr(share_module, "time", SimpleNamespace(monotonic=clock))
    clock.advance(100)
    main, other = open_mailboxes(2)
    link = RemoteLink(other, 1)
    received = []
    for number in range(12):
        main.post(1, (1, [number]))
        received.append(link.exchange([]))
        clock.advance(0.001)
    assert [aborts for aborts in received if aborts] == [[0], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert received[0] == [0]
    assert received[5] == [1, 2, 3, 4, 5]


def test_reports_are_sent_at_once(monkeypatch):
    monkeypatch.setattr(share_module, "POLL_S", 60.0)
    main, other = open_mailboxes(2)
    link = RemoteLink(other, 5)
    link.exchange([Report(0, 1)])
    link.exchange([Report(0, 2)])
    link.exchange([])
    assert main.receive() == [(5, [Report(0, 1)]), (5, [Report(0, 2)])]
