"""Tests the models fitted to a profile, their held-out errors, and the file."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trl_darts.errors import ConfigurationError
from trl_darts.policy import (
    DecodePoint,
    LatencyCurve,
    LatencyProfile,
    LatencySurface,
    PrefillCurve,
    PrefillPoint,
)


CONTEXTS = (128, 512, 2048, 8192)


def point(size: int, length: int, factor: float = 1.0) -> DecodePoint:
    tokens = size * (length + 20)
    seconds = (0.010 + 2e-5 * size + 1e-7 * tokens) * factor
    return DecodePoint(size, length, tokens, seconds, 0.02, (seconds,))


def points(noise: float = 0.0, contexts: tuple[int, ...] = CONTEXTS, limit: int = 65_536) -> list[DecodePoint]:
    rng = np.random.default_rng(0)
    pairs = [(2**i, length) for i in range(8) for length in contexts if 2**i * length <= limit]
    return [point(size, length, float(np.exp(noise * rng.standard_normal()))) for size, length in pairs]


def prompts() -> list[PrefillPoint]:
    return [PrefillPoint(tokens, 0.005 + tokens / 20_000, 0.1) for tokens in (128, 512, 2048, 8192)]


def test_the_curve_takes_the_context_that_the_most_batch_sizes_have() -> None:
    profile = LatencyProfile.fit(points(), metadata={"model": "tiny", "servers": ["a"]})
    assert profile.curve.metadata == {"model": "tiny", "context_length": 512}  # 2,048 x 128 is too much
    for size in (1, 24, 128):
        assert profile.curve(size) == pytest.approx(point(size, 512).seconds, rel=0.01)


def test_one_context_makes_no_surface() -> None:
    assert LatencyProfile.fit(points()).surface(4, 4 * 8212) == pytest.approx(point(4, 8192).seconds, rel=0.005)
    profile = LatencyProfile.fit(points(contexts=(512,)))
    assert profile.surface is None
    assert set(profile.held_out) == {"curve"}


def test_held_out_errors_grow_with_the_noise() -> None:
    exact, noisy = (LatencyProfile.fit(points(noise), prompts()).held_out for noise in (0.0, 0.05))
    assert set(exact) == {"curve", "surface", "prefill"}
    assert all(error.worst < 0.01 for error in exact.values())
    assert 0.01 < noisy["surface"].median < 0.1
    assert noisy["curve"].worst > 0.02


def test_prefill_is_a_quadratic() -> None:
    line = PrefillCurve.fit([100, 1_000, 10_000], [0.011, 0.020, 0.110])
    assert (line.base_s, line.per_token_s) == (pytest.approx(0.010), pytest.approx(1e-5))
    assert line(2_000) == pytest.approx(0.030)
    assert PrefillCurve.fit([100, 1_000, 10_000], [0.001, 0.02, 0.3]).base_s == 0
    assert PrefillCurve.fit([100, 1_000, 10_000], [0.3, 0.02, 0.001]).per_token_s == 0
    with pytest.raises(ConfigurationError, match="`base_s`"):
        PrefillCurve(-1.0, 0.0)
    tokens = np.array([100, 1_000, 10_000, 30_000])
    curve = PrefillCurve.fit(tokens, 0.01 + 1e-5 * tokens + 1e-9 * tokens**2)
    assert curve.per_square_s == pytest.approx(1e-9, rel=1e-3)
    root_mean_square = math.sqrt((9_000**2 + 15_000**2) / 2)
    squares = curve.batch([9_000, 15_000]) - curve.base_s - curve.per_token_s * 24_000
    assert squares == pytest.approx(2 * curve.per_square_s * root_mean_square**2)  # PAT, Eq. 3


def test_one_file_for_profile_curve_and_surface(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    profile = LatencyProfile.fit(points(0.02), prompts(), {"model": "tiny", "servers": ["a", "b"]})
    profile.save(path)
    assert LatencyProfile.load(path) == profile
    assert LatencyCurve.load(path) == profile.curve
    assert LatencySurface.load(path) == profile.surface
    assert LatencySurface.load(path).metadata == {"model": "tiny"}
    data = json.loads(path.read_text())
    assert (data["kind"], data["version"]) == ("latency_profile", 1)
    both = replace(profile, tail=LatencyProfile.fit(points()))
    both.save(path)
    assert LatencyProfile.load(path) == both
    assert LatencyCurve.load(path) == profile.curve


def test_no_error_from_a_single_point() -> None:
    assert set(LatencyProfile.fit(points(contexts=(512,), limit=2048)).held_out) == set()  # 1, 2 and 4 sequences
    assert set(LatencyProfile.fit(points(contexts=(512,), limit=4096)).held_out) == {"curve"}


def test_prefill_of_a_file(tmp_path: Path) -> None:
    """A profile has a prefill curve, unlike the file of a latency curve and a profile without prefill points."""
    points = [DecodePoint(1, 10, 10.0, 1.0, 0.0, (1.0,))]
    LatencyProfile.fit(points, [PrefillPoint(1, 1.5, 0.0), PrefillPoint(2, 2.0, 0.0)]).save(tmp_path / "both.json")
    line = PrefillCurve.load(tmp_path / "both.json")
    assert line is not None
    assert (line.base_s, line.per_token_s) == (pytest.approx(1.0), pytest.approx(0.5))
    LatencyProfile.fit(points).save(tmp_path / "decoding.json")
    LatencyCurve([1], [1.0]).save(tmp_path / "curve.json")
    assert PrefillCurve.load(tmp_path / "decoding.json") is None
    assert PrefillCurve.load(tmp_path / "curve.json") is None
    (tmp_path / "broken.json").write_text('{"kind": "latency_profile", "version": 1, "prefill": {"base_s": 1.0}}')
    for kind, reason in ((PrefillCurve, "per_token_s"), (LatencySurface, "holds no"), (LatencyProfile, "`points`")):
        with pytest.raises(ConfigurationError, match=reason):
            kind.load(tmp_path / "broken.json")
