"""Tests the draft budget: the fastest one, and smaller on a fuller engine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve, draft_budget, drafted_latency


cases = {
    "num_running": st.integers(1, 300),
    "knee": st.floats(1, 300),
    "acceptance": st.floats(0, 1),
}


@given(**cases, more=st.floats(1, 4))
def test_rises_with_what_is_gained_and_falls_with_what_it_costs(more, **case):
    budget = draft_budget(**case)
    assert draft_budget(**{**case, "num_running": int(case["num_running"] * more)}) <= budget
    assert draft_budget(**{**case, "knee": case["knee"] * more}) >= budget
    assert draft_budget(**{**case, "acceptance": min(1.0, case["acceptance"] * more)}) >= budget


@given(**cases, limit=st.integers(0, 16))
def test_no_other_budget_is_faster(num_running, knee, acceptance, limit):
    def speed(budget):
        return sum(acceptance**i for i in range(budget + 1)) / (1 + num_running * (1 + budget) / knee)

    chosen = draft_budget(num_running, knee, acceptance, limit)
    assert 0 <= chosen <= limit
    assert speed(chosen) >= max(speed(budget) for budget in range(limit + 1)) * (1 - 1e-9)


@given(
    steps=st.lists(st.tuples(st.integers(1, 100), st.floats(0, 0.1)), min_size=1, max_size=4),
    acceptance=st.floats(0.01, 0.99),
)
def test_the_latency_with_drafts_is_that_of_the_best_number_of_drafts(steps, acceptance):
    knots, values = np.cumsum(steps, axis=0).T
    plain = LatencyCurve(knots, 0.01 + values)
    drafted = drafted_latency(plain, acceptance)
    for size in (1, 2, 3, int(knots[-1])):
        per_token = [plain(size * (1 + n)) / sum(acceptance**i for i in range(n + 1)) for n in range(17)]
        assert drafted(size) == pytest.approx(min(per_token), rel=0.02)
    sizes = np.linspace(1, 2 * knots[-1], 50)
    assert (drafted(sizes) <= plain(sizes) * (1 + 1e-9)).all()


@pytest.mark.parametrize("acceptance", [0.0, 1.0, -1.0, float("nan")])
def test_an_acceptance_out_of_bounds_is_refused(acceptance):
    with pytest.raises(ConfigurationError, match=r"`draft_acceptance` \(.*\) must be more than 0 and less than 1"):
        drafted_latency(LatencyCurve([1], [0.01]), acceptance)
