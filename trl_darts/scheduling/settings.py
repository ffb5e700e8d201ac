"""What a schedule can be told. The trainer's config and the simulator share it, and so refuse the same."""

import math
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ConfigurationError
from ..policy import BudgetController, LatencyCurve, LengthTracker
from .admission import AdmissionPolicy, UniformAdmission, VarianceAdmission
from .policies import SchedulePolicies
from .schedules import SCHEDULES, make_policies


# M_total is about 1.5·N·M on average in the paper (Appendix B).
DEFAULT_REDUNDANCY = 1.5
# A response that was aborted or cut off is taken to be at most this many times as long as the limit. At the limit
# itself, a prompt whose responses are all cut off would look calm.
HORIZON = 2


@dataclass
class ScheduleSettings:
    """
    The settings of a schedule; see the fields of the same names of [`DARTSGRPOConfig`].

    Raises:
        [`ConfigurationError`]: If a setting can't work. Names it, its value, the rule and a remedy.
    """

    schedule: str = "darts"
    num_generations: int = 8
    max_num_generations: int = None  # type: ignore[assignment]  # the default depends on others
    target_redundancy: float = None  # type: ignore[assignment]
    redundancy_cost_weight: float | None = None
    length_ema: float = 0.5
    num_longest: int = 1
    tail_pruning: bool = True
    long_end_patience: float | None = None

    def __post_init__(self) -> None:
        if self.num_generations < 1:
            raise ConfigurationError(f"`num_generations` ({self.num_generations}) must be at least 1.")
        if self.max_num_generations is None:
            self.max_num_generations = 2 * self.num_generations
        if self.target_redundancy is None:
            self.target_redundancy = min(DEFAULT_REDUNDANCY, self.max_num_generations / self.num_generations)
        self._check_selection()
        self._check_budget()

    @classmethod
    def of(cls, config: Any) -> "ScheduleSettings":
        """Those of an object that has them all, such as a [`DARTSGRPOConfig`]."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    @property
    def policies(self) -> SchedulePolicies:
        """The policy objects that these settings stand for."""
        return make_policies(
            self.schedule,
            num_generations=self.num_generations,
            max_num_generations=self.max_num_generations,
            num_longest=self.num_longest,
            tail_pruning=self.tail_pruning,
            long_end_patience=self.long_end_patience,
        )

    def tracker(self, max_completion_length: int) -> LengthTracker:
        """
        A new tracker of response lengths.

        Args:
            max_completion_length (`int`):
                Tokens at which responses are cut off.
        """
        return LengthTracker(self.length_ema, HORIZON * max_completion_length)

    def admission(
        self, tracker: LengthTracker, latency_curve: LatencyCurve | None = None, num_engines: int = 1
    ) -> AdmissionPolicy:
        """
        The policy that gives each prompt its candidates.

        Args:
            tracker ([`LengthTracker`]):
                What is known of response lengths. Not used by `"grpo"`.
            latency_curve ([`LatencyCurve`], *optional*):
                Of one engine; see [`BudgetController`].
            num_engines (`int`, *optional*, defaults to `1`):
                Engines that decode a batch together.

        Returns:
            [`AdmissionPolicy`]: A new one.
        """
        if self.schedule == "grpo":
            return UniformAdmission(self.num_generations)
        budget = BudgetController(
            num_generations=self.num_generations,
            max_num_generations=self.max_num_generations,
            target_redundancy=self.target_redundancy,
            cost_weight=self.redundancy_cost_weight,
            latency_curve=latency_curve,
            num_engines=num_engines,
        )
        return VarianceAdmission(tracker, budget, self.num_generations, self.max_num_generations)

    def _check_selection(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigurationError(
                f"`schedule` ({self.schedule!r}) must be one of {', '.join(map(repr, SCHEDULES))}."
            )
        if self.max_num_generations < self.num_generations:
            raise ConfigurationError(
                f"`max_num_generations` ({self.max_num_generations}) must be at least `num_generations` "
                f"({self.num_generations}). Raise it, or leave it unset for 2 × `num_generations`."
            )
        if not 0 <= self.num_longest < self.num_generations:
            raise ConfigurationError(
                f"`num_longest` ({self.num_longest}) must be at least 0 and less than `num_generations` "
                f"({self.num_generations}): the other rows are the shortest ones. The paper uses 1."
            )
        if self.long_end_patience is not None and not self.long_end_patience >= 1:
            raise ConfigurationError(
                f"`long_end_patience` ({self.long_end_patience}) must be at least 1, in multiples of the "
                "`num_generations`-th shortest complete length. Leave it unset to wait for all candidates."
            )

    def _check_budget(self) -> None:
        highest = self.max_num_generations / self.num_generations
        if not 1 <= self.target_redundancy <= highest:
            raise ConfigurationError(
                f"`target_redundancy` ({self.target_redundancy}) must be between 1 and `max_num_generations` / "
                f"`num_generations` ({highest:g}). Lower it, or raise `max_num_generations`."
            )
        if self.redundancy_cost_weight is not None and not 0 < self.redundancy_cost_weight < math.inf:
            raise ConfigurationError(
                f"`redundancy_cost_weight` ({self.redundancy_cost_weight}) must be positive. Leave it unset to have "
                "it calibrated."
            )
        if not 0 < self.length_ema <= 1:
            raise ConfigurationError(
                f"`length_ema` ({self.length_ema}) must be greater than 0 and at most 1, the weight of the newest "
                "observation."
            )
