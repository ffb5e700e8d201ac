"""How well a fit predicts measurements that it was not given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


HELD_OUT_EVERY = 3
"""Every third point is left out: three fits, and each inner point is predicted once."""


@dataclass(frozen=True)
class HeldOutError:
    """
    Relative errors at points that were left out of the fit.

    Args:
        median (`float`):
            Of |predicted / measured - 1|.
        worst (`float`):
            The largest.
        num_points (`int`):
            How many points were left out, each once.
    """

    median: float
    worst: float
    num_points: int

    def to_dict(self) -> dict[str, Any]:
        """As a dictionary that can be serialised as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HeldOutError:
        """The errors that [`~HeldOutError.to_dict`] described."""
        return cls(float(data["median"]), float(data["worst"]), int(data["num_points"]))


def held_out_error(
    measured: ArrayLike, inner: ArrayLike, predict: Callable[[NDArray[np.bool_]], NDArray[np.float64]]
) -> HeldOutError | None:
    """
    Leaves out every third inner point, fits, predicts it, and begins again with the next one.

    Args:
        measured (`Sequence[float]` of shape `(P,)`):
            Positive measurements.
        inner (`Sequence[bool]` of shape `(P,)`):
            Which points may be left out. Those at the edge stay: without them a fit would have to extrapolate, which
            is another question.
        predict (`Callable`):
            Fits to the points of a mask of shape `(P,)` and returns predictions for all, of shape `(P,)`.

    Returns:
        [`HeldOutError`]: Of the inner points. `None` if there are none.
    """
    truth, order = np.asarray(measured, float), np.flatnonzero(inner)
    errors: list[float] = []
    for start in range(min(HELD_OUT_EVERY, len(order))):
        left_out = order[start::HELD_OUT_EVERY]
        kept = np.ones(len(truth), bool)
        kept[left_out] = False
        errors += np.abs(predict(kept)[left_out] / truth[left_out] - 1).tolist()
    return HeldOutError(float(np.median(errors)), max(errors), len(errors)) if errors else None
