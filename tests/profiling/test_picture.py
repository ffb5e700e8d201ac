"""The picture shows what was measured, and what was fitted."""

import numpy as np
import pytest

from trl_darts.policy import DecodePoint, LatencyProfile, PrefillPoint


pytest.importorskip("matplotlib")


def profile(contexts: tuple[int, ...], num_prompts: int = 4) -> LatencyProfile:
    points = [
        DecodePoint(2**i, length, 2**i * length, 0.01 + 1e-4 * 2**i + 1e-7 * 2**i * length, 0.0, (0.01,))
        for i in range(9)
        for length in contexts
    ]
    prompts = [PrefillPoint(128 * 2**i, 0.01 * (i + 1), 0.0) for i in range(num_prompts)]
    return LatencyProfile.fit(points, prompts, {"model": "tiny", "vllm_version": "0.31.0", "tensor_parallel_size": 2})


def markers(axes) -> dict[str, int]:
    """Number of points by label; lines without markers are left out."""
    lines = [line for line in axes.lines if line.get_marker() not in ("None", None, "")]
    return {line.get_label(): len(line.get_xdata()) for line in lines}


def test_points_fit_and_knots():
    from trl_darts.profiling.picture import make_figure

    measured = profile((128, 512, 2048))
    figure = make_figure(measured)
    by_batch, by_tokens, prompts = figure.axes
    shown = markers(by_batch)
    assert [shown[f"{length:,} tokens"] for length in (128, 512, 2048)] == [9, 9, 9]
    knots = next(line for line in by_batch.lines if line.get_marker() == "D")
    assert knots.get_xdata() == pytest.approx(np.array(measured.curve.knots))
    assert knots.get_ydata() == pytest.approx(1e3 * np.array(measured.curve.values))
    assert set(markers(by_tokens).values()) == {3}
    assert len(markers(by_tokens)) == 6  # of nine batch sizes: first, last, and between
    assert list(markers(prompts).values()) == [4]
    assert "held-out error" in by_batch.get_title()
    assert figure.get_suptitle() == "tiny · vLLM 0.31.0 · TP 2"


def test_fitted_lines_are_the_surface():
    from trl_darts.profiling.picture import make_figure

    measured = profile((128, 512, 2048))
    by_tokens = make_figure(measured).axes[1]
    line = next(line for line in by_tokens.lines if line.get_marker() == "None")
    expected = [1e3 * measured.surface(1, tokens) for tokens in line.get_xdata()]
    assert line.get_ydata() == pytest.approx(np.array(expected))


def test_one_context_and_no_prompts(tmp_path):
    from trl_darts.profiling.picture import draw

    draw(profile((512,), num_prompts=0), tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()
