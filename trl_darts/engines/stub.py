"""An engine without a model: scripted lengths and virtual time, for tests of whatever sits on top of a rollout."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from ..scheduling import (
    Abort,
    CandidateEnded,
    Command,
    EngineLoad,
    FinishReason,
    GroupPlan,
    RolloutResult,
    Scheduler,
    Submit,
    TokensArrived,
)


Latency = Callable[[int], float]


@dataclass(slots=True)
class _Running:
    command: Submit
    start_clock: int  # token clock at the submission
    reported: int  # tokens already told to the scheduler


class StubEngine:
    """
    Decodes nothing, but takes as many steps as it is told to.

    All running candidates advance by one token per step, as under continuous batching, and a step takes as long as the
    latency curve says for the number of candidates that run. Aborts are answered at once.

    Args:
        lengths (`Mapping[int, Sequence[int]]` or `Callable[[int, int], int]`):
            Natural length of candidate `index` of group `group_id`: `lengths[group_id][index]`, or a function of both.
        max_completion_length (`int`, *optional*, defaults to `1_000_000`):
            Longer candidates end here, with `finish_reason` `"length"`.
        latency (`Callable[[int], float]`, *optional*):
            Seconds per step for a number of running candidates, for example a [`LatencyCurve`]. Defaults to one
            second.
        progress_interval (`int`, *optional*, defaults to `16`):
            Steps between two reports of tokens, where the schedule needs them.
        token_id (`int`, *optional*, defaults to `7`):
            The token that is sampled all the time; its log-prob is −1.

    Example:

    ```python
    >>> from trl_darts.engines import StubEngine
    >>> from trl_darts.scheduling import GroupPlan, Scheduler, make_policies
    >>> scheduler = Scheduler(make_policies("darts", 2, 4, num_longest=1), num_generations=2)
    >>> engine = StubEngine({0: [5, 90, 7, 30]})
    >>> result = engine.run(scheduler, [GroupPlan(group_id=0, num_candidates=4)])
    >>> result.groups[0].selected  # saturated, so it stopped at the second complete candidate
    [0, 2]

    ```
    """

    def __init__(
        self,
        lengths: Mapping[int, Sequence[int]] | Callable[[int, int], int],
        max_completion_length: int = 1_000_000,
        latency: Latency | None = None,
        progress_interval: int = 16,
        token_id: int = 7,
    ) -> None:
        self._length = lengths if callable(lengths) else lambda group_id, index: lengths[group_id][index]
        self.max_completion_length = max_completion_length
        self.latency = latency or (lambda num_running: 1.0)
        self.progress_interval = progress_interval
        self.token_id = token_id
        self.commands: list[Command] = []  # everything that was asked for, in order
        self.num_decoded_tokens = 0

    def run(self, scheduler: Scheduler, plans: Sequence[GroupPlan]) -> RolloutResult:
        """
        Runs one rollout in virtual time.

        Args:
            scheduler ([`Scheduler`]):
                A new one.
            plans (`Sequence[GroupPlan]`):
                The groups.

        Returns:
            [`RolloutResult`]: The groups with their rows.
        """
        self._scheduler = scheduler
        self._now, self._clock = 0.0, 0
        self._running: dict[int, _Running] = {}
        self._ends: list[tuple[int, int, int]] = []  # (token clock of the end, tie-breaker, candidate_id)
        self._ties = count()
        self._execute(scheduler.start(plans, [EngineLoad("stub")], self._now))
        while not scheduler.done:
            self._step()
        return scheduler.result()

    def _step(self) -> None:
        """Advances to the next end, or to the next report of progress."""
        while self._ends[0][2] not in self._running:  # aborted meanwhile
            heapq.heappop(self._ends)
        until = self._ends[0][0]
        if self._scheduler.needs_progress:
            until = min(until, self._clock + self.progress_interval)
        self._now += (until - self._clock) * float(self.latency(len(self._running)))
        self._clock = until
        while self._ends and self._ends[0][0] <= self._clock:
            candidate_id = heapq.heappop(self._ends)[2]
            if candidate_id in self._running:
                natural = self._natural_length(self._running[candidate_id].command)
                stopped = natural <= self.max_completion_length
                self._end(candidate_id, FinishReason.STOP if stopped else FinishReason.LENGTH)
        if self._scheduler.needs_progress:
            for candidate_id in list(self._running):
                self._progress(candidate_id)

    def _execute(self, commands: Sequence[Command]) -> None:
        self.commands.extend(commands)
        for command in commands:
            if isinstance(command, Abort):
                if command.candidate_id in self._running:
                    self._end(command.candidate_id, FinishReason.ABORT)
                continue
            prior = len(command.prior_tokens)
            remaining = min(self._natural_length(command), self.max_completion_length) - prior
            self._running[command.candidate_id] = _Running(command, self._clock, prior)
            heapq.heappush(self._ends, (self._clock + max(1, remaining), next(self._ties), command.candidate_id))

    def _natural_length(self, command: Submit) -> int:
        return self._length(command.group_id, command.index)

    def _new_tokens(self, running: _Running) -> tuple[int, list[int], list[float]]:
        offset = running.reported
        length = len(running.command.prior_tokens) + self._clock - running.start_clock
        running.reported = length
        self.num_decoded_tokens += length - offset
        return offset, [self.token_id] * (length - offset), [-1.0] * (length - offset)

    def _progress(self, candidate_id: int) -> None:
        if candidate_id in self._running:  # not aborted by what an earlier report led to
            running = self._running[candidate_id]
            chunk = self._new_tokens(running)
            event = TokensArrived(candidate_id, running.command.segment, *chunk, now=self._now)
            self._execute(self._scheduler.handle(event))

    def _end(self, candidate_id: int, reason: FinishReason) -> None:
        running = self._running.pop(candidate_id)
        chunk = self._new_tokens(running)
        event = CandidateEnded(candidate_id, running.command.segment, *chunk, finish_reason=reason, now=self._now)
        self._execute(self._scheduler.handle(event))
