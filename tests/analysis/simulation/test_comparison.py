"""Comparisons over seeds."""

import math

import numpy as np
import pytest

from trl_darts.analysis.simulation import (
    ClusterSpec,
    Estimate,
    LogNormalLengths,
    Workload,
    compare,
)
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import ScheduleSettings


FLAT = ClusterSpec(LatencyCurve([1], [0.01]))


def compare_two(lengths, cluster, num_seeds=3, **fields):
    settings = {
        "grpo": ScheduleSettings("grpo", num_generations=4),
        "darts": ScheduleSettings("darts", num_generations=4, **fields),
    }
    return compare(Workload(lengths, 16, 4096), settings, cluster, num_steps=20, num_seeds=num_seeds)


def test_interval_is_students():
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert (estimate.mean, estimate.half_width) == (2.0, pytest.approx(4.303 / math.sqrt(3), rel=1e-3))
    assert math.isinf(Estimate.of([1.0]).half_width)
    rng = np.random.default_rng(0)
    hits = [abs(Estimate.of(x).mean) <= Estimate.of(x).half_width for x in rng.standard_normal((2000, 5))]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.02)


def test_heavy_tails_on_flat_latency_gain():
    lengths = LogNormalLengths(64, median_length=200.0, intra_prompt_std=1.0)
    grpo, darts = compare_two(lengths, FLAT, num_seeds=8, max_num_generations=6)
    assert grpo.speedup == Estimate(1.0, 0.0)
    assert darts.speedup.mean - darts.speedup.half_width > 1.2
    assert darts.estimate("wasted_share").mean > 0.1


def test_tokens_that_wait_are_not_wasted():
    settings = {"partial": ScheduleSettings("partial_rollout", num_generations=4)}
    workload = Workload(LogNormalLengths(128, median_length=200.0), 16, 4096)
    (partial,) = compare(workload, settings, FLAT, num_steps=3, num_seeds=2)
    assert partial.estimate("wasted_share").mean == pytest.approx(0.0, abs=1e-12)
    assert all(run.buffered_tokens[-1] > 0 for run in partial.runs)


def test_a_row_has_totals_and_means_over_steps():
    settings = {"partial": ScheduleSettings("partial_rollout", num_generations=4)}
    (partial,) = compare(Workload(LogNormalLengths(128), 16, 4096), settings, FLAT, num_steps=8, num_seeds=2)
    means = [np.mean(run.off_policy_share) for run in partial.runs]
    assert partial.estimate("off_policy_share").mean != pytest.approx(np.mean(means), rel=1e-3)  # it weighs tokens
    row = partial.row()
    share = partial.estimate("off_policy_share")
    assert (row["off_policy_share"], row["off_policy_share_ci95"]) == (share.mean, share.half_width)
    assert row["longest_wait"] == max(max(run.longest_wait) for run in partial.runs) > 0
    assert "longest_wait_ci95" not in row
    assert row["bubble_ratio"] == partial.estimate("bubble_ratio").mean
