"""
A rollout in virtual time: simulated engines drive the same scheduler as the real ones.

```
scheduler ──Submit──▶ engine: prefill, then one token of every running sequence per step
    ▲                    │
    └──CandidateEnded────┘   the next event is the nearest of any engine
```

Invariants: time never runs backwards; a candidate that ends by itself has exactly its given length; one engine without
limits takes `rollout_time` seconds.

A sequence of a thousand tokens reports sixty times, and few reports decide anything: [`DualEnd`] with a numeric
patience acts on the first one beyond a bound. Only reports beyond it are events, which makes a simulation up to fifty
times as fast and changes no decision. Any other policy gets every report.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from ...scheduling import (
    CandidateEnded,
    Command,
    DualEnd,
    EngineLoad,
    EngineResized,
    FinishReason,
    Group,
    GroupPlan,
    RolloutResult,
    Scheduler,
    Submit,
    TakeTurns,
    TokensArrived,
)
from .cluster_spec import ClusterSpec
from .virtual_engine import SimulatedEngine, SimulatedSequence


R = TypeVar("R", bound="VirtualRollout")
Lengths: TypeAlias = Mapping[int, Sequence[int]] | Sequence[Sequence[int]]
# Before Python 3.12, looking up a member in its enum calls a function.
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


class SimulatedCluster:
    """Runs rollouts in virtual time, for simulated trainings and for tests of your own policies."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        # Seconds per step, by the number of running sequences.
        self._kinds = [(own, [0.0]) for own in (spec, spec.tail) if own is not None]

    def run(
        self, scheduler: Scheduler, plans: Sequence[GroupPlan], lengths: Lengths, max_length: int
    ) -> RolloutResult:
        """Runs one rollout."""
        return self.rollout(VirtualRollout, scheduler, plans, lengths, max_length).run()

    def rollout(
        self, make: Callable[..., R], scheduler: Scheduler, plans: Sequence[GroupPlan], lengths: Lengths, limit: int
    ) -> R:
        """Returns a rollout on new engines. Lengths are cut at `limit`."""
        self.make_room(sum(plan.num_candidates for plan in plans))
        return make(self.spec, self.engines(), scheduler, plans, lengths, limit)

    def make_room(self, num_candidates: int) -> None:
        """Computes the seconds of a step for this many sequences, also for engines that are running."""
        for spec, seconds in self._kinds:
            seconds.extend(spec.latency(count) for count in range(len(seconds), num_candidates + 1))

    def engines(self) -> list[SimulatedEngine]:
        """Returns new engines, which are idle."""
        return [SimulatedEngine(*kind) for kind in self._kinds for _ in range(kind[0].num_engines)]


class VirtualRollout:
    """One rollout in progress."""

    def __init__(
        self,
        spec: ClusterSpec,
        engines: list[SimulatedEngine],
        scheduler: Scheduler,
        plans: Sequence[GroupPlan],
        lengths: Lengths,
        max_length: int,
    ) -> None:
        self.spec, self.engines, self.scheduler, self.plans = spec, engines, scheduler, plans
        self.lengths, self.max_length = lengths, max_length
        self.times = [math.inf] * len(engines)  # of the engines' next events
        self.prompt_tokens = {plan.group_id: plan.num_prompt_tokens for plan in plans}
        self.groups = scheduler.ledger.groups
        self.sequences: dict[int, SimulatedSequence] = {}  # by candidate

    def run(self) -> RolloutResult:
        times, engines = self.times, self.engines
        loads = [EngineLoad(str(index), tail=engine.spec is self.spec.tail) for index, engine in enumerate(engines)]
        for load in loads if self.spec.switch_seconds else ():
            load.capacity = 0 if load.tail else None
        self._execute(self.scheduler.start(self.plans, loads, 0.0), 0.0)
        ledger = self.scheduler.ledger
        while ledger.num_open:  # the scheduler is not done
            self._step(min(times))  # as fast as a heap for tens of engines
        return self.scheduler.result()

    def _step(self, now: float) -> None:
        """Handles the next event, at the earliest of `times`."""
        index = self.times.index(now)  # the first of several, so that every run is the same
        engine = self.engines[index]
        engine.advance(now)
        sequence = engine.take_event()
        if sequence is not None and engine.steps >= sequence.end:
            self._decoded(engine, sequence, now)
        elif sequence is not None:
            self._report(sequence, engine.decoded(sequence), now)
        if engine.waiting:
            engine.admit()
        self.times[index] = engine.next_time()

    def _report(self, sequence: SimulatedSequence, length: int, now: float) -> None:
        command, known = sequence.command, sequence.reported
        sequence.reported = length
        event = TokensArrived(command.candidate_id, command.segment, known, range(length - known), None, now)
        self._execute(self.scheduler.handle(event), now)

    def _decoded(self, engine: SimulatedEngine, sequence: SimulatedSequence, now: float) -> None:
        """Handles the last token of a sequence on an engine."""
        self._end(engine, sequence, sequence.length + sequence.remaining, sequence.reason, now)

    def _is_complete(self, sequence: SimulatedSequence, length: int) -> bool:
        return sequence.end != 0.0 and length == sequence.length + sequence.remaining

    def _end(
        self, engine: SimulatedEngine, sequence: SimulatedSequence, length: int, reason: FinishReason, now: float
    ) -> None:
        if self.scheduler.weighs_switch:
            self._report_all(now)
        command, known = sequence.command, sequence.reported
        engine.leave(sequence, length)
        event = CandidateEnded(command.candidate_id, command.segment, known, range(length - known), None, reason, now)
        if commands := self.scheduler.handle(event):
            self._execute(commands, now)
        if self.scheduler.needs_progress:
            self._watch(self.groups[command.group_id], now)

    def _report_all(self, now: float) -> None:
        """Reports all sequences, also those whose reports decide nothing else."""
        for sequence in [own for own in self.sequences.values() if own.alive]:
            self._report_streamed(sequence, 0.0, now)

    def _watch(self, group: Group, now: float) -> None:
        """Plans the reports that can decide something, after a candidate of the group has ended."""
        bound = self._report_from(group)
        for candidate in group.unfinished if bound < math.inf else ():
            sequence = self.sequences.get(candidate.candidate_id)
            if sequence is None or not sequence.alive:  # not submitted yet, or aborted after another's report
                continue
            self._report_streamed(sequence, bound, now)
            if sequence.alive and sequence.report_from != bound:
                index = int(sequence.command.engine_id)
                self.engines[index].watch(sequence, bound)
                self.times[index] = self.engines[index].next_time()

    def _report_streamed(self, sequence: SimulatedSequence, bound: float, now: float) -> None:
        """Reports the tokens that a server would have streamed, if they are new and at least `bound`."""
        engine = self.engines[int(sequence.command.engine_id)]
        engine.advance(now)
        if sequence.alive and (length := engine.streamed(sequence)) > sequence.reported and length >= bound:
            self._report(sequence, length, now)

    def _report_from(self, group: Group) -> float:
        """Returns the length from which a report of the group's sequences can decide something; infinity for never."""
        stop = self.scheduler.policies.group_stop
        if not isinstance(stop, DualEnd) or type(stop).surplus is not DualEnd.surplus:
            return 0.0
        if group.closed or group.num_complete < stop.num_generations or stop.saturated(group):
            return math.inf
        assert stop.length_bound is not None  # or it would need no progress
        return stop.length_bound * group.complete_lengths[stop.num_generations - 1]

    def _execute(self, commands: list[Command], now: float) -> None:
        touched = set()
        for command in commands:
            if isinstance(command, TakeTurns):
                self._take_turns(now)
                continue
            index = int(command.engine_id)
            engine = self.engines[index]
            if index not in touched:
                touched.add(index)
                engine.advance(now)
            if isinstance(command, Submit):
                engine.waiting.append(self._sequence(command))
            else:
                sequence = self.sequences[command.candidate_id]
                length = engine.decoded(sequence)
                reason = sequence.reason if self._is_complete(sequence, length) else ABORT
                self._end(engine, sequence, length, reason, now)
        for index in touched:
            engine = self.engines[index]
            engine.admit()
            self.times[index] = engine.next_time()

    def _take_turns(self, now: float) -> None:
        for index, engine in enumerate(self.engines):
            if engine.spec is self.spec.tail:
                engine.advance(now)
                engine.clock += self.spec.switch_seconds  # as while it prefills
                self._execute(self.scheduler.handle(EngineResized(str(index), None, now)), now)

    def _sequence(self, command: Submit) -> SimulatedSequence:
        length, prior, reason = self.lengths[command.group_id][command.index], len(command.prior_tokens), STOP
        if length > self.max_length:
            length, reason = self.max_length, LENGTH
        remaining = max(1, length - prior) if prior else length
        tokens = self.prompt_tokens[command.group_id]
        sequence = SimulatedSequence(command, tokens, prior, remaining, reason, reported=prior)
        if self.scheduler.needs_progress:
            sequence.report_from = self._report_from(self.groups[command.group_id])
        self.sequences[command.candidate_id] = sequence
        return sequence
