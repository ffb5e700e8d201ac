"""
Per-token latency as a function of the number of running sequences and of the tokens in their contexts.

Invariants: a surface is positive, continuous, and non-decreasing in either argument while the other one is held, also
beyond what was measured.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trl_darts.errors import ConfigurationError
from trl_darts.policy import latency_file
from trl_darts.policy.latency import LatencyCurve
from trl_darts.policy.surface_fitting import fit_lines


_NOUN = "latency surface"
_KIND = "latency_surface"
_VERSION = 1
_ROUNDING = 1e-9  # two lines may cross by this much, relatively: their order is not exact in floating point


@dataclass(frozen=True)
class LatencySurface:
    """
    Per-token latency in seconds as a function of the number of running sequences B and of the tokens T in all their
    contexts together (PAT, "Accelerating Long-Tail Generation in Synchronous RLHF Training via Adaptive Tensor
    Parallelism", Section 4.2).

    At each profiled batch size the latency is linear in the tokens, between two of them it is interpolated. Below the
    first batch size it is that of the first one; beyond the last one, each further sequence adds as much as between
    the last two, without context. Beyond its reach a line goes on with the smallest slope of its own and those of
    larger batch sizes: a steep line that was measured over few tokens must not overtake the others where it is a
    guess.

    Args:
        batch_sizes (`Sequence[float]` of shape `(K,)`):
            Profiled batch sizes. Positive and strictly increasing.
        base_latencies (`Sequence[float]` of shape `(K,)`):
            Seconds per token without context. Positive and non-decreasing.
        token_latencies (`Sequence[float]` of shape `(K,)`):
            What each token of context adds, in seconds. Not negative.
        reaches (`Sequence[float]` of shape `(K,)`):
            Tokens in all contexts together up to which each line holds. Positive and non-decreasing; up to its reach,
            no line lies above that of a larger batch size.
        metadata (`dict`, *optional*):
            What was measured, for humans. Must be serialisable as JSON. Surfaces that differ only here are equal.

    Example:

    ```python
    >>> from trl_darts.policy import LatencySurface

    >>> surface = LatencySurface([1, 64], [0.010, 0.012], [1e-7, 1e-7], [8_000, 64_000])
    >>> round(surface(1, 4_000), 4), round(surface(64, 40_000), 4), round(surface(32.5, 10_000), 4)
    (0.0104, 0.016, 0.012)
    >>> round(surface.at_context(1_000)(64), 4)
    0.0184

    ```
    """

    batch_sizes: Sequence[float]
    base_latencies: Sequence[float]
    token_latencies: Sequence[float]
    reaches: Sequence[float]
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "base_latencies", "token_latencies", "reaches"):
            values = tuple(map(float, getattr(self, name)))
            if not values or len(values) != len(self.batch_sizes):
                raise ConfigurationError(f"`{name}` ({len(values)} entries) must have one entry per batch size.")
            if not np.isfinite(values).all():
                raise ConfigurationError(f"`{name}` ({list(values)}) must be finite.")
            object.__setattr__(self, name, values)
        sizes, base, reaches = self.batch_sizes, self.base_latencies, self.reaches
        if not (sizes[0] > 0 and all(a < b for a, b in pairwise(sizes))):
            raise ConfigurationError(f"`batch_sizes` ({list(sizes)}) must be positive and strictly increasing.")
        for name, row in (("base_latencies", base), ("reaches", reaches)):
            if not (row[0] > 0 and all(a <= b for a, b in pairwise(row))):
                raise ConfigurationError(f"`{name}` ({list(row)}) must be positive and non-decreasing.")
        if min(self.token_latencies) < 0:
            raise ConfigurationError(f"`token_latencies` ({list(self.token_latencies)}) must not be negative.")
        for k, reach in enumerate(reaches[:-1]):
            if self._line(k, reach) > self._line(k + 1, reach) * (1 + _ROUNDING):
                raise ConfigurationError(
                    f"`base_latencies` and `token_latencies` make {sizes[k + 1]:g} sequences with {reach:g} tokens of "
                    f"context faster than {sizes[k]:g}: more sequences are never faster."
                )

    @classmethod
    def fit(cls, batch_sizes: ArrayLike, context_tokens: ArrayLike, latencies: ArrayLike) -> LatencySurface:
        """
        Fit the surface to a profile (PAT, Section 4.2).

        Repeated measurements are reduced to their median. The fit minimises the Huber loss of the relative errors over
        all lines together, under the constraint that none falls and none crosses the next one within its reach. A
        batch size with a single context takes the slope of its neighbour.

        Args:
            batch_sizes (`Sequence[float]` of shape `(P,)`):
                Numbers of running sequences, in any order, repeats allowed.
            context_tokens (`Sequence[float]` of shape `(P,)`):
                Tokens in the contexts of all running sequences together.
            latencies (`Sequence[float]` of shape `(P,)`):
                Seconds per token of each sequence, as measured.

        Returns:
            [`LatencySurface`]: The fitted surface.

        Raises:
            [`ValueError`]: If there is nothing to fit, the lengths differ, or an entry is not positive and finite.
        """
        lines = fit_lines(batch_sizes, context_tokens, latencies)
        return cls(lines.batch_sizes.tolist(), lines.base.tolist(), lines.slopes.tolist(), lines.reaches.tolist())

    @overload
    def __call__(self, batch_size: float, context_tokens: float) -> float: ...
    @overload
    def __call__(self, batch_size: ArrayLike, context_tokens: ArrayLike) -> NDArray[np.float64]: ...
    def __call__(self, batch_size: Any, context_tokens: Any) -> float | NDArray[np.float64]:
        """
        Per-token latency of each of `batch_size` running sequences.

        Args:
            batch_size (`float` or `np.ndarray`):
                Number of running sequences.
            context_tokens (`float` or `np.ndarray`):
                Tokens in their contexts together: prompts and what was generated so far. Broadcast against
                `batch_size`.

        Returns:
            `float`, or `np.ndarray` of the broadcast shape: Seconds per token.
        """
        if np.ndim(batch_size) == np.ndim(context_tokens) == 0:
            return self._at(float(batch_size), float(context_tokens))
        return np.vectorize(self._at, otypes=[np.float64])(batch_size, context_tokens)

    def _at(self, batch_size: float, context_tokens: float) -> float:
        sizes = self.batch_sizes
        i = bisect_right(sizes, batch_size)
        if i == 0:
            return self._line(0, context_tokens)
        before = self._line(i - 1, context_tokens)
        if i < len(sizes):
            share = (batch_size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
            return before + share * (self._line(i, context_tokens) - before)
        return before + self._last_increment * (batch_size - sizes[-1])

    def _line(self, k: int, context_tokens: float) -> float:
        reach = self.reaches[k]
        latency = self.base_latencies[k] + self.token_latencies[k] * min(max(context_tokens, 0.0), reach)
        if context_tokens > reach:
            latency += min(self.token_latencies[k:]) * (context_tokens - reach)
        return latency

    @property
    def _last_increment(self) -> float:
        if len(self.batch_sizes) == 1:
            return 0.0
        rise = self.base_latencies[-1] - self.base_latencies[-2]
        return rise / (self.batch_sizes[-1] - self.batch_sizes[-2])

    def at_context(self, context_length: float) -> LatencyCurve:
        """
        The curve of sequences that all have the same context.

        Args:
            context_length (`float`):
                Tokens of prompt and completion of each sequence.

        Returns:
            [`LatencyCurve`]: With one knot per profiled batch size.

        Raises:
            [`ConfigurationError`]: If `context_length` is negative.
        """
        if not context_length >= 0:
            raise ConfigurationError(f"`context_length` ({context_length:g}) must not be negative.")
        values = [self._at(size, size * context_length) for size in self.batch_sizes]
        rising = np.maximum.accumulate(values).tolist()  # they rise but for rounding
        return LatencyCurve(self.batch_sizes, rising, {**self.metadata, "context_length": context_length})

    def to_dict(self) -> dict[str, Any]:
        """The surface as a dictionary that can be serialised as JSON."""
        return {
            "kind": _KIND,
            "version": _VERSION,
            "batch_sizes": list(self.batch_sizes),
            "base_latencies": list(self.base_latencies),
            "token_latencies": list(self.token_latencies),
            "reaches": list(self.reaches),
            "metadata": dict(self.metadata),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LatencySurface:
        """
        The surface that [`~LatencySurface.to_dict`] described.

        Args:
            data (`Mapping[str, Any]`):
                Dictionary with the keys `kind`, `version`, `batch_sizes`, `base_latencies`, `token_latencies`,
                `reaches` and, optionally, `metadata`.

        Returns:
            [`LatencySurface`]: The surface.

        Raises:
            [`ConfigurationError`]: If it does not describe a surface.
        """
        latency_file.check_kind(data, _NOUN, _KIND, _VERSION)
        names = ("batch_sizes", "base_latencies", "token_latencies", "reaches")
        try:
            return cls(**{name: data[name] for name in names}, metadata=dict(data.get("metadata") or {}))
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"A latency surface needs lists of numbers {', '.join(f'`{name}`' for name in names)}: "
                f"{type(error).__name__} {error}."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the surface to a JSON file."""
        latency_file.write(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencySurface:
        """
        Read a surface from a JSON file.

        Args:
            path (`str` or `os.PathLike`):
                A file that [`~LatencySurface.save`], [`LatencyProfile.save`] or `trl-darts profile` wrote.

        Returns:
            [`LatencySurface`]: The surface.

        Raises:
            [`ConfigurationError`]: If the file is missing or does not hold a latency surface.
        """
        return latency_file.read(path, _NOUN, "surface", cls.from_dict)
