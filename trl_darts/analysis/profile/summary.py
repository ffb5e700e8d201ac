"""A profile in words."""

from ...policy import HeldOutError, LatencyProfile
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
    knots = ", ".join(f"{short(value * 1e3)} ms at {short(knot)}" for knot, value in pairs)
    lines = [
        f"{about.get('model')} ({', '.join(detail for detail in details if detail) or 'unknown hardware'})",
        f"Per token, {curve.metadata['context_length']:,} tokens of context: {knots} sequences",
    ]
    if profile.prefill is not None:
        base, rate = profile.prefill.base_s * 1e3, profile.prefill.per_token_s
        lines.append(f"Prompt: {short(base)} ms{f' and 1 s per {short(1 / rate, 2)} tokens' if rate else ''}")
    for name, error in profile.held_out.items():
        lines.append(f"Held-out error of the {name}: median {describe(error)} ({error.num_points} points)")
    return lines


def describe(error: HeldOutError) -> str:
    """The middle and the worst of an error."""
    median, worst = (f"{share:.{1 if share < 0.0995 else 0}%}" for share in (error.median, error.worst))
    return f"{median}, at most {worst}"


def short(value: float, digits: int = 3) -> str:
    """A number with so many significant digits."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def warn(result: ProfileResult) -> list[str]:
    """What makes the result doubtful, in lines."""
    profile, found = result.profile, []
    points = profile.points
    if result.skipped:
        skipped = ", ".join(f"{point.batch_size} x {point.context_length}" for point in result.skipped)
        found.append(f"not measured, because their sequences never all decoded at once: {skipped} tokens.")
    versions = zip(profile.metadata["servers"], profile.metadata.get("weight_versions", ()), strict=False)
    if trained := [f"{url} (version {version!r})" for url, version in versions if version not in (None, "default")]:
        found.append(
            f"{', '.join(trained)} had weights of a training. If that still runs, it was disturbed, and so were the "
            "measurements: repeat once it has ended."
        )
    noisy = sum(point.spread > NOISY for point in points)
    if noisy > len(points) / 2:
        found.append(
            f"repetitions of {noisy} of {len(points)} points differ by more than {NOISY:.0%}: the machine was busy. "
            "Repeat on an idle one, or with more `--repeats`."
        )
    for k, url in enumerate(profile.metadata["servers"]):
        ratios = sorted(point.server_seconds[k] / point.seconds for point in points)
        if abs(ratio := ratios[len(ratios) // 2] - 1) > UNEQUAL:
            found.append(f"{url} is {abs(ratio):.0%} {'slower' if ratio > 0 else 'faster'} than the servers' median.")
    return found
