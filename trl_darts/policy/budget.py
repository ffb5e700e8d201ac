"""
Chooses the total number of candidates of a batch.

Invariants: a budget is always within [N·M, N·M_up], and at least N·M_low where spare candidates pay. It depends only
on the observations and their order, never on time, so a restored controller gives the same budgets as the saved one.
"""

import math
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigurationError, StateMismatchError
from .latency import LatencyCurve


SETTLING_STEPS, REFERENCE_STEPS = 8, 64
"""
Number of first steps with history that don't count once there are more, and of those after them whose mean ρ and mean
length are the reference. In the former, lengths of a first long round or of another schedule raise ρ, and all later
budgets would be lower. The reference is fixed afterwards: the budget itself changes the observed lengths, so a moving
one would follow its own decisions. It is a mean, so that budgets have their target on average.
"""

BREAK_EVEN_SPREAD, DOUBLING_WAVES = 0.12, 4
"""
Spread of a prompt's lengths at which spare candidates cost as much time as they save, on engines with a slot for each,
and the number of waves that doubles it. With few slots a batch is decoded in N·M / slots waves. Spare candidates start
after all rows and shorten the last wave, but keep the engines full, and so slow, to its end. In a simulation with the
latencies that NVIDIA published for Llama-3.1-8B, 0.5 spare candidates per row break even at 0.14, 0.17 and 0.20 for 1,
2 and 4 waves. For 8 and 16, they do at 0.25 and 0.33 where all prompts are alike, and never where prompts differ.
"""
DEFAULT_REDUNDANCY = 1.5  # M_total is about 1.5·N·M on average in the paper (Appendix B)
USUAL_SPREAD = 0.5  # without history


def redundancy_budget(rho: float, cost_slope: float, cost_weight: float, low: int, high: int) -> int:
    """
    Compute the batch size that maximises the utility ρ·ln M - λ·(k·M + c) within bounds
    ([DARTS](https://huggingface.co/papers/2605.30859), Eq. 8 and 9).

    Args:
        rho (`float`):
            Standard deviation over mean of the data set's response lengths, ρ.
        cost_slope (`float`):
            Seconds per additional candidate, k.
        cost_weight (`float`):
            Price of a second in units of utility, λ.
        low (`int`):
            Fewest candidates, N·M_low (N·M in the paper).
        high (`int`):
            Most candidates, N·M_up.

    Returns:
        `int`: Total number of candidates, M_total.

    Raises:
        [`ValueError`]: If `rho` is negative or not finite, `cost_slope` or `cost_weight` is not positive and finite,
            or `low` exceeds `high`.
    """
    if not 0 <= rho < math.inf:
        raise ValueError(f"`rho` ({rho}) must be finite and not negative.")
    for name, value in (("cost_slope", cost_slope), ("cost_weight", cost_weight)):
        if not 0 < value < math.inf:
            raise ValueError(f"`{name}` ({value}) must be positive and finite.")
    if low > high:
        raise ValueError(f"`low` ({low}) must not exceed `high` ({high}).")
    price = cost_weight * cost_slope
    optimum = rho / price if price else math.inf  # the product may underflow
    return math.floor(min(max(optimum, low), high))


class BudgetController:
    """
    Adaptive redundancy budget of the next step ([DARTS](https://huggingface.co/papers/2605.30859), Appendix B).

    The paper doesn't say how it chose λ, only that the budget was about 1.5·N·M on average. If λ is chosen such that
    Eq. 8 gives this target for the ρ of the first steps, k cancels:

    ```
    M_total = target_redundancy · N · M · ρ / ρ_ref     within [N·M_low, N·M_up]
    ```

    Longer tails than in the first steps raise the budget, shorter ones lower it. If a prompt's lengths spread too
    little for the number of slots, no candidates beyond N·M are added ([`BREAK_EVEN_SPREAD`]). If the user sets λ,
    Eq. 8 is used as published, with k from the latency curve.
    """

    def __init__(
        self,
        num_generations: int,
        max_num_generations: int,
        target_redundancy: float = DEFAULT_REDUNDANCY,  # budget over N·M for the ρ of the first steps; 1 for no spares
        cost_weight: float | None = None,  # λ, replaces the target
        latency_curve: LatencyCurve | None = None,  # of one engine, gives k: required with λ, unused otherwise
        num_engines: int = 1,  # number of engines that share a batch
        min_num_generations: int | None = None,  # M_low, M by default
        num_slots: int | None = None,  # sequences that all engines together decode at once; `None`: no limit
        keeps_spares: bool = False,  # whether M_low and the target also apply below the break-even
    ) -> None:
        if cost_weight is not None and latency_curve is None:
            raise ConfigurationError(
                f"`cost_weight` ({cost_weight}) needs `latency_curve`, which says what a candidate costs. Give both."
            )
        self.num_generations = num_generations
        self.max_num_generations = max_num_generations
        self.min_num_generations = num_generations if min_num_generations is None else min_num_generations
        self.target_redundancy = target_redundancy
        self.cost_weight = cost_weight
        self.latency_curve = latency_curve
        self.num_engines = num_engines
        self.num_slots = num_slots
        self.keeps_spares = keeps_spares
        self._rhos: list[float] = []
        self._lengths: list[float] = []

    def total(self, num_prompts: int, rho: float, spread: float = math.nan) -> int:
        """
        Returns the number of candidates M_total (Eq. 8 and 9) for a step of `num_prompts` prompts. `spread` is the
        standard deviation of a prompt's lengths over their mean. Without history, both are NaN, and the budget is the
        target unless slots are few.
        """
        low, high = num_prompts * self.min_num_generations, num_prompts * self.max_num_generations
        if self.cost_weight is not None and self._rhos and not math.isnan(rho):
            return redundancy_budget(rho, self._cost_slope(low, high), self.cost_weight, low, high)
        reference = _reference(self._rhos)
        known = rho >= 0 and reference > 0 and self.target_redundancy > 1
        ratio = rho / reference if known else 1.0
        rows = num_prompts * self.num_generations
        wanted = min(max(self.target_redundancy * ratio * rows, low), high)
        return round(rows + self._paying_share(rows, spread) * (wanted - rows))

    def _paying_share(self, rows: int, spread: float) -> float:
        """Returns the share of the spare candidates to add: 0 up to the break-even, rising to 1 at twice that."""
        if self.keeps_spares or self.cost_weight is not None:
            return 1.0
        waves = rows / self.num_slots if self.num_slots else 0.0
        spread = USUAL_SPREAD if math.isnan(spread) else spread
        return min(max(spread * 2.0 ** (-waves / DOUBLING_WAVES) / BREAK_EVEN_SPREAD - 1, 0.0), 1.0)

    def _cost_slope(self, low: int, high: int) -> float:
        """
        Returns k of Eq. 6 in seconds: the slope of the latency curve between the bounds of the batch, times the mean
        length.
        """
        assert self.latency_curve is not None
        fewest, most = low / self.num_engines, max(high, low + 1) / self.num_engines
        slope = (self.latency_curve(most) - self.latency_curve(fewest)) / (most - fewest)
        seconds = slope * _reference(self._lengths) / self.num_engines
        return max(seconds, sys.float_info.min)  # 0 where the curve is flat

    def observe(self, rho: float, mean_length: float) -> None:
        """Record ρ and the mean response length L̃ after a step. Only the first steps with history count."""
        if len(self._rhos) < SETTLING_STEPS + REFERENCE_STEPS and not math.isnan(rho):
            self._rhos.append(rho)
            self._lengths.append(mean_length)

    def state_dict(self) -> dict[str, Any]:
        """Observations and the group sizes that they belong to, serialisable as JSON."""
        return {
            "num_generations": self.num_generations,
            "max_num_generations": self.max_num_generations,
            "rhos": list(self._rhos),
            "lengths": list(self._lengths),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Restore a saved state; `target_redundancy` and `cost_weight` stay as configured. Raises [`StateMismatchError`]
        if the keys or the group sizes differ.
        """
        own = self.state_dict()
        sizes = ("num_generations", "max_num_generations")
        if set(state) != set(own) or any(state[name] != own[name] for name in sizes):
            raise StateMismatchError(
                f"`state` ({dict(state)}) must have the keys and group sizes of this `BudgetController` ({own}). "
                "Restore the group sizes, or start without the state."
            )
        self._rhos, self._lengths = [float(rho) for rho in state["rhos"]], [float(mean) for mean in state["lengths"]]


def _reference(values: list[float]) -> float:
    """Returns the mean of the steps that count, or NaN without any."""
    return statistics.mean(values[SETTLING_STEPS:] or values) if values else math.nan
