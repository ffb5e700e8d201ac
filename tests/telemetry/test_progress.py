"""Tests the progress of a rollout in the training's progress bar."""

import sys

import pytest
from transformers import PrinterCallback, ProgressCallback

from tests.policies import make_policies
from tests.stub_engine import StubEngine
from trl_darts.scheduling import (
    Abort,
    Admission,
    CandidateEnded,
    EngineLoad,
    FinishReason,
    GroupPlan,
    GroupSummary,
    Occupancy,
    Scheduler,
)
from trl_darts.scheduling.policies import FirstGroups
from trl_darts.telemetry.metrics import RolloutRecord, rollout_metrics
from trl_darts.telemetry.progress import RolloutProgress, describe


class Bar:
    """Stub of a `tqdm` bar."""

    def __init__(self):
        self.shown = []

    def set_postfix_str(self, text, refresh=True):
        self.shown.append((text, refresh))


@pytest.fixture
def ledger():
    scheduler = Scheduler(make_policies("darts", 2), 2)
    StubEngine({0: [5, 90, 7, 30]}).run(scheduler, [GroupPlan(0, 4)])
    return scheduler.ledger


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_shows_candidates_often_on_a_terminal_and_at_the_end_anywhere(ledger, monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    now = iter([0.0, 0.05, 1.0, 1.05, 9.0])
    monkeypatch.setattr("trl_darts.telemetry.progress.time.monotonic", lambda: next(now))
    callback = ProgressCallback()
    callback.training_bar = bar = Bar()
    with RolloutProgress([PrinterCallback(), callback]) as progress:
        for _ in range(4):
            progress(ledger)
    words = "0 running, 2 complete, 2 aborted of 4 candidates"
    often = [(words, True)] * 2  # at 1.0 and 9.0 seconds
    assert bar.shown == [*(often if terminal else []), (words, terminal)]


def test_without_a_bar_nothing_is_shown(ledger, capsys):
    with RolloutProgress([PrinterCallback(), ProgressCallback()]) as progress:
        progress(ledger)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("carries_over", [False, True])
def test_the_bar_counts_the_candidates_that_the_log_counts_as_aborted(carries_over):
    """Group 0 aborts two candidates, one of which ends before its abort. Group 1 is deferred."""
    scheduler = Scheduler(make_policies("darts", 2, batch_stop=FirstGroups(1)), 2)
    commands = scheduler.start([GroupPlan(0, 4), GroupPlan(1, 3)], [EngineLoad("one")], 0.0)

    def end(candidate, reason):
        tokens = [5] * 3
        return scheduler.handle(CandidateEnded(candidate, 0, 0, tokens, [-1.0] * 3, reason, now=1.0))

    end(0, FinishReason.STOP)
    commands = end(1, FinishReason.STOP)
    assert [c.candidate_id for c in commands if isinstance(c, Abort)] == [2, 3, 4, 5, 6]
    end(2, FinishReason.STOP)
    for candidate in (3, 4, 5, 6):
        end(candidate, FinishReason.ABORT)
    result = scheduler.result()
    own, left = ([GroupSummary.of(group) for group in groups] for groups in (result.groups, result.deferred))
    record = RolloutRecord(Admission([4, 3]), own, Occupancy.of(result), 2, deferred=left, carries_over=carries_over)
    metrics = rollout_metrics(record)
    num_aborted = 1 if carries_over else 4
    assert metrics["darts/rollout/aborted_candidates"] == num_aborted
    assert metrics["darts/rollout/discarded_tokens"] == (6 if carries_over else 15)
    assert metrics.get("darts/rollout/carried_tokens") == (9 if carries_over else None)
    goes_on = ", 3 carried over" if carries_over else ""
    text = f"0 running, 2 complete, {num_aborted} aborted{goes_on} of 7 candidates"
    assert describe(scheduler.ledger, carries_over) == text
