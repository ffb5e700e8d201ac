"""
`ScheduleSettings`: the settings of a rollout. They are checked and turned into policies here. The trainer's config
inherits them; the simulator uses them alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..policy import BudgetController, LatencyCurve, LengthTracker
from ..policy.audit import BoundedWait
from .admission import AdmissionPolicy, UniformAdmission, VarianceAdmission
from .continuous import NUM_BATCHES
from .placement import LengthOrder
from .policies import (
    AUTO,
    AllGroups,
    BatchStop,
    DualEnd,
    GroupStop,
    LeastLoaded,
    Placement,
    SchedulePolicies,
    UniformPool,
    WaitForAll,
)
from .rules import FilledIn, check_conflicts, check_fields, filled_in
from .schedule_fields import COMPUTED, CONTINUOUS, GUARD_EVERY, SCHEDULE_CONFLICTS, ScheduleFields
from .tail import TailPolicy, TailServers
from .types import GroupPlan


# With `long_end_patience="auto"`, the prompt with the least spread of lengths gets this many candidates beyond M. In
# simulation with 1 % of never-ending answers, rollouts are 2.5 times as fast with 2 as with none; 3 add little.
SPARE_CANDIDATES = 2
# The length of an aborted or truncated response is estimated up to this many times the limit. If it were the limit
# itself, a prompt whose responses are all truncated would seem to have no spread of lengths.
HORIZON = 2


@dataclass(frozen=True)
class Facts:
    """
    What settings depend on beside themselves. Each is a reason, as it reads in a message, or `None`.

    Args:
        no_deferral (`str`, *optional*):
            Why groups can't wait for another round, after "does not run with".
        whole_groups (`str`, *optional*):
            Why no candidates can be chosen among, after "has no effect with".
    """

    no_deferral: str | None = None
    whole_groups: str | None = None


@dataclass
class ScheduleSettings(ScheduleFields):
    """
    Settings of rollouts: how many candidates are sampled, when a rollout ends, which candidates are kept, and which
    prompts make a batch. Each field's help describes it. Symbols in brackets are those of
    [DARTS](https://huggingface.co/papers/2605.30859).

    Raises:
        [`ConfigurationError`]: If a value can't work. The message names the setting, its value, the rule and a remedy.
    """

    def __post_init__(self) -> None:
        check_fields(self, ScheduleFields)  # first: 'false' would count as true, and '1.5' end in a `TypeError`
        self.resolve()

    def resolve(self, facts: Facts | None = None) -> None:
        """
        Computes defaults that depend on other settings, and checks settings against each other. May be called again
        with other facts. Without any, nothing guards against the loss of long answers by default.
        """
        self.facts = facts
        self.forget_filled_in()
        if not self.is_continuous:  # this and the next are text from a command line
            self.rollout_ahead = int(self.rollout_ahead or 0)
        if self.long_end_patience not in (None, AUTO):
            self.long_end_patience = None if self.long_end_patience == "none" else float(self.long_end_patience)
        for name, default in COMPUTED.items():
            if getattr(self, name) is None:
                setattr(self, name, filled_in(default(self)))
        check_conflicts(self, SCHEDULE_CONFLICTS)
        self._keep_long_answers()

    def _keep_long_answers(self) -> None:
        """Guards against the loss of long answers by default: defers groups where that is possible."""
        facts = self.facts
        self.defers_groups = bool(self.defer_unsettled_groups)
        if self.over_provisions and self.keeps_all is not None:
            self.selection = filled_in("all")
            self.max_num_generations = self.min_num_generations = filled_in(self.num_generations)
            self.target_redundancy = filled_in(1.0)
            self.defers_groups = False
        elif facts is not None and self.defer_unsettled_groups is None and self.bounds_wait:
            self.defers_groups = self.cannot_defer is None and facts.no_deferral is None
            if not self.defers_groups and self.long_end_every is None and not self.is_continuous:
                self.long_end_every = filled_in(GUARD_EVERY)

    def forget_filled_in(self) -> None:
        """Unsets values that another config computed, so that they are computed from this config's fields."""
        for name, value in vars(self).items():
            if isinstance(value, FilledIn):
                setattr(self, name, None)

    @property
    def is_continuous(self) -> bool:
        """Whether rollouts never end."""
        return self.rollout_ahead == CONTINUOUS

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that share a batch."""
        return 1

    def num_under_way(self, num_groups: int) -> int:
        """Returns how many prompts may have entered without being trained on, for batches of `num_groups`."""
        return min(NUM_BATCHES, (self.max_staleness or 0) // self.steps_per_batch) * num_groups

    @property
    def num_spare(self) -> int:
        """Candidates of each prompt beyond `num_generations`, by default."""
        return SPARE_CANDIDATES if self.over_provisions and self.long_end_patience == AUTO else 0

    @property
    def affordable(self) -> int:
        """Average number of candidates per prompt within the budget."""
        return math.floor(self.target_redundancy * self.num_generations + 1e-9)  # 1.1 × 10 is 11

    @property
    def keeps_all(self) -> str | None:
        """Why every candidate is kept, as it reads after "has no effect with"."""
        if self.over_provisions:
            return None if self.facts is None else self.facts.whole_groups
        return (
            f"`schedule` ({self.schedule!r}) and `selection` ({self.selection!r}), which keep every candidate, unlike "
            "`schedule='darts'` and `selection='dual_end'`"
        )

    @property
    def cannot_defer(self) -> str | None:
        """The setting with which groups can't be deferred, as it reads after "does not run with"."""
        if not self.bounds_wait:
            if self.schedule == "darts":
                return "`long_end_patience` (None), which waits for all candidates"
            return f"`schedule` ({self.schedule!r}): only 'darts' aborts candidates of groups that it trains on"
        if self.drop_uniform_groups:
            return "`drop_uniform_groups` (True), which replaces uniform groups"
        if self.is_continuous:
            return "`rollout_ahead` ('continuous'), which samples no prompt again"
        return None

    @property
    def over_provisions(self) -> bool:
        """Whether prompts may get more than `num_generations` candidates."""
        return self.selection != "all"

    @property
    def keeps_long_end(self) -> bool:
        """Whether prompts below `max_num_generations` keep their longest candidates beside the shortest."""
        return self.selection == "dual_end" and self.num_longest > 0

    @property
    def ranks(self) -> bool:
        """Whether the order of submission depends on expected lengths."""
        return self.submit_order != "arrival"

    @property
    def reads_lengths(self) -> bool:
        """Whether any decision depends on the lengths of earlier responses."""
        return self.over_provisions or self.ranks

    @property
    def buffers_prompts(self) -> bool:
        """Whether prompts are taken before their turn, or outlive a rollout. The rollout buffer then makes batches."""
        own = self.schedule in ("tail_batching", "partial_rollout", "sorted")
        ahead = self.rollout_ahead != 0 or self.skip_uniform_prompts
        return own or ahead or self.drop_uniform_groups or self.scores_early

    @property
    def scores_early(self) -> bool:
        """Whether some prompts wait for long rounds, and groups are scored before a batch has them."""
        return self.defers_groups or self.audit_share > 0

    @property
    def bounds_wait(self) -> bool:
        """Whether candidates of groups that are trained on are aborted for their length."""
        return self.schedule == "darts" and self.over_provisions and self.long_end_patience is not None

    @property
    def bounded_wait(self) -> BoundedWait:
        """The selection as audits compare it with plain sampling."""
        saturates_at = self.max_num_generations if self.tail_pruning else math.inf
        patience = None if isinstance(self.long_end_patience, str) else self.long_end_patience
        return BoundedWait(self.num_generations, self.num_longest, saturates_at, patience)

    @property
    def own_prompts(self) -> str:
        """Beginning of an error message about the setting because of which the schedule `buffers_prompts`."""
        names = (
            *("rollout_ahead", "drop_uniform_groups", "skip_uniform_prompts"),
            *("defer_unsettled_groups", "audit_share"),
        )
        name = next((name for name in names if getattr(self, name)), "schedule")
        return f"`{name}` ({getattr(self, name)!r}) takes prompts before or out of their turn, and does not run"

    @property
    def keeps_tokens(self) -> bool:
        """Whether candidates that are unfinished when a batch is ready continue in the next rollout."""
        return self.schedule == "partial_rollout" or self.sorted_mode == "partial"

    def policies(
        self,
        plans: Sequence[GroupPlan] = (),
        batch_stop: BatchStop | None = None,
        placement: Placement | None = None,
        rollout: int = 0,
        tail: TailServers | None = None,
    ) -> SchedulePolicies:
        """
        Returns the policies of one rollout. Groups start in `submit_order` of the expected lengths in their `plans`,
        if all are known and no `placement` is given. By default, the batch is ready when all groups are. `rollout`
        counts from 0 and is used for `long_end_every`. `tail` describes the tail servers, if any.
        """
        lengths = {plan.group_id: plan.expected_length for plan in plans if plan.expected_length is not None}
        if placement is None and self.ranks and lengths and len(lengths) == len(plans):
            placement = LengthOrder(lengths, self.submit_order == "longest")
        every = self.long_end_every
        stop: GroupStop = WaitForAll()
        if self.over_provisions:
            stop = (DualEnd if self.selection == "dual_end" else UniformPool)(
                self.num_generations,
                self.max_num_generations,
                num_longest=self.num_longest,
                tail_pruning=self.tail_pruning,
                long_end_patience=None if every and (rollout + 1) % every == 0 else self.long_end_patience,
            )
        return SchedulePolicies(
            stop,
            batch_stop or AllGroups(),
            placement or LeastLoaded(),
            None if tail is None else TailPolicy(tail, self.tail_switch_at, self._long_groups(lengths)),
        )

    def _long_groups(self, lengths: Mapping[int, float]) -> frozenset[int]:
        """Returns the groups that tail servers decode from the start (StreamRL's skewness-aware dispatching)."""
        if not self.tail_share or not lengths:
            return frozenset()
        ranking = sorted(lengths, key=lambda group_id: -lengths[group_id])
        return frozenset(ranking[: max(1, round(self.tail_share * len(ranking)))])

    def tracker(self, max_completion_length: int, source: str = "") -> LengthTracker:
        """Creates a tracker of response lengths."""
        return LengthTracker(self.length_ema, HORIZON * max_completion_length, source)

    def admission(
        self,
        tracker: LengthTracker,
        latency_curve: LatencyCurve | None = None,
        num_engines: int = 1,
        num_slots: int | None = None,
        tail: TailServers | None = None,
    ) -> AdmissionPolicy:
        """
        Creates the policy that decides the number of candidates per prompt. `num_engines` share a batch and decode
        `num_slots` sequences at once (`None` for no limit). The curve is that of one engine. Raises
        [`ConfigurationError`] if `redundancy_cost_weight` is set without it. With every schedule, lengths are tracked
        if a switch to `tail` servers is predicted.
        """
        if not self.over_provisions:
            learns = self.ranks or (tail is not None and tail.times is not None)
            return UniformAdmission(self.num_generations, tracker if learns else None)
        budget = BudgetController(
            self.num_generations,
            self.max_num_generations,
            target_redundancy=self.target_redundancy,
            cost_weight=self.redundancy_cost_weight,
            latency_curve=latency_curve,
            num_engines=num_engines,
            min_num_generations=self.min_num_generations,
            num_slots=num_slots,
            keeps_spares=not isinstance(self.min_num_generations, FilledIn),  # if the user set it
        )
        return VarianceAdmission(tracker, budget)
