"""How far a rollout is, behind the training's progress bar."""

import sys

import pytest
from transformers import PrinterCallback, ProgressCallback

from tests.stub_engine import StubEngine
from trl_darts.scheduling import GroupPlan, Scheduler, make_policies
from trl_darts.telemetry.progress import RolloutProgress


class Bar:
    """As much of a `tqdm` as is used."""

    def __init__(self):
        self.shown = []

    def set_postfix_str(self, text, refresh=True):
        self.shown.append((text, refresh))


@pytest.fixture
def ledger():
    scheduler = Scheduler(make_policies("darts", 2, 4, num_longest=1), 2)
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
