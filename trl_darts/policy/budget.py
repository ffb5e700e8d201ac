"""
How many candidates a batch gets in total.

Invariants: a budget is always within [N·M, N·M_up]; it depends only on what was observed, in that order, so a restored
controller goes on as the saved one would have (with a latency curve even on a slower machine).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from trl_darts.errors import ConfigurationError, StateMismatchError
from trl_darts.policy.cost_slope import PredictedCostSlope, TimedCostSlope, calibration_cycle
from trl_darts.policy.latency import LatencyCurve


def redundancy_budget(rho: float, cost_slope: float, cost_weight: float, low: int, high: int) -> int:
    """
    The batch size of the highest utility ρ·ln M - λ·(k·M + c), within bounds
    ([DARTS](https://huggingface.co/papers/2605.30859), Eq. 8 and 9).

    Args:
        rho (`float`):
            Standard deviation over mean of the data set's response lengths, ρ.
        cost_slope (`float`):
            Seconds per additional candidate, k.
        cost_weight (`float`):
            Price of a second in units of utility, λ.
        low (`int`):
            Fewest candidates, N·M.
        high (`int`):
            Most candidates, N·M_up.

    Returns:
        `int`: Total number of candidates, M_total.

    Raises:
        [`ValueError`]: If `rho` is negative or not finite, `cost_slope` or `cost_weight` is not positive and finite,
        or `low`
            exceeds `high`.
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
    Adaptive redundancy budget of the coming step ([DARTS](https://huggingface.co/papers/2605.30859), Appendix B).

    The paper doesn't say how it chose λ, only that the budget came out at about 1.5·N·M on average. Here the first
    steps calibrate it: their budgets cycle around the target, so that the cost of a candidate shows in the timings,
    and λ is then set such that Eq. 8 gives the target, and held. So is k, which in the paper belongs to the model and
    the cluster. From there on ρ moves the budget: longer tails raise it.

    A k that followed the rollouts would run away: a budget that makes prompts stop early makes rollouts shorter, so
    candidates would look cheap, and the next budget would be larger.

    λ belongs to the largest batch seen while calibrating. A smaller one (the last of an epoch) gets its proportional
    share of Eq. 8's optimum, and so the same redundancy per prompt.

    Args:
        num_generations (`int`):
            Group size M.
        max_num_generations (`int`):
            Most candidates of a prompt, M_up.
        target_redundancy (`float`, *optional*, defaults to `1.5`):
            Budget over N·M while calibrating, and on average afterwards as long as ρ and k stay. `1` turns
            over-provisioning off.
        cost_weight (`float`, *optional*):
            λ. Calibrated if not given.
        calibration_steps (`int`, *optional*, defaults to `8`):
            Number of observed steps after which λ and k are set.
        latency_curve ([`LatencyCurve`], *optional*):
            Predicts k from the lengths of the pools. Without it k is measured.
        num_engines (`int`, *optional*, defaults to `1`):
            Number of engines that share a batch, for the prediction.
    """

    def __init__(
        self,
        num_generations: int,
        max_num_generations: int,
        target_redundancy: float = 1.5,
        cost_weight: float | None = None,
        calibration_steps: int = 8,
        latency_curve: LatencyCurve | None = None,
        num_engines: int = 1,
    ) -> None:
        _check_settings(num_generations, max_num_generations, target_redundancy, cost_weight)
        if calibration_steps < 1 or num_engines < 1:
            raise ConfigurationError(
                f"`calibration_steps` ({calibration_steps}) and `num_engines` ({num_engines}) must be at least 1."
            )
        self.num_generations = num_generations
        self.max_num_generations = max_num_generations
        self.target_redundancy = target_redundancy
        self.calibration_steps = calibration_steps
        self._given_cost_weight = cost_weight
        self._calibrated_cost_weight: float | None = None
        self._timed = TimedCostSlope(calibration_steps) if latency_curve is None else None
        self._predicted = None if latency_curve is None else PredictedCostSlope(latency_curve, num_engines)
        self._held_cost_slope: float | None = None
        self._num_observed = 0
        self._reference_prompts = 0
        self._rho = math.nan
        self._rho_sum, self._num_rhos = 0.0, 0

    @property
    def cost_weight(self) -> float | None:
        """λ, `None` while calibrating."""
        return self._calibrated_cost_weight if self._given_cost_weight is None else self._given_cost_weight

    @property
    def cost_slope(self) -> float | None:
        """k in seconds per candidate, `None` before it is known; held once the calibration is over."""
        if self._held_cost_slope is not None:
            return self._held_cost_slope
        if self._timed is not None:
            return self._timed.value
        if self._predicted is None or not self._reference_prompts or self.max_num_generations == self.num_generations:
            return None
        num_prompts = self._reference_prompts
        return self._predicted.value(num_prompts * self.num_generations, num_prompts * self.max_num_generations)

    def total(self, num_prompts: int, rho: float) -> int:
        """
        Number of candidates of the coming step, M_total (Eq. 8 and 9).

        Args:
            num_prompts (`int`):
                Number of prompts of the batch, N.
            rho (`float`):
                Standard deviation over mean of the data set's response lengths, ρ. NaN before there is history: the
                budget is then the target.

        Returns:
            `int`: A number in `[N * num_generations, N * max_num_generations]`.

        Raises:
            [`ValueError`]: If there is no prompt, or `rho` is negative or infinite.
        """
        if num_prompts < 1:
            raise ValueError(f"`num_prompts` ({num_prompts}) must be at least 1.")
        if rho < 0 or rho == math.inf:
            raise ValueError(f"`rho` ({rho}) must be finite and not negative, or NaN where there is no history.")
        low, high = num_prompts * self.num_generations, num_prompts * self.max_num_generations
        target = min(round(self.target_redundancy * low), high)
        if self._calibrated_cost_weight is None:
            self._reference_prompts = max(self._reference_prompts, num_prompts)
        self._rho = rho
        if self.target_redundancy == 1 or math.isnan(rho):
            return target
        cost_weight, cost_slope = self.cost_weight, self.cost_slope
        if cost_weight is None:
            cycle = calibration_cycle(self.calibration_steps)
            # Half of the room on the narrower side: at the bounds every prompt would be treated alike.
            return target + cycle[self._num_observed % len(cycle)] * (min(target - low, high - target) // 2)
        if cost_slope is None:
            return target
        share = num_prompts / self._reference_prompts
        return redundancy_budget(rho * share, cost_slope, cost_weight, low, high)

    def observe(self, num_candidates: int, seconds: float, lengths: ArrayLike | None = None) -> None:
        """
        Record what the step after the last [`~BudgetController.total`] cost.

        Args:
            num_candidates (`int`):
                Number of candidates that were started.
            seconds (`float`):
                Wall-clock time of its rollouts.
            lengths (`Sequence[int]` of shape `(num_candidates,)`, *optional*):
                Response lengths of the whole pool in tokens. Needed with a latency curve.

        Raises:
            [`ValueError`]: If `num_candidates` or `seconds` is not positive and finite, or `lengths` are needed and
            missing.
        """
        if num_candidates < 1 or not 0 < seconds < math.inf:
            raise ValueError(
                f"`num_candidates` ({num_candidates}) and `seconds` ({seconds}) must be positive and finite."
            )
        if self._predicted is not None and (lengths is None or not np.size(lengths)):
            raise ValueError("`lengths` must be given with a latency curve. Pass the lengths of all candidates.")
        self._num_observed += 1
        if self._held_cost_slope is not None and self.cost_weight is not None:
            return
        if self._timed is not None:
            self._timed.observe(num_candidates, seconds)
        elif self._predicted is not None and lengths is not None:
            self._predicted.observe(lengths)
        self._calibrate()

    def _calibrate(self) -> None:
        """Set λ so that Eq. 8 gives the target for the mean ρ so far, and hold k. Waits for both if need be."""
        if not math.isnan(self._rho):
            self._rho_sum += self._rho
            self._num_rhos += 1
        cost_slope = self.cost_slope
        if self._num_observed < self.calibration_steps or not self._rho_sum or cost_slope is None:
            return
        self._held_cost_slope = cost_slope
        if self._given_cost_weight is None:
            target = self.target_redundancy * self._reference_prompts * self.num_generations
            # Half a candidate more, because Eq. 9 rounds down.
            self._calibrated_cost_weight = self._rho_sum / self._num_rhos / (cost_slope * (target + 0.5))

    def state_dict(self) -> dict[str, Any]:
        """
        State that can be serialised as JSON.

        Returns:
            `dict[str, Any]`: What was observed, and the group sizes that it belongs to.
        """
        return {
            "num_generations": self.num_generations,
            "max_num_generations": self.max_num_generations,
            "target_redundancy": self.target_redundancy,
            "cost_weight": self._calibrated_cost_weight,
            "held_cost_slope": self._held_cost_slope,
            "num_observed": self._num_observed,
            "reference_prompts": self._reference_prompts,
            "rho": None if math.isnan(self._rho) else self._rho,
            "rho_sum": self._rho_sum,
            "num_rhos": self._num_rhos,
            "timed_cost_slope": None if self._timed is None else self._timed.state_dict(),
            "predicted_cost_slope": None if self._predicted is None else self._predicted.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Go on from a saved state. A `cost_weight` that was given stays; a `target_redundancy` that has changed since is
        met.

        Args:
            state (`Mapping[str, Any]`):
                What [`~BudgetController.state_dict`] returned.

        Raises:
            [`StateMismatchError`]: If the keys are others, or the state belongs to other group sizes or to the other
            way of
                knowing the cost of a candidate (measured, or predicted by a latency curve).
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise StateMismatchError(
                f"The state of a `BudgetController` has the keys {sorted(own)}, and this one has {sorted(state)}. "
                "Load the state that the controller saved, or start without one."
            )
        for name in ("num_generations", "max_num_generations"):
            if state[name] != own[name]:
                raise StateMismatchError(
                    f"The saved state belongs to `{name}` ({state[name]}), and it is {own[name]} now. Set it back, or "
                    "start without the state to calibrate anew."
                )
        if (state["timed_cost_slope"] is None) != (self._timed is None):
            raise StateMismatchError(
                "The saved state and this `BudgetController` differ in whether there is a `latency_curve`. Give both "
                "the same, or start without the state to calibrate anew."
            )
        self._calibrated_cost_weight = state["cost_weight"]
        if self._calibrated_cost_weight is not None:
            # λ was set to meet the target of then, and is inversely proportional to it.
            self._calibrated_cost_weight *= state["target_redundancy"] / self.target_redundancy
        self._held_cost_slope = state["held_cost_slope"]
        self._num_observed, self._reference_prompts = int(state["num_observed"]), int(state["reference_prompts"])
        self._rho = math.nan if state["rho"] is None else float(state["rho"])
        self._rho_sum, self._num_rhos = float(state["rho_sum"]), int(state["num_rhos"])
        if self._timed is not None:
            self._timed.load_state_dict(state["timed_cost_slope"])
        if self._predicted is not None:
            self._predicted.load_state_dict(state["predicted_cost_slope"])


def _check_settings(num_generations: int, max_num_generations: int, target: float, cost_weight: float | None) -> None:
    if not 1 <= num_generations <= max_num_generations:
        raise ConfigurationError(
            f"`max_num_generations` ({max_num_generations}) must be at least `num_generations` ({num_generations}), "
            "and both at least 1."
        )
    # Without room for redundancy the target has no say.
    most = max_num_generations / num_generations
    if not target >= 1 or (most > 1 and target > most * (1 + 1e-9)):
        raise ConfigurationError(
            f"`target_redundancy` ({target}) must be between 1 and `max_num_generations` / `num_generations` "
            f"({most:g}). Lower it, or raise `max_num_generations`."
        )
    if cost_weight is not None and not 0 < cost_weight < math.inf:
        raise ConfigurationError(
            f"`cost_weight` ({cost_weight}) must be positive and finite. Leave it unset to calibrate it."
        )
