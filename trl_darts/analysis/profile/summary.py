"""A profile in words."""

from __future__ import annotations

from ...policy import LatencyProfile
from .run import ProfileResult


NOISY = 0.25
"""Distance of the slowest repetition from the fastest one, relatively, from which the machine was busy."""

UNEQUAL = 0.1
"""Distance of one server from the others from which it deserves a look."""


def summarize(profile: LatencyProfile) -> list[str]:
    """What was found, in lines."""
    about, curve = profile.metadata, profile.curve
    details = [about.get("hardware"), f"vLLM {about['vllm_version']}" if about.get("vllm_version") else None]
    pairs = zip(curve.knots, curve.values, strict=True)
    knots = ", ".join(f"{value * 1e3:.3g} ms at {knot:g}" for knot, value in pairs)
    lines = [
        f"{about.get('model')} ({', '.join(detail for detail in details if detail) or 'unknown hardware'})",
        f"Per token, {curve.metadata['context_length']:,} tokens of context: {knots} sequences",
    ]
    if profile.prefill is not None:
        base, rate = profile.prefill.base_s * 1e3, profile.prefill.per_token_s
        lines.append(f"Prompt: {base:.3g} ms{f' and 1 s per {1 / rate:,.0f} tokens' if rate else ''}")
    for name, error in profile.held_out.items():
        lines.append(
            f"Held-out error of the {name}: median {error.median:.1%}, at most {error.worst:.1%} "
            f"({error.num_points} point{'s' if error.num_points > 1 else ''})"
        )
    return lines


def warn(result: ProfileResult) -> list[str]:
    """What makes the result doubtful, in lines."""
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
