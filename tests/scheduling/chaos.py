"""An adversarial engine: reports what it likes in any order, twice, too late; loses, regains and resizes engines."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

from trl_darts.scheduling import (
    Abort,
    CandidateEnded,
    CandidateFailed,
    CandidateState,
    Command,
    EngineJoined,
    EngineLoad,
    EngineLost,
    EngineResized,
    Event,
    FinishReason,
    GroupPlan,
    RolloutExpired,
    Scheduler,
    Submit,
    TokensArrived,
)


class ChaosEngine:
    """Drives a scheduler with events in random order; `trace` keeps each event with the commands that it led to."""

    def __init__(
        self,
        seed: int,
        num_engines: int = 2,
        max_length: int = 40,
        logprobs: bool = True,
        failure_rate: float = 0.0,
        expires_at: float | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.num_engines = num_engines
        self.max_length = max_length
        self.logprobs = logprobs
        self.failure_rate = failure_rate
        self.expires_at = expires_at
        self.trace: list[tuple[Event, list[Command]]] = []
        self.running: dict[tuple[int, int], Submit] = {}  # by (candidate_id, segment)
        self.sent: dict[tuple[int, int], int] = {}  # tokens reported, prior ones included
        self.aborts: set[tuple[int, int]] = set()
        self.ends: dict[int, int] = {}  # how many ends each candidate was told, by candidate_id
        self.num_dropped = 0  # called off, and lost with their engine before they were told to have ended
        self.alive: set[str] = set()
        self.now = 0.0

    def run(self, scheduler: Scheduler, plans: Sequence[GroupPlan]) -> None:
        self.scheduler = scheduler
        self.alive = {f"engine{i}" for i in range(self.num_engines)}
        loads = [EngineLoad(name, self.random.choice([None, 3])) for name in sorted(self.alive)]
        self.initial = copy.deepcopy(loads)
        self.first_commands = scheduler.start(plans, loads, self.now)
        self._take(self.first_commands)
        steps = 0
        while not scheduler.done:
            steps += 1
            assert steps < 100_000, "the rollout does not end"
            self._step()

    def _step(self) -> None:
        choice = self.random.random()
        if self.expires_at is not None and self.now >= self.expires_at:
            self.expires_at = None
            self._send(RolloutExpired("time ran out", self.now))
        elif self.running and self.random.random() < self.failure_rate:
            self._break(self.random.choice(sorted(self.running)))
        elif choice < 0.10 and self.trace:  # a duplicate, or an event that comes late
            self._send(copy.deepcopy(self.random.choice(self.trace)[0]), fresh=False)
        elif choice < 0.12 and self.alive:
            self._lose(self.random.choice(sorted(self.alive)))
        elif choice < 0.14 and len(self.alive) < self.num_engines:
            name = next(f"engine{i}" for i in range(self.num_engines) if f"engine{i}" not in self.alive)
            self.alive.add(name)
            self._send(EngineJoined(name, self.now, capacity=4))
        elif choice < 0.17 and self.alive:
            capacity = self.random.choice([None, 0, 1, 5])
            self._send(EngineResized(self.random.choice(sorted(self.alive)), capacity, self.now))
        elif self.running:
            self._advance(self.random.choice(sorted(self.running)))

    def _advance(self, key: tuple[int, int]) -> None:
        offset = self.sent[key]
        count = self.random.randint(0, 6)
        tokens = list(range(offset, offset + count))  # token i of a completion is i, so gaps and repeats show
        logprobs = [-float(t) for t in tokens] if self.logprobs else None
        self.sent[key] += count
        end = self.sent[key] > 0 and (self.sent[key] >= self.max_length or self.random.random() < 0.25)
        if key in self.aborts and (end or self.random.random() < 0.5):
            stops = [FinishReason.STOP] if self.sent[key] else []  # it may end by itself just before
            reason = self.random.choice([FinishReason.ABORT, *stops])
        elif end:
            reason = FinishReason.LENGTH if self.sent[key] >= self.max_length else FinishReason.STOP
        else:
            self._send(TokensArrived(*key, offset, tokens, logprobs, self.now))
            return
        del self.running[key]
        self.ends[key[0]] = self.ends.get(key[0], 0) + 1
        self._send(CandidateEnded(*key, offset, tokens, logprobs, reason, self.now))

    def _break(self, key: tuple[int, int]) -> None:
        del self.running[key]
        self.ends[key[0]] = self.ends.get(key[0], 0) + 1
        self._send(CandidateFailed(*key, "broken", self.now))

    def _lose(self, name: str) -> None:
        self.alive.remove(name)
        for key in [k for k, command in self.running.items() if command.engine_id == name]:
            del self.running[key]
            self.num_dropped += self.scheduler.ledger.candidates[key[0]].state is CandidateState.ABORTING
        self._send(EngineLost(name, "gone", self.now))

    def _send(self, event: Event, fresh: bool = True) -> None:
        if not fresh and isinstance(event, EngineLost | EngineJoined | EngineResized | RolloutExpired):
            return  # a repeated loss of an engine that has come back is a new loss
        self.now += 1.0
        event.now = self.now
        commands = self.scheduler.handle(event)
        self.trace.append((event, commands))
        self._take(commands)

    def _take(self, commands: Sequence[Command]) -> None:
        for command in commands:
            key = (command.candidate_id, command.segment)
            if isinstance(command, Abort):
                assert key in self.running, "an abort for a candidate that does not run"
                self.aborts.add(key)
            else:
                assert key not in self.running, "submitted twice"
                assert command.engine_id in self.alive, "submitted to an engine that is gone"
                self.running[key] = command
                self.sent[key] = len(command.prior_tokens)
