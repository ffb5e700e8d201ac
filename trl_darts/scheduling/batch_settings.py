"""
`BatchSettings`: which prompts go into a batch, with its checks and what follows from it. Unless it says otherwise, a
batch is the data loader's next prompts, sampled in their turn.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from .policies import check_choice
from .setting import FilledIn, filled_in, setting


MAX_OVERSAMPLING = 4.0  # with `drop_uniform_groups`: where 3 groups of 4 are uniform, most batches are full
SORTED_MODES = ("on_policy", "partial")
# What means something with some schedules only, and its defaults there.
SCHEDULE_DEFAULTS: dict[str, dict[str, Any]] = {
    "prompt_oversampling": {"tail_batching": 1.25, "partial_rollout": 2.0},
    "max_partial_age": {"partial_rollout": 4},
    "mask_stale_after": {"partial_rollout": None, "sorted": None},
    "sorted_group_batches": {"sorted": 4},
    "sorted_mode": {"sorted": "on_policy"},
}


@dataclass(kw_only=True)
class BatchSettings:
    """Part of [`ScheduleSettings`], whose `schedule` is read where a check needs it."""

    if TYPE_CHECKING:
        schedule: str

    prompt_oversampling: float | None = setting(
        None,
        "Prompts that are started for each that is trained on, with 'tail_batching' (defaults to 1.25) and "
        "'partial_rollout' (defaults to 2).",
    )
    max_partial_age: int | None = setting(
        None,
        "Rollouts that may end without a prompt of 'partial_rollout' once it is in flight; the next one waits for "
        "it. Defaults to 4.",
    )
    mask_stale_after: int | None = setting(
        None,
        "Tokens that were sampled by a policy more than this many optimizer steps old have no weight in the loss. "
        "Only with schedules that keep tokens. Unset, all are trained on, with TRL's importance sampling correction.",
    )
    sorted_group_batches: int | None = setting(
        None, "Batches of prompts that enter together with 'sorted'. Defaults to 4."
    )
    sorted_mode: str | None = setting(
        None,
        "What becomes of unfinished prompts with 'sorted': 'on_policy' begins them anew, 'partial' goes on with their "
        "tokens. Defaults to 'on_policy'.",
    )

    rollout_ahead: int = setting(
        0,
        "1 samples the next batch while the optimizer steps on this one, so that servers and trainer work at the same "
        "time. What is trained on then comes from the weights of one batch before, with TRL's importance sampling "
        "correction. 0 waits for each rollout. Only with `vllm_mode='server'`.",
    )

    drop_uniform_groups: bool = setting(
        False,
        "Whether groups whose rewards are all equal, which teach nothing, leave the batch for further prompts, until "
        "all of its groups have a spread of rewards (DAPO's dynamic sampling). Only with `schedule` 'darts' or 'grpo' "
        "and `vllm_mode='server'`.",
    )
    max_prompt_oversampling: float | None = setting(
        None,
        "Prompts sampled for each that is trained on, at most, with `drop_uniform_groups`. Groups that are missing "
        "then are filler rows without weight. Defaults to 4.",
    )

    def forget_filled_in(self) -> None:
        """Unsets what another config had filled in: this one may have other fields."""
        for name, value in vars(self).items():
            if isinstance(value, FilledIn):
                setattr(self, name, None)

    def _fill_in_batches(self) -> None:
        """A schedule's own defaults; what it does not know must be unset."""
        for name, defaults in SCHEDULE_DEFAULTS.items():
            value = getattr(self, name)
            if value is None:
                setattr(self, name, filled_in(defaults.get(self.schedule)))
            elif self.schedule not in defaults:
                raise ConfigurationError(
                    f"`{name}` ({value!r}) has no effect with `schedule` ({self.schedule!r}). Leave it unset, or set "
                    f"`schedule` to {' or '.join(map(repr, defaults))}."
                )

    def _check_batches(self) -> None:
        self._check_rounds()
        self._check_uniform()

    def _check_rounds(self) -> None:
        oversampling = self.prompt_oversampling
        if oversampling is not None and not 1 < oversampling < math.inf:
            raise ConfigurationError(
                f"`prompt_oversampling` ({oversampling}) must be greater than 1: the prompts started for each that is "
                "trained on."
            )
        for name, low in (("max_partial_age", 1), ("mask_stale_after", 0), ("sorted_group_batches", 2)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigurationError(f"`{name}` ({value}) must be at least {low}.")
        if self.rollout_ahead not in (0, 1):
            raise ConfigurationError(
                f"`rollout_ahead` ({self.rollout_ahead}) must be 0 or 1: no more than one batch is sampled ahead."
            )
        if self.schedule == "sorted":
            check_choice("sorted_mode", self.sorted_mode, SORTED_MODES)
        if self.mask_stale_after is not None and not self.keeps_tokens:
            raise ConfigurationError(
                f"`mask_stale_after` ({self.mask_stale_after}) has no effect with `sorted_mode` "
                f"({self.sorted_mode!r}): all tokens are of the newest policy. Leave it unset."
            )

    def _check_uniform(self) -> None:
        if self.drop_uniform_groups and self.schedule not in ("darts", "grpo"):
            raise ConfigurationError(
                f"`drop_uniform_groups` (True) does not run with `schedule` ({self.schedule!r}), which chooses its "
                "prompts itself. Set it to `False`, or use `schedule='darts'` or 'grpo'."
            )
        oversampling = self.max_prompt_oversampling
        if oversampling is not None and not self.drop_uniform_groups:
            raise ConfigurationError(
                f"`max_prompt_oversampling` ({oversampling}) has no effect without `drop_uniform_groups`. Leave it "
                "unset, or set that to `True`."
            )
        if oversampling is not None and not 1 < oversampling < math.inf:
            raise ConfigurationError(
                f"`max_prompt_oversampling` ({oversampling}) must be greater than 1 and finite: what replaces a group "
                "are further prompts."
            )
        if self.drop_uniform_groups and oversampling is None:
            self.max_prompt_oversampling = filled_in(MAX_OVERSAMPLING)

    @property
    def buffers_prompts(self) -> bool:
        """Whether prompts are taken before their turn, or outlive a rollout: batches are then the rollout buffer's."""
        own = self.schedule in ("tail_batching", "partial_rollout", "sorted")
        return own or self.rollout_ahead > 0 or self.drop_uniform_groups

    @property
    def own_prompts(self) -> str:
        """Of a schedule that `buffers_prompts`, the beginning of an error."""
        if self.rollout_ahead:
            return f"`rollout_ahead` ({self.rollout_ahead}) samples each batch before its turn, and does not run"
        given = "`drop_uniform_groups` (True)" if self.drop_uniform_groups else f"`schedule` ({self.schedule!r})"
        return f"{given} trains on other prompts than the data loader's next ones, and does not run"

    @property
    def without_own_prompts(self) -> str:
        """What to set instead."""
        if self.rollout_ahead:
            return "`rollout_ahead=0`"
        return "`drop_uniform_groups=False`" if self.drop_uniform_groups else "`schedule='darts'`"

    @property
    def keeps_tokens(self) -> bool:
        """Whether what is unfinished when a batch is ready goes on in the next rollout."""
        return self.schedule == "partial_rollout" or self.sorted_mode == "partial"
