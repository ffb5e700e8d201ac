"""
An engine in virtual time: one token of every running sequence per step, [`LatencyCurve`] seconds a step.

Between two events its batch is constant, so nothing is computed per token.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ...policy import EngineTimes, LatencyCurve, LatencyProfile, Layout, PrefillCurve, TailTimes
from ...scheduling import FinishReason, Submit, TailServers


@dataclass(frozen=True)
class ClusterSpec:
    """
    The engines that decode a batch together.

    Args:
        latency ([`LatencyCurve`]):
            Seconds per token of one engine, at its tensor parallel size.
        num_engines (`int`, *optional*, defaults to `1`):
            Data parallel replicas.
        max_num_seqs (`int`, *optional*):
            Most sequences that an engine decodes at once; the others wait in its queue. No limit by default.
        kv_tokens (`int`, *optional*):
            Tokens that fit in an engine's KV cache. When it overflows, the sequence that came last is preempted: it
            goes back to the head of the queue and is prefilled anew. No limit by default.
        prefill_seconds_per_token (`float`, *optional*, defaults to `0.0`):
            An engine that prefills decodes nothing. A prompt is prefilled once per engine, its candidates share it.
        seconds_per_request (`float`, *optional*, defaults to `0.0`):
            Time that each candidate costs its engine before it decodes, whatever its length.
        report_interval (`int`, *optional*, defaults to `16`):
            Tokens between two reports of a sequence, where the schedule asks for them: our vLLM engine's streaming
            interval.
        tail ([`ClusterSpec`], *optional*):
            Engines of another layout, which take over what is left.
        switch_seconds (`float`, *optional*, defaults to `0.0`):
            Time until `tail` is awake where it is on the same GPUs, asleep until it takes over. With 0 it has its own.

    Raises:
        [`ConfigurationError`]: If a number is not positive.
    """

    latency: LatencyCurve
    num_engines: int = 1
    max_num_seqs: int | None = None
    kv_tokens: int | None = None
    prefill_seconds_per_token: float = 0.0
    seconds_per_request: float = 0.0
    report_interval: int = 16
    tail: ClusterSpec | None = None
    switch_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_engines", "max_num_seqs", "kv_tokens", "report_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"`{name}` ({value}) must be at least 1.")
        for name in ("prefill_seconds_per_token", "seconds_per_request", "switch_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"`{name}` ({getattr(self, name)}) must be finite and not negative.")

    @classmethod
    def measured(cls, path: Path, **fields: Any) -> ClusterSpec:
        """As `trl-darts profile` measured an engine, with its limits, but for `fields`."""
        curve, prefill = LatencyCurve.load(path, "--latency-curve"), PrefillCurve.load(path)
        return cls.of(curve, prefill, **fields)

    @classmethod
    def of(cls, curve: LatencyCurve, prefill: PrefillCurve | None, **fields: Any) -> ClusterSpec:
        """As a profile has it, but for `fields`."""
        own: dict[str, Any] = {
            "max_num_seqs": curve.metadata.get("max_num_seqs"),
            "kv_tokens": curve.metadata.get("kv_cache_tokens"),
            "prefill_seconds_per_token": prefill.per_token_s if prefill is not None else 0.0,
        }
        return cls(curve, **own | fields)

    @classmethod
    def of_layouts(cls, path: Path, main: Layout, tail: Layout, **fields: Any) -> ClusterSpec:
        """Main and tail engines of a profile that has both."""
        profile = LatencyProfile.load(path, "--latency-curve")
        if profile.tail is None:
            raise ConfigurationError(
                f"`--latency-curve` ({str(path)!r}) must be a profile of both kinds of engines, and has none of the "
                f"tail's. Add it with `trl-darts profile URL --tail-of {path}`."
            )
        own = cls.of(profile.tail.curve, profile.tail.prefill, num_engines=tail.num_engines)
        return cls.of(profile.curve, profile.prefill, num_engines=main.num_engines, tail=own, **fields)

    def tail_servers(self, max_completion_length: int) -> TailServers | None:
        """What the schedule is told of the tail's engines; `None` without any."""
        if self.tail is None:
            return None
        main, tail = (
            EngineTimes(spec.latency, PrefillCurve(0.0, spec.prefill_seconds_per_token), spec.max_num_seqs)
            for spec in (self, self.tail)
        )
        times = TailTimes(main, tail, self.switch_seconds)
        return TailServers(times, max_completion_length, takes_turns=self.switch_seconds > 0)


_NOW = 1e-6  # steps, or tokens of the cache, that are as good as none


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """
    A candidate on an engine.

    `length` is what it had when it was admitted last and `remaining` what it lacked then, in tokens. It decodes from
    the engine's step `begin` to `end`, which is 0 while it waits. `reported` is what the scheduler knows of, and
    `report_from` the tokens from which on its reports are events.
    """

    command: Submit
    prompt_tokens: int
    length: int
    remaining: int
    reason: FinishReason
    reported: int
    report_from: float = math.inf
    next_report: float = -1.0  # step
    begin: float = 0.0
    end: float = 0.0
    admissions: int = 0
    alive: bool = True


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """One replica. `seconds` of a step are by the number of running sequences; `steps` may be a fraction."""

    spec: ClusterSpec
    seconds: list[float]
    clock: float = 0.0
    steps: float = 0.0
    num_running: int = 0
    used: float = 0.0  # tokens in the KV cache; counted only where it has a limit
    events: list[tuple[float, int, int, SimulatedSequence]] = field(default_factory=list)  # sorted, by step
    admitted: list[SimulatedSequence] = field(default_factory=list)  # in order, for preemptions
    waiting: deque[SimulatedSequence] = field(default_factory=deque)
    prefilled: set[int] = field(default_factory=set)  # groups whose prompt is in the cache

    def advance(self, now: float) -> None:
        """Decode until `now`. While it prefills, its clock is ahead of the others'."""
        if now > self.clock:
            if self.num_running:
                steps = (now - self.clock) / self.seconds[self.num_running]
                self.steps += steps
                self.used += steps * self.num_running
            self.clock = now

    def next_time(self) -> float:
        """When a sequence ends or reports, or the cache overflows; infinity if it is idle."""
        events = self.events
        while events:
            step, _, admissions, sequence = events[0]
            is_here = sequence.end != 0.0 and sequence.admissions == admissions
            if is_here and (step == sequence.end or step == sequence.next_report):
                break
            del events[0]  # overtaken: its sequence has left, was admitted anew, or reports at another time
        else:
            return math.inf
        steps = step - self.steps
        if self.spec.kv_tokens is not None and self.num_running > 1:
            steps = min(steps, (self.spec.kv_tokens - self.used) / self.num_running)
        return self.clock if steps < 0 else self.clock + steps * self.seconds[self.num_running]

    def take_event(self) -> SimulatedSequence | None:
        """
        At its next time: the sequence that ends or reports there. `None` where the cache overflowed instead, and the
        sequence that came last was preempted.
        """
        step, _, _, sequence = self.events[0]
        if step - self.steps > _NOW:
            self._preempt()
            return None
        del self.events[0]  # moves the others, and is faster than a heap nevertheless
        if step > self.steps - _NOW:  # rounded steps would put events that coincide in any order
            self.steps = step
        if step < sequence.end:
            self._plan_report(sequence)
        return sequence

    def watch(self, sequence: SimulatedSequence, num_tokens: float) -> None:
        """Have a sequence report from now on, once it has so many tokens."""
        sequence.report_from = num_tokens
        if sequence.end != 0.0:
            self._plan_report(sequence)

    def admit(self) -> None:
        """Start those that wait, in order, as far as there is room. An idle engine always has room."""
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
        if len(started) > 8:  # as at the beginning of a rollout: then to sort once is faster
            self.events += started
            self.events.sort()
        else:
            for event in started:
                insort(self.events, event)
        for *_, sequence in started:
            if sequence.report_from != math.inf:
                self._plan_report(sequence)

    def leave(self, sequence: SimulatedSequence, length: int) -> None:
        """Take a sequence out, running or waiting, that has this many tokens."""
        sequence.alive = False
        if sequence.end == 0.0:
            return
        sequence.end = 0.0
        self.num_running -= 1
        if self.spec.kv_tokens is not None:
            self.used = max(0.0, self.used - sequence.prompt_tokens - length) if self.num_running else 0.0

    def decoded(self, sequence: SimulatedSequence) -> int:
        """Tokens that a sequence has now, prior ones included."""
        if sequence.end == 0.0:
            return sequence.length
        tokens = int(self.steps - sequence.begin + _NOW)
        return sequence.length + (tokens if tokens < sequence.remaining else sequence.remaining)

    def streamed(self, sequence: SimulatedSequence) -> int:
        """Tokens that its reports have told until now, had it made them all. The last token comes with its end."""
        prior, interval = len(sequence.command.prior_tokens), self.spec.report_interval
        last = sequence.length + sequence.remaining - 1
        return prior + (min(self.decoded(sequence), last) - prior) // interval * interval

    def _start(self, sequence: SimulatedSequence, context: int) -> None:
        spec, group, cost = self.spec, sequence.command.group_id, sequence.length
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
        """Its next report that is an event, if it makes one before its end."""
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
        sequence.length, sequence.alive = length, True  # it comes back
        self.waiting.appendleft(sequence)
