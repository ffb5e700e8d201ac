"""Whether over-provisioning can pay at all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.policy import LatencyCurve, rollout_time
from trl_darts.policy.worth import best_case_speedup


FLAT = LatencyCurve([1], [1.0])
STEEP = LatencyCurve([1, 1000], [1.0, 1000.0])  # a candidate costs as much as the first

pools = st.lists(st.lists(st.integers(1, 500), min_size=2, max_size=5), min_size=1, max_size=8)


def test_on_flat_latency_it_is_the_ratio_of_the_longest() -> None:
    assert best_case_speedup([[10, 100, 10], [20, 30, 40]], 2, FLAT) == pytest.approx(100 / 30)


def test_where_candidates_cost_as_much_as_the_first_calm_prompts_lose() -> None:
    assert best_case_speedup([[10, 10, 10]], 2, STEEP) == pytest.approx(2 / 3)


@given(pools)
def test_flat_latency_never_loses_and_nothing_extra_changes_nothing(lengths: list[list[int]]) -> None:
    assert best_case_speedup(lengths, 2, FLAT) >= 1 - 1e-12
    assert best_case_speedup([own[:2] for own in lengths], 2, STEEP) == pytest.approx(1.0)


@given(pools, st.integers(1, 3))
def test_it_is_at_least_as_good_as_what_was_kept(lengths: list[list[int]], num_engines: int) -> None:
    """Waiting for all of a pool takes longer than stopping at the M-th shortest."""
    whole = sorted((length for own in lengths for length in own), reverse=True)[::num_engines]
    plain = sorted((length for own in lengths for length in own[:2]), reverse=True)[::num_engines]
    waiting = rollout_time(plain, STEEP) / rollout_time(whole, STEEP)
    assert best_case_speedup(lengths, 2, STEEP, num_engines) >= waiting * (1 - 1e-9)


def test_nothing_to_say() -> None:
    assert math.isnan(best_case_speedup([], 2, FLAT))
    with pytest.raises(ValueError, match="1 candidates, and needs `num_generations` \\(2\\)"):
        best_case_speedup([[5]], 2, FLAT)
