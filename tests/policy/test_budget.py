"""`redundancy_budget` and `BudgetController`: bounds, calibration, what moves the budget, small batches, resuming."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.clusters import CURVE, M_UP, TARGET, Cluster, M, N, calibrated, mean
from trl_darts.errors import ConfigurationError
from trl_darts.policy import BudgetController, LatencyCurve, redundancy_budget
from trl_darts.policy.cost_slope import TRUST_REGION, TimedCostSlope, calibration_cycle


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
        (math.nan, 1, 1, 1, 2, r"`rho` \(nan\)"),
        (math.inf, 1, 1, 1, 2, r"`rho` \(inf\)"),
        (1, 0, 1, 1, 2, r"`cost_slope` \(0\)"),
        (1, math.nan, 1, 1, 2, "`cost_slope`"),
        (1, 1, -1, 1, 2, r"`cost_weight` \(-1\)"),
        (1, 1, math.inf, 1, 2, "`cost_weight`"),
        (1, 1, 1, 3, 2, r"`low` \(3\)"),
    ],
)
def test_impossible_budgets_are_named(rho: float, k: float, price: float, low: int, high: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        redundancy_budget(rho, k, price, low, high)


@given(st.integers(1, 40))
def test_the_calibration_cycle_is_balanced(num_steps: int) -> None:
    cycle = calibration_cycle(num_steps)
    assert len(cycle) == num_steps
    assert sum(cycle) == 0
    assert cycle[0] == 0
    assert set(cycle) <= {-1, 0, 1}
    assert num_steps - sum(map(abs, cycle)) <= 2


@given(
    st.integers(1, 12),
    st.integers(0, 12),
    st.floats(0, 1),
    st.lists(
        st.tuples(st.integers(1, 50), st.one_of(st.just(math.nan), st.floats(0, 20)), st.floats(1e-3, 1e4)),
        max_size=25,
    ),
)
def test_always_within_bounds(
    num_generations: int, room: int, share: float, steps: list[tuple[int, float, float]]
) -> None:
    most = num_generations + room
    target = 1 + share * (most / num_generations - 1)
    controller = BudgetController(num_generations, most, target_redundancy=target, calibration_steps=4)
    for num_prompts, rho, seconds in steps:
        total = controller.total(num_prompts, rho)
        assert type(total) is int
        assert num_prompts * num_generations <= total <= num_prompts * most
        controller.observe(total, seconds)
        slope = controller.cost_slope
        assert slope is None or 0 < slope < math.inf


def test_calibration_cycles_around_the_target_and_then_sets_the_price() -> None:
    controller, cluster = BudgetController(M, M_UP), Cluster(noise=0.0)
    totals: list[int] = []
    for step in range(8):
        assert controller.cost_weight is None
        assert (controller.cost_slope is None) == (step < 2)
        totals += cluster.run(controller, 1)
    assert statistics.fmean(totals) == TARGET
    assert min(totals) < 0.85 * TARGET
    assert max(totals) > 1.15 * TARGET
    price, k = controller.cost_weight, controller.cost_slope
    assert price is not None
    assert k is not None
    assert k == pytest.approx(0.01, rel=0.05)
    assert price == pytest.approx(0.9 / (k * TARGET), rel=1e-3)
    assert list(cluster.run(controller, 20)) == [TARGET] * 20
    assert controller.cost_weight == price  # held


@pytest.mark.parametrize("c", [0.0, 8.0, 40.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_mean_budget_is_the_target_while_rho_and_k_stay(c: float, seed: int) -> None:
    controller, cluster = BudgetController(M, M_UP), Cluster(c=c, seed=seed, noise=0.05)
    list(cluster.run(controller, 8))
    assert mean(cluster.run(controller, 200)) == pytest.approx(TARGET, rel=0.06)


def test_over_many_runs_the_mean_budget_is_the_target() -> None:
    means = []
    for seed in range(20):
        controller, cluster = BudgetController(M, M_UP), Cluster(seed=seed, noise=0.1)
        list(cluster.run(controller, 8))
        means.append(mean(cluster.run(controller, 150)))
    print(f"mean budget over target, 20 runs with 10 % noise: {statistics.fmean(means) / TARGET:.3f}")
    assert statistics.fmean(means) == pytest.approx(TARGET, rel=0.03)


def test_a_slow_first_step_is_told_from_the_others() -> None:
    controller, cluster = BudgetController(M, M_UP), Cluster(warm_up=6.0)
    list(cluster.run(controller, 8))
    assert mean(cluster.run(controller, 100)) == pytest.approx(TARGET, rel=0.12)


@pytest.mark.parametrize("curve", [None, CURVE])
def test_rises_with_rho(curve: LatencyCurve | None) -> None:
    cluster = Cluster()
    controller, before = calibrated(cluster, latency_curve=curve)
    assert mean(cluster.run(controller, 60, rho=0.9 * 1.2)) == pytest.approx(1.2 * before, rel=0.08)
    assert mean(cluster.run(controller, 60, rho=9.0)) == N * M_UP
    assert mean(cluster.run(controller, 60, rho=0.1)) == N * M


@pytest.mark.parametrize("curve", [None, CURVE])
def test_rollouts_that_get_shorter_do_not_make_candidates_cheap(curve: LatencyCurve | None) -> None:
    """Else a budget that makes prompts stop early would raise the next one, up to the bound."""
    cluster = Cluster(c=2.0)
    controller, before = calibrated(cluster, latency_curve=curve)
    k = controller.cost_slope
    assert before == pytest.approx(TARGET, rel=0.05)
    for factor in (0.25, 4.0):
        cluster.k *= factor
        cluster.lengths_median *= factor
        assert mean(cluster.run(controller, 60)) == pytest.approx(before, rel=0.05)
        cluster.k /= factor
        cluster.lengths_median /= factor
    assert controller.cost_slope == k


def test_equal_steps_do_not_move_the_measured_cost() -> None:
    """A thousand steps of the same size say nothing of the slope; noise must not be taken for it."""
    slope, rng = TimedCostSlope(8), np.random.default_rng(0)
    for size in [768, 640, 896, 896, 640, 640, 896, 768]:
        slope.observe(size, 0.01 * size + 8)
    before = slope.value
    for _ in range(1000):
        slope.observe(768, (0.01 * 768 + 8) * math.exp(0.1 * rng.standard_normal()))
    assert slope.value == pytest.approx(before, rel=0.15)


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-3, 1e4)), min_size=2, max_size=30))
def test_the_cost_slope_stays_in_its_trust_region(steps: list[tuple[int, float]]) -> None:
    slope = TimedCostSlope(4)
    for size, seconds in steps:
        slope.observe(size, seconds)
    per_candidate = slope._mean_time / slope._mean_size
    assert slope.value is not None
    assert TRUST_REGION[0] * (1 - 1e-9) <= slope.value / per_candidate <= TRUST_REGION[1] * (1 + 1e-9)


@pytest.mark.parametrize(("k", "c"), [(0.02, 0.0), (0.01, 8.0), (0.002, 14.0)])
def test_the_cost_slope_is_found(k: float, c: float) -> None:
    slope, rng = TimedCostSlope(8), np.random.default_rng(0)
    for i in range(60):
        size = (640, 768, 896)[i % 3]
        slope.observe(size, (k * size + c) * math.exp(0.03 * rng.standard_normal()))
    assert slope.value == pytest.approx(k, abs=0.07 * (k + c / 768))  # 7 % of a candidate's share of the step


def test_predicted_cost_is_the_slope_of_equation_4() -> None:
    flat = BudgetController(M, M_UP, latency_curve=LatencyCurve([1], [0.01]))
    steep = BudgetController(M, M_UP, latency_curve=LatencyCurve([1, 2], [0.01, 0.02]))
    for controller in (flat, steep):
        controller.total(N, 0.9)
        controller.observe(TARGET, 1.0, [500] * TARGET)
    per_candidate = 500 * 0.01 / (N * M)
    assert flat.cost_slope == pytest.approx(TRUST_REGION[0] * per_candidate)  # free candidates are not believed
    assert steep.cost_slope == pytest.approx(500 * 0.01)  # every running sequence adds 0.01 s to each of 500 tokens


def test_engines_share_the_batch() -> None:
    one, four = (BudgetController(M, M_UP, latency_curve=CURVE, num_engines=num) for num in (1, 4))
    lengths = np.random.default_rng(0).lognormal(6, 1, TARGET).astype(int)
    for controller in (one, four):
        controller.total(N, 0.9)
        controller.observe(TARGET, 1.0, lengths)
    assert one.cost_slope is not None
    assert four.cost_slope is not None
    assert four.cost_slope < one.cost_slope / 3


def test_a_given_price_is_equation_8_once_the_cost_is_known() -> None:
    controller = BudgetController(M, M_UP, cost_weight=0.1)
    assert controller.cost_weight == 0.1
    for _ in range(2):
        assert controller.total(N, 0.9) == TARGET
        controller.observe(TARGET, 15.68)
    k = controller.cost_slope
    assert k is not None
    assert controller.total(N, 0.9) == redundancy_budget(0.9, k, 0.1, N * M, N * M_UP)
    assert controller.cost_weight == 0.1


def test_the_last_small_batch_has_the_same_redundancy() -> None:
    controller, cluster = BudgetController(M, M_UP), Cluster(noise=0.02)
    shares: dict[int, list[float]] = {N: [], 20: []}
    for epoch in range(12):
        for step in range(10):
            num_prompts = 20 if step == 9 else N
            total = next(cluster.run(controller, 1, num_prompts=num_prompts))
            if epoch:
                shares[num_prompts].append(total / (num_prompts * M))
    assert statistics.fmean(shares[N]) == pytest.approx(1.5, rel=0.06)
    assert statistics.fmean(shares[20]) == pytest.approx(statistics.fmean(shares[N]), rel=0.05)


def test_a_small_batch_has_the_same_redundancy_under_a_given_price() -> None:
    controller, cluster = BudgetController(M, M_UP, cost_weight=0.12), Cluster(noise=0.0)
    list(cluster.run(controller, 30))
    large, small = controller.total(N, 0.9), controller.total(16, 0.9)
    assert N * M < large < N * M_UP
    assert small == large * 16 // N


def test_a_larger_batch_after_calibration_has_the_same_redundancy() -> None:
    controller, cluster = BudgetController(M, M_UP), Cluster(noise=0.0)
    list(cluster.run(controller, 8, num_prompts=20))
    assert controller.total(N, 0.9) == pytest.approx(TARGET, rel=0.05)


@pytest.mark.parametrize(
    "controller",
    [
        BudgetController(M, M_UP, target_redundancy=1),
        BudgetController(M, M),
        BudgetController(M, M, latency_curve=CURVE),
        BudgetController(M, M_UP, target_redundancy=1, cost_weight=1e-9),
    ],
)
def test_no_redundancy_is_possible(controller: BudgetController) -> None:
    assert list(Cluster().run(controller, 20)) == [N * M] * 20


def test_no_history_means_the_target() -> None:
    controller, cluster = BudgetController(M, M_UP), Cluster()
    assert list(cluster.run(controller, 3, rho=math.nan)) == [TARGET] * 3
    list(cluster.run(controller, 5))
    assert controller.cost_weight == pytest.approx(0.9 / ((controller.cost_slope or 0) * TARGET), rel=1e-3)
    assert controller.total(N, math.nan) == TARGET


@pytest.mark.parametrize("rho", [0.0, math.nan])
def test_calibration_waits_for_a_rho(rho: float) -> None:
    controller, cluster = BudgetController(M, M_UP), Cluster()
    assert mean(cluster.run(controller, 16, rho=rho)) == TARGET
    assert controller.cost_weight is None
    list(cluster.run(controller, 2))
    assert controller.cost_weight is not None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_generations": 0}, "at least 1"),
        ({"max_num_generations": 7}, r"`max_num_generations` \(7\) must be at least `num_generations` \(8\)"),
        ({"target_redundancy": 0.9}, r"`target_redundancy` \(0.9\)"),
        ({"target_redundancy": 2.1}, r"`target_redundancy` \(2.1\)"),
        ({"target_redundancy": math.nan}, r"`target_redundancy` \(nan\)"),
        ({"cost_weight": 0.0}, r"`cost_weight` \(0.0\)"),
        ({"calibration_steps": 0}, r"`calibration_steps` \(0\)"),
        ({"num_engines": 0}, r"`num_engines` \(0\)"),
    ],
)
def test_impossible_settings_are_named(kwargs: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BudgetController(**{"num_generations": M, "max_num_generations": M_UP, **kwargs})  # type: ignore[arg-type]


def test_impossible_observations_are_named() -> None:
    controller = BudgetController(M, M_UP)
    for num_candidates, seconds in ((0, 1.0), (8, 0.0), (8, -1.0), (8, math.nan), (8, math.inf)):
        with pytest.raises(ValueError, match="`num_candidates`"):
            controller.observe(num_candidates, seconds)
    for num_prompts, rho, message in ((0, 1.0, "`num_prompts`"), (1, -1.0, "`rho`"), (1, math.inf, "`rho`")):
        with pytest.raises(ValueError, match=message):
            controller.total(num_prompts, rho)
    with pytest.raises(ValueError, match="`lengths` must be given"):
        BudgetController(M, M_UP, latency_curve=CURVE).observe(8, 1.0)
