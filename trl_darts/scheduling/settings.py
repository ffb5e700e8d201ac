"""
`ScheduleSettings`: the settings of a rollout. They are checked and turned into policies here. The trainer's config
inherits them; the simulator uses them alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from ..policy import BudgetController, LatencyCurve, LengthTracker
from ..policy.audit import BoundedWait
from ..policy.budget import DEFAULT_REDUNDANCY
from ..policy.lengths import DEFAULT_EMA
from .admission import AdmissionPolicy, UniformAdmission, VarianceAdmission
from .continuous import NUM_BATCHES
from .placement import LengthOrder, known_lengths
from .policies import (
    AUTO,
    SCHEDULES,
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
from .rules import FilledIn, check_fields, filled_in
from .schedule_fields import (
    CONTINUOUS,
    GUARD_EVERY,
    MAX_OVERSAMPLING,
    OF_SELECTION,
    SCHEDULE_DEFAULTS,
    STALE_BATCHES,
    SUBMIT_ORDERS,
    ScheduleFields,
)
from .tail import TailPolicy, TailServers


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
        self.forget_filled_in()
        self._check_patience()
        self._check_ahead_of_time()
        self._fill_in()
        self._check_selection()
        self._check_unread()
        self._check_budget()
        self._check_prompts()
        self._guard(facts)
        if facts is not None and facts.whole_groups is not None and self.over_provisions:
            self._keep_all(facts.whole_groups)
        if self.tail_share and not self.ranks:
            raise ConfigurationError(
                f"`tail_share` ({self.tail_share}) needs expected lengths, which `submit_order` "
                f"({self.submit_order!r}) does not use. Set `submit_order='longest'`, or leave `tail_share` unset."
            )

    def _guard(self, facts: Facts | None) -> None:
        """Guards against the loss of long answers by default: defers groups where that is possible."""
        self.defers_groups = bool(self.defer_unsettled_groups)
        if facts is None or self.defer_unsettled_groups is not None or not self.bounds_wait:
            return
        self.defers_groups = self.cannot_defer is None and facts.no_deferral is None
        if not self.defers_groups and self.long_end_every is None and not self.is_continuous:
            self.long_end_every = filled_in(GUARD_EVERY)

    def forget_filled_in(self) -> None:
        """Unsets values that another config computed, so that they are computed from this config's fields."""
        for name, value in vars(self).items():
            if isinstance(value, FilledIn):
                setattr(self, name, None)

    def _check_patience(self) -> None:
        patience = self.long_end_patience
        if isinstance(patience, str) and patience != AUTO:  # from a command line
            try:
                patience = None if patience == "none" else float(patience)
            except ValueError:
                raise ConfigurationError(
                    f"`long_end_patience` ({patience!r}) must be a number, 'auto' or None."
                ) from None
            self.long_end_patience = patience
        if isinstance(patience, float | int) and not patience >= 1:
            raise ConfigurationError(
                f"`long_end_patience` ({patience}) must be at least 1, in multiples of the `num_generations`-th "
                "shortest complete length. Set it to None for the paper's rule, which has no bound."
            )
        if self.long_end_every is not None and patience is None:
            raise ConfigurationError(
                f"`long_end_every` ({self.long_end_every}) has no effect with `long_end_patience` (None), with which "
                "every rollout waits for the long end. Leave it unset."
            )

    def _check_ahead_of_time(self) -> None:
        if isinstance(self.rollout_ahead, str) and self.rollout_ahead.isdecimal():  # from a command line
            self.rollout_ahead = int(self.rollout_ahead)
        if self.rollout_ahead not in (0, 1, CONTINUOUS):
            raise ConfigurationError(
                f"`rollout_ahead` ({self.rollout_ahead!r}) must be 0, 1 or 'continuous': at most one batch is sampled "
                "ahead, or rollouts never end. Correct it."
            )
        if not self.is_continuous:
            for name in ("max_staleness", "kv_after_update"):
                if (value := getattr(self, name)) is not None:
                    raise ConfigurationError(
                        f"`{name}` ({value!r}) has no effect with `rollout_ahead` ({self.rollout_ahead}). Leave it "
                        "unset, or set that to 'continuous'."
                    )
            return
        if self.kv_after_update is None:
            self.kv_after_update = filled_in("recompute")
        if self.max_staleness is None:
            self.max_staleness = filled_in(STALE_BATCHES * self.steps_per_batch)
        if self.max_staleness < self.steps_per_batch:
            raise ConfigurationError(
                f"`max_staleness` ({self.max_staleness}) must be at least {self.steps_per_batch}, the optimizer steps "
                "of one batch: the next batch is sampled meanwhile. Raise it, or set `rollout_ahead=0`."
            )
        reasons = {
            "schedule": self.schedule not in ("darts", "grpo") and "'darts' and 'grpo' alone: it carries tokens over",
            "drop_uniform_groups": self.drop_uniform_groups and "groups that are not replaced for their rewards",
            "defer_unsettled_groups": self.defer_unsettled_groups and "prompts that are not sampled again",
            "audit_share": self.audit_share and "prompts that are not sampled again",
            "long_end_every": self.long_end_every and "one rollout, which is not counted",
        }
        for name, reason in reasons.items():
            if reason:
                raise ConfigurationError(
                    f"`{name}` ({getattr(self, name)!r}) does not run with `rollout_ahead` ('continuous'), which has "
                    f"{reason}. Set one of them to its default."
                )

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

    def _fill_in(self) -> None:
        """Computes the defaults that depend on other fields."""
        low = self.num_generations
        if self.selection is None:
            self.selection = filled_in(SCHEDULES[self.schedule])
        if self.submit_order is None:
            self.submit_order = filled_in(SUBMIT_ORDERS.get(self.schedule, "longest"))
        if self.max_num_generations is None:
            self.max_num_generations = filled_in(2 * low if self.over_provisions else low)
        if self.target_redundancy is None:
            self.target_redundancy = filled_in(min(DEFAULT_REDUNDANCY, self.max_num_generations / low))
        if self.min_num_generations is None:
            spare = SPARE_CANDIDATES if self.over_provisions and self.long_end_patience == AUTO else 0
            self.min_num_generations = filled_in(min(low + spare, self.max_num_generations, self._affordable))
        if self.drop_uniform_groups and self.max_prompt_oversampling is None:
            self.max_prompt_oversampling = filled_in(MAX_OVERSAMPLING)
        for name, defaults in SCHEDULE_DEFAULTS.items():
            value = getattr(self, name)
            if value is None:
                setattr(self, name, filled_in(defaults.get(self.schedule)))
            elif self.schedule not in defaults and not (name == "mask_stale_after" and self.is_continuous):
                raise ConfigurationError(
                    f"`{name}` ({value!r}) has no effect with `schedule` ({self.schedule!r}). Leave it unset, or set "
                    f"`schedule` to {' or '.join(map(repr, defaults))}."
                )

    @property
    def _affordable(self) -> int:
        """Average number of candidates per prompt within the budget."""
        return math.floor(self.target_redundancy * self.num_generations + 1e-9)  # 1.1 × 10 is 11

    def _check_selection(self) -> None:
        schedule, selection = self.schedule, self.selection
        if (schedule == "grpo") != (selection == "all") and schedule in ("grpo", "darts"):
            other = {"grpo": "darts", "darts": "grpo"}[schedule]
            raise ConfigurationError(
                f"`selection` ({selection!r}) does not go with `schedule` ({schedule!r}), which "
                f"{'keeps all that it samples' if schedule == 'grpo' else 'samples more than it keeps'}. Set "
                f"`schedule={other!r}`, or leave `selection` unset."
            )
        if selection == "dual_end" and self.num_longest >= self.num_generations:
            raise ConfigurationError(
                f"`num_longest` ({self.num_longest}) must be at least 0 and less than `num_generations` "
                f"({self.num_generations}), because the other rows are the shortest ones. The paper uses 1."
            )

    def _check_unread(self) -> None:
        """Raises for values without an effect, unless they describe what happens anyway."""
        if not self.over_provisions:
            remedy = "schedule='darts'" if self.schedule == "grpo" else "selection='dual_end'"
            reason = f"`schedule` ({self.schedule!r}) and `selection` ('all'), which keep every candidate"
            self._refuse_unread(OF_SELECTION, reason, remedy)
        if self.selection == "uniform":
            reason = "`selection` ('uniform'), which does not look at lengths"
            self._refuse_unread({"num_longest": (1,)}, reason, "selection='dual_end'")
        if not self.reads_lengths:
            reason = f"`schedule` ({self.schedule!r}) and `submit_order` ('arrival'), which do not depend on lengths"
            self._refuse_unread({"length_ema": (DEFAULT_EMA,)}, reason, "submit_order='longest'")

    def _keep_all(self, reason: str) -> None:
        """
        Samples as many candidates as are kept, because of `reason`. Raises for settings that choose among candidates,
        unless their values were computed.
        """
        self._refuse_unread({"selection": ("all",), "defer_unsettled_groups": (False, None), **OF_SELECTION}, reason)
        self.selection, self.long_end_every, self.defers_groups = filled_in("all"), None, False
        self.max_num_generations = self.min_num_generations = filled_in(self.num_generations)
        self.target_redundancy = filled_in(1.0)

    def _refuse_unread(self, unread: Mapping[str, tuple[Any, ...]], reason: str, remedy: str | None = None) -> None:
        for name, choices in unread.items():
            value = getattr(self, name)
            values = [self.num_generations if choice == "M" else choice for choice in choices]
            if value not in values and not isinstance(value, FilledIn):
                other = f", or set `{remedy}`" if remedy else ""
                raise ConfigurationError(
                    f"`{name}` ({value!r}) has no effect with {reason}. Leave it unset or at {values[0]!r}{other}."
                )

    def _check_budget(self) -> None:
        low, high = self.num_generations, self.max_num_generations
        if high < low:
            raise ConfigurationError(
                f"`max_num_generations` ({high}) must be at least `num_generations` ({low}). Raise it, or leave it "
                "unset for 2 × `num_generations`."
            )
        if not 1 <= self.target_redundancy <= high / low:
            raise ConfigurationError(
                f"`target_redundancy` ({self.target_redundancy}) must be between 1 and `max_num_generations` / "
                f"`num_generations` ({high / low:g}). Correct it, or raise `max_num_generations`."
            )
        if not low <= self.min_num_generations <= high:
            raise ConfigurationError(
                f"`min_num_generations` ({self.min_num_generations}) must be between `num_generations` ({low}) and "
                f"`max_num_generations` ({high}). Correct it, or leave it unset."
            )
        if self.redundancy_cost_weight is None and self.min_num_generations > self._affordable:
            raise ConfigurationError(
                f"`min_num_generations` ({self.min_num_generations}) must be at most `target_redundancy` × "
                f"`num_generations` ({self.target_redundancy * low:g}), the average per prompt. Lower it, or raise "
                "`target_redundancy`."
            )

    def _check_prompts(self) -> None:
        if self.mask_stale_after is not None and not (self.keeps_tokens or self.is_continuous):
            raise ConfigurationError(
                f"`mask_stale_after` ({self.mask_stale_after}) has no effect with `sorted_mode` "
                f"({self.sorted_mode!r}), with which all tokens are of the newest policy. Leave it unset."
            )
        if self.drop_uniform_groups and self.schedule not in ("darts", "grpo"):
            raise ConfigurationError(
                f"`drop_uniform_groups` (True) does not run with `schedule` ({self.schedule!r}), which chooses its "
                "prompts itself. Set it to `False`, or use `schedule='darts'` or 'grpo'."
            )
        for name in ("defer_unsettled_groups", "audit_share"):
            if value := getattr(self, name):
                self._check_deferral(name, value)
        if self.max_prompt_oversampling is not None and not self.drop_uniform_groups:
            raise ConfigurationError(
                f"`max_prompt_oversampling` ({self.max_prompt_oversampling}) has no effect without "
                "`drop_uniform_groups`. Leave it unset, or set that to `True`."
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

    def _check_deferral(self, name: str, value: Any) -> None:
        cause = self.cannot_defer
        if cause is None and self.audit_share and self.selection == "uniform":
            cause = "`selection` ('uniform') and audits, which compare rows selected by length with plain sampling"
        if cause is not None:
            raise ConfigurationError(
                f"`{name}` ({value}) does not run with {cause}. Set one of them to another value."
            )

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
        return own or self.rollout_ahead != 0 or self.drop_uniform_groups or self.scores_early

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
        """Beginning of an error message about a schedule that `buffers_prompts`."""
        if self.rollout_ahead:
            return f"`rollout_ahead` ({self.rollout_ahead!r}) samples each batch before its turn, and does not run"
        name = self._own_prompts_of
        given = f"`{name}` ({getattr(self, name)!r})"
        return f"{given} trains on other prompts than the data loader's next ones, and does not run"

    @property
    def without_own_prompts(self) -> str:
        """Remedy for an error about `own_prompts`."""
        if self.rollout_ahead:
            return "`rollout_ahead=0`"
        name = self._own_prompts_of
        return "`schedule='darts'`" if name == "schedule" else f"`{name}={type(getattr(self, name))(0)}`"

    @property
    def _own_prompts_of(self) -> str:
        """The setting by which the schedule trains on other prompts than the loader's next ones."""
        flags = ("drop_uniform_groups", "defer_unsettled_groups", "audit_share")
        return next((name for name in flags if getattr(self, name)), "schedule")

    @property
    def keeps_tokens(self) -> bool:
        """Whether candidates that are unfinished when a batch is ready continue in the next rollout."""
        return self.schedule == "partial_rollout" or self.sorted_mode == "partial"

    def policies(
        self,
        expected_lengths: Sequence[float] | None = None,
        batch_stop: BatchStop | None = None,
        placement: Placement | None = None,
        rollout: int = 0,
        tail: TailServers | None = None,
    ) -> SchedulePolicies:
        """
        Returns the policies of one rollout. Groups start in `submit_order` of their expected lengths (NaN if unknown),
        unless a `placement` is given. By default, the batch is ready when all groups are. `rollout` counts from 0 and
        is used for `long_end_every`. `tail` describes the tail servers, if any.
        """
        if placement is None and self.ranks and expected_lengths is not None:
            placement = LengthOrder(expected_lengths, self.submit_order == "longest")
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
            None if tail is None else TailPolicy(tail, self.tail_switch_at, self._long_groups(expected_lengths)),
        )

    def _long_groups(self, expected_lengths: Sequence[float] | None) -> frozenset[int]:
        """Returns the groups that tail servers decode from the start (StreamRL's skewness-aware dispatching)."""
        if not self.tail_share or expected_lengths is None:
            return frozenset()
        lengths = known_lengths(expected_lengths)
        ranking = sorted(range(len(lengths)), key=lambda group: -lengths[group])
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
