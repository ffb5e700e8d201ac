"""What a budget controller saves, and what it takes back."""

import json
from collections.abc import Callable

import pytest

from tests.policy.clusters import CURVE, M_UP, Cluster, M, calibrated
from trl_darts.errors import StateMismatchError
from trl_darts.policy import BudgetController, LatencyCurve


def test_a_price_that_is_not_given_any_more_is_calibrated() -> None:
    given, cluster = BudgetController(M, M_UP, cost_weight=0.05), Cluster(noise=0.0)
    list(cluster.run(given, 12))
    controller = BudgetController(M, M_UP)
    controller.load_state_dict(given.state_dict())
    list(cluster.run(controller, 2))
    assert controller.cost_weight is not None
    fresh = BudgetController(M, M_UP)
    list(cluster.run(fresh, 8))
    assert list(cluster.run(controller, 5)) == list(cluster.run(fresh, 5))


@pytest.mark.parametrize("num_steps", [0, 1, 5, 8, 30])
@pytest.mark.parametrize("curve", [None, CURVE])
def test_a_restored_controller_decides_the_same(num_steps: int, curve: LatencyCurve | None) -> None:
    controller, restored = (BudgetController(M, M_UP, latency_curve=curve) for _ in range(2))
    list(Cluster(seed=1).run(controller, num_steps))
    restored.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert restored.state_dict() == controller.state_dict()
    assert list(Cluster(seed=2).run(restored, 20)) == list(Cluster(seed=2).run(controller, 20))
    assert restored.state_dict() == controller.state_dict()


def test_with_a_curve_timings_do_not_decide() -> None:
    quiet, busy = (BudgetController(M, M_UP, latency_curve=CURVE) for _ in range(2))
    assert list(Cluster(k=0.01).run(quiet, 40)) == list(Cluster(k=0.5, noise=0.05).run(busy, 40))


def test_a_state_is_not_shared_with_its_owner() -> None:
    controller = BudgetController(M, M_UP)
    state = controller.state_dict()
    before = json.dumps(state)
    list(Cluster().run(controller, 3))
    assert json.dumps(state) == before


def test_a_given_price_survives_loading() -> None:
    calibrated_controller, _ = calibrated(Cluster())
    given_price = BudgetController(M, M_UP, cost_weight=0.5)
    given_price.load_state_dict(calibrated_controller.state_dict())
    assert given_price.cost_weight == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("rho"), r"has the keys \['cost_weight'.*this one has"),
        (lambda state: state.update(surplus=1), "'surplus'"),
        (lambda state: state.update(num_generations=4), r"`num_generations` \(4\), and it is 8 now"),
        (lambda state: state.update(max_num_generations=12), r"`max_num_generations` \(12\)"),
        (lambda state: state.update(timed_cost_slope=None), "`latency_curve`"),
    ],
)
def test_other_states_are_rejected_by_name(change: Callable[[dict[str, object]], object], message: str) -> None:
    state = BudgetController(M, M_UP).state_dict()
    change(state)
    with pytest.raises(StateMismatchError, match=message):
        BudgetController(M, M_UP).load_state_dict(state)


def test_target_that_changed_since_is_met() -> None:
    """λ is saved; a new target on resume must not be ignored in its favour."""
    old = BudgetController(8, 16, target_redundancy=1.25, calibration_steps=3)
    for _ in range(8):
        total = old.total(10, 1.0)
        old.observe(total, 5.0 + 0.01 * total)
    new = BudgetController(8, 16, target_redundancy=1.75, calibration_steps=3)
    new.load_state_dict(old.state_dict())
    assert old.total(10, 1.0) == pytest.approx(100, abs=4)
    assert new.total(10, 1.0) == pytest.approx(140, abs=4)
