"""What decides the rounds of a rollout buffer, and owns what it learns from them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..scheduling import Admission, AdmissionPolicy, GroupPlan, PromptInfo
from .buffer import BufferEntry, RolloutBuffer, Round, begin_again


@dataclass(frozen=True)
class Outcome:
    """What becomes of a round's groups once they are scored."""

    left: list[int] = field(default_factory=list)  # prompts that leave the buffer and are not trained on
    counts: dict[str, int] = field(default_factory=dict)  # metrics, summed over the rounds of a batch
    estimates: dict[str, float] = field(default_factory=dict)  # metrics, of which the newest counts
    warnings: list[str] = field(default_factory=list)


@dataclass
class RoundPolicy(ABC):
    """Which prompts go into the next rollout, and what becomes of them?"""

    scores_first: ClassVar[bool] = False  # whether groups are scored, and `judge`d, before their batch is taken
    shown_states: ClassVar[tuple[str, ...]] = ("waiting", "partial", "complete")  # in the metrics
    has_long_rounds: ClassVar[bool] = False

    num_groups: int  # N, prompts per batch
    was_long: bool = field(default=False, init=False)  # whether the last round was a long one

    def buffer(self) -> RolloutBuffer:
        """Returns an empty buffer that keeps what this policy needs."""
        return RolloutBuffer(keeps_tokens=False)

    @abstractmethod
    def lacking(self, buffer: RolloutBuffer) -> int:
        """Returns how many more prompts it wants from the loader before the next round."""

    @abstractmethod
    def next(self, buffer: RolloutBuffer) -> Round:
        """
        Returns the next round. Called with as many prompts as `lacking` asked for, or with all that are left.
        """

    def enter(self, buffer: RolloutBuffer, prompt: PromptInfo, row: dict[str, Any], tokens: list[int]) -> BufferEntry:
        """Adds a prompt of the loader, on every process."""
        return buffer.enter(prompt, row, tokens)

    def begin(
        self, buffer: RolloutBuffer, current: Round, num_generations: int, admission: AdmissionPolicy
    ) -> tuple[Admission, list[GroupPlan]]:
        """Puts a round's prompts in flight."""
        self.was_long = current.long
        return buffer.begin(current, num_generations, admission)

    def judge(self, buffer: RolloutBuffer, current: Round, is_last: bool) -> Outcome:
        """Decides about the scored groups of a round. `is_last` tells whether its batch is the training's last."""
        raise NotImplementedError

    def take(self, buffer: RolloutBuffer, current: Round, num_dropped: int = 0) -> list[BufferEntry]:
        """Returns what is trained on now, which has left the buffer, as `num_dropped` prompts have in this round."""
        taken, surplus = buffer.take(current, self.order, num_dropped)
        self.keep(buffer, surplus)
        return taken

    def order(self, entry: BufferEntry) -> float:
        """Of the complete prompts, the smallest are trained on first."""
        return entry.entry_id

    def keep(self, buffer: RolloutBuffer, surplus: Sequence[BufferEntry]) -> None:
        """Treats complete prompts that a batch had no room for: a policy that is an old one then sampled them."""
        if not buffer.keeps_tokens:
            for entry in surplus:
                entry.num_deferrals += 1
                begin_again(entry)

    def none_left(self, num_dropped: int) -> str | None:
        """Returns an error where the batch has no group, if that is this policy's doing."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learned, for JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  (most learn nothing)
        """Restores what `state_dict` returned, maybe that of another policy."""
