"""The invariants of `trl_darts/policy/latency_surface.py`, and how well the fit does."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve, LatencySurface


SIZES = 2 ** np.arange(9)
CONTEXTS = (128, 512, 2048, 8192, 32768)
GRID = np.array([(size, size * length) for size in SIZES for length in CONTEXTS if size * length <= 131_072], float)

measurements = st.lists(
    st.tuples(st.integers(1, 600), st.integers(1, 10**6), st.floats(1e-6, 10)), min_size=1, max_size=15
)


def truth(sizes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The shape of a GPU: flat, then compute-bound in the batch; bandwidth-bound in the tokens."""
    return 0.009 + 4e-5 * np.maximum(0, sizes - 48) + 1.1e-7 * tokens


@settings(max_examples=60, deadline=None)
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
        for near in (1 - 1e-12, 1 + 1e-12):
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


@pytest.mark.parametrize("seed", range(2))
def test_noise_and_outliers_do_not_bend_the_surface(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes, tokens = np.repeat(GRID, 3, axis=0).T
    measured = truth(sizes, tokens) * np.exp(0.02 * rng.standard_normal(sizes.size))
    measured[rng.random(sizes.size) < 0.05] *= 3  # another process ran
    spoilt = np.flatnonzero((sizes == 8) & (tokens == 8 * 2048))
    measured[spoilt] *= 2  # each time at one point
    surface = LatencySurface.fit(sizes, tokens, measured)
    errors = np.abs(surface(*GRID.T) / truth(*GRID.T) - 1)
    assert errors.max() < 0.08
    assert np.median(errors) < 0.02


@pytest.mark.parametrize("spoilt", [(1, 8192), (16, 128), (128, 128)])
def test_one_disturbed_point_does_not_bend_the_others(spoilt: tuple[int, int]) -> None:
    sizes, tokens = GRID.T
    measured = truth(sizes, tokens) * np.exp(0.01 * np.cos(2.3 * np.arange(sizes.size)))
    hit = (sizes == spoilt[0]) & (tokens == spoilt[0] * spoilt[1])
    measured[hit] *= 3
    errors = np.abs(LatencySurface.fit(sizes, tokens, measured)(sizes, tokens) / truth(sizes, tokens) - 1)
    assert errors[~hit].max() < 0.04


@pytest.mark.parametrize("seed", range(2))
def test_noise_where_nothing_rises_is_averaged(seed: int) -> None:
    """A fit whose lines are put in order afterwards, each lifted to the one before, is 5 % too high on average."""
    noise = np.exp(0.05 * np.random.default_rng(seed).standard_normal(len(GRID)))
    surface = LatencySurface.fit(*GRID.T, 0.01 * noise)
    assert abs(np.mean(surface(*GRID.T)) / 0.01 - 1) < 0.02


def test_a_batch_size_with_one_context_takes_its_neighbours_slope() -> None:
    sizes, tokens = [1, 1, 1, 8], [100, 1_000, 10_000, 2_000]
    surface = LatencySurface.fit(sizes, tokens, [0.010 + 1e-6 * total for total in tokens])
    assert surface.token_latencies == pytest.approx([1e-6, 1e-6], rel=0.02)


def test_extrapolation() -> None:
    surface = LatencySurface([2, 4], [0.010, 0.012], [3e-6, 1e-6], [1_000, 3_000])
    assert surface(1, 500) == surface(2, 500) == pytest.approx(0.0115)
    assert surface(6, 500) == pytest.approx(0.0125 + 0.002)  # two more sequences, 1 ms each as between the last two
    # Three times as steep over the few tokens that were measured; beyond, it goes on like the larger batch.
    assert surface(2, 2_000) == pytest.approx(0.013 + 0.001)
    assert surface(4, 10_000) == pytest.approx(0.022)
    assert surface(2, -5) == surface(2, 0) == 0.010


def test_arrays_and_scalars_agree() -> None:
    surface = LatencySurface.fit(*GRID.T, truth(*GRID.T))
    sizes, tokens = np.array([[0.5], [24], [400]]), np.array([[0, 5_000, 1e6]])
    values = surface(sizes, tokens)
    assert values.shape == (3, 3)
    assert values[1, 2] == surface(24, 1e6)
    assert isinstance(surface(3, 4), float)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1, 2], [0.1], [0, 0], [1, 1]), "one per batch size"),
        (([1], [float("inf")], [0], [1]), "finite"),
        (([2, 1], [0.1, 0.1], [0, 0], [1, 1]), "`batch_sizes`.*must not decrease"),
        (([1, 2], [0.2, 0.1], [0, 0], [1, 1]), "`base_latencies`.*must not decrease"),
        (([1, 2], [0.1, 0.1], [0, -1], [1, 1]), "`token_latencies` may be 0"),
        (([1, 2], [0.1, 0.1], [0, 0], [2, 1]), "`reaches` must not decrease"),
    ],
)
def test_impossible_surfaces_are_named(columns: tuple[list[float], ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LatencySurface(*columns)
    with pytest.raises(ConfigurationError, match="`context_length`"):
        LatencySurface([1], [0.1], [0], [1]).at_context(-1)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (LatencyCurve([1], [0.1]).to_dict(), "`kind` \\('latency_curve'\\) of a latency surface"),
        ({"kind": "latency_surface", "version": 1, "batch_sizes": [1]}, "`base_latencies`"),
        ({"kind": "latency_profile", "version": 1}, "holds no latency surface. It was measured with one context"),
    ],
)
def test_bad_files_name_path_finding_and_remedy(tmp_path: Path, content: dict, found: str) -> None:
    path = tmp_path / "surface.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=found) as caught:
        LatencySurface.load(path)
    assert str(path) in str(caught.value)
    assert "trl-darts profile" in str(caught.value)
