"""Tests which seconds a stopwatch counts."""

from itertools import count

from trl_darts.telemetry.stopwatch import Stopwatch


def test_the_innermost_block_decides(monkeypatch):
    """Time is the number of readings so far, so that each block takes as long as it has readings."""
    readings = count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(readings)))
    watch = Stopwatch()
    with watch.paused():
        assert watch.pop() == 0
    with watch.running(), watch.running():
        pass
    assert watch.pop() == 3  # and not twice for the inner one
    with watch.running(), watch.paused():
        pass
    assert watch.pop() == 2  # before and after the pause
    with watch.running(), watch.paused(), watch.running():
        pass
    assert watch.pop() == 3
