"""
The ledger of a rollout: every candidate's state, the counters that policies read, and the occupancy over time.

Each state transition is one method, so that a candidate can't end twice and the counters stay consistent. The ledger
makes no decisions.
"""

from bisect import insort

from ..errors import ConfigurationError
from .types import (
    FINAL_STATES,
    Candidate,
    CandidateEnded,
    CandidateState,
    EngineLoad,
    FinishReason,
    Group,
    GroupPlan,
    PartialCandidate,
    Submit,
    Timeline,
    TokensArrived,
)


# Enum members used for every event: before Python 3.12, looking them up in their class calls a function.
RUNNING, WAITING, ABORTING = CandidateState.RUNNING, CandidateState.WAITING, CandidateState.ABORTING
FINISHED, ABORTED = CandidateState.FINISHED, CandidateState.ABORTED
STOP, ABORT = FinishReason.STOP, FinishReason.ABORT


class Ledger:
    """Candidates, groups and engine loads of one rollout."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self._candidates: dict[int, Candidate] = {}  # by candidate_id
        self._num_added = 0
        self.engines: dict[str, EngineLoad] = {}
        self.timeline = Timeline()
        self.num_open = 0  # not in a final state
        self.num_unfinished = 0  # open, and not ABORTING
        self.num_running = 0  # RUNNING or ABORTING, held by an engine
        self.num_complete = 0
        self.num_submitted = 0
        self.num_resumed = 0  # submissions that returned to WAITING because an engine was lost or gave no tokens
        self.num_lost = 0

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates in the order of their IDs, without forgotten ones."""
        return list(self._candidates.values())

    def find(self, candidate_id: int) -> Candidate | None:
        """Returns a candidate, or `None` if its group was forgotten."""
        return self._candidates.get(candidate_id)

    def add_group(self, plan: GroupPlan, now: float) -> Group:
        """Adds and returns a group with its candidates, those of an earlier rollout first."""
        if plan.group_id in self.groups:
            raise ConfigurationError(f"`group_id` ({plan.group_id}) occurs twice. Give each group a different one.")
        group = self.groups[plan.group_id] = Group(plan, [])
        for index in range(plan.num_candidates):
            candidate = self.add_candidate(group)
            if index < len(plan.resumed):
                self._restore(candidate, plan.resumed[index], now)
        return group

    def forget_group(self, group_id: int) -> Group:
        """Removes and returns a group whose candidates have all ended."""
        group = self.groups.pop(group_id)
        self.num_complete -= group.num_complete
        for candidate in group.candidates:
            del self._candidates[candidate.candidate_id]
        return group

    def _restore(self, candidate: Candidate, partial: PartialCandidate, now: float) -> None:
        """Restores a candidate with its tokens: to FINISHED if it had ended, else to WAITING."""
        tokens = partial.tokens
        candidate.tokens = tokens if isinstance(tokens, range) else list(tokens)
        candidate.logprobs = None if partial.logprobs is None else list(partial.logprobs)
        candidate.segment = partial.num_segments - 1
        if partial.finish_reason is not None:
            candidate.started = now
            self.finish(candidate, partial.finish_reason, now)

    def cut(self, now: float) -> tuple[Timeline, int]:
        """Returns the timeline and the number of resumed submissions since the last cut, and begins new ones."""
        timeline, num_resumed = self.timeline, self.num_resumed
        self.timeline, self.num_resumed = Timeline(), 0
        for each in (timeline, self.timeline):
            each.add(now, self.num_running)
        return timeline, num_resumed

    def add_candidate(self, group: Group) -> Candidate:
        """Adds a waiting candidate to a group."""
        candidate = Candidate(self._num_added, group.plan.group_id, len(group.candidates))
        self._candidates[candidate.candidate_id] = candidate
        self._num_added += 1
        group.candidates.append(candidate)
        group.num_unfinished += 1
        self.num_unfinished += 1
        self.num_open += 1
        return candidate

    def live(self, candidate_id: int, segment: int) -> Candidate | None:
        """Returns the candidate, or `None` if it has ended or was submitted again since `segment`."""
        candidate = self._candidates.get(candidate_id)
        if candidate is None:
            return None
        state = candidate.state
        live = candidate.segment == segment and (state is RUNNING or state is ABORTING)
        return candidate if live else None

    def submit(self, candidate: Candidate, engine_id: str, now: float) -> Submit:
        """WAITING → RUNNING."""
        candidate.state = RUNNING
        candidate.engine_id = engine_id
        candidate.segment += 1
        candidate.num_prior = len(candidate.tokens)
        if candidate.started is None:
            candidate.started = now
        self.num_submitted += 1
        engine = self.engines[engine_id]
        engine.num_running += 1
        if engine.version is not None:
            candidate.stamp(candidate.num_prior, engine.version)
        expected, prior = self.groups[candidate.group_id].plan.expected_length, candidate.num_prior
        # 1 if nothing is known. Without prior tokens, the plan's number object is shared by all candidates.
        candidate.expected_rest = 1.0 if expected is None else max(1.0, expected - prior if prior else expected)
        engine.expected_tokens += candidate.expected_rest
        self.num_running += 1
        self.timeline.add(now, self.num_running)
        return Submit(
            candidate.candidate_id,
            candidate.group_id,
            candidate.index,
            engine_id,
            candidate.segment,
            candidate.tokens if isinstance(candidate.tokens, range) else tuple(candidate.tokens),
        )

    def append(self, candidate: Candidate, event: TokensArrived | CandidateEnded) -> str | None:
        """
        Adds the new tokens of a chunk. Returns a message if the chunk is invalid.

        A completion that arrives in one piece is not copied: its lists become the candidate's.
        """
        tokens, logprobs = event.tokens, event.logprobs
        known = len(candidate.tokens) - event.offset
        if known < 0:
            return f"tokens {candidate.length} to {event.offset} of the completion never arrived"
        if logprobs is not None and len(logprobs) != len(tokens):
            return f"{len(logprobs)} log-probs came for {len(tokens)} tokens"
        if not candidate.tokens:
            final = type(event) is CandidateEnded
            # A range represents tokens of which only the number is known.
            kept = tokens if final and isinstance(tokens, (list, range)) else list(tokens)
            candidate.tokens = kept
            if logprobs is not None:
                candidate.logprobs = logprobs if final and isinstance(logprobs, list) else list(logprobs)
        elif len(tokens) > known:
            if isinstance(candidate.tokens, list):
                candidate.tokens.extend(tokens[known:])
            else:
                candidate.tokens = range(event.offset + len(tokens))
            if logprobs is not None and candidate.logprobs is not None:
                candidate.logprobs.extend(logprobs[known:])
            elif logprobs is not None or candidate.logprobs is not None:
                return "some of its tokens have log-probs, others have none"
        return None

    def finish(self, candidate: Candidate, reason: FinishReason, now: float) -> None:
        """RUNNING → FINISHED, or ABORTING → ABORTED if it was aborted before it ended."""
        if candidate.state is ABORTING:
            self._end(candidate, ABORTED, now)
        else:
            self._end(candidate, FINISHED, now)
            if reason is STOP:
                group = self.groups[candidate.group_id]
                self.num_complete += 1
                group.num_complete += 1
                insort(group.complete_lengths, len(candidate.tokens))
        candidate.finish_reason = reason

    def request_abort(self, candidate: Candidate, now: float) -> bool:
        """RUNNING → ABORTING, or WAITING → ABORTED. Returns whether the engine must be sent an abort."""
        if candidate.state is RUNNING:
            candidate.state = ABORTING
            self.groups[candidate.group_id].num_unfinished -= 1
            self.num_unfinished -= 1
            return not candidate.moving  # otherwise the abort was already sent
        if candidate.state is WAITING:
            self.abort(candidate, now)
        return False

    def abort(self, candidate: Candidate, now: float) -> None:
        """→ ABORTED, with the tokens so far."""
        self._end(candidate, ABORTED, now)
        candidate.finish_reason = ABORT

    def requeue(self, candidate: Candidate, now: float, keeps_tokens: bool = True, is_attempt: bool = True) -> None:
        """RUNNING → WAITING, because its engine is lost or gives no tokens, or because it moves to another engine."""
        if not candidate.moving:
            if candidate.length > candidate.num_prior:
                candidate.num_empty_attempts = 0
            else:
                candidate.num_empty_attempts += is_attempt
            self.num_resumed += 1
        candidate.moving = False
        if keeps_tokens:
            candidate.tokens = list(candidate.tokens)  # a copy, because they may belong to an event
            candidate.logprobs = None if candidate.logprobs is None else list(candidate.logprobs)
        elif candidate.tokens:
            candidate.tokens, candidate.logprobs = [], None
            candidate.num_restarts += 1
        candidate.state = WAITING
        self._leave_engine(candidate, now)

    def lose(self, candidate: Candidate, now: float) -> None:
        """→ LOST, because it can't be completed."""
        self.num_lost += 1
        self._end(candidate, CandidateState.LOST, now)

    def _end(self, candidate: Candidate, state: CandidateState, now: float) -> None:
        before = candidate.state
        if before in FINAL_STATES:
            raise AssertionError(f"candidate {candidate.candidate_id} ended twice")
        if before is not WAITING:
            self._leave_engine(candidate, now)
        if before is not ABORTING:
            self.groups[candidate.group_id].num_unfinished -= 1
            self.num_unfinished -= 1
        candidate.state = state
        candidate.ended = now
        if not candidate.tokens:
            candidate.tokens = []
        self.num_open -= 1

    def _leave_engine(self, candidate: Candidate, now: float) -> None:
        self.num_running -= 1
        self.timeline.add(now, self.num_running)
        engine = self.engines.get(candidate.engine_id or "")
        if engine is not None:  # otherwise it was lost
            engine.num_running -= 1
            engine.expected_tokens -= candidate.expected_rest
