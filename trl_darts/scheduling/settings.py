"""
The settings of a schedule: declared, documented, checked and turned into policies here, and nowhere else. The
trainer's config inherits them, the simulator uses them by themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from ..policy import BudgetController, LatencyCurve, LengthTracker
from .admission import AdmissionPolicy, UniformAdmission, VarianceAdmission
from .batch_settings import BatchSettings
from .placement import LengthOrder, known_lengths
from .policies import (
    AUTO,
    SCHEDULES,
    SELECTIONS,
    BatchStop,
    Placement,
    SchedulePolicies,
    check_choice,
    make_policies,
)
from .setting import FilledIn, check_types, filled_in, setting
from .tail import TailPolicy, TailServers


# M_total is about 1.5·N·M on average in the paper (Appendix B).
DEFAULT_REDUNDANCY = 1.5
# Candidates beyond M of the calmest prompt where the wait is bounded. In simulation with 1 % of never-ending answers
# rollouts are 2.5 times as fast with 2 as with none, and hardly faster with 3.
SPARE_CANDIDATES = 2
# A response that was aborted or cut off is taken to be at most this many times as long as the limit. At the limit
# itself, a prompt whose responses are all cut off would look calm.
HORIZON = 2
SUBMIT_ORDERS = ("longest", "shortest", "arrival")


@dataclass
class ScheduleSettings(BatchSettings):
    """
    What shapes rollouts: what is sampled, what is waited for and what is kept. The symbols in brackets are those of
    [DARTS](https://huggingface.co/papers/2605.30859). Each field's help says what it means.

    Raises:
        [`ConfigurationError`]: If a setting can't work. Names it, its value, the rule and a remedy.
    """

    # Before `num_generations`, for those who give them by position.
    schedule: str = setting(
        "darts",
        "Which system decides about rollouts, see docs/schedules.md. 'darts' samples up to `max_num_generations` "
        "candidates per prompt and keeps the shortest and the longest complete ones; 'grpo' samples and keeps "
        "`num_generations`, as TRL does; 'tail_batching' defers the slowest prompts to rounds of their own; "
        "'partial_rollout' goes on with unfinished candidates in the next step; 'sorted' takes several batches at "
        "once and trains on those first that finish first.",
    )
    num_generations: int = setting(8, "Number of generations per prompt that are trained on [M].")

    # What is sampled
    max_num_generations: int = setting(
        None, "Most candidates of one prompt [M_up]. Defaults to twice `num_generations`."
    )
    min_num_generations: int = setting(
        None,
        "Fewest candidates of one prompt [M_low]. With `long_end_patience='auto'` defaults to `num_generations + 2`, "
        "or to what `target_redundancy` and `max_num_generations` allow where that is less: a prompt without a spare "
        "candidate waits for each of its own. Otherwise defaults to `num_generations`, as in the paper. Where lengths "
        "hardly spread, or engines are full, spare candidates can't pay, and there are none unless it is set.",
    )
    target_redundancy: float = setting(
        None,
        "Candidates per row trained on, on average over a batch, while response lengths spread as they did in the "
        "first steps [M_total / (N·M)]. The budget follows their spread from there. Between 1 and "
        "`max_num_generations / num_generations`. Defaults to 1.5, or to the upper end where that is less.",
    )
    redundancy_cost_weight: float | None = setting(
        None,
        "Weight of rollout time, in seconds, against variety in the budget [λ]. A larger one makes the budget "
        "smaller. Needs `latency_curve`, and replaces `target_redundancy`. Unset, the budget is that of "
        "`target_redundancy`.",
    )
    length_ema: float = setting(0.5, "Weight of the newest observation in the moving averages of response lengths.")

    # What is waited for and kept
    num_longest: int = setting(
        1,
        "How many of a prompt's `num_generations` rows are its longest complete candidates [L]. The others are its "
        "shortest ones.",
    )
    tail_pruning: bool = setting(
        True,
        "Whether a prompt that was given `max_num_generations` candidates stops at its `num_generations`-th complete "
        "one, keeps those and aborts the rest.",
    )
    # In this order, `str` is what a command line's value is: `HfArgumentParser` takes the type in the middle.
    long_end_patience: float | str | None = setting(
        AUTO,
        "Bound on the wait for the long end. With 'auto', a prompt that has `num_generations` complete candidates "
        "goes on as long as another prompt is still short of them, and no longer. A number, at least 1, aborts those "
        "that reach this many times the `num_generations`-th shortest complete length. None ('none' on a command "
        "line), the paper's rule, waits for the whole pool of every prompt that `tail_pruning` does not stop.",
    )
    long_end_every: int | None = setting(
        None,
        "One rollout in so many waits for the long end as in the paper, as if `long_end_patience` were None: long "
        "wrong answers are then trained on, and lengths are known to their end. At least 2. Unset, none does.",
    )
    selection: str = setting(
        None,
        "What is kept of a prompt's candidates: 'dual_end', the shortest and the longest complete ones; 'uniform', "
        "those that came to an end, whatever their length; 'all', where no more are sampled than are kept. Defaults "
        "to 'dual_end' with `schedule='darts'` and to 'all' otherwise. Tail batching, partial rollouts and sorted "
        "batches can be combined with any.",
    )

    # Where candidates run
    submit_order: str = setting(
        None,
        "In which order candidates start, by the lengths that are expected of them: 'longest' first, 'shortest' "
        "first, or in that of their 'arrival'. Matters where engines have no room for all at once. Defaults to "
        "'shortest' with `schedule='sorted'`, whose batches are those that finish first, to 'arrival' with 'grpo', as "
        "in TRL, and to 'longest' otherwise.",
    )
    tail_switch_at: int | None = setting(
        None,
        "Unfinished candidates at which what is left of a rollout moves to `vllm_tail_server_url`. Unset, it moves "
        "when that is predicted to pay, from the profile of both kinds of servers in `latency_curve`. 0 for never.",
    )
    tail_share: float = setting(
        0.0,
        "Share of prompts, those that are expected to be longest, whose candidates `vllm_tail_server_url` decodes "
        "from the start.",
    )

    def __post_init__(self) -> None:
        self.check_types()
        patience = self.long_end_patience
        if isinstance(patience, str) and patience.replace(".", "", 1).isdigit():  # of a command line
            self.long_end_patience = float(patience)
        elif patience == "none":
            self.long_end_patience = None
        self._check_schedule()
        self.forget_filled_in()
        self._fill_in_batches()
        self._fill_in()
        self._check_selection()
        self._check_patience()
        self._check_long_end_every()
        self._check_budget()
        self._check_batches()
        self._check_placement()

    def check_types(self) -> None:
        """Before anything is computed of the values: `'false'` would count as true, and `'1.5'` end in a TypeError."""
        check_types(self, ScheduleSettings)

    def _check_schedule(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        if self.num_generations < 1:
            raise ConfigurationError(f"`num_generations` ({self.num_generations}) must be at least 1.")

    def _fill_in(self) -> None:
        if self.max_num_generations is None:
            self.max_num_generations = filled_in(2 * self.num_generations)
        if self.target_redundancy is None:
            most = self.max_num_generations / self.num_generations
            self.target_redundancy = filled_in(min(DEFAULT_REDUNDANCY, most))
        if self.submit_order is None:
            order = {"grpo": "arrival", "sorted": "shortest"}.get(self.schedule, "longest")
            self.submit_order = filled_in(order)
        if self.selection is None:
            self.selection = filled_in(SCHEDULES[self.schedule])

    def _check_selection(self) -> None:
        schedule, selection = self.schedule, self.selection
        check_choice("selection", selection, SELECTIONS)
        if (schedule == "grpo") != (selection == "all") and schedule in ("grpo", "darts"):
            other = {"grpo": "darts", "darts": "grpo"}[schedule]
            raise ConfigurationError(
                f"`selection` ({selection!r}) does not go with `schedule` ({schedule!r}), which "
                f"{'keeps all that it samples' if schedule == 'grpo' else 'samples more than it keeps'}. Set "
                f"`schedule={other!r}`, or leave `selection` unset."
            )
        self._check_unread()
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

    def _check_unread(self) -> None:
        """Where all that is sampled is kept, values are refused that say something else."""
        if self.over_provisions:
            return
        rows = self.num_generations
        said_anyhow: dict[str, tuple[Any, ...]] = {
            "max_num_generations": (rows, None),
            "min_num_generations": (rows, None),
            "target_redundancy": (1, None),
            "redundancy_cost_weight": (None,),
            "num_longest": (1,),  # the default; the others' default is filled in, or says what happens
            "long_end_patience": (AUTO, None),  # both mean the same: what is wanted is waited for
            "long_end_every": (None,),
        }
        for name, values in said_anyhow.items():
            value = getattr(self, name)
            if value not in values and not isinstance(value, FilledIn):
                remedy = "schedule='darts'" if self.schedule == "grpo" else "selection='dual_end'"
                raise ConfigurationError(
                    f"`{name}` ({value!r}) has no effect with `schedule` ({self.schedule!r}) and `selection` ('all'): "
                    f"all that is sampled is kept. Leave it unset or at {values[0]!r}, or set `{remedy}`."
                )

    def _check_patience(self) -> None:
        patience = self.long_end_patience
        if patience in (None, AUTO):
            return
        if isinstance(patience, str):
            raise ConfigurationError(f"`long_end_patience` ({patience!r}) must be a number, 'auto' or None.")
        if not (patience or 0) >= 1:
            raise ConfigurationError(
                f"`long_end_patience` ({patience}) must be at least 1, in multiples of the `num_generations`-th "
                "shortest complete length. Set it to None for the paper's rule, which has no bound."
            )

    def _check_long_end_every(self) -> None:
        every = self.long_end_every
        if every is None:
            return
        if every < 2:
            raise ConfigurationError(
                f"`long_end_every` ({every}) must be at least 2. Set `long_end_patience=None` for a wait in every "
                "rollout, or leave it unset for none."
            )
        if self.long_end_patience is None:
            raise ConfigurationError(
                f"`long_end_every` ({every}) has no effect with `long_end_patience` (None): every rollout waits so. "
                "Leave it unset."
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
                f"`redundancy_cost_weight` ({self.redundancy_cost_weight}) must be positive and finite. Leave it "
                "unset for a budget by `target_redundancy`."
            )
        self._set_minimum()
        if not 0 < self.length_ema <= 1:
            raise ConfigurationError(
                f"`length_ema` ({self.length_ema}) must be greater than 0 and at most 1, the weight of the newest "
                "observation."
            )

    def _set_minimum(self) -> None:
        low, high = self.num_generations, self.max_num_generations
        affordable = math.floor(self.target_redundancy * low + 1e-9)  # 1.1 × 10 is 11
        if self.min_num_generations is None:
            spare = SPARE_CANDIDATES if self.over_provisions and self.long_end_patience == AUTO else 0
            self.min_num_generations = filled_in(min(low + spare, high, affordable))
        if not low <= self.min_num_generations <= high:
            raise ConfigurationError(
                f"`min_num_generations` ({self.min_num_generations}) must be between `num_generations` ({low}) and "
                f"`max_num_generations` ({high}). Correct it, or leave it unset."
            )
        if self.redundancy_cost_weight is None and self.min_num_generations > affordable:
            raise ConfigurationError(
                f"`min_num_generations` ({self.min_num_generations}) must be at most `target_redundancy` × "
                f"`num_generations` ({self.target_redundancy * low:g}), what there is for each prompt. Lower it, "
                "or raise `target_redundancy`."
            )

    def _check_placement(self) -> None:
        check_choice("submit_order", self.submit_order, SUBMIT_ORDERS)
        if self.tail_switch_at is not None and self.tail_switch_at < 0:
            raise ConfigurationError(
                f"`tail_switch_at` ({self.tail_switch_at}) must be at least 1 candidate, or 0 for never. Leave it "
                "unset for a switch when it is predicted to pay."
            )
        if not 0 <= self.tail_share < 1:
            raise ConfigurationError(
                f"`tail_share` ({self.tail_share}) must be at least 0 and less than 1: the main servers decode the "
                "other prompts."
            )
        if self.tail_share and not self.ranks:
            raise ConfigurationError(
                f"`tail_share` ({self.tail_share}) needs expected lengths, which nothing asks for with `submit_order` "
                f"({self.submit_order!r}). Set `submit_order='longest'`, or leave it out."
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
        """Whether the order of submission asks for expected lengths."""
        return self.submit_order != "arrival"

    def policies(
        self,
        expected_lengths: Sequence[float] | None = None,
        batch_stop: BatchStop | None = None,
        placement: Placement | None = None,
        rollout: int = 0,
        tail: TailServers | None = None,
    ) -> SchedulePolicies:
        """
        The policies of one rollout, complete. Groups start in `submit_order` by their expected lengths (NaN where
        nothing is known), unless their `placement` is decided already. `batch_stop` defaults to the end of all groups;
        see [`Round`]. `rollout` counts from 0, for `long_end_every`. `tail` is what is known of tail servers, where
        there are any.
        """
        if placement is None and self.ranks and expected_lengths is not None:
            placement = LengthOrder(expected_lengths, self.submit_order == "longest")
        every = self.long_end_every
        return make_policies(
            self.schedule,
            self.num_generations,
            self.max_num_generations,
            self.num_longest,
            self.tail_pruning,
            None if every and (rollout + 1) % every == 0 else self.long_end_patience,
            self.selection,
            batch_stop,
            placement,
            None if tail is None else TailPolicy(tail, self.tail_switch_at, self._long_groups(expected_lengths)),
        )

    def _long_groups(self, expected_lengths: Sequence[float] | None) -> frozenset[int]:
        """Those that tail servers decode from the start (StreamRL's skewness-aware dispatching)."""
        if not self.tail_share or expected_lengths is None:
            return frozenset()
        lengths = known_lengths(expected_lengths)
        ranking = sorted(range(len(lengths)), key=lambda group: -lengths[group])
        return frozenset(ranking[: max(1, round(self.tail_share * len(ranking)))])

    def tracker(self, max_completion_length: int, source: str = "") -> LengthTracker:
        """A new tracker of response lengths."""
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
        The policy that gives each prompt its candidates, for `num_engines` that decode a batch together, `num_slots`
        sequences of it at once (no limit by default). The curve is that of one engine, and [`ConfigurationError`] is
        raised if it is missing where `redundancy_cost_weight` needs it. A switch to `tail` servers is predicted from
        lengths, which are learned for it under any schedule.
        """
        if not self.over_provisions:
            learns = self.ranks or (tail is not None and tail.times is not None)
            return UniformAdmission(self.num_generations, tracker if learns else None)
        budget = BudgetController(
            self.num_generations,
            self.max_num_generations,
            self.target_redundancy,
            self.redundancy_cost_weight,
            latency_curve,
            num_engines,
            self.min_num_generations,
            num_slots,
            not isinstance(self.min_num_generations, FilledIn),  # a user asks for the spare candidates
        )
        return VarianceAdmission(tracker, budget)
