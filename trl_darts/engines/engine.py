"""The interface of all engines, which decode rollouts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ..scheduling import (
    Admission,
    FinishedGroups,
    FreshGroups,
    GroupPlan,
    GroupResult,
    Placement,
    RolloutResult,
    Scheduler,
)
from ..scheduling.ledger import Ledger
from ..training.conversations import Turns
from ..training.rows import KeptRows, Tokens
from .batch import PromptBatch
from .prefixes import VerifiedPrefixes


OnProgress = Callable[[Ledger], None]
OnGroup = Callable[[GroupResult], None]


@dataclass(frozen=True)
class RolloutPlan:
    """Decisions of the main process before a rollout, and the scheduler that decides during it."""

    admission: Admission
    groups: list[GroupPlan]
    scheduler: Scheduler
    # The next groups of a rollout whose groups are added and taken while it runs, instead of a rollout of its own.
    takes: FreshGroups | FinishedGroups | None = None
    keeps_kv: bool = False  # of a rollout without an end: whether keys and values survive a weight sync
    # Of the first groups of a rollout without an end: called in any thread with each of its groups whose rows are
    # selected. Returns at once.
    on_group: OnGroup | None = None
    reuse: VerifiedPrefixes | None = None  # earlier answers, with which the groups begin


class Engine(ABC):
    """Decodes rollouts. Methods are called on every process at once, unless they say otherwise."""

    @abstractmethod
    def check_prompts(self, prompts: Sequence[Tokens], where: str, first_index: int = 0) -> None:
        """Raises [`ConfigurationError`] if prompts leave no room for a completion. Called on the main process."""

    @abstractmethod
    def placement(self, admission: Admission, batch: PromptBatch) -> Placement | None:
        """Assigns candidates to engines, if that is decided before the rollout. Called on the main process."""

    @abstractmethod
    def run(
        self,
        plan: RolloutPlan | None,
        batch: PromptBatch,
        on_progress: OnProgress | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> RolloutResult | None:
        """
        Decodes one rollout of the prompts in `batch`, or waits for it if it was launched with the same plan.

        Plan and result are `None` on all processes but the main one. The result has the rows' tokens and log-probs.
        `on_progress` is called on the main process while candidates decode, `meanwhile` on the others while they wait
        for servers. If the engine fails, a [`GenerationError`] is raised on every process.
        """

    @abstractmethod
    def later_turn(self, batch: PromptBatch) -> KeptRows | None:
        """Decodes the next turn of this process's tool loops, or returns `None` to let TRL generate it."""

    def turns(self, num_conversations: int) -> "AbstractContextManager[Turns | None]":
        """
        Returns what decodes turns of this process's conversations one by one, or `None` where TRL takes all of them
        through each turn together.
        """
        return nullcontext()

    def converse(
        self,
        num_conversations: int,
        play: Callable[[Turns], RolloutResult],
        meanwhile: Callable[[], None] | None = None,
    ) -> RolloutResult | None:
        """
        Has the main process `play` conversations with what decodes their turns, and returns its result there. Raises
        for an engine in the trainer's process.
        """
        raise NotImplementedError

    @abstractmethod
    def launch(self, plan: RolloutPlan | None, batch: PromptBatch) -> None:
        """Starts a rollout of text and returns at once. Raises for an engine in the trainer's process."""

    def extend(self, plan: RolloutPlan, batch: PromptBatch) -> None:  # noqa: B027
        """
        Adds prompts to the rollout without an end of the plan's scheduler, which begins with the first ones. Called on
        the main process.
        """

    def drain(self, step: int) -> None:  # noqa: B027  (nothing to do if `launch` raises; the same for the next two)
        """
        Waits for a launched rollout and keeps its result for `run`. Called before the weights change to those of a
        `step`. A rollout without an end goes on.
        """

    def cancel(self) -> None:  # noqa: B027
        """Aborts a launched rollout."""

    def wait_for_aborts(self) -> None:  # noqa: B027
        """Waits until aborted requests have ended. Called on the main process."""
