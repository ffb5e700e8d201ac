"""How long a prompt takes before its first token."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trl_darts.errors import ConfigurationError
from trl_darts.policy import latency_file
from trl_darts.policy.curve_fitting import non_negative_least_squares


@dataclass(frozen=True)
class PrefillLine:
    """
    Seconds until the first token, linear in the tokens of a prompt that is not cached.

    Args:
        base_s (`float`):
            Seconds that any prompt takes: the request's way, and one pass through the model. Not negative.
        per_token_s (`float`):
            Seconds per token of the prompt. Not negative.
    """

    base_s: float
    per_token_s: float

    def __post_init__(self) -> None:
        for name in ("base_s", "per_token_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigurationError(f"`{name}` ({getattr(self, name)}) must be finite and not negative.")

    @classmethod
    def fit(cls, num_tokens: ArrayLike, seconds: ArrayLike) -> PrefillLine:
        """
        Least squares of the relative errors.

        Args:
            num_tokens (`Sequence[float]` of shape `(P,)`):
                Tokens of the prompts, with or without repeats.
            seconds (`Sequence[float]` of shape `(P,)`):
                As measured.

        Returns:
            [`PrefillLine`]: The line.

        Raises:
            [`ValueError`]: If there is nothing to fit, the lengths differ, or an entry is not positive and finite.
        """
        tokens, times = np.asarray(num_tokens, float), np.asarray(seconds, float)
        if tokens.ndim != 1 or tokens.shape != times.shape or not tokens.size:
            raise ValueError(
                f"`num_tokens` (shape {tokens.shape}) and `seconds` (shape {times.shape}) must be lists of the same "
                "length, at least 1."
            )
        for name, array in (("num_tokens", tokens), ("seconds", times)):
            if not (np.isfinite(array).all() and (array > 0).all()):
                raise ValueError(
                    f"`{name}` must be positive and finite, and holds {array.min():g} to {array.max():g}."
                )
        units = times.mean(), times.mean() / tokens.max()
        design = np.column_stack([np.full_like(tokens, units[0]), tokens * units[1]]) / times[:, None]
        base, slope = non_negative_least_squares(design, np.ones_like(times))
        return cls(float(base * units[0]), float(slope * units[1]))

    @overload
    def __call__(self, num_tokens: float) -> float: ...
    @overload
    def __call__(self, num_tokens: NDArray[Any]) -> NDArray[np.float64]: ...
    def __call__(self, num_tokens: float | NDArray[Any]) -> float | NDArray[np.float64]:
        """
        Seconds until the first token.

        Args:
            num_tokens (`float` or `np.ndarray`):
                Tokens of the prompt that are not cached.

        Returns:
            `float` or `np.ndarray` of the same shape: Seconds.
        """
        return self.base_s + self.per_token_s * num_tokens

    def to_dict(self) -> dict[str, Any]:
        """As a dictionary that can be serialised as JSON."""
        return {"base_s": self.base_s, "per_token_s": self.per_token_s}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrefillLine:
        """
        The line that [`~PrefillLine.to_dict`] described.

        Args:
            data (`Mapping[str, Any]`):
                Dictionary with the keys `base_s` and `per_token_s`.

        Returns:
            [`PrefillLine`]: The line.

        Raises:
            [`ConfigurationError`]: If it does not describe a line.
        """
        try:
            return cls(float(data["base_s"]), float(data["per_token_s"]))
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"A prefill line needs numbers `base_s` and `per_token_s`: {type(error).__name__} {error}."
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PrefillLine | None:
        """
        Read the line from a JSON file with a latency model.

        Args:
            path (`str` or `os.PathLike`):
                A file that [`LatencyProfile.save`] or `trl-darts profile` wrote, or one with a curve or surface alone.

        Returns:
            [`PrefillLine`]: The line. `None` if the file has none.

        Raises:
            [`ConfigurationError`]: If the file is missing, or holds a line that is none.
        """
        return latency_file.read(path, "latency model", None, cls._of_file)

    @classmethod
    def _of_file(cls, data: Any) -> PrefillLine | None:
        is_profile = isinstance(data, Mapping) and data.get("kind") == latency_file.PROFILE_KIND
        return cls.from_dict(data["prefill"]) if is_profile and data.get("prefill") else None
