"""
The scheduler: a state machine without I/O that turns events into commands.

It uses no torch, HTTP or clock. An engine's driver calls `start`, executes the returned commands, reports events to
`handle`, executes the commands that it returns, and reads `result` once `done`. Asyncio with real servers, a stopping
criterion inside `generate`, and simulated time drive the same object.

Invariants (`tests/scheduling/test_invariants.py` checks each under its name, over random orders of events with
duplicates and late ones among them):

- ends_once: every submitted candidate ends exactly once: finished, aborted or lost.
- rows_per_group: a group that is not deferred yields exactly `num_generations` rows.
- tokens_match_logprobs: `len(tokens) == len(logprobs)` for every candidate of an engine that returns log-probs.
- nothing_outstanding: once `done`, every command has been answered.
- same_trace_same_commands: decisions depend on the events alone.
- settled_is_final: once a group's rows are selected, no later event changes them.
- moves_once: the remaining candidates move to the tail servers once, and back only if these are lost.
- restarts_whole: if tokens can't be carried, no request has prior tokens, and no row has tokens of two requests.
- only_attempts_count: no candidate fails because engines were lost before they had its request, or were busy.
- rows_first: of the candidates that start at once, the first `num_generations` of each group start before the others.
- dropped_or_complete: with `drop_failed_groups`, each group has either its rows or an error message.
"""

from collections import deque
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

from ..errors import ConfigurationError, GenerationError
from .ledger import ABORT, ABORTING, RUNNING, WAITING, Ledger
from .policies import SchedulePolicies
from .types import (
    FINAL_STATES,
    Abort,
    Candidate,
    CandidateEnded,
    CandidateErred,
    CandidateFailed,
    CandidateStalled,
    Command,
    EngineJoined,
    EngineLoad,
    EngineLost,
    EngineResized,
    EngineUpdated,
    Event,
    Group,
    GroupPlan,
    GroupResult,
    RolloutExpired,
    RolloutResult,
    Submit,
    TailSwitch,
    TakeTurns,
    TokensArrived,
)


# A candidate that errs, or is lost with its engine, more often, each time without a new token, is seen as the cause.
MAX_EMPTY_ATTEMPTS = 8
# A candidate that stalls more often in a row is considered the cause.
MAX_STALLS = 2


class Scheduler:
    """
    Schedules one rollout: decides what the engines decode until the batch is ready.

    Args:
        policies ([`SchedulePolicies`]):
            Policies of the schedule.
        num_generations (`int`):
            Number of rows of each group, M.
        drop_failed_groups (`bool`, *optional*, defaults to `False`):
            Whether to drop a group that can't be completed, instead of ending the rollout. A group with
            `num_generations` complete candidates keeps them.
        carries_tokens (`bool`, *optional*, defaults to `True`):
            Whether a candidate whose engine is lost continues from its tokens. If `False`, it restarts, because some
            sampling options only work within one request.
    """

    def __init__(
        self,
        policies: SchedulePolicies,
        num_generations: int,
        drop_failed_groups: bool = False,
        carries_tokens: bool = True,
    ) -> None:
        self.policies = policies
        self.num_generations = num_generations
        self.drop_failed_groups = drop_failed_groups
        self.carries_tokens = carries_tokens
        self.ledger = Ledger()
        self.error: str | None = None
        self._waiting: deque[Candidate] = deque()  # in the order in which they will be submitted
        self._selected: set[int] = set()  # group IDs
        self._ready: set[int] = set()  # with rows, or with enough complete candidates if the policy follows the batch
        self._dropped: set[int] = set()
        self._batch_ready = False
        self._tail_switch: TailSwitch | None = None
        self._given_back = False  # whether all tail engines were lost after the switch
        self._turns_over = False  # whether engines must take turns once no candidate runs

    @property
    def needs_progress(self) -> bool:
        """Whether engines must report tokens while they decode, not only finished candidates."""
        return self.policies.group_stop.needs_progress

    @property
    def weighs_switch(self) -> bool:
        """Whether the next finished candidate may cause a switch, for which current lengths are needed."""
        return self._may_switch(self.ledger.num_unfinished - 1)

    @property
    def done(self) -> bool:
        """Whether every candidate has ended."""
        return self.ledger.num_open == 0

    def start(self, plans: Sequence[GroupPlan], engines: Sequence[EngineLoad], now: float) -> list[Command]:
        """
        Starts the rollout and returns the first commands. Results have the order of the plans. Without an engine, all
        candidates wait for one to join. Raises [`ConfigurationError`] if a plan has fewer candidates than rows.
        """
        self.ledger.engines = {engine.engine_id: engine for engine in engines}
        return self.add(plans, now)

    def add(self, plans: Sequence[GroupPlan], now: float) -> list[Command]:
        """Adds groups, of a rollout that may already run, and returns commands. Raises as `start`."""
        for plan in plans:
            if plan.num_candidates < self.num_generations:
                raise ConfigurationError(
                    f"`num_candidates` ({plan.num_candidates}) of group {plan.group_id} must be at least "
                    f"`num_generations` ({self.num_generations}). Raise it."
                )
        groups = [self.ledger.add_group(plan, now) for plan in plans]
        waiting = [c for group in groups for c in group.candidates if c.state is WAITING]
        self._waiting.extend(self.policies.placement.order(waiting))
        resumed = [group for group in groups if group.plan.resumed]
        commands = [command for group in resumed for command in self._decide(group, now)]
        return commands + self._submit(now)

    def handle(self, event: Event) -> list[Command]:
        """
        Handles an event and returns commands for the engines. Repeated events, and events of a candidate that has
        ended, have no effect.
        """
        commands = _HANDLERS[type(event)](self, event)
        if self._turns_over and not self.ledger.num_running:
            self._turns_over = False
            if self.ledger.num_open:
                commands.append(TakeTurns())
        return commands

    # A rollout without end, whose groups are added and taken while it runs

    @property
    def takeable(self) -> list[int]:
        """IDs of the groups with enough complete candidates, and of dropped ones, in the order of their entry."""
        return sorted(self._ready | self._dropped)

    @property
    def selected(self) -> Set[int]:
        """IDs of the groups whose rows are selected."""
        return self._selected

    def select(self, group_ids: Sequence[int], now: float) -> list[Command]:
        """Selects the rows of groups with enough complete candidates, and aborts the unfinished ones."""
        commands: list[Command] = []
        for group in [self.ledger.groups[group_id] for group_id in group_ids]:
            if not group.closed:
                commands += self._abort(group.unfinished, now)
                self._select_rows(group)
        return commands

    def drop(self, group_id: int, reason: str, now: float) -> list[Command]:
        """Aborts the candidates of a group that nobody waits for any longer. Once they have ended, it can be taken."""
        return self._drop(self.ledger.groups[group_id], reason, now)

    def has_ended(self, group_ids: Sequence[int]) -> bool:
        """Whether all candidates of these groups have ended."""
        return all(c.state in FINAL_STATES for group_id in group_ids for c in self.ledger.groups[group_id].candidates)

    def take(self, group_ids: Sequence[int], now: float) -> RolloutResult:
        """
        Removes groups with rows, or dropped ones, whose candidates have ended, and returns them. The result's timeline
        and its resumed submissions are those since the last call.
        """
        groups = [self.ledger.forget_group(group_id) for group_id in group_ids]
        self.policies.placement.forget(group_ids)
        for ids in (self._ready, self._selected, self._dropped):
            ids.difference_update(group_ids)
        timeline, num_resumed = self.ledger.cut(now)
        results = [GroupResult(g.plan, g.candidates, g.selected or []) for g in groups if g.error is None]
        dropped = {group.group_id: group.error for group in groups if group.error is not None}
        return RolloutResult(results, [], timeline, num_resumed, dropped)

    def result(self) -> RolloutResult:
        """
        Returns the result once `done`. Raises [`GenerationError`] with the engine's message if the rollout failed or
        every group was dropped.
        """
        if not self.done:
            raise GenerationError(f"The rollout is not done: {self.ledger.num_open} candidates are still open.")
        if self.error is not None:
            raise GenerationError(self.error)
        groups = self.ledger.groups.values()
        results = [GroupResult(g.plan, g.candidates, g.selected or [], g.has_rows) for g in groups if g.error is None]
        return RolloutResult(
            groups=[r for r in results if r.complete],
            deferred=[r for r in results if not r.complete],
            timeline=self.ledger.timeline,
            num_resumed=self.ledger.num_resumed,
            dropped={group.group_id: group.error for group in groups if group.error is not None},
            tail_switch=self._tail_switch,
        )

    # Events

    def _on_tokens(self, event: TokensArrived) -> list[Command]:
        candidate = self.ledger.live(event.candidate_id, event.segment)
        if candidate is None:
            return []
        if problem := self.ledger.append(candidate, event):
            return self._fail(candidate, problem, event.now)
        return self._decide(self.ledger.groups[candidate.group_id], event.now)

    def _on_ended(self, event: CandidateEnded) -> list[Command]:
        candidate = self.ledger.live(event.candidate_id, event.segment)
        if candidate is None:
            return []
        problem = self.ledger.append(candidate, event)
        if problem is None and candidate.state is RUNNING:
            if candidate.moving and event.finish_reason is ABORT:
                return self._move(candidate, event.now)
            if not candidate.tokens:
                problem = "it ended without a single token"
            elif event.finish_reason is ABORT:
                problem = "it was aborted, but not by this trainer"
        if problem:
            return self._fail(candidate, problem, event.now)
        self.ledger.finish(candidate, event.finish_reason, event.now)
        commands = self._decide(self.ledger.groups[candidate.group_id], event.now)
        return commands + self._consider_switch(event.now) + self._submit(event.now)

    def _on_failed(self, event: CandidateFailed) -> list[Command]:
        candidate = self.ledger.live(event.candidate_id, event.segment)
        return [] if candidate is None else self._fail(candidate, event.error, event.now)

    def _on_stalled(self, event: CandidateStalled) -> list[Command]:
        candidate = self.ledger.live(event.candidate_id, event.segment)
        if candidate is None:
            return []
        if candidate.state is ABORTING or candidate.num_empty_attempts >= MAX_STALLS:
            return self._fail(candidate, event.error, event.now)
        return self._retry(candidate, event.now)

    def _on_erred(self, event: CandidateErred) -> list[Command]:
        candidate = self.ledger.live(event.candidate_id, event.segment)
        if candidate is None:
            return []
        has_grown, attempts = candidate.length > candidate.num_prior, candidate.num_empty_attempts + event.tried
        if attempts > MAX_EMPTY_ATTEMPTS and not has_grown:
            return self._fail(candidate, f"{event.error} ({attempts} times in a row)", event.now)
        if candidate.state is ABORTING:
            return self._fail(candidate, event.error, event.now)
        return self._retry(candidate, event.now, event.tried)

    def _retry(self, candidate: Candidate, now: float, is_attempt: bool = True) -> list[Command]:
        """Continues a candidate on another engine, if there is one."""
        candidate.stalled_on, candidate.moving = candidate.engine_id, False
        self._requeue(candidate, now, is_attempt)
        return self._submit(now)

    def _on_engine_lost(self, event: EngineLost) -> list[Command]:
        if self.ledger.engines.pop(event.engine_id, None) is None:
            return []
        if self._tail_switch is not None and not any(engine.tail for engine in self.ledger.engines.values()):
            self._given_back = True
        orphans = [
            c for c in self.ledger.candidates if c.engine_id == event.engine_id and c.state in (RUNNING, ABORTING)
        ]
        for candidate in orphans:
            if candidate.state is ABORTING:  # its tokens so far suffice
                self.ledger.abort(candidate, event.now)
        for candidate in reversed([c for c in orphans if c.state is RUNNING]):
            candidate.moving = False
            self._requeue(candidate, event.now, candidate.candidate_id not in event.untried)
        commands: list[Command] = []
        for candidate in orphans:
            if candidate.num_empty_attempts > MAX_EMPTY_ATTEMPTS and candidate.state is WAITING:
                message = f"its engine was lost {candidate.num_empty_attempts} times in a row before a new token came"
                commands += self._fail(candidate, f"{message}; {event.engine_id}: {event.error}", event.now)
        return commands + self._submit(event.now)

    def _on_engine_joined(self, event: EngineJoined) -> list[Command]:
        load = EngineLoad(event.engine_id, event.capacity, tail=event.tail, version=event.version)
        self.ledger.engines.setdefault(event.engine_id, load)
        return self._submit(event.now)

    def _on_engine_updated(self, event: EngineUpdated) -> list[Command]:
        if (engine := self.ledger.engines.get(event.engine_id)) is not None:
            engine.version = event.version
            if event.num_tokens is None:
                return []
            for candidate in self.ledger.candidates:
                if candidate.engine_id == event.engine_id and candidate.state in (RUNNING, ABORTING):
                    decoded = event.num_tokens.get(candidate.candidate_id)
                    # If it is missing although tokens have arrived, it ended before the update.
                    if decoded is not None or candidate.length == candidate.num_prior:
                        candidate.stamp(candidate.num_prior + (decoded or 0), event.version)
        return []

    def _on_engine_resized(self, event: EngineResized) -> list[Command]:
        if (engine := self.ledger.engines.get(event.engine_id)) is not None:
            engine.capacity = event.capacity
        return self._submit(event.now)

    def _on_expired(self, event: RolloutExpired) -> list[Command]:
        if self.drop_failed_groups:
            groups = [group for group in self.ledger.groups.values() if group.num_unfinished]
            commands = [command for group in groups for command in self._drop(group, event.error, event.now)]
            if groups and len(self._dropped) == len(self.ledger.groups):  # also without an end: no engine may be left
                self.error = self.error or event.error
            return commands
        return self._end_with(event.error, event.now)

    # Decisions

    def _decide(self, group: Group, now: float) -> list[Command]:
        """Aborts surplus candidates of the group, selects its rows if all have ended, and checks the batch."""
        if group.closed or self._batch_ready or self.error is not None:
            return []
        commands: list[Command] = []
        surplus = self.policies.group_stop.surplus(group)
        if surplus:
            commands = self._abort(surplus, now)
        if group.num_unfinished == 0:
            self._select_rows(group)
            commands += self._check_batch(now)
        elif group.num_complete >= self.num_generations and self.policies.group_stop.follows_batch:
            self._ready.add(group.group_id)
            commands += self._check_batch(now)
        return commands

    def _check_batch(self, now: float) -> list[Command]:
        """Checks whether the batch is ready after a change of a group. If so, aborts all other candidates."""
        batch_stop, dropped, num_groups = self.policies.batch_stop, self._dropped, len(self.ledger.groups)
        commands: list[Command] = []
        if self.policies.group_stop.follows_batch and batch_stop.ready(self._ready, dropped, num_groups):
            commands += self.select(sorted(self._ready - self._selected), now)
        if not batch_stop.ready(self._selected, dropped, num_groups):
            return commands
        self._batch_ready = True
        return commands + self._abort_unfinished(now)

    def _select_rows(self, group: Group) -> None:
        selected = sorted(self.policies.group_stop.select(group))
        if len(selected) != self.num_generations:
            raise GenerationError(
                f"`{type(self.policies.group_stop).__name__}.select` returned {len(selected)} rows for group "
                f"{group.group_id}, and must return `num_generations` ({self.num_generations})."
            )
        group.selected = selected
        self._selected.add(group.group_id)
        self._ready.add(group.group_id)

    def _submit(self, now: float) -> list[Command]:
        """Submits as many waiting candidates as there is room for, those of rows before spare ones."""
        waiting = self._waiting
        if not waiting:
            return []
        submits: list[Submit] = []
        engines = list(self.ledger.engines.values())
        kinds = [[engine for engine in engines if engine.tail == tail] or engines for tail in (False, True)]
        passed: list[Candidate] = []  # candidates whose engine has no room, while others have
        while waiting:
            candidate = waiting[0]
            if candidate.state is WAITING:
                engine_id = self.policies.placement.choose(candidate, self._engines_for(candidate, kinds))
                if engine_id is not None:
                    submits.append(self.ledger.submit(candidate, engine_id, now))
                elif any(engine.has_room for engine in engines):
                    passed.append(candidate)
                else:
                    break
            waiting.popleft()  # submitted, passed over, or aborted before its submission
        waiting.extendleft(reversed(passed))
        # Servers open some hundred requests a second: a group may be complete before its spare candidates are open.
        submits.sort(key=lambda submit: max(0, submit.index - self.num_generations + 1))
        return [*submits]

    def _engines_for(self, candidate: Candidate, kinds: Sequence[list[EngineLoad]]) -> list[EngineLoad]:
        """Returns the engines of the candidate's kind, without the one on which it stalled if there are others."""
        engines = kinds[self._belongs_to_tail(candidate)]
        if candidate.stalled_on is None:
            return engines
        return [engine for engine in engines if engine.engine_id != candidate.stalled_on] or engines

    def _requeue(self, candidate: Candidate, now: float, is_attempt: bool = True) -> None:
        """Puts the candidate first in the queue, so that it continues on another engine."""
        self.ledger.requeue(candidate, now, self.carries_tokens, is_attempt)
        self._waiting.appendleft(candidate)

    def _abort(self, candidates: Sequence[Candidate], now: float) -> list[Command]:
        return [
            Abort(c.candidate_id, c.engine_id or "", c.segment)
            for c in candidates
            if self.ledger.request_abort(c, now)
        ]

    def _abort_unfinished(self, now: float) -> list[Command]:
        return self._abort([c for group in self.ledger.groups.values() for c in group.unfinished], now)

    # Tail servers

    def _belongs_to_tail(self, candidate: Candidate) -> bool:
        tail = self.policies.tail
        if self._tail_switch is not None and not self._given_back:
            return True
        return tail is not None and candidate.group_id in tail.long_groups

    def _may_switch(self, num_unfinished: int) -> bool:
        tail, is_over = self.policies.tail, self._batch_ready or self.error is not None
        if tail is None or is_over or self._tail_switch is not None:
            return False
        return tail.is_due(num_unfinished, self.ledger.engines.values())

    def _consider_switch(self, now: float) -> list[Command]:
        """Aborts the running candidates of the main engines if it is time to move them to the tail servers."""
        tail, batch_stop = self.policies.tail, self.policies.batch_stop
        if tail is None or not self._may_switch(self.ledger.num_unfinished):
            return []
        enough = partial(batch_stop.ready, dropped=self._dropped, num_groups=len(self.ledger.groups))
        self._tail_switch = tail.decide(self.ledger, self.policies.group_stop.awaited, enough, self._ready)
        if self._tail_switch is None:
            return []
        self._tail_switch.begun = now
        self._turns_over = tail.servers.takes_turns
        commands: list[Command] = []
        for candidate in self.ledger.candidates:
            if candidate.state is RUNNING and not self.ledger.engines[candidate.engine_id or ""].tail:
                candidate.moving = True
                commands.append(Abort(candidate.candidate_id, candidate.engine_id or "", candidate.segment))
        return commands

    def _move(self, candidate: Candidate, now: float) -> list[Command]:
        """Requeues a candidate that was aborted to move to a tail server."""
        assert self._tail_switch is not None
        self._tail_switch.num_moved += 1
        plan = self.ledger.groups[candidate.group_id].plan
        self._tail_switch.num_tokens += plan.num_prompt_tokens + candidate.length
        self._requeue(candidate, now)
        return self._submit(now)

    # Failures

    def _fail(self, candidate: Candidate, problem: str, now: float) -> list[Command]:
        if candidate.state is ABORTING:  # no longer needed
            self.ledger.abort(candidate, now)
            return self._submit(now)
        where = f"candidate {candidate.index} of prompt {candidate.group_id} on {candidate.engine_id}"
        message = f"Generation failed for {where}: {problem}"
        self.ledger.lose(candidate, now)
        if self.drop_failed_groups:
            return self._drop(self.ledger.groups[candidate.group_id], message, now) + self._submit(now)
        return self._end_with(message, now)

    def _drop(self, group: Group, message: str, now: float) -> list[Command]:
        """Aborts a group's unfinished candidates, and drops the group unless it has enough complete ones."""
        commands = self._abort(group.unfinished, now)
        if group.closed or self._batch_ready or self.error is not None:
            return commands
        if group.num_complete >= self.num_generations:
            self._select_rows(group)
        else:
            group.error = message
            self._ready.discard(group.group_id)
            self._dropped.add(group.group_id)
            if len(self._dropped) == len(self.ledger.groups) and self.policies.batch_stop.ends:  # nothing to train on
                self.error = message
                return commands
        return commands + self._check_batch(now)

    def _end_with(self, message: str, now: float) -> list[Command]:
        """Ends the rollout with an error."""
        if self.error is None:
            self.error = message
        return self._abort_unfinished(now)


# Not an attribute of the scheduler, which would create a reference cycle and delay freeing a rollout's candidates.
_HANDLERS: dict[type, Callable[[Scheduler, Any], list[Command]]] = {
    TokensArrived: Scheduler._on_tokens,
    CandidateEnded: Scheduler._on_ended,
    CandidateFailed: Scheduler._on_failed,
    CandidateStalled: Scheduler._on_stalled,
    CandidateErred: Scheduler._on_erred,
    EngineLost: Scheduler._on_engine_lost,
    EngineJoined: Scheduler._on_engine_joined,
    EngineUpdated: Scheduler._on_engine_updated,
    EngineResized: Scheduler._on_engine_resized,
    RolloutExpired: Scheduler._on_expired,
}
