"""Tests properties of the estimator in `trl_darts/policy/censoring.py`, and compares it with naive estimates."""

import math
import statistics
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.policy import LengthTracker, group_moments
from trl_darts.policy.censoring import _beyond


Group = tuple[list[int], list[bool]]

groups = st.lists(st.tuples(st.integers(0, 100_000), st.booleans()), min_size=1, max_size=40)
log_stds = st.one_of(st.just(math.nan), st.floats(0, 10))


def abort_at(lengths: np.ndarray, num_complete: int) -> Group:
    """Applies type-II censoring: the running candidates are aborted when the `num_complete`-th completes."""
    bound = np.sort(lengths)[num_complete - 1]
    return np.minimum(lengths, bound).tolist(), (lengths > bound).tolist()


def log_normal(rng: np.random.Generator, sigma: float, num: int, median: float = 400) -> np.ndarray:
    return np.maximum(rng.lognormal(math.log(median), sigma, num).round(), 1).astype(int)


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=40))
def test_without_censoring_it_is_the_sample_mean_and_variance(lengths: list[int]) -> None:
    variance = statistics.variance(lengths) if len(lengths) > 1 else 0.0
    for censored in (None, [False] * len(lengths)):
        moments = group_moments(lengths, censored)
        assert moments.mean == pytest.approx(statistics.fmean(lengths))
        assert moments.variance == pytest.approx(variance, rel=1e-9, abs=1e-9)
        assert moments.square == pytest.approx(statistics.fmean([length**2 for length in lengths]))


@given(groups, log_stds)
def test_finite_and_not_below_the_bounds(group: list[tuple[int, bool]], log_std: float) -> None:
    lengths, censored = [length for length, _ in group], [flag for _, flag in group]
    moments = group_moments(lengths, censored, log_std)
    assert all(math.isfinite(value) and value >= 0 for value in moments[:3])
    assert math.isnan(moments.log_std) == (moments.num_complete < 2)
    assert moments.mean >= statistics.fmean(lengths) * (1 - 1e-12)
    assert moments.square >= statistics.fmean([length**2 for length in lengths]) * (1 - 1e-12)


@given(groups, st.randoms())
def test_the_order_of_the_candidates_does_not_matter(group: list[tuple[int, bool]], random: Random) -> None:
    shuffled = list(group)
    random.shuffle(shuffled)
    one, other = (group_moments([x for x, _ in pairs], [flag for _, flag in pairs]) for pairs in (group, shuffled))
    assert other == pytest.approx(one, rel=1e-9, abs=1e-6, nan_ok=True)


def test_the_fewer_are_complete_the_more_the_data_set_says() -> None:
    lengths = [100 + 5 * i for i in range(16)]

    def effect(num_complete: int) -> float:
        censored = [i >= num_complete for i in range(16)]
        calm, wild = (group_moments(lengths, censored, log_std).variance for log_std in (0.1, 1.0))
        return wild / calm

    assert effect(1) > effect(4) > effect(12) > effect(16) == 1.0


@pytest.mark.parametrize("sigma", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("bound", [50.0, 400.0, 2000.0])
@pytest.mark.parametrize("horizon", [500.0, 4000.0, 1e6])
def test_beyond_a_bound_and_cut_at_a_horizon_is_what_sampling_says(sigma: float, bound: float, horizon: float) -> None:
    mean, variance = _beyond(bound, 6.0, sigma, horizon)
    if bound >= horizon:
        assert (mean, variance) == (bound, 0.0)
        return
    draws = np.random.default_rng(0).lognormal(6.0, sigma, 4_000_000)
    kept = np.minimum(draws[draws > bound], horizon)
    if len(kept) < 1000:  # too rare to be sampled
        assert bound <= mean <= min(1.5 * bound, horizon)
        return
    assert mean == pytest.approx(kept.mean(), rel=0.02)
    assert math.sqrt(variance) == pytest.approx(kept.std(), rel=0.05)


@given(groups, log_stds, st.floats(1, 1e6))
def test_a_horizon_only_takes_away(group: list[tuple[int, bool]], log_std: float, horizon: float) -> None:
    lengths, censored = [length for length, _ in group], [flag for _, flag in group]
    free, cut = group_moments(lengths, censored, log_std), group_moments(lengths, censored, log_std, horizon)
    assert statistics.fmean(lengths) * (1 - 1e-12) <= cut.mean <= free.mean * (1 + 1e-9) + 1e-9
    assert cut.square <= free.square * (1 + 1e-6) + 1e-6
    assert cut.mean <= max(horizon, *lengths, 1.0) * (1 + 1e-9)


@pytest.mark.parametrize("pool", [8, 16])
@pytest.mark.parametrize("sigma", [0.25, 1.0])
def test_a_tracked_deviation_is_that_of_the_tail_that_was_cut_off(sigma: float, pool: int) -> None:
    """64 prompts, half of each pool aborted, six updates. Fitted to each group alone, the median was 1.7 to 2.0."""
    rng, tracker = np.random.default_rng(0), LengthTracker()
    for _ in range(6):
        for prompt in range(64):
            tracker.update(prompt, *abort_at(log_normal(rng, sigma, pool), pool // 2))
        tracker.end_step()
    truth = 400 * math.exp(sigma**2 / 2) * math.sqrt(math.expm1(sigma**2))
    ratios = [tracker.std(prompt) / truth for prompt in range(64)]
    print(f"sigma {sigma}, pools of {pool}: quartiles of std / true std {np.quantile(ratios, [0.25, 0.5, 0.75])}")
    assert 0.6 < statistics.median(ratios) < 1.6


def test_prompts_that_differ_in_deviation_are_told_apart() -> None:
    """Also with shrinkage towards the data set. Relative to their lengths, their true deviations are 1 to 5."""
    rng, tracker = np.random.default_rng(0), LengthTracker()
    for _ in range(6):
        for prompt in range(64):
            tracker.update(prompt, *abort_at(log_normal(rng, 0.25 if prompt % 2 else 1.0, 16), 8))
        tracker.end_step()
    wild, calm = ([tracker.std(prompt) for prompt in range(first, 64, 2)] for first in (0, 1))
    assert statistics.median(wild) > 2 * statistics.median(calm)
    assert sum(a > b for a in wild for b in calm) > 0.95 * len(wild) * len(calm)


@pytest.mark.parametrize(
    ("lengths", "censored", "message"),
    [
        ([], None, "`lengths`"),
        ([3, -1], None, "no negative one"),
        ([3, 1], [True], "`censored` has 1 entries and `lengths` has 2"),
    ],
)
def test_impossible_groups_are_named(lengths: list[int], censored: list[bool] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_moments(lengths, censored)
