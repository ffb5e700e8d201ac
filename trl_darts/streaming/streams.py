"""What is done while candidates decode, on all processes: one object for the rollout to call."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from ..engines.mailbox import Mailbox
from ..scheduling import GroupResult, RolloutResult, Scheduler
from ..scheduling.ledger import Ledger
from .log_probs import LogprobStream
from .rewards import RewardStream
from .rounds import Round, Tokens


@dataclass(frozen=True, slots=True)
class SettledRows:
    """Rows of one process whose completions are final: their places on that process, and their tokens."""

    rows: list[int]
    completion_ids: list[Tokens]


class Streams:
    """
    The streams of a trainer. Without any, all of this does nothing.

    Args:
        log_probs ([`LogprobStream`], *optional*):
            Scores tokens as they arrive.
        rewards ([`RewardStream`], *optional*):
            Calls reward functions as groups are complete.
        num_generations (`int`, *optional*, defaults to `1`):
            M, rows per group.
        process_index (`int`, *optional*, defaults to `0`):
            This process.
        num_processes (`int`, *optional*, defaults to `1`):
            How many there are.
        open_mailbox (`Callable[[], Mailbox]`, *optional*):
            Gives this process's mailbox; needed where there are several. First called on every process at once.
    """

    def __init__(
        self,
        log_probs: LogprobStream | None = None,
        rewards: RewardStream | None = None,
        num_generations: int = 1,
        process_index: int = 0,
        num_processes: int = 1,
        open_mailbox: Callable[[], Mailbox] | None = None,
    ) -> None:
        self.log_probs = log_probs
        self.rewards = rewards
        self._num_generations = num_generations
        self._process_index = process_index
        self._num_processes = num_processes
        self._open_mailbox = open_mailbox
        self._settled: set[int] = set()
        self._num_groups = 0

    def __bool__(self) -> bool:
        return self.log_probs is not None or self.rewards is not None

    # Of the trainer, on every process

    @contextmanager
    def serving(self, inputs: Sequence[dict[str, Any]] | None) -> Iterator[dict[str, float]]:
        """
        Inside, TRL generates and scores a batch of training, and is served with what is ready by then.

        Args:
            inputs (`Sequence[dict[str, Any]]` of shape `(B,)`, *optional*):
                Rows of this process. `None` in evaluation, where there is nothing to do.

        Returns:
            `dict[str, float]`: Filled with the metrics of the batch at the end, see `docs/metrics.md`.
        """
        metrics: dict[str, float] = {}
        if inputs is None:
            yield metrics
            return
        if self.rewards is not None:
            self.rewards.begin(inputs)
        if self.log_probs is not None:
            self.log_probs.open()
        try:
            yield metrics
        finally:
            if self.log_probs is not None:
                metrics |= self.log_probs.close()
            if self.rewards is not None:
                metrics |= self.rewards.metrics()

    def serving_rewards(self) -> AbstractContextManager[None]:
        """Inside, TRL calls reward functions for the whole batch, and is given what they have said of its groups."""
        return nullcontext() if self.rewards is None else self.rewards.serving()

    def close(self) -> None:
        """Ends the threads and processes of reward functions."""
        if self.rewards is not None:
            self.rewards.close()

    # On the main process

    def watch(
        self, scheduler: Scheduler, prompts: Sequence[Tokens], progress: Callable[[Ledger], None]
    ) -> Callable[[Ledger], None]:
        """
        Begins a rollout.

        Args:
            scheduler ([`Scheduler`]):
                The rollout's.
            prompts (`Sequence[list[int]]` of shape `(N,)`):
                Tokens of each group's prompt, by `group_id`.
            progress (`Callable[[Ledger], None]`):
                What else is to be called while it runs.

        Returns:
            `Callable[[Ledger], None]`: All in one.
        """
        self._settled, self._num_groups = set(), len(prompts)
        score = None if self.log_probs is None else self.log_probs.watch(scheduler, prompts)

        def watch(ledger: Ledger) -> None:
            progress(ledger)
            if self.rewards is not None:
                for group in ledger.groups.values():
                    if group.settled and group.group_id not in self._settled:
                        self._submit(GroupResult(group.plan, group.candidates, group.selected or []))
            if score is not None:
                score(ledger)

        return watch if self else progress

    def finish(self, result: RolloutResult, completion_ids: Sequence[Tokens] | None = None) -> None:
        """
        Ends the rollout: all that is trained on is scored, and all reward functions are called.

        Args:
            result ([`RolloutResult`]):
                The rollout.
            completion_ids (`Sequence[list[int]]` of shape `(N·M,)`, *optional*):
                What is trained on, where that is not all that the rollout yielded.
        """
        if self.rewards is not None:
            for group in result.groups:
                if group.plan.group_id not in self._settled:
                    self._submit(group)
        if self.log_probs is not None:
            self.log_probs.finish(result, completion_ids)

    def _submit(self, group: GroupResult) -> None:
        """Sends a group's rows to the processes that they belong to."""
        group_id = group.plan.group_id
        self._settled.add(group_id)
        per_process = self._num_groups * self._num_generations // self._num_processes
        shares: dict[int, SettledRows] = {}
        for row, candidate in enumerate(group.rows, start=group_id * self._num_generations):
            share = shares.setdefault(row // per_process, SettledRows([], []))
            share.rows.append(row % per_process)
            share.completion_ids.append(list(candidate.tokens))
        for process, share in shares.items():
            if process == self._process_index:
                self.rewards.submit(share.rows, share.completion_ids)
            else:
                self._open_mailbox().post(process, share)

    # On the others

    def follow(self) -> None:
        """Does what the main process has sent. Called again and again while that runs the rollout, and once after."""
        for message in self._open_mailbox().receive() if self else ():
            if isinstance(message, Round):
                self.log_probs.execute(message)
            elif isinstance(message, SettledRows):
                self.rewards.submit(message.rows, message.completion_ids)
