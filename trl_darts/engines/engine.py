"""What every engine can do: decode one rollout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..scheduling import Admission, GroupPlan, Placement, Scheduler
from ..scheduling.ledger import Ledger
from .batch import PromptBatch


OnProgress = Callable[[Ledger], None]


@dataclass(frozen=True)
class RolloutPlan:
    """What is decided before a rollout, on the main process: the groups, and who decides about them meanwhile."""

    admission: Admission
    groups: list[GroupPlan]
    scheduler: Scheduler


class Engine(Protocol):
    """Decodes rollouts. Both methods are called on every process at once."""

    def placement(self, admission: Admission, batch: PromptBatch) -> Placement | None:
        """Which candidate runs where, if that must be known before the rollout. Called on the main process."""

    def run(
        self,
        plan: Any,
        batch: PromptBatch,
        on_progress: OnProgress | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        """
        Decodes one rollout of the prompts in `batch`.

        The main process has a [`RolloutPlan`], the others `None`; the same holds for what is returned, a
        [`RolloutResult`] with tokens and log-probs of the rows. `on_progress` is called on the main process again and
        again while candidates decode, `meanwhile` on the others while they wait for servers. If the engine fails, a
        [`GenerationError`] is raised on every process.
        """
