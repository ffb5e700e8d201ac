"""
A training in virtual time, step by step, with the trainer's own admission, policies, scheduler and tracker.

```
Workload ──▶ N prompts ──▶ admission ──▶ plans ──▶ SimulatedCluster ──▶ summaries ──▶ tracker, budget
   ▲                                                                        │
   └────────────── the next step, the next epoch ◀── shaping ◀──────────────┘
```

Schedules that make their own batches have a [`RolloutBuffer`] between the prompts and the admission.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import count, islice

import numpy as np

from ...buffer.buffer import BufferEntry, RolloutBuffer, Round
from ...buffer.round_policy import RoundPolicy
from ...buffer.rounds import DynamicSampling, round_policy
from ...errors import ConfigurationError
from ...scheduling import (
    BatchStop,
    GroupPlan,
    GroupSummary,
    Occupancy,
    PromptInfo,
    RolloutResult,
    Scheduler,
    ScheduleSettings,
)
from .cluster import SimulatedCluster
from .cluster_spec import ClusterSpec
from .continuous import ContinuousTraining
from .conversations import VirtualConversations
from .run import SimulatedRun, SimulatedStep
from .workload import BatchLengths, Calls, Workload


class SimulatedTraining:
    """A training in virtual time."""

    def __init__(self, workload: Workload, settings: ScheduleSettings, cluster: ClusterSpec, seed: int = 0) -> None:
        self.workload = workload
        self.settings = settings
        self.seed = seed
        self.cluster = SimulatedCluster(cluster)
        self.tail = cluster.tail_servers(workload.max_completion_length)
        self.num_rollouts = 0
        tracker = settings.tracker(workload.max_completion_length)
        slots = cluster.max_num_seqs and cluster.max_num_seqs * cluster.num_engines
        self.admission = settings.admission(tracker, cluster.latency, cluster.num_engines, slots, self.tail)
        if workload.tools is not None and (cause := self._plays_no_conversations()):
            raise ConfigurationError(f"`tools` of a workload are not simulated with {cause}. Leave one of them out.")
        self.stop_rate = 0.0  # added to each candidate's probability to stop at a token, see `Workload.shaping`

    def _plays_no_conversations(self) -> str | None:
        """Returns what a trainer refuses for whole conversations."""
        if self.tail is not None:
            return "tail servers"
        if round_policy(self.settings, self.workload.prompts_per_step) is not None:
            return f"a buffer of prompts (`schedule`, {self.settings.schedule!r})"
        return f"`rollout_ahead` ({self.settings.rollout_ahead})" if self.settings.rollout_ahead else None

    def run(self, num_steps: int) -> SimulatedRun:
        """Trains from the beginning."""
        if num_steps < 1:
            raise ConfigurationError(f"`num_steps` ({num_steps}) must be at least 1.")
        run = SimulatedRun()
        with _collector_off():
            for step in islice(self.optimizer_steps(), num_steps):
                run.add(step, self.workload, self.settings.rollout_ahead)
        return run

    def optimizer_steps(self) -> Iterator[SimulatedStep]:
        """Yields optimizer steps, without end."""
        for step in self._steps():
            self.admission.observe(step.observed)
            yield step

    def rollout(
        self,
        plans: list[GroupPlan],
        lengths: Mapping[int, list[int]] | list[list[int]],
        batch_stop: BatchStop | None = None,
        calls_of: Callable[[int, int, int], Calls] | None = None,
    ) -> RolloutResult:
        """Runs one rollout, until all groups are complete or `batch_stop` ends it."""
        policies = self.settings.policies(plans, batch_stop, None, self.num_rollouts, self.tail)
        self.num_rollouts += 1
        scheduler = Scheduler(policies, self.settings.num_generations)
        limit = self.workload.max_completion_length
        if calls_of is None:
            result = self.cluster.run(scheduler, plans, lengths, limit)
        else:
            make = partial(VirtualConversations, calls_of=calls_of)
            result = self.cluster.rollout(make, scheduler, plans, lengths, limit).run()
        self.learn_shape(result, lengths)
        return result

    def learn_shape(self, result: RolloutResult, lengths: Mapping[int, list[int]] | list[list[int]]) -> None:
        """Shortens later answers by what the selection of a rollout teaches, see `Workload.shaping`."""
        if self.workload.shaping:
            self.stop_rate += self.workload.shaping * self._selection_effect(result, lengths)

    def _selection_effect(self, result: RolloutResult, lengths: Mapping[int, list[int]] | list[list[int]]) -> float:
        """Returns the kept candidates' probability to stop at a token, minus that of all at full length."""
        kept, pool = [], []
        for group in result.groups:
            own = np.array(lengths[group.plan.group_id][: len(group.candidates)])
            logs = np.log(np.minimum(own, self.workload.max_completion_length))
            kept.append(logs[group.selected].mean())
            pool.append(logs.mean())
        return float(np.exp(-np.mean(kept)) - np.exp(-np.mean(pool))) if kept else 0.0

    def _steps(self) -> Iterator[SimulatedStep]:
        numbers = count()
        rounds = round_policy(self.settings, self.workload.prompts_per_step)
        if rounds is not None and self.settings.is_continuous:
            yield from ContinuousTraining(self, rounds).steps()
        for epoch in self.workload.epochs(self.seed):
            batches = (BatchLengths(self.workload.lengths, self.seed, next(numbers), prompts) for prompts in epoch)
            yield from map(self._step, batches) if rounds is None else _EpochOfRounds(self, rounds).steps(batches)

    def _step(self, batch: BatchLengths) -> SimulatedStep:
        infos = [PromptInfo(int(prompt), self.workload.prompt_tokens) for prompt in batch.prompts]
        admission = self.admission.plan(infos)
        lengths = batch.all(max(admission.num_candidates), self.stop_rate)
        tools = self.workload.tools
        result = self.rollout(admission.plans(infos), lengths, calls_of=partial(batch.calls, tools) if tools else None)
        kept = [(row.length, row.finish_reason) for group in result.groups for row in group.rows]
        complete = [GroupSummary.of(group) for group in result.groups]
        informative = int(batch.informative(self.workload.uniform_share).sum())
        return SimulatedStep(complete, [], complete, kept, Occupancy.of(result), admission.saturated, informative)


@dataclass(slots=True)
class _Sampled:
    """The batch of a buffer's entry, its place there, and its candidates' lengths."""

    batch: BatchLengths
    place: int
    informative: bool
    lengths: list[int] = field(default_factory=list)
    first_version: int | None = None  # of the policy that first sampled for it


class _EpochOfRounds:
    """
    An epoch of a schedule that makes its own batches. The buffer is empty before and after it, so it holds each prompt
    at most once. The policy's version counts from the epoch's first step.
    """

    def __init__(self, training: SimulatedTraining, rounds: RoundPolicy) -> None:
        self.training = training
        self.rounds = rounds
        self.buffer: RolloutBuffer = rounds.buffer()
        self.version = 0
        self.sampled: dict[int, _Sampled] = {}  # by the ID of the entry

    def steps(self, batches: Iterator[BatchLengths]) -> Iterator[SimulatedStep]:
        """Yields one step per batch of the loader; with `drop_uniform_groups`, while there are prompts for one."""
        drops = self.training.settings.drop_uniform_groups
        for self.version in count():
            rollouts: list[tuple[RolloutResult, int]] = []  # with their saturated prompts
            num_dropped, current = 0, self._next(batches)
            while current.entries:
                result, saturated = self._run(current)
                rollouts.append((result, saturated))
                num_dropped += len(self.buffer.absorb(result, self.version))
                if not drops:
                    break
                self._drop_uniform([group.plan.group_id for group in result.groups])
                current = self._next(batches)
            if not len(self.buffer) or (drops and self.rounds.lacking(self.buffer)):  # too few prompts for a step
                return
            yield self._finished(rollouts, self.rounds.take(self.buffer, current, num_dropped))

    def _next(self, batches: Iterator[BatchLengths]) -> Round:
        """Returns the next round, with the prompts that it needs, or with all remaining ones."""
        while self.rounds.lacking(self.buffer):
            batch = next(batches, None)
            if batch is None:
                break
            infos = (PromptInfo(int(prompt), self.training.workload.prompt_tokens) for prompt in batch.prompts)
            informative = batch.informative(self.training.workload.uniform_share).tolist()
            for place, info in enumerate(infos):
                entry = self.rounds.enter(self.buffer, info, {}, [])
                self.sampled[entry.entry_id] = _Sampled(batch, place, informative[place])
        return self.rounds.next(self.buffer)

    def _run(self, current: Round) -> tuple[RolloutResult, int]:
        training = self.training
        admission, plans = self.rounds.begin(
            self.buffer, current, training.settings.num_generations, training.admission
        )
        lengths = {entry.entry_id: self._lengths_of(entry) for entry in current.entries}
        return training.rollout(plans, lengths, current.batch_stop), admission.saturated

    def _drop_uniform(self, complete: list[int]) -> None:
        uniform = [entry_id for entry_id in complete if not self.sampled[entry_id].informative]
        assert isinstance(self.rounds, DynamicSampling)
        self.rounds.drop(self.buffer, uniform, len(complete))
        for entry_id in uniform:
            del self.sampled[entry_id]

    def _lengths_of(self, entry: BufferEntry) -> list[int]:
        """Returns the lengths of an entry's candidates. A resumed entry keeps them."""
        own, training = self.sampled[entry.entry_id], self.training
        if not entry.candidates:
            redraws = training.workload.redraws and not self.buffer.keeps_tokens
            attempt = entry.num_deferrals if redraws else 0
            own.lengths = own.batch.of(own.place, training.settings.max_num_generations, attempt, training.stop_rate)
            own.first_version = self.version if own.first_version is None else own.first_version
        return own.lengths

    def _finished(self, rollouts: list[tuple[RolloutResult, int]], entries: list[BufferEntry]) -> SimulatedStep:
        rows = [row for entry in entries for row in entry.candidates]
        complete = [GroupSummary.of(group) for result, _ in rollouts for group in result.groups]
        deferred = [GroupSummary.of(group) for result, _ in rollouts for group in result.deferred]
        taken = [self.sampled.pop(entry.entry_id) for entry in entries]
        ages = [(self.version - version, num) for row in rows for version, num in row.versions]
        return SimulatedStep(
            complete,
            deferred,
            complete if self.buffer.keeps_tokens else [*complete, *deferred],
            [(row.length, row.partial.finish_reason) for row in rows],
            reduce(Occupancy.then, (Occupancy.of(result) for result, _ in rollouts), Occupancy(0, 0.0, 0.0)),
            sum(saturated for _, saturated in rollouts),
            sum(own.informative for own in taken),
            sum(num for age, num in ages if age),
            sum(c.length for entry in self.buffer.entries.values() for c in entry.candidates),
            self.version - min(own.first_version or 0 for own in taken),
            sum(age * num for age, num in ages) / max(1, sum(num for _, num in ages)),
        )


@contextmanager
def _collector_off() -> Iterator[None]:
    """Turns garbage collection off: a rollout has no reference cycles, and scanning its candidates takes long."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
