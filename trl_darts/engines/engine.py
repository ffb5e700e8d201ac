"""What every engine can do: decode rollouts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..scheduling import Admission, GroupPlan, Placement, RolloutResult, Scheduler
from ..scheduling.ledger import Ledger
from ..training.rows import KeptRows, Tokens
from .batch import PromptBatch


OnProgress = Callable[[Ledger], None]


@dataclass(frozen=True)
class RolloutPlan:
    """What the main process decides before a rollout: the groups, and the scheduler that decides during it."""

    admission: Admission
    groups: list[GroupPlan]
    scheduler: Scheduler


class Engine(ABC):
    """Decodes rollouts. Methods are called on every process at once, unless they say otherwise."""

    @abstractmethod
    def check_prompts(self, prompts: Sequence[Tokens], where: str, first_index: int = 0) -> None:
        """Raises [`ConfigurationError`] if prompts leave no room for a completion. Called on the main process."""

    @abstractmethod
    def placement(self, admission: Admission, batch: PromptBatch) -> Placement | None:
        """Returns which candidate runs where, if that is decided before the rollout. Called on the main process."""

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

        The main process has a plan and gets the result, with tokens and log-probs of the rows; the others have `None`
        for both. `on_progress` is called on the main process while candidates decode, `meanwhile` on the others while
        they wait for servers. If the engine fails, a [`GenerationError`] is raised on every process.
        """

    @abstractmethod
    def later_turn(self, batch: PromptBatch) -> KeptRows | None:
        """Decodes the next turn of this process's tool loops, by itself. `None` where TRL generates them."""

    @abstractmethod
    def launch(self, plan: RolloutPlan | None, batch: PromptBatch) -> None:
        """Starts a rollout of text and returns at once. Only engines outside of the trainer's process can."""

    def drain(self) -> None:  # noqa: B027  (nothing is launched where `launch` is refused; as for the next two)
        """Waits for a rollout that was launched, and keeps its result for `run`: weights must not change during it."""

    def cancel(self) -> None:  # noqa: B027
        """Aborts a rollout that was launched."""

    def settle(self) -> None:  # noqa: B027
        """Waits until requests that were aborted have ended. Called on the main process."""
