"""Tests what the seconds of a step are counted as."""

from itertools import count

import pytest

from tests.builders import make_args, make_trainer, rollout_logs
from trl_darts.telemetry.stopwatch import PARTS, REST, Stopwatch, step_line


def test_the_innermost_block_decides(monkeypatch):
    """Time is the number of readings so far, so that each block takes as long as it has readings."""
    readings = count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(readings)))
    watch = Stopwatch()
    with watch.on(REST):
        assert watch.pop("passes") == 0
    with watch.on("passes"), watch.on("passes"):
        pass
    assert watch.pop("passes") == 3  # and not twice for the inner one
    with watch.on("passes"), watch.on("scoring"):
        pass
    assert watch.pop("passes") == 2  # before and after the scoring
    with watch.on("passes"), watch.on(REST), watch.on("passes"):
        pass
    assert watch.pop("passes") == 3
    assert dict(watch.seconds) | {REST: 0} == {"passes": 8, "scoring": 1, REST: 0}


def test_the_parts_of_a_step_are_the_step(model_dir, tmp_path):
    """Also of one that samples nothing. What lies between steps, such as an evaluation, is in neither."""
    fields = {"num_iterations": 2, "max_steps": 3, "gradient_accumulation_steps": 1, "steps_per_generation": 1}
    trainer = make_trainer(model_dir, make_args(tmp_path, **fields))
    trainer.train()
    steps = [log for log in trainer.state.log_history if "darts/step/seconds" in log]
    assert len(steps) == 3
    for log in steps:
        parts = {part: log[f"darts/step/{part}"] for part in (*PARTS, REST)}
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(log["darts/step/seconds"])
        assert parts["passes"] == pytest.approx(log["darts/train/seconds"])
        assert parts["optimizer"] > 0
        if "darts/rollout/seconds" in log:
            assert parts["rollout"] >= log["darts/rollout/seconds"]
            assert parts["scoring"] == pytest.approx(log["darts/score/seconds"])
        else:
            assert parts["rollout"] == parts["scoring"] == 0
    assert len(rollout_logs(trainer)) == 2


def test_the_line_of_a_step():
    parts = {"rollout": 6.0, "scoring": 1.0, "passes": 2.5, "optimizer": 0.01, "weights": 0.0, REST: 0.49}
    logs = {f"darts/step/{part}": seconds for part, seconds in parts.items()} | {"darts/step/seconds": 10.0}
    assert step_line(logs) == "10 s: rollout 60%, passes 25%, scoring 10%, rest 5%"
    assert step_line({"reward": 1.0}) is None
