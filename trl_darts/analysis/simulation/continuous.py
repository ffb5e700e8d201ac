"""A rollout without an end in virtual time, and a training with it (`rollout_ahead="continuous"`)."""

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from ...buffer.buffer import BufferEntry, RolloutBuffer, Round
from ...buffer.round_policy import RoundPolicy
from ...scheduling import (
    Continuous,
    EngineLoad,
    EngineUpdated,
    FreshGroups,
    GroupPlan,
    GroupSummary,
    Occupancy,
    PromptInfo,
    RolloutResult,
    Scheduler,
)
from ...scheduling.continuous import entering
from .cluster import LENGTH, STOP, SimulatedCluster, VirtualRollout
from .run import SimulatedStep
from .workload import BatchLengths


class VirtualContinuous(VirtualRollout):
    """
    A rollout whose groups are added and taken while it runs. `now` is the trainer's time: engines decode until then
    before anything changes.
    """

    def __init__(self, cluster: SimulatedCluster, scheduler: Scheduler, max_length: int, version: int = 0) -> None:
        super().__init__(cluster.spec, cluster.engines(), scheduler, [], {}, max_length)
        self.lengths: Any = {}  # by group
        self.cluster = cluster
        self.now = 0.0
        loads = [EngineLoad(str(index), version=version) for index in range(len(self.engines))]
        self._execute(scheduler.start([], loads, 0.0), 0.0)

    def add(self, plans: Sequence[GroupPlan], lengths: Sequence[Sequence[int]]) -> None:
        """Starts groups whose candidates have these lengths."""
        for plan, own in zip(plans, lengths, strict=True):
            self.lengths[plan.group_id] = own
            self.prompt_tokens[plan.group_id] = plan.num_prompt_tokens
        ledger = self.scheduler.ledger
        self.cluster.make_room(len(ledger.candidates) + sum(plan.num_candidates for plan in plans))
        self._execute(self.scheduler.add(plans, self.now), self.now)

    def advance(self, seconds: float) -> None:
        """Decodes for this long."""
        self.now += seconds
        while (event := min(self.times)) <= self.now:
            self._step(event)

    def take(self, rule: FreshGroups) -> RolloutResult:
        """Decodes until the groups of the next batch can be taken."""
        while (chosen := rule.choose(self.scheduler)) is None:
            self.now = max(self.now, min(self.times))
            self._step(min(self.times))
        self._execute(self.scheduler.select(chosen, self.now), self.now)
        result = self.scheduler.take(chosen, self.now)
        for group in result.groups:
            del self.lengths[group.plan.group_id], self.prompt_tokens[group.plan.group_id]
            for candidate in group.candidates:
                self.sequences.pop(candidate.candidate_id, None)
        return result

    def update(self, version: int, pause_s: float = 0.0) -> dict[int, int]:
        """
        Gives all engines new weights, which takes a pause and a prefill of what runs. Returns the tokens of each
        running candidate, by ID.
        """
        decoded: dict[int, int] = {}
        for index, engine in enumerate(self.engines):
            engine.advance(self.now)
            running = [s for s in self.sequences.values() if s.alive and s.command.engine_id == str(index)]
            own = {s.command.candidate_id: engine.decoded(s) - len(s.command.prior_tokens) for s in running}
            self.scheduler.handle(EngineUpdated(str(index), version, own, self.now))
            context = sum(engine.decoded(s) + s.prompt_tokens for s in running if s.end != 0.0)
            engine.clock += pause_s + context * self.spec.prefill_seconds_per_token
            self.times[index] = engine.next_time()
            decoded |= own
        return decoded

    def redraw(self, group_id: int, index: int, length: int) -> None:
        """Changes the length of a candidate that has not ended, as new weights do."""
        self.lengths[group_id][index] = length
        sequence = self.sequences.get(self.groups[group_id].candidates[index].candidate_id)
        if sequence is None or not sequence.alive:
            return
        sequence.reason = LENGTH if length > self.max_length else STOP
        sequence.remaining = min(length, self.max_length) - sequence.length
        number = int(sequence.command.engine_id)
        engine, end = self.engines[number], sequence.begin + sequence.remaining
        if sequence.end not in (0.0, end):
            sequence.end = end
            insort(engine.events, (end, sequence.command.candidate_id, sequence.admissions, sequence))
            self.times[number] = engine.next_time()


class ContinuousTraining:
    """The steps of a [`SimulatedTraining`]. Versions of the weights count its steps."""

    def __init__(self, training: Any, rounds: RoundPolicy) -> None:
        self.training = training
        self.rounds = rounds
        self.buffer: RolloutBuffer = rounds.buffer()
        self.informative: dict[int, bool] = {}  # by the ID of the entry
        self.lengths: dict[int, list[int]] = {}
        policies = training.settings.policies(batch_stop=Continuous())
        scheduler = Scheduler(policies, training.settings.num_generations)
        self.rollout = VirtualContinuous(training.cluster, scheduler, training.workload.max_completion_length)
        self._saturated: set[int] = set()

    def steps(self) -> Iterator[SimulatedStep]:
        """Yields steps without end. The time of a step that was yielded passes before the next one."""
        workload, settings = self.training.workload, self.training.settings
        batches = self._batches()
        for version in count():
            if version:
                self.rollout.update(version)
            self._enter(batches)
            start = self.rollout.now
            result = self.rollout.take(FreshGroups(self.rounds.num_groups, version - (settings.max_staleness or 0)))
            step = self._step(result, version, self.rollout.now - start)
            yield step
            self._enter(batches)
            self.rollout.advance(workload.train_seconds([length for length, _ in step.kept]))

    def _batches(self) -> Iterator[BatchLengths]:
        workload, seed, numbers = self.training.workload, self.training.seed, count()
        for epoch in workload.epochs(seed):
            for prompts in epoch:
                yield BatchLengths(workload.lengths, seed, next(numbers), prompts)

    def _enter(self, batches: Iterator[BatchLengths]) -> None:
        training = self.training
        while self.rounds.lacking(self.buffer):
            batch = next(batches)
            infos = [PromptInfo(int(prompt), training.workload.prompt_tokens) for prompt in batch.prompts]
            ids = [self.rounds.enter(self.buffer, info, {}, []).entry_id for info in infos]
            self.informative |= zip(ids, batch.informative(training.workload.uniform_share).tolist(), strict=True)
            most = training.settings.max_num_generations
            self.lengths |= {i: batch.of(place, most, 0, training.stop_rate) for place, i in enumerate(ids)}
        current = self.rounds.next(self.buffer)
        if not current.entries:
            return
        _, plans = self.rounds.begin(self.buffer, current, training.settings.num_generations, training.admission)
        plans = entering(plans, training.settings.submit_order)
        self.rollout.add(plans, [self.lengths[own.group_id] for own in plans])

    def _step(self, result: RolloutResult, version: int, waited: float) -> SimulatedStep:
        training = self.training
        ids = [group.plan.group_id for group in result.groups]
        lengths = {entry_id: self.lengths.pop(entry_id) for entry_id in ids}
        current = Round([self.buffer.entries[entry_id] for entry_id in ids], len(ids), len(ids))
        self.buffer.absorb(result, version)
        entries: list[BufferEntry] = self.rounds.take(self.buffer, current)
        training.learn_shape(result, lengths)
        rows = [row for entry in entries for row in entry.candidates]
        ages = [(version - sampled_by, num) for row in rows for sampled_by, num in row.versions]
        complete = [GroupSummary.of(group) for group in result.groups]
        most = training.settings.max_num_generations if training.settings.over_provisions else math.inf
        return SimulatedStep(
            complete,
            [],
            complete,
            [(row.length, row.partial.finish_reason) for row in rows],
            Occupancy.of(result),
            sum(len(group.candidates) >= most for group in result.groups),
            sum(self.informative.pop(entry_id) for entry_id in ids),
            num_stale_tokens=sum(num for age, num in ages if age),
            longest_wait=max(age for age, _ in ages),
            mean_lag=sum(age * num for age, num in ages) / sum(num for _, num in ages),
            waited_seconds=waited,
        )
