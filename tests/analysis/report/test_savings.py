"""
The seconds that a step saved, and their parts.

Invariants: the parts sum to the whole; a slower machine does not count as shorter rows; a busy machine is named,
also if settings differ.
"""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from trl_darts.analysis.estimates import fit_linear, ratio_of_sums
from trl_darts.analysis.report import read_run
from trl_darts.analysis.report.tables import compared_steps
from trl_darts.analysis.report.verdict import busy, describe, saving
from trl_darts.analysis.report.verdict import in_short as in_short_over

from .builders import make_entry, write_run


def save(first, other):
    return saving(first, other, compared_steps([first, other]))


def in_short(runs):
    return in_short_over(runs, [], compared_steps(runs))


def entry(step, rollout, longest, per_token=0.02, other=1.0):
    """A step whose training and scoring take `other` seconds and `per_token` for each token of the longest row."""
    seconds = rollout + other + per_token * longest
    times = {"step_time": seconds, "darts/rollout/seconds": rollout, "completions/max_length": longest}
    return make_entry(step, **times)


def make(tmp_path, name, rollout, longest, num=40, **more):
    rng = np.random.default_rng(sum(map(ord, name)))
    noisy = [
        entry(step, rollout + 0.2 * rng.standard_normal(), round(longest * rng.uniform(0.7, 1.3)), **more)
        for step in range(1, num + 1)
    ]
    for line in noisy:
        line["step_time"] += 0.1 * rng.standard_normal()
    noisy[0]["step_time"] += 100.0  # warms up
    return read_run(write_run(tmp_path / name, log=noisy))


def test_shorter_rows_are_told_from_rollouts_and_from_the_machine(tmp_path):
    first = make(tmp_path, "grpo", 5.0, 400)
    saved = save(first, make(tmp_path, "darts", 4.5, 200))
    for part, true in ((saved.rollouts, 0.5), (saved.shorter_rows, 0.02 * (saved.widths[0] - saved.widths[1]))):
        assert abs(part.mean - true) <= 1.5 * part.half_width < 1.0
    assert abs(saved.rest.mean) <= 1.5 * saved.rest.half_width < 0.5
    parts = saved.rollouts.mean + saved.shorter_rows.mean + saved.rest.mean
    assert parts == pytest.approx(saved.step.mean) == pytest.approx(saved.seconds[0] - saved.seconds[1])
    verdict, _, shorter, rest = describe(saved)
    assert verdict.startswith("darts took 9.")
    assert " s: saved " in verdict
    assert verdict.endswith(" %), most of it by narrower micro-batches.")
    assert "tokens wide instead of" in shorter
    assert "busy" not in rest

    slow = save(first, make(tmp_path, "slow", 5.0, 400, other=6.0))
    assert abs(slow.shorter_rows.mean) < 1.0
    assert slow.rest.mean == pytest.approx(-5.0, abs=1.0)
    verdict, *_, rest = describe(slow)
    assert ": lost " in verdict
    assert "the machine of slow was busy" in rest
    assert "Unless learning_rate explains that, the machine of slow was busy" in describe(slow, ["learning_rate"])[-1]


def test_rows_are_as_wide_as_they_were_computed(tmp_path):
    """Micro-batches without padding: the longest row of the batch is paid for by its own micro-batch alone."""
    runs = []
    for name, ratio in (("padded", 1.0), ("trimmed", 0.25)):
        lengths = [300 + 10 * (step % 7) for step in range(1, 30)]
        log = [entry(step, 5.0, ratio * longest) for step, longest in enumerate(lengths, 1)]
        for line, longest in zip(log, lengths, strict=True):
            line |= {"completions/max_length": float(longest), "darts/train/completion_width": ratio * longest}
        runs.append(read_run(write_run(tmp_path / name, log=log)))
    saved = save(*runs)
    assert saved.widths[1] == pytest.approx(saved.widths[0] / 4)
    assert saved.shorter_rows.mean == pytest.approx(0.02 * (saved.widths[0] - saved.widths[1]))
    assert saved.rest.mean == pytest.approx(0, abs=1e-6)


def test_what_can_not_be_told(tmp_path):
    flat = [
        read_run(write_run(tmp_path / n, log=[entry(s, 5.0, x) for s in range(1, 6)])) for n, x in (("a", 9), ("b", 5))
    ]
    assert "the rest are unknown" in in_short(flat)[0][-1]
    again = read_run(write_run(tmp_path / "c", log=[entry(s, 5.0, 9) for s in range(1, 6)]))
    assert "no difference beyond the noise" in in_short([flat[0], again])[0][0]
    few = read_run(write_run(tmp_path / "few", log=[entry(s, 50.0, 9) for s in range(1, 5)]))
    ((line,),) = in_short([flat[0], few])
    assert line.startswith("few and a: too few steps to compare. Log entries of both in steps 2 to 4: 3. At")
    no_times = read_run(write_run(tmp_path / "d", log=[{"step": 1, "reward": 1.0}]))
    assert in_short([flat[0], no_times]) == []
    assert in_short(flat[:1]) == []


def test_a_busy_machine_is_said_of_any_run(tmp_path):
    assert busy(make(tmp_path, "quiet", 5.0, 400)) is None
    lines = [entry(step, 5.0, 100 + 7 * step % 50, other=9.0 if 11 <= step <= 18 else 1.0) for step in range(1, 41)]
    told = busy(read_run(write_run(tmp_path / "run", log=lines)))
    assert told.startswith("run: training and scoring took more than 1.5 times as long as usual")
    assert "in 8 of 39 log entries (steps 11 to 18). Other work ran on the machine then." in told
    assert busy(read_run(write_run(tmp_path / "short", log=2))) is None


def test_intervals_are_those_of_the_textbook():
    """Against the two-sample t-test, and a mean's own interval."""
    a, b = [4.0, 5.0, 7.0, 6.5], [3.0, 2.0, 4.5]
    table = pd.DataFrame({"base": 1.0, "other": [0.0] * 4 + [1.0] * 3})
    (found,) = fit_linear(table, pd.Series(a + b), pd.Series([1.0] * 7), [[0, -1]])
    low, high = stats.ttest_ind(a, b).confidence_interval(0.95)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx((low, high))
    mean = ratio_of_sums([pd.Series(a)], [pd.Series([1.0] * 4)])
    low, high = stats.t.interval(0.95, 3, np.mean(a), stats.sem(a))
    assert (mean.mean - mean.half_width, mean.mean + mean.half_width) == pytest.approx((low, high))
    assert ratio_of_sums([pd.Series([0.0, 0.0])], [pd.Series([1.0, 2.0])]).mean == 0.0
