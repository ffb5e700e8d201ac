"""Tests the invariants of `trl_darts/policy/allocation.py` under the names in its docstring."""

import math
from itertools import product
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.policy import allocate_redundancy


Problem: TypeAlias = tuple[list[float | None], int, int, int]  # stds, total, low, high

STDS = st.lists(
    st.one_of(
        st.none(),
        st.just(math.nan),
        st.integers(0, 5).map(float),
        st.floats(0, 1e300),
    ),
    min_size=1,
    max_size=8,
)


@st.composite
def problems(draw: st.DrawFn, stds: st.SearchStrategy[list[float | None]] = STDS) -> Problem:
    length_stds = draw(stds)
    low = draw(st.integers(1, 4))
    high = draw(st.integers(low, low + 5))
    total = draw(st.integers(len(length_stds) * low, len(length_stds) * high))
    return length_stds, total, low, high


def weights_by_definition(stds: list[float]) -> list[float]:
    known = [std for std in stds if not math.isnan(std)]
    if not known or min(known) == max(known):
        return [1.0] * len(stds)
    norms = [(std - min(known)) / (max(known) - min(known)) for std in stds]
    mean = sum(norm for norm in norms if not math.isnan(norm)) / len(known)
    return [mean if math.isnan(norm) else norm for norm in norms]


def objective(weights: list[float], allocation: list[int] | tuple[int, ...]) -> float:
    return sum(weight / size for weight, size in zip(weights, allocation, strict=True))


@given(problems(st.lists(st.one_of(st.just(math.nan), st.floats(0, 100)), min_size=1, max_size=4)))
def test_minimises_the_objective(problem: tuple[list[float], int, int, int]) -> None:
    stds, total, low, high = problem
    weights = weights_by_definition(stds)
    best = min(
        objective(weights, sizes) for sizes in product(range(low, high + 1), repeat=len(stds)) if sum(sizes) == total
    )
    assert objective(weights, allocate_redundancy(stds, total, low, high)) <= best * (1 + 1e-12) + 1e-15


@given(problems())
def test_sums_to_the_total_within_bounds(problem: Problem) -> None:
    stds, total, low, high = problem
    allocation = allocate_redundancy(stds, total, low, high)
    assert len(allocation) == len(stds)
    assert sum(allocation) == total
    assert all(type(size) is int and low <= size <= high for size in allocation)


@given(problems())
def test_a_larger_std_never_gets_fewer(problem: Problem) -> None:
    stds, total, low, high = problem
    allocation = allocate_redundancy(stds, total, low, high)
    known = [
        (std, size) for std, size in zip(stds, allocation, strict=True) if std is not None and not math.isnan(std)
    ]
    for std, size in known:
        assert all(size <= other_size for other_std, other_size in known if other_std > std)


@pytest.mark.parametrize(
    ("stds", "total", "expected"),
    [
        ([3.0, 3.0, 3.0, 3.0], 10, [3, 3, 2, 2]),  # all equal: evenly, lower index first
        ([math.nan, None, math.nan, None], 11, [3, 3, 3, 2]),  # no history counts as all equal
        ([0.0, 0.0, 0.0, 9.0], 11, [3, 2, 2, 4]),  # weight 0 gets the rest, evenly, lower index first
        ([0.0, 8.0, 4.0, 4.0], 10, [2, 3, 3, 2]),  # once 8 has one, all gain 1/12: fewer candidates come first
    ],
)
def test_examples(stds: list[float | None], total: int, expected: list[int]) -> None:
    assert allocate_redundancy(stds, total, low=2, high=4) == expected


def test_stds_that_the_norm_cannot_tell_apart_keep_their_order() -> None:
    assert allocate_redundancy([0.0, 1e-30, 2e-30, 1e300], 11, low=2, high=4) == [2, 2, 3, 4]


def test_without_history_means_the_mean_weight() -> None:
    stds = [0.0, 10.0, None, 2.0]  # mean of the three: 4, which is weight 0.4
    as_mean = [0.0, 10.0, 4.0, 2.0]
    for total in range(16, 33):
        assert allocate_redundancy(stds, total, 4, 8) == allocate_redundancy(as_mean, total, 4, 8)


@pytest.mark.parametrize(
    ("stds", "total", "low", "high", "message"),
    [
        ([1.0, 2.0], 3, 2, 4, r"`total` \(3\) must be between 4 and 8"),
        ([1.0, 2.0], 6, 4, 2, r"`low` \(4\)"),
        ([1.0, -2.0], 6, 2, 4, r"`length_stds\[1\]` \(-2.0\)"),
        ([math.inf, 2.0], 6, 2, 4, r"`length_stds\[0\]` \(inf\)"),
    ],
)
def test_impossible_requests_are_named(stds: list[float], total: int, low: int, high: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate_redundancy(stds, total, low, high)


@given(problems(), st.floats(0, 10), st.floats(0, 10))
def test_a_typical_range_keeps_the_order_and_the_sum(problem: Problem, one: float, other: float) -> None:
    stds, total, low, high = problem
    allocation = allocate_redundancy(stds, total, low, high, (min(one, other), max(one, other)))
    assert sum(allocation) == total
    known = [
        (std, size) for std, size in zip(stds, allocation, strict=True) if std is not None and not math.isnan(std)
    ]
    assert all(size <= larger for std, size in known for bigger, larger in known if bigger > std)


def test_predictions_that_are_close_together_get_about_the_same() -> None:
    stds = [95.0, 100.0, 105.0, 100.0]
    assert allocate_redundancy(stds, 24, 4, 8) == [4, 6, 8, 6]
    assert allocate_redundancy(stds, 24, 4, 8, (20.0, 500.0)) == [6, 6, 6, 6]
