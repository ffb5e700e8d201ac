"""What a schedule can be told. The trainer's config and the simulator share it, and so refuse the same."""

from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import ConfigurationError
from ..policy import BudgetController, LatencyCurve, LengthTracker
from .admission import AdmissionPolicy, UniformAdmission, VarianceAdmission
from .policies import AUTO, Patience, Ranking, Refill, SchedulePolicies
from .refill import BubbleFilling
from .rounds import PartialRollout, RoundPolicy, Sorted, TailBatching
from .schedules import SCHEDULES, make_policies
from .setting_checks import check_schedule, check_settings


# M_total is about 1.5·N·M on average in the paper (Appendix B).
DEFAULT_REDUNDANCY = 1.5
# A response that was aborted or cut off is taken to be at most this many times as long as the limit. At the limit
# itself, a prompt whose responses are all cut off would look calm.
HORIZON = 2
# Of settings that mean something with one schedule only.
DEFAULTS: dict[str, dict[str, Any]] = {
    "tail_batching": {"prompt_oversampling": 1.25},
    "partial_rollout": {"prompt_oversampling": 2.0, "max_partial_age": 4},
    "sorted": {
        "sorted_group_batches": 4,
        "sorted_mode": "on_policy",
        "sorted_grouped": True,
        "sorted_order": "shortest",
    },
}


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
    long_end_patience: Patience = AUTO
    selection: str = None  # type: ignore[assignment]
    fill_bubbles: bool = False
    prompt_oversampling: float | None = None
    max_partial_age: int | None = None
    mask_stale_after: int | None = None
    sorted_group_batches: int | None = None
    sorted_mode: str | None = None
    sorted_grouped: bool | None = None
    sorted_order: str | None = None
    length_ranked: bool = None  # type: ignore[assignment]
    num_long_servers: int = 0
    long_share: float = 0.1

    def __post_init__(self) -> None:
        patience: Any = self.long_end_patience  # words of a command line
        if isinstance(patience, str) and patience.replace(".", "", 1).isdigit():
            self.long_end_patience = float(patience)
        elif patience == "none":
            self.long_end_patience = None
        check_schedule(self)
        if self.max_num_generations is None:
            self.max_num_generations = 2 * self.num_generations
        if self.target_redundancy is None:
            self.target_redundancy = min(DEFAULT_REDUNDANCY, self.max_num_generations / self.num_generations)
        if self.length_ranked is None:
            self.length_ranked = self.schedule != "grpo"
        defaults = {"selection": SCHEDULES[self.schedule], **DEFAULTS.get(self.schedule, {})}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        check_settings(self)

    @classmethod
    def of(cls, config: Any) -> "ScheduleSettings":
        """Those of an object that has them all, such as a [`DARTSGRPOConfig`]."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    @property
    def over_provisions(self) -> bool:
        """Whether prompts may get more than `num_generations` candidates."""
        return self.selection != "all"

    @property
    def keeps_tokens(self) -> bool:
        """Whether what is unfinished when a batch is ready goes on in the next rollout."""
        return self.schedule == "partial_rollout" or self.sorted_mode in ("partial", "post_hoc")

    @property
    def policies(self) -> SchedulePolicies:
        """The policy objects that these settings stand for."""
        policies = make_policies(
            self.schedule,
            num_generations=self.num_generations,
            max_num_generations=self.max_num_generations,
            num_longest=self.num_longest,
            tail_pruning=self.tail_pruning,
            long_end_patience=self.long_end_patience,
            selection=self.selection,
        )
        return replace(
            policies, ranking=Ranking(self.num_long_servers, self.long_share) if self.length_ranked else None
        )

    def refill(self, latency_curve: LatencyCurve | None, num_engines: int = 1) -> Refill | None:
        """
        The policy that adds candidates during a rollout, with `fill_bubbles`.

        Args:
            latency_curve ([`LatencyCurve`], *optional*):
                Of one engine.
            num_engines (`int`, *optional*, defaults to `1`):
                Engines that decode a batch together.

        Raises:
            [`ConfigurationError`]: If there is no curve.
        """
        if not self.fill_bubbles:
            return None
        if latency_curve is None:
            raise ConfigurationError(
                "`fill_bubbles` (True) needs `latency_curve`, which says when engines have room. Measure one with "
                "`trl-darts profile`."
            )
        return BubbleFilling(num_engines * latency_curve.knee(), self.max_num_generations)

    def rounds(self, num_groups: int) -> RoundPolicy | None:
        """
        The policy that decides which prompts go into a rollout; `None` where they are the loader's batch.

        Args:
            num_groups (`int`):
                N, prompts per batch.
        """
        if self.schedule == "tail_batching":
            return TailBatching(num_groups, self.prompt_oversampling or 0.0)
        if self.schedule == "partial_rollout":
            return PartialRollout(num_groups, self.prompt_oversampling or 0.0, self.max_partial_age or 0)
        if self.schedule == "sorted":
            return Sorted(
                num_groups,
                self.sorted_group_batches or 0,
                self.sorted_mode or "",
                bool(self.sorted_grouped),
                self.sorted_order or "",
            )
        return None

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
                What is known of response lengths.
            latency_curve ([`LatencyCurve`], *optional*):
                Of one engine; see [`BudgetController`].
            num_engines (`int`, *optional*, defaults to `1`):
                Engines that decode a batch together.

        Returns:
            [`AdmissionPolicy`]: A new one.
        """
        if not self.over_provisions or self.fill_bubbles:
            return UniformAdmission(self.num_generations, tracker if self.length_ranked else None)
        budget = BudgetController(
            num_generations=self.num_generations,
            max_num_generations=self.max_num_generations,
            target_redundancy=self.target_redundancy,
            cost_weight=self.redundancy_cost_weight,
            latency_curve=latency_curve,
            num_engines=num_engines,
        )
        return VarianceAdmission(tracker, budget, self.num_generations, self.max_num_generations)
