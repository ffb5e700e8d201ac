"""A curve fitted to rollouts recovers the one that they were simulated with."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_darts.policy import LatencyCurve
from trl_darts.policy.traced_latency import MIN_CANDIDATES, TimedRollout, fit_rollouts


curves = st.builds(
    lambda value, growths: LatencyCurve([2, 16, 64], value * np.cumprod([1.0, *growths])),
    st.floats(1e-4, 0.1),
    st.tuples(st.floats(1, 3), st.floats(1, 4)),
)


def rollout(curve: LatencyCurve, lengths: np.ndarray, starts: np.ndarray) -> TimedRollout:
    """Decodes token by token on one engine: in each step, all that have begun and not ended get one."""
    now, tokens, ends = 0.0, np.zeros(len(lengths)), np.zeros(len(lengths))
    begun = np.full(len(lengths), np.nan)
    while (tokens < lengths).any():
        running = (starts <= now) & (tokens < lengths)
        if not running.any():
            now = starts[tokens < lengths].min()
            continue
        begun = np.where(running & np.isnan(begun), now, begun)
        now += curve(float(running.sum()))
        tokens += running
        ends = np.where(running & (tokens == lengths), now, ends)
    return TimedRollout(begun, ends, lengths)


def sample(rng: np.random.Generator, curve: LatencyCurve, spread: float, late: float = 0.0) -> list[TimedRollout]:
    lengths = [np.ceil(np.exp(rng.normal(3.5, spread, 64))) for _ in range(3)]
    return [rollout(curve, own, rng.uniform(0, late * curve(64) * 30, 64)) for own in lengths]


@settings(max_examples=8, deadline=None)
@given(curves, st.floats(0.5, 1.2), st.sampled_from([0.0, 0.5]), st.integers(0, 2**32 - 1))
def test_recovers_a_curve(curve, spread, late, seed):
    fitted = fit_rollouts(sample(np.random.default_rng(seed), curve, spread, late))
    assert fitted.num_candidates == 3 * 64
    sizes = np.array([2.0, 4, 8, 16, 32, 56])
    errors = np.abs(fitted.curve(sizes) / curve(sizes) - 1)
    assert np.median(errors) < 0.08
    assert errors.max() < 0.25
    if not late:  # otherwise the prediction, for which all begin together, is another time
        assert np.abs(fitted.errors).max() < 0.08


def test_time_before_the_first_token_is_none_of_the_curve():
    curve, rng = LatencyCurve([8, 64], [0.01, 0.04]), np.random.default_rng(0)
    fitted = fit_rollouts([own._replace(ends=own.ends + 0.05) for own in sample(rng, curve, 0.8)])
    sizes = np.array([4.0, 16, 32, 56])
    assert np.abs(fitted.curve(sizes) / curve(sizes) - 1).max() < 0.1


def test_too_little_is_no_curve():
    few = TimedRollout(np.zeros(8), np.arange(1.0, 9), np.arange(1.0, 9))
    idle = TimedRollout(np.zeros(99), np.zeros(99), np.zeros(99))  # aborted before they ran
    assert MIN_CANDIDATES == 32
    assert fit_rollouts([few] * 3) is None
    assert fit_rollouts([few] * 3 + [idle]) is None
    assert fit_rollouts([few] * 4).curve(1.0) > 0
    assert fit_rollouts([few] * 4 + [few._replace(ends=few.ends * np.nan)]) is None
    assert fit_rollouts([]) is None
