"""
What `trl-darts profile` learned of a server: the measurements, the models fitted to them, and how well these predict.

One file holds it all. [`LatencyCurve.load`] and [`LatencySurface.load`] take their part of it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trl_darts.errors import ConfigurationError
from trl_darts.policy import latency_file
from trl_darts.policy.held_out import HeldOutError, held_out_error
from trl_darts.policy.latency import LatencyCurve
from trl_darts.policy.latency_surface import LatencySurface
from trl_darts.policy.prefill import PrefillLine


_NOUN = "latency profile"


@dataclass(frozen=True)
class DecodePoint:
    """
    Latency of one batch size and context length.

    Args:
        batch_size (`int`):
            Sequences that decoded together.
        context_length (`int`):
            Tokens of each one's prompt.
        context_tokens (`float`):
            Tokens in all contexts together, prompt and completion, in the middle of the measurement.
        seconds (`float`):
            Per token of each sequence. Of several servers: their median.
        spread (`float`):
            How far the slowest repetition was above the fastest one, relatively. The largest of several servers'.
        server_seconds (`tuple[float, ...]`):
            Seconds per token of each server.
    """

    batch_size: int
    context_length: int
    context_tokens: float
    seconds: float
    spread: float
    server_seconds: tuple[float, ...]


@dataclass(frozen=True)
class PrefillPoint:
    """Seconds until the first token of a prompt of `num_tokens`, of which none is cached; `spread` as for decoding."""

    num_tokens: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class LatencyProfile:
    """
    Measurements of one kind of server, and what was fitted to them.

    Args:
        points (`Sequence[DecodePoint]`):
            Decoding, at least one point.
        prefill_points (`Sequence[PrefillPoint]`):
            Prompts. May be empty.
        curve ([`LatencyCurve`]):
            Over the batch size, at one context length ([DARTS](https://huggingface.co/papers/2605.30859), Appendix A).
        surface ([`LatencySurface`], *optional*):
            Over batch size and context tokens (PAT, Section 4.2). `None` if one context length was measured.
        prefill ([`PrefillLine`], *optional*):
            `None` if no prompts were measured.
        held_out (`Mapping[str, HeldOutError]`):
            Errors of `"curve"`, `"surface"` and `"prefill"` at points that were left out of the fit. Models with too
            few points have none.
        metadata (`dict`, *optional*):
            What was measured, for humans: model, hardware, vLLM's version. Must be serialisable as JSON.
    """

    points: Sequence[DecodePoint]
    prefill_points: Sequence[PrefillPoint]
    curve: LatencyCurve
    surface: LatencySurface | None
    prefill: PrefillLine | None
    held_out: Mapping[str, HeldOutError]
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        points: Sequence[DecodePoint],
        prefill_points: Sequence[PrefillPoint] = (),
        metadata: Mapping[str, Any] | None = None,
        num_segments: int = 3,
    ) -> LatencyProfile:
        """
        Fit everything to measurements, and measure how well that predicts.

        The curve takes the points of the context length that the most batch sizes have; of several, the longest.

        Args:
            points (`Sequence[DecodePoint]`):
                Decoding.
            prefill_points (`Sequence[PrefillPoint]`, *optional*):
                Prompts.
            metadata (`Mapping[str, Any]`, *optional*):
                What was measured.
            num_segments (`int`, *optional*, defaults to `3`):
                Number of linear segments of the curve.

        Returns:
            [`LatencyProfile`]: Points and fits.

        Raises:
            [`ValueError`]: If there is no point.
        """
        if not points:
            raise ValueError("`points` (empty) must hold at least one measurement.")
        points = sorted(points, key=lambda point: (point.batch_size, point.context_length))
        counts = Counter(point.context_length for point in points)
        context = max(counts, key=lambda length: (counts[length], length))
        on_curve = [point for point in points if point.context_length == context]
        about = {key: value for key, value in (metadata or {}).items() if isinstance(value, str | int | float)}
        curve = LatencyCurve.fit([p.batch_size for p in on_curve], [p.seconds for p in on_curve], num_segments)
        curve = LatencyCurve(curve.knots, curve.values, {**about, "context_length": context})
        surface = None
        if len(counts) > 1:
            fitted = _fit_surface(points)
            surface = LatencySurface(
                fitted.batch_sizes, fitted.base_latencies, fitted.token_latencies, fitted.reaches, about
            )
        prefill = PrefillLine.fit(*_columns(prefill_points)) if prefill_points else None
        errors = {
            "curve": _curve_error(on_curve, num_segments),
            "surface": _surface_error(points) if surface else None,
            "prefill": _prefill_error(prefill_points),
        }
        held_out = {name: error for name, error in errors.items() if error is not None}
        return cls(points, list(prefill_points), curve, surface, prefill, held_out, dict(metadata or {}))

    def to_dict(self) -> dict[str, Any]:
        """The profile as a dictionary that can be serialised as JSON."""
        return {
            "kind": latency_file.PROFILE_KIND,
            "version": latency_file.PROFILE_VERSION,
            "metadata": dict(self.metadata),
            "held_out": {name: error.to_dict() for name, error in self.held_out.items()},
            "curve": self.curve.to_dict(),
            "surface": self.surface.to_dict() if self.surface else None,
            "prefill": self.prefill.to_dict() if self.prefill else None,
            "points": [asdict(point) for point in self.points],
            "prefill_points": [asdict(point) for point in self.prefill_points],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LatencyProfile:
        """
        The profile that [`~LatencyProfile.to_dict`] described.

        Args:
            data (`Mapping[str, Any]`):
                The dictionary.

        Returns:
            [`LatencyProfile`]: The profile.

        Raises:
            [`ConfigurationError`]: If it does not describe a profile.
        """
        latency_file.check_kind(data, _NOUN, latency_file.PROFILE_KIND, latency_file.PROFILE_VERSION)
        try:
            return cls(
                [DecodePoint(**{**p, "server_seconds": tuple(p["server_seconds"])}) for p in data["points"]],
                [PrefillPoint(**point) for point in data["prefill_points"]],
                LatencyCurve.from_dict(data["curve"]),
                LatencySurface.from_dict(data["surface"]) if data["surface"] else None,
                PrefillLine.from_dict(data["prefill"]) if data["prefill"] else None,
                {name: HeldOutError.from_dict(error) for name, error in data["held_out"].items()},
                dict(data["metadata"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"A latency profile lacks an entry: {type(error).__name__} {error}.") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a JSON file."""
        latency_file.write(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyProfile:
        """
        Read a profile from a JSON file.

        Args:
            path (`str` or `os.PathLike`):
                A file that [`~LatencyProfile.save`] or `trl-darts profile` wrote.

        Returns:
            [`LatencyProfile`]: The profile.

        Raises:
            [`ConfigurationError`]: If the file is missing or does not hold a profile.
        """
        return latency_file.read(path, _NOUN, None, cls.from_dict)


def _fit_surface(points: Sequence[DecodePoint]) -> LatencySurface:
    columns = ((p.batch_size, p.context_tokens, p.seconds) for p in points)
    return LatencySurface.fit(*zip(*columns, strict=True))


def _columns(points: Sequence[PrefillPoint]) -> tuple[list[int], list[float]]:
    return [point.num_tokens for point in points], [point.seconds for point in points]


def _curve_error(points: Sequence[DecodePoint], num_segments: int) -> HeldOutError | None:
    sizes, times = np.array([(p.batch_size, p.seconds) for p in points], float).T

    def predict(kept: NDArray[np.bool_]) -> NDArray[np.float64]:
        return LatencyCurve.fit(sizes[kept], times[kept], num_segments)(sizes)

    return held_out_error(times, (sizes > sizes.min()) & (sizes < sizes.max()), predict)


def _surface_error(points: Sequence[DecodePoint]) -> HeldOutError | None:
    sizes, lengths, tokens, times = np.array(
        [(p.batch_size, p.context_length, p.context_tokens, p.seconds) for p in points], float
    ).T
    ends = [(lengths[sizes == size].min(), lengths[sizes == size].max()) for size in sizes]
    inner = [low < length < high for length, (low, high) in zip(lengths, ends, strict=True)]
    if not any(inner):  # two contexts: whatever is left out leaves a batch size with one
        inner = [sizes.min() < size < sizes.max() for size in sizes]

    def predict(kept: NDArray[np.bool_]) -> NDArray[np.float64]:
        fitted = _fit_surface([point for point, keep in zip(points, kept, strict=True) if keep])
        return fitted(sizes, tokens)

    return held_out_error(times, inner, predict)


def _prefill_error(points: Sequence[PrefillPoint]) -> HeldOutError | None:
    if len(points) < 3:
        return None
    tokens, times = (np.array(column, float) for column in _columns(points))

    def predict(kept: NDArray[np.bool_]) -> NDArray[np.float64]:
        line = PrefillLine.fit(tokens[kept], times[kept])
        return np.array([line(num_tokens) for num_tokens in tokens])

    return held_out_error(times, (tokens > tokens.min()) & (tokens < tokens.max()), predict)
