"""Describes a profile in words, and draws it."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...import_utils import require_matplotlib
from ...policy import HeldOutError, LatencyCurve, LatencyProfile, LatencySurface
from .profiler import ProfileResult


NOISY = 0.25  # by how much the slowest repetition exceeds the fastest on a busy machine
UNEQUAL = 0.1  # relative difference from the servers' median that deserves a warning
MAX_BATCHES = 6  # lines of the middle panel that can be told apart


def summarize(profile: LatencyProfile) -> list[str]:
    """Returns the results as lines of text."""
    about, curve = profile.metadata, profile.curve
    details = [about.get("hardware"), f"vLLM {about['vllm_version']}" if about.get("vllm_version") else None]
    pairs = zip(curve.knots, curve.values, strict=True)
    knots = ", ".join(f"{_short(value * 1e3)} ms at {_short(knot)}" for knot, value in pairs)
    lines = [
        f"{about.get('model')} ({', '.join(filter(None, details)) or 'unknown hardware'})",
        f"Per token, {curve.metadata['context_length']:,} tokens of context: {knots} sequences",
    ]
    if profile.prefill is not None:
        base, rate = profile.prefill.base_s * 1e3, profile.prefill.per_token_s
        lines.append(f"Prompt: {_short(base)} ms{f' and 1 s per {_short(1 / rate, 2)} tokens' if rate else ''}")
    for name, error in profile.held_out.items():
        lines.append(f"Held-out error of the {name}: median {_percents(error)} ({error.num_points} points)")
    return lines


def _percents(error: HeldOutError) -> str:
    median, worst = (f"{share:.{1 if share < 0.0995 else 0}%}" for share in (error.median, error.worst))
    return f"{median}, at most {worst}"


def _short(value: float, digits: int = 3) -> str:
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def warn(result: ProfileResult) -> list[str]:
    """Returns the reasons to doubt the result as lines of text."""
    points, found = result.profile.points, []
    if result.skipped:
        skipped = ", ".join(f"{point.batch_size} x {point.context_length}" for point in result.skipped)
        found.append(f"not measured, because their sequences never all decoded at once: {skipped} tokens.")
    noisy = sum(point.spread > NOISY for point in points)
    if noisy > len(points) / 2:
        found.append(
            f"repetitions of {noisy} of {len(points)} points differ by more than {NOISY:.0%}: the machine was busy. "
            "Repeat on an idle one, or with more `--repeats`."
        )
    for k, url in enumerate(result.profile.metadata["servers"]):
        ratios = sorted(point.server_seconds[k] / point.seconds for point in points)
        if abs(ratio := ratios[len(ratios) // 2] - 1) > UNEQUAL:
            found.append(f"{url} is {abs(ratio):.0%} {'slower' if ratio > 0 else 'faster'} than the servers' median.")
    return found


def draw(profile: LatencyProfile, path: str | Path) -> None:
    """
    Writes a picture, in the format of the path's suffix, with three panels: latency against batch size with a colour
    per context length, latency against the tokens of all contexts with a colour per batch size, and the time until the
    first token against the prompt's length. The axes are logarithmic, so equal distances are equal relative errors.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    by_batch, by_tokens, prompts = figure.subplots(1, 3)
    points, surface, prefill = pd.DataFrame(map(asdict, profile.points)), profile.surface, profile.prefill
    _draw_decoding(by_batch, points, "context_length", "batch_size", surface, "viridis", label="{:,} tokens")
    _draw_curve(by_batch, profile.curve)
    by_batch.legend(frameon=False, fontsize=8, title="context", title_fontsize=8)
    sizes = np.unique(points["batch_size"])
    sizes = sizes[np.unique(np.linspace(0, len(sizes) - 1, MAX_BATCHES).round().astype(int))]
    few = points[points["batch_size"].isin(sizes)]
    _draw_decoding(by_tokens, few, "batch_size", "context_tokens", surface, "plasma", label="{:,}")
    by_tokens.legend(frameon=False, fontsize=8, title="sequences", title_fontsize=8)
    if prefill is not None:
        tokens, seconds = np.array([(point.num_tokens, point.seconds) for point in profile.prefill_points]).T
        _draw(prompts, tokens, seconds, prefill, color="C0")
    _style(by_batch, "Batch size", profile.held_out.get("curve"), "sequences that decode together")
    _style(by_tokens, "Context", profile.held_out.get("surface"), "tokens in all contexts")
    _style(prompts, "Prompt", profile.held_out.get("prefill"), "tokens of the prompt", "ms until the first token")
    about = profile.metadata
    version, tp = about.get("vllm_version"), about.get("tensor_parallel_size")
    parts = [about.get("model"), about.get("hardware"), version and f"vLLM {version}", tp and f"TP {tp}"]
    figure.suptitle(" · ".join(str(part) for part in parts if part), fontsize=11)
    figure.savefig(path, dpi=150)


def _draw_decoding(
    axes: Any, points: pd.DataFrame, by: str, x: str, surface: LatencySurface | None, colors: str, label: str
) -> None:
    """Draws the points of each value of a column over another column, and the surface between them."""
    from matplotlib import colormaps

    groups = points.groupby(by)
    for (value, own), color in zip(groups, colormaps[colors](np.linspace(0.08, 0.85, len(groups))), strict=True):
        own = own.sort_values(x)
        between = partial(_between, own, x, surface) if surface is not None else None
        _draw(axes, own[x], own["seconds"], between, color=color, label=label.format(value))


def _between(own: pd.DataFrame, x: str, surface: LatencySurface, grid: np.ndarray) -> np.ndarray:
    """Evaluates the surface between points, on a grid of one of their columns."""
    return surface(*(np.interp(grid, own[x], own[name]) for name in ("batch_size", "context_tokens")))


def _draw_curve(axes: Any, curve: LatencyCurve) -> None:
    grid = np.geomspace(curve.knots[0], curve.knots[-1], 300)
    label = f"latency_curve ({curve.metadata['context_length']:,})"
    axes.plot(grid, curve(grid) * 1e3, color="black", linewidth=1.4, linestyle="--", label=label)
    axes.plot(curve.knots, np.array(curve.values) * 1e3, "D", color="black", markersize=6, markerfacecolor="none")


def _draw(axes: Any, x: Any, seconds: Any, fitted: Callable[[Any], Any] | None, **style: Any) -> None:
    """Draws measurements as dots, and the fit as a line between the first and the last."""
    axes.plot(x, seconds * 1e3, "o", markersize=5, **style)
    if fitted is not None and len(x) > 1:
        grid = np.geomspace(min(x), max(x), 200)
        axes.plot(grid, fitted(grid) * 1e3, color=style["color"], linewidth=1.2)


def _style(axes: Any, title: str, error: HeldOutError | None, xlabel: str, ylabel: str = "ms per token") -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    title = f"{title} (held-out error {_percents(error)})" if error else title
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, yscale="log")
    axes.set_xscale("log", base=2)
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
