"""The line that shows a rollout while it runs."""

import sys

import pytest

from tests.stub_engine import StubEngine
from trl_darts.scheduling import GroupPlan, Scheduler, make_policies
from trl_darts.telemetry.progress import RolloutProgress, describe


@pytest.fixture
def ledger():
    scheduler = Scheduler(make_policies("darts", 2, 4, num_longest=1), 2)
    StubEngine({0: [5, 90, 7, 30]}).run(scheduler, [GroupPlan(0, 4)])
    return scheduler.ledger


def test_line_says_what_runs(ledger):
    assert describe(ledger) == "rollout: 0 running, 2 complete, 2 aborted of 4 candidates"


@pytest.mark.parametrize(
    ("enabled", "terminal", "shown"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_line_is_shown_on_terminals_only(ledger, monkeypatch, capsys, enabled, terminal, shown):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with RolloutProgress(enabled) as progress:
        progress(ledger)
        progress(ledger)  # too soon after the first: left out
    assert ("2 aborted of 4 candidates" in capsys.readouterr().err) is shown
