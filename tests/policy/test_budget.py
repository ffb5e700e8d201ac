"""Tests bounds, reactions and resuming of `redundancy_budget` and `BudgetController`."""

import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.errors import ConfigurationError, StateMismatchError
from trl_darts.policy import BudgetController, LatencyCurve, redundancy_budget
from trl_darts.policy.budget import BREAK_EVEN_SPREAD, DOUBLING_WAVES, REFERENCE_STEPS, SETTLING_STEPS


M, M_UP, N = 8, 16, 64
TARGET = 1.5 * N * M
CURVE = LatencyCurve([1, 1000], [0.01, 0.02])


def totals(controller: BudgetController, rhos: list[float], mean_length: float = 100.0) -> list[int]:
    """Returns one budget per step, each of which ends with the ρ of the next."""
    budgets = []
    for rho in rhos:
        budgets.append(controller.total(N, rho))
        controller.observe(rho, mean_length)
    return budgets


@given(st.floats(0, 1e6), st.floats(1e-12, 1e6), st.floats(1e-12, 1e6), st.integers(0, 5000), st.integers(0, 5000))
def test_budget_is_equation_8_floored_and_clipped(rho: float, k: float, price: float, low: int, span: int) -> None:
    expected = min(max(math.floor(rho / (price * k)), low), low + span)
    assert redundancy_budget(rho, k, price, low, low + span) == expected


def test_budget_examples() -> None:
    assert redundancy_budget(1.0, 0.5, 0.01, 100, 400) == 200
    assert redundancy_budget(1.999, 1.0, 1.0, 0, 10) == 1  # floor
    assert redundancy_budget(1.0, 1e-300, 1e-300, 100, 400) == 400  # the price underflows
    assert redundancy_budget(0.0, 1.0, 1.0, 100, 400) == 100


@pytest.mark.parametrize(
    ("rho", "k", "price", "low", "high", "message"),
    [
        (-0.1, 1, 1, 1, 2, r"`rho` \(-0.1\)"),
        (1, 0, 1, 1, 2, r"`cost_slope` \(0\)"),
        (1, 1, -1, 1, 2, r"`cost_weight` \(-1\)"),
        (1, 1, 1, 3, 2, r"`low` \(3\)"),
    ],
)
def test_impossible_budgets_are_named(rho: float, k: float, price: float, low: int, high: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        redundancy_budget(rho, k, price, low, high)


@given(
    st.integers(1, 12),
    st.integers(0, 12),
    st.floats(0, 1),
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(1, 50), *[st.just(math.nan) | st.floats(0, 20)] * 2), max_size=25),
    st.none() | st.floats(1e-6, 1e6),
    st.none() | st.integers(1, 1000),
    st.booleans(),
)
def test_always_within_bounds(
    num_generations: int,
    room: int,
    share: float,
    low_share: float,
    steps: list[tuple[int, float, float]],
    price: float | None,
    slots: int | None,
    keeps: bool,
) -> None:
    most, least = num_generations + room, num_generations + int(low_share * room)
    target = 1 + share * (most / num_generations - 1)
    bounds = {"min_num_generations": least, "num_slots": slots, "keeps_spares": keeps}
    controller = BudgetController(num_generations, most, target, price, CURVE, **bounds)
    fewest = least if keeps or price is not None else num_generations
    for num_prompts, rho, spread in steps:
        total = controller.total(num_prompts, rho, spread)
        assert type(total) is int
        assert num_prompts * fewest <= total <= num_prompts * most
        controller.observe(rho, 100.0)


def test_rho_moves_the_budget_in_proportion_to_that_of_the_first_steps() -> None:
    controller = BudgetController(M, M_UP)
    assert totals(controller, [math.nan, 0.0]) == [TARGET, TARGET]  # without history
    controller = BudgetController(M, M_UP)
    assert totals(controller, [2.0] * SETTLING_STEPS) == [TARGET] * SETTLING_STEPS
    totals(controller, np.linspace(0.6, 1.0, REFERENCE_STEPS).tolist())
    totals(controller, [1.1] * 50)  # the reference is the mean of these steps, without those before and after
    assert controller.total(N, 0.8 * 1.2) == round(1.2 * TARGET)
    assert controller.total(N, 0.8 * 0.9) == round(0.9 * TARGET)
    assert controller.total(N, 8.0) == N * M_UP
    assert controller.total(N, 0.0) == N * M
    assert controller.total(N // 4, 0.8) == TARGET / 4  # a smaller batch has the same redundancy


@given(st.floats(0, 3), st.floats(0, 3), st.integers(1, 10_000), st.integers(1, 10_000))
def test_less_spread_and_fewer_slots_never_mean_more_candidates(
    spread: float, other_spread: float, slots: int, other_slots: int
) -> None:
    def total(spread: float, num_slots: int | None, **fields: int | bool) -> int:
        return BudgetController(M, M_UP, 1.5, num_slots=num_slots, **fields).total(N, 0.5, spread)

    (low, high), (few, many) = sorted((spread, other_spread)), sorted((slots, other_slots))
    assert N * M <= total(low, few) <= total(high, few) <= total(high, many) <= total(high, None) <= TARGET
    assert total(low, few, keeps_spares=True, min_num_generations=M + 2) == TARGET


@pytest.mark.parametrize("waves", [0, 1, 4, 16])
def test_spare_candidates_shrink_to_none_where_they_cannot_pay(waves: int) -> None:
    """The default `M_low` does not apply then either. That prompts differ in their lengths, as ρ tells, is no help."""

    def total(spread: float) -> int:
        num_slots = N * M // waves if waves else None
        controller = BudgetController(M, M_UP, min_num_generations=M + 2, num_slots=num_slots)
        controller.observe(1.2, 100.0)
        return controller.total(N, 1.2, spread)

    break_even = BREAK_EVEN_SPREAD * 2 ** (waves / DOUBLING_WAVES)
    assert total(break_even) == total(0.0) == N * M
    assert total(1.5 * break_even) == (N * M + TARGET) / 2
    assert total(2 * break_even) == TARGET
    assert (total(math.nan) == TARGET) == (waves <= 4)


def test_over_many_runs_the_mean_budget_is_the_target() -> None:
    """ρ of a step is noisy, and so is the reference of 8 steps."""
    means = []
    for seed in range(50):
        noise = np.random.default_rng(seed).lognormal(-0.005, 0.1, 100)
        means.append(statistics.fmean(totals(BudgetController(M, M_UP), (0.9 * noise).tolist())))
    assert statistics.fmean(means) == pytest.approx(TARGET, rel=0.01)


@pytest.mark.parametrize("controller", [BudgetController(M, M_UP, target_redundancy=1), BudgetController(M, M)])
def test_no_redundancy_is_possible(controller: BudgetController) -> None:
    assert totals(controller, [0.5, 2.0, 1.0]) == [N * M] * 3


def test_a_price_of_time_takes_equation_8_with_the_slope_of_the_curve() -> None:
    """With a slope of 0.01 / 999 s per sequence and token, a candidate of 100 tokens takes k = 1 / 999 s."""
    controller = BudgetController(M, M_UP, cost_weight=1.25, latency_curve=CURVE)
    assert controller.total(N, 0.9) == TARGET  # without history
    controller.observe(0.9, 100.0)
    for rho in (0.7, 0.9, 1.2):
        k = 0.01 / 999 * 100
        assert controller.total(N, rho) == redundancy_budget(rho, k, 1.25, N * M, N * M_UP)
    assert controller.total(N, 0.9) == 719


def test_more_engines_and_flat_curves_make_candidates_cheaper() -> None:
    def total(curve: LatencyCurve, num_engines: int = 1) -> int:
        controller = BudgetController(M, M_UP, cost_weight=1.5, latency_curve=curve, num_engines=num_engines)
        controller.observe(1.0, 100.0)
        return controller.total(N, 1.0)

    assert N * M < total(CURVE) < total(CURVE, 2) <= N * M_UP  # each engine has half of the candidates
    assert total(LatencyCurve([1], [0.01])) == N * M_UP  # candidates cost nothing
    assert total(LatencyCurve([1, 2], [0.01, 0.02])) == N * M


@pytest.mark.parametrize("num_steps", [1, 30])
@pytest.mark.parametrize("price", [None, 1.2])
def test_a_restored_controller_decides_the_same(num_steps: int, price: float | None) -> None:
    controller, restored = (BudgetController(M, M_UP, 1.5, price, CURVE) for _ in range(2))
    rhos = np.random.default_rng(0).uniform(0.6, 1.2, num_steps + 20).tolist()
    totals(controller, rhos[:num_steps])
    state = controller.state_dict()
    restored.load_state_dict(json.loads(json.dumps(state)))
    assert restored.state_dict() == state
    assert totals(restored, rhos[num_steps:]) == totals(controller, rhos[num_steps:])


@pytest.mark.parametrize("change", [{"num_generations": 4}, {"surplus": 1}])
def test_other_states_are_rejected_by_name(change: dict[str, int]) -> None:
    state = BudgetController(M, M_UP).state_dict()
    with pytest.raises(StateMismatchError, match=f"`state` .*{next(iter(change))!r}.*group sizes"):
        BudgetController(M, M_UP).load_state_dict(state | change)


def test_a_price_without_a_curve_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"`cost_weight` \(0.1\) needs `latency_curve`"):
        BudgetController(M, M_UP, cost_weight=0.1)
