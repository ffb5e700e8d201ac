"""
An engine in virtual time. A step decodes one token of every running sequence, and takes the seconds of a
[`LatencyCurve`]. Between two events the batch is constant, so nothing is computed per token.
"""

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from ...scheduling import FinishReason, Submit
from .cluster_spec import ClusterSpec


_NOW = 1e-6  # steps, or tokens of the cache, that count as zero


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """A candidate on an engine."""

    command: Submit
    prompt_tokens: int
    length: int  # tokens when it was last admitted
    remaining: int  # tokens to decode from there
    reason: FinishReason
    reported: int  # tokens that were reported to the scheduler
    report_from: float = math.inf  # its reports are events from this number of tokens on
    next_report: float = -1.0  # step of the next one
    begin: float = 0.0  # the engine's step at which it was admitted
    end: float = 0.0  # the step at which it ends; 0 while it waits
    admissions: int = 0
    cached: int = 0  # tokens that need no prefill when it is admitted
    alive: bool = True


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """One replica."""

    spec: ClusterSpec
    seconds: list[float]  # of a step, by the number of running sequences
    clock: float = 0.0
    steps: float = 0.0  # a step may be partly done
    num_running: int = 0
    used: float = 0.0  # tokens in the KV cache; counted only if it has a limit
    events: list[tuple[float, int, int, SimulatedSequence]] = field(default_factory=list)  # sorted, by step
    admitted: list[SimulatedSequence] = field(default_factory=list)  # in order, for preemptions
    waiting: deque[SimulatedSequence] = field(default_factory=deque)
    prefilled: set[int] = field(default_factory=set)  # groups whose prompt is in the cache

    def advance(self, now: float) -> None:
        """Decodes until `now`. While an engine prefills, its clock is ahead of the others'."""
        if now > self.clock:
            if self.num_running:
                steps = (now - self.clock) / self.seconds[self.num_running]
                self.steps += steps
                self.used += steps * self.num_running
            self.clock = now

    def next_time(self) -> float:
        """Returns the time at which a sequence ends or reports, or the cache overflows; infinity if it is idle."""
        events = self.events
        while events:
            step, _, admissions, sequence = events[0]
            is_here = sequence.end != 0.0 and sequence.admissions == admissions
            if is_here and (step == sequence.end or step == sequence.next_report):
                break
            del events[0]  # outdated: its sequence has left, was admitted again, or reports at another time
        else:
            return math.inf
        steps = step - self.steps
        if self.spec.kv_tokens is not None and self.num_running > 1:
            steps = min(steps, (self.spec.kv_tokens - self.used) / self.num_running)
        return self.clock if steps < 0 else self.clock + steps * self.seconds[self.num_running]

    def take_event(self) -> SimulatedSequence | None:
        """Returns the sequence that ends or reports now, or `None` if the cache overflowed and one was preempted."""
        step, _, _, sequence = self.events[0]
        if step - self.steps > _NOW:
            self._preempt()
            return None
        del self.events[0]  # faster than a heap, although it moves the others
        if step > self.steps - _NOW:  # rounding errors would reorder events that coincide
            self.steps = step
        if step < sequence.end:
            self._plan_report(sequence)
        return sequence

    def watch(self, sequence: SimulatedSequence, num_tokens: float) -> None:
        """Turns the reports of a sequence into events, once it has this many tokens."""
        sequence.report_from = num_tokens
        if sequence.end != 0.0:
            self._plan_report(sequence)

    def admit(self) -> None:
        """Starts waiting sequences in order while there is room. An idle engine always has room."""
        spec, waiting = self.spec, self.waiting
        started = []
        while waiting:
            sequence = waiting[0]
            if sequence.alive:
                context = sequence.prompt_tokens + sequence.length
                full = spec.max_num_seqs is not None and self.num_running >= spec.max_num_seqs
                if spec.kv_tokens is not None:
                    full |= self.used + context + self.num_running >= spec.kv_tokens - _NOW
                if full and self.num_running:
                    break
                self._start(sequence, context)
                started.append((sequence.end, sequence.command.candidate_id, sequence.admissions, sequence))
            waiting.popleft()
        if len(started) > 8:  # as at the start of a rollout: sorting once is faster
            self.events += started
            self.events.sort()
        else:
            for event in started:
                insort(self.events, event)
        for *_, sequence in started:
            if sequence.report_from != math.inf:
                self._plan_report(sequence)

    def leave(self, sequence: SimulatedSequence, length: int) -> None:
        """Removes a running or waiting sequence, which has this many tokens."""
        sequence.alive = False
        if sequence.end == 0.0:
            return
        sequence.end = 0.0
        self.num_running -= 1
        if self.spec.kv_tokens is not None:
            self.used = max(0.0, self.used - sequence.prompt_tokens - length) if self.num_running else 0.0

    def decoded(self, sequence: SimulatedSequence) -> int:
        """Returns the tokens that a sequence has now, including prior ones."""
        if sequence.end == 0.0:
            return sequence.length
        return sequence.length + min(int(self.steps - sequence.begin + _NOW), sequence.remaining)

    def streamed(self, sequence: SimulatedSequence) -> int:
        """Returns the tokens that a server would have streamed by now. The last one comes with the end."""
        prior, interval = len(sequence.command.prior_tokens), self.spec.report_interval
        last = sequence.length + sequence.remaining - 1
        return prior + (min(self.decoded(sequence), last) - prior) // interval * interval

    def _start(self, sequence: SimulatedSequence, context: int) -> None:
        spec, group, cost = self.spec, sequence.command.group_id, sequence.length - sequence.cached
        if group not in self.prefilled:
            self.prefilled.add(group)
            cost += sequence.prompt_tokens
        self.clock += spec.seconds_per_request + cost * spec.prefill_seconds_per_token
        sequence.begin = self.steps
        sequence.end = self.steps + sequence.remaining
        sequence.admissions += 1
        self.num_running += 1
        if spec.kv_tokens is not None:
            self.used += context
            self.admitted.append(sequence)

    def _plan_report(self, sequence: SimulatedSequence) -> None:
        """Plans the sequence's next report that is an event, if there is one before its end."""
        prior, interval = len(sequence.command.prior_tokens), self.spec.report_interval
        tokens = max(sequence.report_from, self.decoded(sequence) + 1) - prior
        tokens = prior + math.ceil(tokens / interval) * interval
        step = sequence.begin + tokens - sequence.length
        sequence.next_report = step
        if step < sequence.end:
            insort(self.events, (step, sequence.command.candidate_id, sequence.admissions, sequence))

    def _preempt(self) -> None:
        while self.admitted[-1].end == 0.0:
            self.admitted.pop()
        sequence = self.admitted.pop()
        length = self.decoded(sequence)
        self.leave(sequence, length)
        sequence.remaining -= length - sequence.length
        sequence.length, sequence.cached, sequence.alive = length, 0, True  # it returns
        self.waiting.appendleft(sequence)
