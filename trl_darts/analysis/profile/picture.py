"""The picture of a profile: what was measured, and what was fitted to it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...import_utils import require_matplotlib
from ...policy import DecodePoint, LatencyProfile, PrefillPoint
from .summary import describe


MAX_BATCHES = 6  # of the middle panel: more lines than that can't be told apart


def draw(profile: LatencyProfile, path: str | Path) -> None:
    """
    Writes a picture, in the format that the ending of the path says.

    Three panels: latency against batch size, with a colour per context length; against the tokens of all contexts,
    with a colour per batch size; and the time until the first token against a prompt's length. Logarithmic, so that
    the same distance is the same relative error everywhere.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    by_batch, by_tokens, prompts = figure.subplots(1, 3)
    _draw_batches(by_batch, profile)
    _draw_contexts(by_tokens, profile)
    if profile.prefill is not None:
        tokens = [point.num_tokens for point in profile.prefill_points]
        _draw(prompts, tokens, profile.prefill_points, profile.prefill, color="C0")
    titles = {"curve": "Batch size", "surface": "Context", "prefill": "Prompt"}
    labels = ("sequences that decode together", "tokens in all contexts", "tokens of the prompt")
    for axes, (name, title), label in zip(figure.axes, titles.items(), labels, strict=True):
        error = profile.held_out.get(name)
        axes.set_title(f"{title} (held-out error {describe(error)})" if error else title)
        axes.set(xlabel=label, ylabel="ms until the first token" if axes is prompts else "ms per token")
        _style(axes)
    about = profile.metadata
    version, tp = about.get("vllm_version"), about.get("tensor_parallel_size")
    parts = [about.get("model"), about.get("hardware"), version and f"vLLM {version}", tp and f"TP {tp}"]
    figure.suptitle(" · ".join(str(part) for part in parts if part), fontsize=11)
    figure.savefig(path, dpi=150)


def _draw_batches(axes: Any, profile: LatencyProfile) -> None:
    surface, curve = profile.surface, profile.curve
    contexts = sorted({point.context_length for point in profile.points})
    for context, color in zip(contexts, _colors("viridis", len(contexts)), strict=True):
        points = [point for point in profile.points if point.context_length == context]
        sizes, tokens = np.array([(point.batch_size, point.context_tokens) for point in points]).T

        _draw(axes, sizes, points, None, color=color, label=f"{context:,} tokens")
        if surface is not None:
            grid = np.geomspace(sizes[0], sizes[-1], 200)
            axes.plot(grid, surface(grid, np.interp(grid, sizes, tokens)) * 1e3, color=color, linewidth=1.2)
    grid = np.geomspace(curve.knots[0], curve.knots[-1], 300)
    label = f"latency_curve ({curve.metadata['context_length']:,})"
    axes.plot(grid, curve(grid) * 1e3, color="black", linewidth=1.4, linestyle="--", label=label)
    axes.plot(curve.knots, np.array(curve.values) * 1e3, "D", color="black", markersize=6, markerfacecolor="none")
    axes.legend(frameon=False, fontsize=8, title="context", title_fontsize=8)


def _draw_contexts(axes: Any, profile: LatencyProfile) -> None:
    sizes = sorted({point.batch_size for point in profile.points})
    chosen = [sizes[i] for i in np.unique(np.linspace(0, len(sizes) - 1, MAX_BATCHES).round().astype(int))]
    for size, color in zip(chosen, _colors("plasma", len(chosen)), strict=True):
        points = [point for point in profile.points if point.batch_size == size]
        fitted = partial(profile.surface, size) if profile.surface else None
        _draw(axes, [p.context_tokens for p in points], points, fitted, color=color, label=f"{size:,}")
    axes.legend(frameon=False, fontsize=8, title="sequences", title_fontsize=8)


def _draw(
    axes: Any,
    x: Sequence[float],
    points: Sequence[DecodePoint] | Sequence[PrefillPoint],
    fitted: Callable[[Any], Any] | None,
    **style: Any,
) -> None:
    """Measurements as dots, and the fit as a line between the first and the last."""
    axes.plot(x, [point.seconds * 1e3 for point in points], "o", markersize=5, **style)
    if fitted is not None and len(x) > 1:
        grid = np.geomspace(min(x), max(x), 200)
        axes.plot(grid, fitted(grid) * 1e3, color=style["color"], linewidth=1.2)


def _colors(name: str, num: int) -> Any:
    from matplotlib import colormaps

    return colormaps[name](np.linspace(0.08, 0.85, num))


def _style(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.1, high * 1.3)  # room for the legend
    steps = (1, 1.5, 2, 3, 4, 5, 7) if high / low < 10 else (1, 2, 5)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value % 1024 == 0 else f"{value:g}")
        axis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
