"""An adversarial engine that sends events in any order, repeats and delays them, and loses and resizes engines."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

from trl_darts.scheduling import (
    Abort,
    CandidateEnded,
    CandidateErred,
    CandidateFailed,
    CandidateStalled,
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
    TakeTurns,
    TokensArrived,
)
from trl_darts.scheduling.scheduler import MAX_EMPTY_ATTEMPTS, MAX_STALLS


class ChaosEngine:
    """Drives a scheduler with events in random order. `trace` records each event with the returned commands."""

    def __init__(
        self,
        seed: int,
        num_engines: int = 2,
        num_tail_engines: int = 0,
        takes_turns: bool = False,
        max_length: int = 40,
        logprobs: bool = True,
        failure_rate: float = 0.0,
        expires_at: float | None = None,
        trouble_rate: float = 0.02,
        tries: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.names = [f"engine{i}" for i in range(num_engines)] + [f"tail{i}" for i in range(num_tail_engines)]
        self.asleep = {name for name in self.names if takes_turns and name.startswith("tail")}
        self.max_length = max_length
        self.logprobs = logprobs
        self.failure_rate = failure_rate
        self.expires_at = expires_at
        self.trouble_rate = trouble_rate  # of errors of single candidates
        self.tries = tries  # whether these, and losses, may count as attempts
        self.trace: list[tuple[Event, list[Command]]] = []
        self.running: dict[tuple[int, int], Submit] = {}  # by (candidate_id, segment)
        self.sent: dict[tuple[int, int], int] = {}  # reported tokens, including prior ones
        self.aborts: set[tuple[int, int]] = set()
        self.ends: dict[int, int] = {}  # number of ends reported, by candidate_id
        self.num_moved = 0  # aborted to move, and reported as ended
        self.num_dropped = 0  # aborted, and lost with their engine before the end was reported
        self.alive: set[str] = set()
        self.now = 0.0

    def run(self, scheduler: Scheduler, plans: Sequence[GroupPlan]) -> None:
        self.scheduler = scheduler
        self.alive = set(self.names)
        loads = [EngineLoad(name, self._capacity(None, 3), tail=name.startswith("tail")) for name in self.names]
        for load in loads:
            load.capacity = 0 if load.engine_id in self.asleep else load.capacity
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
        trouble = self.random.random()
        if self.expires_at is not None and self.now >= self.expires_at:
            self.expires_at = None
            self._send(RolloutExpired("time ran out", self.now))
        elif self.running and self.random.random() < self.failure_rate:
            self._break(self.random.choice(sorted(self.running)))
        elif self.running and trouble < self.trouble_rate:
            self._err(self.random.choice(sorted(self.running)))
        elif choice < 0.10 and self.trace:  # a duplicate or late event
            self._send(copy.deepcopy(self.random.choice(self.trace)[0]), fresh=False)
        elif choice < 0.12 and self.alive:
            self._lose(self.random.choice(sorted(self.alive)))
        elif choice < 0.14 and len(self.alive) < len(self.names):
            name = next(name for name in self.names if name not in self.alive)
            self.alive.add(name)
            capacity = 0 if name in self.asleep else 4
            self._send(EngineJoined(name, self.now, capacity, tail=name.startswith("tail")))
        elif choice < 0.16 and self.running and self.tries:
            self._stall(self.random.choice(sorted(self.running)))
        elif choice < 0.19 and self.alive - self.asleep:
            name = self.random.choice(sorted(self.alive - self.asleep))
            self._send(EngineResized(name, self._capacity(None, 0, 1, 5), self.now))
        elif self.running:
            self._advance(self.random.choice(sorted(self.running)))

    def _capacity(self, *choices: int | None) -> int | None:
        return self.random.choice(choices)

    def _take_turns(self) -> None:
        """Puts the main engines to sleep and wakes the tail engines; if that fails, wakes the main engines again."""
        assert not self.running, "engines that decode were put to sleep"
        main = sorted(name for name in self.alive if not name.startswith("tail"))
        tail = sorted(self.alive - set(main))
        for name in main:
            self._send(EngineResized(name, 0, self.now))
        self.asleep = {name for name in self.names if not name.startswith("tail")}
        if self.random.random() < 0.5:
            for name in tail:
                self._send(EngineResized(name, None, self.now))
            return
        self.asleep = set()
        for name in tail:
            self._lose(name)
        for name in main:
            self._send(EngineResized(name, None, self.now))

    def _advance(self, key: tuple[int, int]) -> None:
        offset = self.sent[key]
        count = self.random.randint(0, 6)
        tokens = list(range(offset, offset + count))  # token i of a completion is i, which reveals gaps and repeats
        logprobs = [-float(t) for t in tokens] if self.logprobs else None
        self.sent[key] += count
        end = self.sent[key] > 0 and (self.sent[key] >= self.max_length or self.random.random() < 0.25)
        if key in self.aborts and (end or self.random.random() < 0.5):
            stops = [FinishReason.STOP] if self.sent[key] else []  # it may end just before
            reason = self.random.choice([FinishReason.ABORT, *stops])
        elif end:
            reason = FinishReason.LENGTH if self.sent[key] >= self.max_length else FinishReason.STOP
        else:
            self._send(TokensArrived(*key, offset, tokens, logprobs, self.now))
            return
        del self.running[key]
        candidate = self.scheduler.ledger.candidates[key[0]]
        if candidate.moving and candidate.state is CandidateState.RUNNING and reason is FinishReason.ABORT:
            self.num_moved += 1
        else:
            self.ends[key[0]] = self.ends.get(key[0], 0) + 1
        self._send(CandidateEnded(*key, offset, tokens, logprobs, reason, self.now))

    def _break(self, key: tuple[int, int]) -> None:
        del self.running[key]
        self.ends[key[0]] = self.ends.get(key[0], 0) + 1
        self._send(CandidateFailed(*key, "broken", self.now))

    def _stall(self, key: tuple[int, int]) -> None:
        """Stalls a candidate. Its closed request gets no more answers."""
        candidate = self.scheduler.ledger.candidates[key[0]]
        if candidate.state is CandidateState.RUNNING and candidate.num_empty_attempts >= MAX_STALLS:
            return  # would be an error
        del self.running[key]
        if candidate.state is CandidateState.ABORTING:
            self.ends[key[0]] = self.ends.get(key[0], 0) + 1
        self._send(CandidateStalled(*key, "late", self.now))

    def _err(self, key: tuple[int, int]) -> None:
        """Fails on a candidate, or does not try it. Its closed request gets no more answers."""
        candidate, tried = self.scheduler.ledger.candidates[key[0]], self.tries and self.random.random() < 0.5
        if tried and candidate.num_empty_attempts >= MAX_EMPTY_ATTEMPTS:
            return  # would be an error
        del self.running[key]
        if candidate.state is CandidateState.ABORTING:
            self.ends[key[0]] = self.ends.get(key[0], 0) + 1
        self._send(CandidateErred(*key, "it broke", self.now, tried))

    def _lose(self, name: str) -> None:
        self.alive.remove(name)
        own = {c for (c, _), command in self.running.items() if command.engine_id == name}
        untried = own if not self.tries else {c for c in own if self.random.random() < 0.5}
        for key in [k for k, command in self.running.items() if command.engine_id == name]:
            del self.running[key]
            self.num_dropped += self.scheduler.ledger.candidates[key[0]].state is CandidateState.ABORTING
        self._send(EngineLost(name, "gone", self.now, untried))

    def _send(self, event: Event, fresh: bool = True) -> None:
        if not fresh and isinstance(event, EngineLost | EngineJoined | EngineResized | RolloutExpired):
            return  # for an engine that is back, a repeated loss is a new one
        self.now += 1.0
        event.now = self.now
        commands = self.scheduler.handle(event)
        self.trace.append((event, commands))
        self._take(commands)

    def _take(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, TakeTurns):
                self._take_turns()
                continue
            key = (command.candidate_id, command.segment)
            if isinstance(command, Abort):
                assert key in self.running, "an abort for a candidate that does not run"
                assert key not in self.aborts, "aborted twice"
                self.aborts.add(key)
            else:
                assert key not in self.running, "submitted twice"
                assert command.engine_id in self.alive, "submitted to an engine that is gone"
                assert command.engine_id not in self.asleep, "submitted to an engine that sleeps"
                if not self.scheduler.carries_tokens:
                    assert not command.prior_tokens
                self.running[key] = command
                self.sent[key] = len(command.prior_tokens)
