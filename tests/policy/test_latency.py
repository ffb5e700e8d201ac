"""Tests the invariants of `trl_darts/policy/latency.py` and the quality of the fit."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve, rollout_time


THREE_STAGES = LatencyCurve(knots=[1, 24, 150, 512], values=[0.010, 0.0115, 0.030, 0.120])
POWERS = [1, 2, 4, 8, 16, 32, 64, 128]
# Two compiled models under vLLM on two quiet CPU cores, ms (DESIGN.md, section 7), and a GPU's shape with a flat
# region.
SMALL_MODEL = [1.70, 1.73, 1.84, 1.99, 2.29, 2.99, 4.21, 6.66]
LARGER_MODEL = [6.1, 6.4, 8.3, 9.9, 13.0, 18.0, 27.7, 48.2]

measurements = st.lists(st.tuples(st.integers(1, 600), st.floats(1e-6, 10)), min_size=1, max_size=12)


def rollout_time_by_definition(lengths: list[int], curve: LatencyCurve) -> float:
    """Eq. 4 as in the paper."""
    ordered = [0, *sorted(lengths)]
    num = len(lengths)
    return sum((ordered[m] - ordered[m - 1]) * curve(num - m + 1) for m in range(1, num + 1))


@settings(max_examples=40)
@given(measurements, st.integers(1, 4))
def test_positive_continuous_non_decreasing_and_a_segment_per_two_batch_sizes(
    points: list[tuple[int, float]], num_segments: int
) -> None:
    measured = [size for size, _ in points]
    curve = LatencyCurve.fit(measured, [latency for _, latency in points], num_segments)
    sizes = np.unique(np.concatenate([np.geomspace(0.1, 1e5, 400), curve.knots]))
    values = curve(sizes)
    assert (values > 0).all()
    assert (np.diff(values) >= -1e-12 * values[1:]).all()
    for knot, value in zip(curve.knots, curve.values, strict=True):
        assert curve(knot) == pytest.approx(value, rel=1e-9)
        assert curve(knot * (1 - 1e-13)) == pytest.approx(value, rel=0.01)
    num_sizes = len(set(measured))
    assert len(curve.knots) - 1 <= min(num_segments, max(1, num_sizes // 2), num_sizes - 1)
    assert (curve.knots[0], curve.knots[-1]) == (min(measured), max(measured))


def test_recovers_a_three_stage_curve() -> None:
    sizes = np.unique(np.geomspace(1, 512, 40).round())
    curve = LatencyCurve.fit(sizes, THREE_STAGES(sizes))
    assert curve.knots == pytest.approx(THREE_STAGES.knots, rel=0.02)
    assert curve.values == pytest.approx(THREE_STAGES.values, rel=0.01)


@pytest.mark.parametrize(("latencies", "worst"), [(SMALL_MODEL, 0.012), (LARGER_MODEL, 0.055)])
def test_fits_measured_profiles(latencies: list[float], worst: float) -> None:
    curve = LatencyCurve.fit(POWERS, latencies)
    errors = np.abs(curve(np.array(POWERS, float)) / latencies - 1)
    single = LatencyCurve.fit(POWERS, latencies, num_segments=1)
    assert errors.max() <= worst
    assert errors.max() < np.abs(single(np.array(POWERS, float)) / latencies - 1).max() / 1.5


def test_models_are_compared_by_the_names_that_are_known() -> None:
    curve = LatencyCurve([1], [1.0], {"model": "some/Tiny-1B"})
    assert curve.is_of("/models/tiny-1b/")
    assert curve.is_of(None)
    assert LatencyCurve([1], [1.0]).is_of("some/Tiny-1B")
    assert not curve.is_of("some/Other-7B")


@pytest.mark.parametrize("spoilt", [0, 6, 9])
def test_one_disturbed_batch_size_does_not_bend_the_curve(spoilt: int) -> None:
    """Also the last one, whose segment determines all larger batches."""
    sizes = 2.0 ** np.arange(10)
    measured = THREE_STAGES(sizes) * np.exp(0.02 * np.cos(np.arange(10) * 2.3))
    measured[spoilt] *= 3
    curve = LatencyCurve.fit(sizes, measured)
    kept = np.arange(10) != spoilt
    assert np.abs(curve(sizes[kept]) / THREE_STAGES(sizes[kept]) - 1).max() < 0.12
    assert np.abs(curve(2048.0) / THREE_STAGES(2048.0) - 1) < 0.25


def test_extrapolation_and_arrays() -> None:
    sizes = np.array([[0.5, 1, 20], [24, 300, 2000]])
    assert THREE_STAGES(sizes).ravel() == pytest.approx([THREE_STAGES(size) for size in sizes.ravel().tolist()])
    curve = LatencyCurve([8, 64], [0.010, 0.038])
    assert curve(0) == curve(1) == curve(8) == 0.010
    assert curve(128) == pytest.approx(0.070)  # the last segment's slope
    assert LatencyCurve([4], [0.02])(1000) == 0.02
    falling = LatencyCurve.fit([1, 2, 4, 8, 16, 32], [6, 5, 4, 3, 2, 1])
    assert len(set(falling.values)) == 1


@pytest.mark.parametrize(
    ("batch_sizes", "latencies", "num_segments", "message"),
    [
        ([], [], 3, "at least 1"),
        ([1, 2], [0.1], 3, r"shape \(2,\)"),
        ([1, 0], [0.1, 0.1], 3, "`batch_sizes` .0 to 1. must be positive"),
        ([1, 2], [0.1, 0.1], 0, r"`num_segments` \(0\)"),
    ],
)
def test_impossible_fits_are_named(batch_sizes, latencies, num_segments, message) -> None:
    with pytest.raises(ValueError, match=message):
        LatencyCurve.fit(batch_sizes, latencies, num_segments)


@given(st.lists(st.integers(0, 50), max_size=30))
def test_rollout_time_is_its_definition(lengths: list[int]) -> None:
    assert rollout_time(lengths, THREE_STAGES) == pytest.approx(rollout_time_by_definition(lengths, THREE_STAGES))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(0, 50), st.data())
def test_never_faster_by_adding_or_lengthening(lengths: list[int], added: int, data: st.DataObject) -> None:
    before = rollout_time(lengths, THREE_STAGES)
    assert rollout_time([*lengths, added], THREE_STAGES) >= before * (1 - 1e-12)
    i = data.draw(st.integers(0, len(lengths) - 1))
    longer = [*lengths[:i], lengths[i] + added, *lengths[i + 1 :]]
    assert rollout_time(longer, THREE_STAGES) >= before * (1 - 1e-12)


def test_rollout_time_examples() -> None:
    flat = LatencyCurve([1], [0.01])
    assert rollout_time([], flat) == 0.0
    assert rollout_time([0, 0], flat) == 0.0
    assert rollout_time([100, 700, 300], flat) == pytest.approx(7.0)  # a flat curve waits for the longest only
    assert rollout_time([100, 100], LatencyCurve([1, 2], [0.01, 0.02])) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="`lengths`"):
        rollout_time([3, -1], flat)


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    curve = LatencyCurve([1, 8.5], [0.1, 0.25], metadata={"model": "tiny", "tensor_parallel_size": 2})
    curve.save(path)
    assert LatencyCurve.load(path) == curve
    assert json.loads(path.read_text()) == {
        "kind": "latency_curve",
        "version": 1,
        "knots": [1.0, 8.5],
        "values": [0.1, 0.25],
        "metadata": {"model": "tiny", "tensor_parallel_size": 2},
    }


CURVE = '{"kind": "latency_curve", "version": 1, '


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file"),
        ("", "Expecting value"),
        ('{"kind": "recipe", "version": 1}', "`kind` \\('recipe'\\)"),
        ('{"kind": "latency_curve", "version": 2}', r"`version` \(2\)"),
        (CURVE + '"knots": [1]}', "`values`"),
        (CURVE + '"knots": [1, 2], "values": [1]}', "same length"),
        (CURVE + '"knots": [2, 1], "values": [1, 2]}', "strictly increasing"),
        (CURVE + '"knots": [1, 2], "values": [2, 1]}', "non-decreasing"),
        ('{"kind": "latency_profile", "version": 1}', "holds no latency curve"),
    ],
)
def test_bad_files_name_path_finding_and_remedy(tmp_path: Path, content: str | None, found: str) -> None:
    path = tmp_path / "curve.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=found) as caught:
        LatencyCurve.load(path)
    assert str(path) in str(caught.value)
    assert "trl-darts profile" in str(caught.value)
