"""
Types of a rollout: candidates, groups, engines, results, events and commands.

A *group* is one prompt and all the answers sampled for it. A *candidate* is one of those answers. `num_generations` of
a group's candidates become the rows that TRL trains on.

```
WAITING ──Submit──▶ RUNNING ──┬── stop / length ──▶ FINISHED
   │                          ├── Abort ──▶ ABORTING ──▶ ABORTED
   │◀─ engine lost, moved ────┤
   │                          └── can't be completed ──▶ LOST
   └── no longer needed ──▶ ABORTED
```
"""

from array import array
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

from ..policy import Forecast


class FinishReason(StrEnum):
    """Why an engine stopped decoding a candidate. The values are vLLM's."""

    STOP = "stop"  # natural end: an end-of-sequence token or a stop string
    LENGTH = "length"  # cut off at `max_completion_length`
    ABORT = "abort"  # cut off by us


class CandidateState(StrEnum):
    """State of a candidate. The last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    ABORTING = "aborting"
    FINISHED = "finished"
    ABORTED = "aborted"
    LOST = "lost"


FINAL_STATES = frozenset({CandidateState.FINISHED, CandidateState.ABORTED, CandidateState.LOST})
# Before Python 3.12, looking up an enum member in its class calls a function, which is too slow per candidate.
_WAITING, _RUNNING, _FINISHED = CandidateState.WAITING, CandidateState.RUNNING, CandidateState.FINISHED
_STOP = FinishReason.STOP


@dataclass(slots=True)
class Candidate:
    """
    One answer being sampled.

    `tokens` holds all tokens sampled so far, including prior segments. `logprobs` has the same length, or is `None` if
    the engine returns none. `segment` counts submissions: an event of an older segment is ignored.
    `num_empty_attempts` counts consecutive submissions that were lost without a new token. `started` and `ended` are
    the times of the first submission and of the end, in seconds. `stamps` has, for each version of the weights that
    samples it, the number of tokens before and the version; it is empty if engines don't tell their version.
    """

    candidate_id: int
    group_id: int
    index: int
    tokens: Sequence[int] = ()  # becomes a list with the first tokens, or at the end
    logprobs: list[float] | None = None
    state: CandidateState = CandidateState.WAITING
    finish_reason: FinishReason | None = None
    engine_id: str | None = None
    segment: int = -1
    num_prior: int = 0  # number of tokens at the last submission
    expected_rest: float = 0.0  # tokens expected to follow at the last submission
    num_empty_attempts: int = 0
    moving: bool = False  # whether it was aborted to continue on another engine
    stalled_on: str | None = None  # engine that gave it no tokens; it continues on another one if possible
    num_restarts: int = 0  # how often its tokens were discarded, because requests can't carry them
    started: float | None = None
    ended: float | None = None
    stamps: tuple[tuple[int, int], ...] = ()

    @property
    def length(self) -> int:
        return len(self.tokens)

    def stamp(self, num_tokens: int, version: int) -> None:
        """Notes that `version` samples the tokens after the first `num_tokens`."""
        before = tuple(stamp for stamp in self.stamps if stamp[0] < num_tokens)
        if not before or before[-1][1] != version:
            before += ((num_tokens, version),)
        self.stamps = before

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """Returns which version of the weights sampled how many tokens, in their order."""
        ends = [*(start for start, _ in self.stamps[1:]), self.length]
        runs = ((v, min(end, self.length) - start) for (start, v), end in zip(self.stamps, ends, strict=False))
        return tuple((version, count) for version, count in runs if count > 0)

    @property
    def complete(self) -> bool:
        """Whether it ended by itself and was not aborted before."""
        return self.state is _FINISHED and self.finish_reason is _STOP


@dataclass(frozen=True, slots=True)
class PartialCandidate:
    """A candidate carried over from an earlier rollout."""

    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None  # `None` if the engine returns none
    finish_reason: FinishReason | None = None  # set if it has ended, so that it is not resumed
    num_segments: int = 0  # number of submissions, so that an engine with a seed does not reuse random numbers


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Plan for one prompt. The `resumed` candidates come first; the other `num_candidates - len(resumed)` are new."""

    group_id: int  # of its prompt in the buffer, or else its place in the batch
    num_candidates: int  # M'_i, at least `num_generations`
    prompt_key: int = 0  # identity over the whole run, see `prompt_key` in admission.py
    num_prompt_tokens: int = 0
    resumed: tuple[PartialCandidate, ...] = ()
    expected_length: float | None = None  # tokens of one candidate, if known


@dataclass(slots=True)
class Group:
    """
    One prompt and its candidates. The ledger updates the counters, so that policies decide in O(1). `error` is the
    engine's message if the group was dropped because it can't be completed.
    """

    plan: GroupPlan
    candidates: list[Candidate]
    num_complete: int = 0
    num_unfinished: int = 0
    selected: list[int] | None = None
    complete_lengths: list[int] = field(default_factory=list)  # sorted
    error: str | None = None

    @property
    def group_id(self) -> int:
        return self.plan.group_id

    @property
    def has_rows(self) -> bool:
        """Whether its rows are selected. Later events do not change them."""
        return self.selected is not None

    @property
    def closed(self) -> bool:
        """Whether its rows are selected, or it is dropped."""
        return self.selected is not None or self.error is not None

    @property
    def unfinished(self) -> list[Candidate]:
        """Candidates that are WAITING or RUNNING."""
        return [c for c in self.candidates if c.state is _RUNNING or c.state is _WAITING]


class Timeline:
    """Number of running candidates over time, in arrays: a long rollout has hundreds of thousands of entries."""

    __slots__ = ("running", "times")

    def __init__(self) -> None:
        self.times = array("d")  # seconds
        self.running = array("q")  # candidates running from then on

    def add(self, now: float, num_running: int) -> None:
        """Records a change. Of several changes at the same time, the last one counts."""
        times = self.times
        if times and times[-1] == now:
            self.running[-1] = num_running
        else:
            times.append(now)
            self.running.append(num_running)


@dataclass(slots=True)
class EngineLoad:
    """Load of an engine, for placement."""

    engine_id: str
    capacity: int | None = None  # most candidates at once; `None` for no limit
    num_running: int = 0
    expected_tokens: float = 0.0  # expected tokens of its running candidates, as of their submission
    tail: bool = False  # whether it is a tail server
    version: int | None = None  # of its weights, if they can change while it decodes

    @property
    def has_room(self) -> bool:
        return self.capacity is None or self.num_running < self.capacity


@dataclass(frozen=True, slots=True)
class GroupResult:
    """
    Result of a group. `selected` are the indices of its `num_generations` rows in `candidates`, ascending. A deferred
    group is not `complete`: it has no rows, and its candidates have the tokens sampled so far.
    """

    plan: GroupPlan
    candidates: list[Candidate]
    selected: list[int]
    complete: bool = True

    @property
    def rows(self) -> list[Candidate]:
        """The `num_generations` candidates to train on."""
        return [self.candidates[i] for i in self.selected]


@dataclass
class TailSwitch:
    """A switch to tail servers, at most one per rollout, with counters of the moved candidates."""

    num_unfinished: int  # unfinished candidates at the decision
    forecast: Forecast | None = None  # predicted times, if the layouts were profiled
    begun: float = 0.0  # seconds on the engine's clock
    num_moved: int = 0
    num_tokens: int = 0  # tokens that tail servers prefill, prompts included


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """
    Result of a rollout: the groups in their given order, and the number of running candidates over time. `num_resumed`
    counts submissions that were repeated because an engine was lost or gave no tokens. `dropped` has the errors of
    groups that could not be completed, by `group_id`; it is empty unless `drop_failed_groups` is set. `tail_switch` is
    set if tail servers took over.
    """

    groups: list[GroupResult]
    deferred: list[GroupResult]
    timeline: Timeline
    num_resumed: int = 0
    dropped: dict[int, str] = field(default_factory=dict)
    tail_switch: TailSwitch | None = None


# Events from engines and commands to them. `now` is in seconds on the engine's clock. The `segment` of an event is
# that of the command that it answers.


@dataclass(slots=True)
class TokensArrived:
    """New tokens of a running candidate. `offset` is its previous number of tokens, so that repeats are detected."""

    candidate_id: int
    segment: int
    offset: int
    tokens: Sequence[int]
    logprobs: Sequence[float] | None
    now: float


@dataclass(slots=True)
class CandidateEnded:
    """A candidate has ended, with its last tokens (those after `offset`)."""

    candidate_id: int
    segment: int
    offset: int
    tokens: Sequence[int]
    logprobs: Sequence[float] | None
    finish_reason: FinishReason
    now: float


@dataclass(slots=True)
class CandidateFailed:
    """An engine rejected a candidate or failed while decoding it. `error` is the engine's message."""

    candidate_id: int
    segment: int
    error: str
    now: float


@dataclass(slots=True)
class CandidateStalled:
    """
    A candidate got no tokens for too long from an engine that decodes others, and its request was closed. It continues
    on another engine.
    """

    candidate_id: int
    segment: int
    error: str
    now: float


@dataclass(slots=True)
class CandidateErred:
    """
    An engine failed on one candidate, but not on others, or did not try it because it is busy (`tried=False`). The
    candidate continues on another engine. With too many failures in a row, it is considered the cause.
    """

    candidate_id: int
    segment: int
    error: str
    now: float
    tried: bool = True


@dataclass(slots=True)
class EngineLost:
    """
    An engine is lost. Its candidates continue on other engines, or wait for one. `untried` has the IDs of those that
    had not reached it, for which this is no failure.
    """

    engine_id: str
    error: str
    now: float
    untried: Set[int] = frozenset()


@dataclass(slots=True)
class EngineJoined:
    """An engine is ready for candidates."""

    engine_id: str
    now: float
    capacity: int | None = None
    tail: bool = False
    version: int | None = None


@dataclass(slots=True)
class EngineUpdated:
    """
    An engine has new weights. `num_tokens` has the tokens that each of its candidates had decoded on it before, by
    `candidate_id`; one that is missing has not started. `None` if running candidates keep their weights.
    """

    engine_id: str
    version: int
    num_tokens: Mapping[int, int] | None
    now: float


@dataclass(slots=True)
class EngineResized:
    """The capacity of an engine has changed, to 0 while it is drained. Its running candidates continue."""

    engine_id: str
    capacity: int | None
    now: float


@dataclass(slots=True)
class RolloutExpired:
    """The rollout must end, because a deadline has passed or no engine remains. `error` is the reason."""

    error: str
    now: float


Event = (
    TokensArrived
    | CandidateEnded
    | CandidateFailed
    | CandidateStalled
    | CandidateErred
    | EngineLost
    | EngineJoined
    | EngineUpdated
    | EngineResized
    | RolloutExpired
)


@dataclass(slots=True)
class Submit:
    """Decode a candidate, continuing from its `prior_tokens` if any."""

    candidate_id: int
    group_id: int
    index: int
    engine_id: str
    segment: int
    prior_tokens: Sequence[int] = ()


@dataclass(slots=True)
class Abort:
    """Stop decoding a candidate and report its tokens."""

    candidate_id: int
    engine_id: str
    segment: int


@dataclass(slots=True)
class TakeTurns:
    """Put the idle main engines to sleep, and wake the tail engines on the same GPUs."""


Command = Submit | Abort | TakeTurns
