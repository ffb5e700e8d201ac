"""The picture of a profile: what was measured, and what was fitted to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..import_utils import require_matplotlib
from ..policy import LatencyProfile


MAX_BATCHES = 6  # of the middle panel: more lines than that can't be told apart


def draw(profile: LatencyProfile, path: str | Path) -> None:
    """
    Writes the picture of [`make_figure`].

    Args:
        profile ([`LatencyProfile`]):
            What was measured.
        path (`str` or `Path`):
            Where to write the picture. The ending decides about the format.

    Raises:
        [`ImportError`]: If matplotlib is missing.
    """
    make_figure(profile).savefig(path, dpi=150)


def make_figure(profile: LatencyProfile) -> Any:
    """
    Latency against batch size, with a colour per context length and the fitted curve; against the tokens of all
    contexts, with a colour per batch size; and the time until the first token against a prompt's length. Logarithmic,
    so that the same distance is the same relative error everywhere.

    Args:
        profile ([`LatencyProfile`]):
            What was measured.

    Returns:
        `matplotlib.figure.Figure`: Three panels.

    Raises:
        [`ImportError`]: If matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    by_batch, by_tokens, prompts = figure.subplots(1, 3)
    _draw_batches(by_batch, profile)
    _draw_tokens(by_tokens, profile)
    _draw_prompts(prompts, profile)
    for axes in (by_batch, by_tokens, prompts):
        _style(axes)
    about = profile.metadata
    version, tp = about.get("vllm_version"), about.get("tensor_parallel_size")
    words = [about.get("model"), about.get("hardware"), version and f"vLLM {version}", tp and f"TP {tp}"]
    figure.suptitle(" · ".join(str(word) for word in words if word), fontsize=11)
    return figure


def _style(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _short(value))
    low, high = axes.get_ylim()
    low, high = low / 1.1, high * 1.3  # room for the legend
    steps = (1, 1.5, 2, 3, 4, 5, 7) if high / low < 10 else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(-4, 7) for step in steps]
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    axes.set_ylim(low, high)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _short(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def _draw_batches(axes: Any, profile: LatencyProfile) -> None:
    """Latency against batch size: a colour per context length, the fitted curve with its knots in black."""
    from matplotlib import colormaps

    contexts = sorted({point.context_length for point in profile.points})
    colors = colormaps["viridis"](np.linspace(0.1, 0.85, len(contexts)))
    for color, context in zip(colors, contexts, strict=True):
        points = [point for point in profile.points if point.context_length == context]
        sizes = np.array([point.batch_size for point in points], float)
        axes.plot(
            sizes, [p.seconds * 1e3 for p in points], "o", color=color, markersize=5, label=f"{context:,} tokens"
        )
        if profile.surface is not None and len(sizes) > 1:
            tokens = np.array([point.context_tokens for point in points])
            grid = np.geomspace(sizes[0], sizes[-1], 200)
            fitted = profile.surface(grid, np.interp(grid, sizes, tokens))
            axes.plot(grid, fitted * 1e3, color=color, linewidth=1.2, alpha=0.8)
    curve = profile.curve
    grid = np.geomspace(curve.knots[0], curve.knots[-1], 300)
    label = f"latency_curve ({curve.metadata['context_length']:,})"
    axes.plot(grid, curve(grid) * 1e3, color="black", linewidth=1.4, linestyle="--", label=label)
    axes.plot(curve.knots, np.array(curve.values) * 1e3, "D", color="black", markersize=6, markerfacecolor="none")
    axes.set(
        xlabel="sequences that decode together", ylabel="ms per token", title="Batch size" + _error(profile, "curve")
    )
    axes.legend(frameon=False, fontsize=8, title="context", title_fontsize=8)


def _draw_tokens(axes: Any, profile: LatencyProfile) -> None:
    """Latency against the tokens of all contexts: a colour per batch size, the surface's lines."""
    from matplotlib import colormaps

    sizes = sorted({point.batch_size for point in profile.points})
    chosen = [sizes[i] for i in np.unique(np.linspace(0, len(sizes) - 1, MAX_BATCHES).round().astype(int))]
    colors = colormaps["plasma"](np.linspace(0.05, 0.85, len(chosen)))
    for color, size in zip(colors, chosen, strict=True):
        points = [point for point in profile.points if point.batch_size == size]
        tokens = np.array([point.context_tokens for point in points])
        axes.plot(tokens, [p.seconds * 1e3 for p in points], "o", color=color, markersize=5, label=f"{size:,}")
        if profile.surface is not None and len(tokens) > 1:
            grid = np.geomspace(tokens[0], tokens[-1], 200)
            axes.plot(grid, profile.surface(size, grid) * 1e3, color=color, linewidth=1.2)
    axes.set(xlabel="tokens in all contexts", ylabel="ms per token", title="Context" + _error(profile, "surface"))
    axes.legend(frameon=False, fontsize=8, title="sequences", title_fontsize=8)


def _draw_prompts(axes: Any, profile: LatencyProfile) -> None:
    """Seconds until the first token against the prompt's length."""
    axes.set(
        xlabel="tokens of the prompt", ylabel="ms until the first token", title="Prompt" + _error(profile, "prefill")
    )
    if profile.prefill is None:
        return
    tokens = np.array([point.num_tokens for point in profile.prefill_points], float)
    axes.plot(tokens, [point.seconds * 1e3 for point in profile.prefill_points], "o", color="C0", markersize=5)
    grid = np.geomspace(tokens.min(), tokens.max(), 200)
    axes.plot(grid, profile.prefill(grid) * 1e3, color="C0", linewidth=1.2)


def _error(profile: LatencyProfile, name: str) -> str:
    error = profile.held_out.get(name)
    return f" (held-out error {error.median:.1%}, at most {error.worst:.1%})" if error else ""
