"""
Result of `trl-darts profile`: measurements of a server, the models fitted to them, and their prediction errors.

All are saved in one file. [`LatencyCurve.load`], [`LatencySurface.load`] and [`PrefillCurve.load`] read their part.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigurationError
from .latency import PROFILE_KIND, LatencyCurve, SavedModel, positive_columns, read_json
from .latency_surface import LatencySurface


Array = NDArray[Any]

HELD_OUT_EVERY = 3
"""Each of three fits leaves out every third inner point, so each inner point is predicted once."""


@dataclass(frozen=True)
class DecodePoint:
    """Latency of one batch size and context length."""

    batch_size: int  # sequences that decoded together
    context_length: int  # tokens of each one's prompt
    context_tokens: float  # prompt and completion tokens of all sequences, halfway through the measurement
    seconds: float  # per token of each sequence; the median over servers
    spread: float  # slowest repetition over the fastest one, minus 1; the maximum over servers
    server_seconds: tuple[float, ...]  # per token, of each server


@dataclass(frozen=True)
class PrefillPoint:
    """Seconds until the first token of an uncached prompt of `num_tokens`. `spread` as in [`DecodePoint`]."""

    num_tokens: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class PrefillCurve:
    """Seconds until the first token, quadratic in the number of uncached prompt tokens, as attention is."""

    base_s: float  # for any prompt: latency of the request and of one forward pass
    per_token_s: float
    per_square_s: float = 0.0  # multiplied by the squared number of tokens

    def __post_init__(self) -> None:
        for name in ("base_s", "per_token_s", "per_square_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigurationError(f"`{name}` ({getattr(self, name)}) must be finite and not negative.")

    @classmethod
    def fit(cls, num_tokens: ArrayLike, seconds: ArrayLike) -> PrefillCurve:
        """
        Fit by least squares of the relative errors; a line for fewer than four distinct lengths. Raises `ValueError`
        if an entry is not positive and finite.
        """
        from scipy.optimize import nnls

        tokens, times = positive_columns(num_tokens=num_tokens, seconds=seconds)
        scale = tokens.max()  # for the condition of the least-squares problem
        powers = np.arange(3 if len(set(tokens.tolist())) > 3 else 2)
        solution, _ = nnls((tokens[:, None] / scale) ** powers / times[:, None], np.ones_like(times))
        return cls(*(solution / scale**powers).tolist())

    def __call__(self, num_tokens: Any) -> Any:
        """Seconds until the first token of a prompt with `num_tokens` (a number or an array) uncached tokens."""
        return self.base_s + (self.per_token_s + self.per_square_s * num_tokens) * num_tokens

    def batch(self, num_tokens: ArrayLike) -> float:
        """
        Seconds for several prompts in one batch (PAT, Eq. 3 and 4). The cost of attention is the sum of the squares.
        """
        tokens = np.asarray(num_tokens, float)
        return float(self.base_s + self.per_token_s * tokens.sum() + self.per_square_s * (tokens**2).sum())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PrefillCurve | None:
        """Read the curve from a file that `trl-darts profile` wrote. Returns `None` if the file has none."""

        def parse(data: Any) -> PrefillCurve | None:
            is_profile = isinstance(data, Mapping) and data.get("kind") == PROFILE_KIND
            return cls(**data["prefill"]) if is_profile and data.get("prefill") else None

        return read_json(path, "latency_model", parse)


@dataclass(frozen=True)
class HeldOutError:
    """Relative errors |predicted / measured - 1| at `num_points` held-out points."""

    median: float
    worst: float
    num_points: int


@dataclass(frozen=True)
class LatencyProfile(SavedModel):
    """Measurements of one kind of server and the models fitted to them; `tail` is the profile of the tail servers."""

    kind = PROFILE_KIND

    points: Sequence[DecodePoint]
    prefill_points: Sequence[PrefillPoint]
    curve: LatencyCurve  # at one context length ([DARTS](https://huggingface.co/papers/2605.30859), Appendix A)
    surface: LatencySurface | None  # PAT, Section 4.2; `None` if one context length was measured
    prefill: PrefillCurve | None
    held_out: Mapping[str, HeldOutError]  # by "curve", "surface" and "prefill"; missing with too few points
    metadata: dict[str, Any] = field(default_factory=dict)  # model, hardware, version of vLLM
    tail: LatencyProfile | None = None  # profile of servers of another layout

    @classmethod
    def fit(
        cls,
        points: Sequence[DecodePoint],
        prefill_points: Sequence[PrefillPoint] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> LatencyProfile:
        """
        Fit all models to the measurements and compute their held-out errors. The curve is fitted at the context length
        with the most batch sizes; at the longest of several such lengths.
        """
        if not points:
            raise ValueError("`points` (empty) must hold at least one measurement.")
        points = sorted(points, key=lambda point: (point.batch_size, point.context_length))
        counts = Counter(point.context_length for point in points)
        context = max(counts, key=lambda length: (counts[length], length))
        about = {key: value for key, value in (metadata or {}).items() if isinstance(value, str | int | float)}
        held_out: dict[str, HeldOutError | None] = {}

        on_curve = np.array([(p.batch_size, p.seconds) for p in points if p.context_length == context], float).T
        curve = LatencyCurve.fit(*on_curve)
        curve = LatencyCurve(curve.knots, curve.values, {**about, "context_length": context})
        held_out["curve"] = held_out_error(LatencyCurve.fit, on_curve, _inside(on_curve[0]))
        surface = prefill = None
        if len(counts) > 1:
            columns = np.array([(p.batch_size, p.context_tokens, p.seconds) for p in points], float).T
            surface = LatencySurface.fit(*columns)
            surface.metadata.update(about)
            held_out["surface"] = held_out_error(LatencySurface.fit, columns, _inside_of_lines(points))
        if prefill_points:
            prompts = np.array([(p.num_tokens, p.seconds) for p in prefill_points], float).T
            prefill = PrefillCurve.fit(*prompts)
            held_out["prefill"] = held_out_error(PrefillCurve.fit, prompts, _inside(prompts[0]))
        found = {name: error for name, error in held_out.items() if error is not None}
        return cls(points, list(prefill_points), curve, surface, prefill, found, dict(metadata or {}))

    def to_dict(self) -> dict[str, Any]:
        models = {"curve": self.curve.to_dict(), "surface": self.surface.to_dict() if self.surface else None}
        return super().to_dict() | models | {"tail": self.tail.to_dict() if self.tail else None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LatencyProfile:
        cls.check(data)
        return cls(
            [DecodePoint(**{**p, "server_seconds": tuple(p["server_seconds"])}) for p in data["points"]],
            [PrefillPoint(**point) for point in data["prefill_points"]],
            LatencyCurve.from_dict(data["curve"]),
            LatencySurface.from_dict(data["surface"]) if data["surface"] else None,
            PrefillCurve(**data["prefill"]) if data["prefill"] else None,
            {name: HeldOutError(**error) for name, error in data["held_out"].items()},
            dict(data["metadata"]),
            LatencyProfile.from_dict(data["tail"]) if data.get("tail") else None,
        )


def held_out_error(fit: Callable[..., Any], columns: Array, inside: Array) -> HeldOutError | None:
    """
    Computes the error of a fit at points left out of it, by three-fold cross-validation. The last of `columns` is the
    prediction target. Points at the edge are never left out, so that no fit extrapolates. Returns `None` for fewer
    than two inner points.
    """
    *inputs, measured = columns
    order, errors = np.flatnonzero(inside), []
    for start in range(min(HELD_OUT_EVERY, len(order))):
        left_out = order[start::HELD_OUT_EVERY]
        model = fit(*np.delete(columns, left_out, axis=1))
        predicted = model(*(column[left_out] for column in inputs))
        errors += np.abs(predicted / measured[left_out] - 1).tolist()
    return HeldOutError(float(np.median(errors)), max(errors), len(errors)) if len(errors) > 1 else None


def _inside(numbers: Array) -> Array:
    return np.asarray((numbers > numbers.min()) & (numbers < numbers.max()))


def _inside_of_lines(points: Sequence[DecodePoint]) -> Array:
    """Returns a mask of the points whose context is neither the shortest nor the longest of their batch size."""
    sizes, lengths = np.array([(point.batch_size, point.context_length) for point in points]).T
    inside = np.zeros(len(points), bool)
    for size in set(sizes.tolist()):
        inside[sizes == size] = _inside(lengths[sizes == size])
    # With only two contexts per batch size, the inner batch sizes are used instead.
    return inside if inside.any() else _inside(sizes)
