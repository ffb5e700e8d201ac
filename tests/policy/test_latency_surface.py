"""Tests the invariants of `trl_darts/policy/latency_surface.py` and the quality of the fit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencySurface


SIZES = 2 ** np.arange(9)
CONTEXTS = (128, 512, 2048, 8192, 32768)
GRID = np.array([(size, size * length) for size in SIZES for length in CONTEXTS if size * length <= 131_072], float)

measurements = st.lists(
    st.tuples(st.integers(1, 600), st.integers(1, 10**6), st.floats(1e-6, 10)), min_size=1, max_size=15
)


def truth(sizes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Latency of a GPU: flat, then compute-bound in the batch; bandwidth-bound in the tokens."""
    return 0.009 + 4e-5 * np.maximum(0, sizes - 48) + 1.1e-7 * tokens


@settings(max_examples=60)
@given(measurements, st.floats(0, 1e5))
def test_positive_continuous_and_non_decreasing_in_both_arguments(
    points: list[tuple[int, int, float]], length: float
) -> None:
    surface = LatencySurface.fit(*zip(*points, strict=True))
    sizes = np.unique(np.concatenate([np.geomspace(0.5, 3000, 25), surface.batch_sizes]))
    tokens = np.unique(np.concatenate([[0], np.geomspace(1, 1e8, 30), surface.reaches]))
    values = surface(sizes[:, None], tokens[None])
    assert (values > 0).all()
    assert (np.diff(values, axis=0) >= -1e-8 * values[1:]).all()
    assert (np.diff(values, axis=1) >= -1e-8 * values[:, 1:]).all()
    for size, reach in zip(surface.batch_sizes, surface.reaches, strict=True):
        here = surface(size, reach)
        for near in (1 - 1e-14, 1 + 1e-14):  # so near that slopes don't matter
            assert surface(size * near, reach) == pytest.approx(here, rel=1e-3)
            assert surface(size, reach * near) == pytest.approx(here, rel=1e-3)
    curve = surface.at_context(length)
    assert curve.knots == surface.batch_sizes
    assert curve.values == pytest.approx([surface(size, size * length) for size in surface.batch_sizes])


def test_recovers_the_lines_it_was_made_of() -> None:
    sizes, tokens = GRID.T
    made = LatencySurface([1, 16, 256], [0.010, 0.012, 0.020], [1e-7, 1e-7, 2e-7], [32_768, 131_072, 131_072])
    surface = LatencySurface.fit(sizes, tokens, made(sizes, tokens))
    assert surface(sizes, tokens) == pytest.approx(made(sizes, tokens), rel=0.01)
    assert surface(200, 50_000) == pytest.approx(made(200, 50_000), rel=0.01)


def test_noise_and_outliers_do_not_bend_the_surface() -> None:
    rng = np.random.default_rng(0)
    sizes, tokens = np.repeat(GRID, 3, axis=0).T
    measured = truth(sizes, tokens) * np.exp(0.02 * rng.standard_normal(sizes.size))
    measured[rng.random(sizes.size) < 0.05] *= 3  # as if another process ran
    spoilt = np.flatnonzero((sizes == 8) & (tokens == 8 * 2048))
    measured[spoilt] *= 2  # each time at one point
    surface = LatencySurface.fit(sizes, tokens, measured)
    errors = np.abs(surface(*GRID.T) / truth(*GRID.T) - 1)
    assert errors.max() < 0.08
    assert np.median(errors) < 0.02


def test_a_batch_size_with_one_context_takes_its_neighbours_slope() -> None:
    sizes, tokens = [1, 1, 1, 8], [100, 1_000, 10_000, 2_000]
    surface = LatencySurface.fit(sizes, tokens, [0.010 + 1e-6 * total for total in tokens])
    assert surface.token_latencies == pytest.approx([1e-6, 1e-6], rel=0.02)


def test_extrapolation() -> None:
    surface = LatencySurface([2, 4], [0.010, 0.012], [3e-6, 1e-6], [1_000, 3_000])
    assert surface(1, 500) == surface(2, 500) == pytest.approx(0.0115)
    assert surface(6, 500) == pytest.approx(0.0125 + 0.002)  # two more sequences, 1 ms each as between the last two
    # Three times as steep over the few measured tokens; beyond, it has the slope of the larger batch.
    assert surface(2, 2_000) == pytest.approx(0.013 + 0.001)
    assert surface(4, 10_000) == pytest.approx(0.022)
    assert surface(2, -5) == surface(2, 0) == 0.010


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1, 2], [0.1], [0, 0], [1, 1]), "one per batch size"),
        (([2, 1], [0.1, 0.1], [0, 0], [1, 1]), "`batch_sizes`.*must not decrease"),
        (([1, 2], [0.1, 0.1], [0, -1], [1, 1]), "`token_latencies` may be 0"),
    ],
)
def test_impossible_surfaces_are_named(columns: tuple[list[float], ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LatencySurface(*columns)
    with pytest.raises(ConfigurationError, match="`context_length`"):
        LatencySurface([1], [0.1], [0], [1]).at_context(-1)
