"""
The numbers behind each panel, against traces counted on paper.

Invariants: shares sum to 1; kept, unused and aborted tokens sum to the generated ones; the parts of a step's time sum
to the step's time; a bubble is between 0 and 1 and the same as the trainer's metric; log and traces agree.
"""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_darts.analysis.report import read_run, tables
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import Occupancy, bubble_ratio

from .builders import as_read, make_entry, make_trace, write_run


@st.composite
def rollouts(draw):
    """Any rollout: each candidate starts and ends when it likes."""
    seconds = st.floats(0, 100, allow_subnormal=False)
    candidate = st.tuples(
        st.integers(1, 200), st.sampled_from(["stop", "length", "abort"]), st.booleans(), seconds, seconds
    ).map(lambda c: (*c[:3], min(c[3], c[4]), max(c[3], c[4]) + 0.5))
    groups = draw(st.lists(st.lists(candidate, min_size=1, max_size=6), min_size=1, max_size=4))
    return as_read(make_trace(dict(enumerate(groups))))


def test_lengths_from_traces_and_from_the_log(tmp_path):
    run = read_run(write_run(tmp_path / "traces", traces=2))
    stats = tables.length_stats(run)
    assert list(stats.index) == [1, 2]
    assert dict(stats.loc[1]) == pytest.approx({"mean": 26 / 6, "p50": 4, "p99": 8.75, "max": 9})  # 9 − 0.05 · 5
    kept = tables.length_stats(run, kept=True)
    assert dict(kept.loc[2]) == pytest.approx({"mean": 4.5, "p50": 3.5, "p99": 8.85, "max": 9})  # 9 − 0.03 · 5
    logged = read_run(write_run(tmp_path / "log", log=2))
    assert dict(tables.length_stats(logged).loc[2]) == pytest.approx(dict(stats.loc[2]))
    assert dict(tables.length_stats(logged, kept=True).loc[2]) == {"mean": 4.5, "max": 9}
    of_trl = read_run(write_run(tmp_path / "trl", log=[{"step": 1, "reward": 1.0, "completions/max_length": 7.0}]))
    assert dict(tables.length_stats(of_trl).loc[1]) == {"max": 7}  # it keeps all candidates


def test_length_shares():
    shares = tables.length_shares(as_read(make_trace()), np.array([0.0, 3, 5, 10]))
    assert list(shares["pool"]) == pytest.approx([1 / 6, 4 / 6, 1 / 6])
    assert list(shares["kept"]) == pytest.approx([1 / 4, 2 / 4, 1 / 4])


def candidates(*lengths):
    return [(length, "stop", True, 0.0, float(length)) for length in lengths]


def test_budget_follows_earlier_rollouts_only():
    first = make_trace({1: candidates(4, 4), 2: candidates(1, 9)}, step=0)
    second = make_trace({1: candidates(1, 99), 2: candidates(4, 4, 4)}, step=1)
    table = tables.budget_by_spread(as_read(first, second), num_bins=2)
    assert list(table.index) == ["new", "1", "2"]
    assert list(table) == [2, 2, 3]  # the second rollout of prompt 1 does not count yet


def test_lanes():
    lanes = tables.lanes(as_read(make_trace()))
    assert lanes[["begin", "end", "lane"]].to_numpy().tolist() == [
        *([0, 2, 0], [0, 3, 1], [0, 4, 2], [0, 4, 3], [0, 4, 4]),  # those that end first are on top
        [1, 10, 5],
    ]
    assert list(lanes["outcome"]) == ["kept", "kept", "unused", "kept", "aborted", "kept"]
    # 5 + 6 + 5 + 4 + 6 · 1 candidate-seconds of 6 · 10
    assert tables.bubble(as_read(make_trace())) == pytest.approx(1 - 26 / 60)
    queue = as_read(make_trace({1: [(1, "stop", True, 0.0, 2.0), (1, "stop", True, 2.0, 3.0)]}))
    assert list(tables.lanes(queue)["lane"]) == [0, 0]  # one slot
    never_ran = as_read(make_trace({1: [(1, "stop", True, 0.0, 0.0)]}))
    assert tables.bubble(never_ran) == 0.0
    assert tables.lanes(never_ran).empty


@settings(deadline=None)  # pandas' first call takes long
@given(rollouts())
def test_bubble_is_the_trainers_and_shares_sum_to_one(trace):
    lanes = tables.lanes(trace)
    begin, end = trace["start_seconds"], trace["end_seconds"]
    for _, lane in lanes.groupby("lane"):
        assert (lane["begin"].to_numpy()[1:] >= lane["end"].to_numpy()[:-1]).all()  # one at a time
    occupancy = Occupancy(lanes["lane"].max() + 1, float((end - begin).sum()), float(end.max() - begin.min()))
    assert tables.bubble(trace) == pytest.approx(bubble_ratio(occupancy), abs=1e-9)
    assert 0 <= tables.bubble(trace) < 1
    assert tables.budget_shares(trace).sum() == pytest.approx(1)
    shares = tables.length_shares(trace, tables.length_edges(int(trace["length"].max())))
    assert shares["pool"].sum() == pytest.approx(1)
    assert shares["kept"].sum() == pytest.approx(1 if trace["selected"].any() else 0)


def test_rollouts_from_traces_and_from_the_log_agree(tmp_path):
    bubble = {"darts/rollout/bubble_ratio": 1 - 26 / 60}
    table = tables.rollouts(read_run(write_run(tmp_path / "traces", traces=2)))
    expected = {
        "num_rollouts": 1,
        "seconds": 10,
        "kept": 18,
        "unused": 4,
        "aborted": 4,
        "candidates": 6,
        "rows": 4,
        "longest": 9,
        "bubble": 1 - 26 / 60,
        "num_steps": 1,
    }
    assert dict(table.loc[2]) == pytest.approx(expected)
    entries = [make_entry(step, **bubble) for step in (1, 2)]
    log = tables.rollouts(read_run(write_run(tmp_path / "log", log=entries)))
    pd.testing.assert_frame_equal(log.sort_index(axis=1), table.sort_index(axis=1))


def test_several_rollouts_of_a_step_are_summed(tmp_path):
    traces = {f"rollout_00000_0{micro}.parquet": make_trace() for micro in range(2)}
    run = read_run(write_run(tmp_path, traces=traces, log=[make_entry(1, step_time=40.0)]))
    summed = {"num_rollouts": 2, "seconds": 20, "kept": 36, "longest": 9}
    assert dict(tables.rollouts(run).loc[1, list(summed)]) == summed
    split = {"total": 40, "generate": 20, "score": 4, "train": 15, "sync": 1, "busy": 20, "idle": 20, "num_steps": 1}
    assert dict(tables.time_split(run).loc[1]) == pytest.approx(split)


def test_time_split(tmp_path):
    entries = [make_entry(step) for step in (1, 2, 3, 4)]
    del entries[1]["darts/score/seconds"], entries[2]["darts/sync/seconds"]
    entries[3]["step_time"] = 3.0  # less than its parts
    split = tables.time_split(read_run(write_run(tmp_path, log=entries)))
    expected = {"total": 18, "generate": 10, "score": 2, "train": 5, "sync": 1, "busy": 10, "idle": 8, "num_steps": 1}
    assert dict(split.loc[1]) == pytest.approx(expected)
    assert list(split["train"].isna()) == [False, True, False, True]
    assert split.loc[3, "train"] == 6  # no weights were sent
    ahead = [make_entry(1, **{"darts/rollout/wait_seconds": 4.0})]  # of 10 seconds, 6 passed while it trained
    split = tables.time_split(read_run(write_run(tmp_path / "ahead", log=ahead)))
    assert dict(split.loc[1]) == pytest.approx({**expected, "generate": 4, "train": 11})


def test_faults_are_counted_per_rollout(tmp_path):
    resumed = "darts/rollout/resumed_candidates"
    entries = [make_entry(2, **{resumed: 1.5}), make_entry(4, **{resumed: 0.0})]
    table = tables.faults(read_run(write_run(tmp_path, log=entries)))
    label = "Candidates resumed on another server or later"
    assert table.to_dict() == {label: {2: 3.0, 4: 0.0}}  # an entry is a mean over its two rollouts


def test_predicted_times():
    curve = LatencyCurve([1, 6], [1.0, 2.0])
    table = tables.predicted_times(as_read(make_trace()), curve)
    # 2 tokens of 6, 1 of 5, 1 of 4, 5 of 1
    predicted = 2 * 2.0 + 1.8 + 1.6 + 5 * 1.0
    assert dict(table.loc[(1, 0)]) == pytest.approx({"predicted": predicted, "real": 10})
