"""
A rollout in virtual time: simulated engines drive the same scheduler as the real ones.

```
scheduler ──Submit──▶ engine: prefill, then one token of every running sequence per step
    ▲                    │
    └──CandidateEnded────┘   the next event is the nearest of any engine
```

Invariants: time never runs backwards; a candidate that ends by itself has exactly the length that it was given; one
engine without limits takes `rollout_time` seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..scheduling import (
    Candidate,
    CandidateEnded,
    Command,
    EngineLoad,
    FinishReason,
    Group,
    GroupPlan,
    RolloutResult,
    Scheduler,
    Submit,
    TokensArrived,
)
from .engine import ClusterSpec, SimulatedEngine, SimulatedSequence
from .reports import Reports


# Members of an enum by a name of their own: before Python 3.12, looking one up in its class calls a function.
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


class SimulatedCluster:
    """
    Runs rollouts in virtual time.

    Args:
        spec ([`ClusterSpec`]):
            The engines.

    Example:

    ```python
    >>> from trl_darts.policy import LatencyCurve
    >>> from trl_darts.scheduling import GroupPlan, Scheduler, make_policies
    >>> from trl_darts.simulation import ClusterSpec, SimulatedCluster

    >>> cluster = SimulatedCluster(ClusterSpec(LatencyCurve([1], [0.01])))
    >>> scheduler = Scheduler(make_policies("grpo", 2, 2, num_longest=0), num_generations=2)
    >>> result = cluster.run(scheduler, [GroupPlan(0, 2)], lengths=[[100, 300]], max_length=1000)
    >>> result.timeline.times[-1]
    3.0

    ```
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self._seconds = [0.0]  # per step, by the number of running sequences

    def run(
        self, scheduler: Scheduler, plans: Sequence[GroupPlan], lengths: Sequence[Sequence[int]], max_length: int
    ) -> RolloutResult:
        """
        Runs one rollout.

        Args:
            scheduler ([`Scheduler`]):
                A new one. The tokens that it is given are ranges: only their number means something.
            plans (`Sequence[GroupPlan]`):
                The groups; `group_id` indexes `lengths`.
            lengths (`Sequence[Sequence[int]]` of shape `(N, ≥ M'_i)`):
                Tokens that each candidate would have if nothing cut it off. At least 1.
            max_length (`int`):
                Tokens at which candidates are cut off.

        Returns:
            [`RolloutResult`]: As of a real engine; its timeline is in virtual seconds.
        """
        return _Rollout(self, scheduler, plans, lengths, max_length).run()

    def seconds_per_step(self, num_candidates: int) -> list[float]:
        """Seconds of a step, by the number of running sequences, up to at least `num_candidates`."""
        known = self._seconds
        known.extend(self.spec.latency(count) for count in range(len(known), num_candidates + 1))
        return known


class _Rollout:
    """One rollout in progress."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        scheduler: Scheduler,
        plans: Sequence[GroupPlan],
        lengths: Sequence[Sequence[int]],
        max_length: int,
    ) -> None:
        self.scheduler = scheduler
        self.plans = plans
        self.lengths = lengths
        self.max_length = max_length
        self.prompt_tokens = {plan.group_id: plan.num_prompt_tokens for plan in plans}
        spec = cluster.spec
        seconds = cluster.seconds_per_step(sum(len(lengths[plan.group_id]) for plan in plans))
        self.reports = Reports(scheduler)
        self.groups = scheduler.ledger.groups
        self.engines = [SimulatedEngine(spec, seconds) for _ in range(spec.num_engines)]
        self.times = [math.inf] * spec.num_engines  # of the engines' next events
        self.sequences: dict[int, SimulatedSequence] = {}  # by candidate
        self.event = (0.0, 0, 0)  # the last end or report: its time, engine and candidate

    def run(self) -> RolloutResult:
        loads = [EngineLoad(str(index)) for index in range(len(self.engines))]
        engines, times = self.engines, self.times
        self._execute(self.scheduler.start(self.plans, loads, 0.0), 0.0)
        ledger = self.scheduler.ledger
        while ledger.num_open:  # the scheduler is not done
            now = min(times)  # for the tens of engines that there are, as fast as a heap that must be kept up to date
            index = times.index(now)  # the first, where several are due: every run goes the same way
            engine = engines[index]
            engine.advance(now)
            sequence = engine.take_event()
            if sequence is not None:
                self.event = now, index, sequence.command.candidate_id
            if sequence is not None and engine.steps >= sequence.end:
                self._end(engine, sequence, sequence.length + sequence.remaining, sequence.reason, now)
            elif sequence is not None:
                self._report(sequence, engine.decoded(sequence), now)
            if engine.waiting:
                engine.admit()
            times[index] = engine.next_time()
        return self.scheduler.result()

    def _report(self, sequence: SimulatedSequence, length: int, now: float) -> None:
        command, known = sequence.command, sequence.reported
        sequence.reported = length
        event = TokensArrived(command.candidate_id, command.segment, known, range(length - known), None, now)
        self._execute(self.scheduler.handle(event), now)

    def _end(
        self, engine: SimulatedEngine, sequence: SimulatedSequence, length: int, reason: FinishReason, now: float
    ) -> None:
        command, known, patient = sequence.command, sequence.reported, self.reports.patient is not None
        if patient:
            self._catch_up(command.candidate_id, self.groups[command.group_id], reason)
        engine.leave(sequence, length)
        event = CandidateEnded(command.candidate_id, command.segment, known, range(length - known), None, reason, now)
        if commands := self.scheduler.handle(event):
            self._execute(commands, now)
        if patient:
            self._watch(self.groups[command.group_id])

    def _catch_up(self, ended: int, group: Group, reason: FinishReason) -> None:
        """Notes what was not reported, of the candidates whose lengths are read when this one ends."""
        for candidate in self.reports.read_at_end(group, reason):
            sequence = self.sequences.get(candidate.candidate_id)
            if sequence is None or candidate.candidate_id == ended:
                continue
            length = self._streamed(candidate)
            if length > sequence.reported:
                candidate.tokens = range(length)
                sequence.reported = length

    def _streamed(self, candidate: Candidate) -> int:
        """Tokens of its last report up to the last event, had it made them all."""
        sequence = self.sequences.get(candidate.candidate_id)
        if sequence is None:
            return len(candidate.tokens)
        now, *before = self.event
        index = int(sequence.command.engine_id)
        engine = self.engines[index]
        engine.advance(now)
        # Of several events at the same time, those of the first engine come first, and of these the first candidate's.
        return engine.streamed(sequence, is_due=[index, candidate.candidate_id] <= before)

    def _watch(self, group: Group) -> None:
        """From now on, reports of the group's sequences that can decide something are events."""
        begin = self.reports.begin_at(group)
        if begin == math.inf:
            return
        for candidate in group.unfinished:
            sequence = self.sequences.get(candidate.candidate_id)
            if sequence is not None and sequence.report_from != begin:
                index = int(sequence.command.engine_id)
                self.engines[index].report(sequence, begin)
                self.times[index] = self.engines[index].next_time()

    def _execute(self, commands: list[Command], now: float) -> None:
        touched = set()
        for command in commands:
            index = int(command.engine_id)
            engine = self.engines[index]
            if index not in touched:
                touched.add(index)
                engine.advance(now)
            if type(command) is Submit:
                engine.waiting.append(self._sequence(command))
            else:
                sequence = self.sequences[command.candidate_id]
                length = engine.decoded(sequence)
                complete = sequence.end != 0.0 and length == sequence.length + sequence.remaining
                self._end(engine, sequence, length, sequence.reason if complete else ABORT, now)
        for index in touched:
            engine = self.engines[index]
            engine.admit()
            self.times[index] = engine.next_time()

    def _sequence(self, command: Submit) -> SimulatedSequence:
        length, prior, reason = self.lengths[command.group_id][command.index], len(command.prior_tokens), STOP
        if length > self.max_length:
            length, reason = self.max_length, LENGTH
        remaining = max(1, length - prior) if prior else length
        tokens = self.prompt_tokens[command.group_id]
        sequence = SimulatedSequence(command, tokens, prior, remaining, reason, reported=prior, streamed=prior)
        if self.reports.needed:
            sequence.report_from = self.reports.begin_at(self.groups[command.group_id])
        self.sequences[command.candidate_id] = sequence
        return sequence
