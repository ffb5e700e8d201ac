"""
The nouns of a rollout: candidates, groups, engines, results, events and commands.

A *group* is one prompt and all the answers sampled for it. A *candidate* is one of those answers. `num_generations` of
a group's candidates become the rows that TRL trains on.

```
WAITING ──Submit──▶ RUNNING ──┬── stop / length ──▶ FINISHED
   │                          ├── Abort ──▶ ABORTING ──▶ ABORTED
   │◀─ engine lost, moved ────┤
   │                          └── can't be completed ──▶ LOST
   └── not wanted any more ──▶ ABORTED
```
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ..policy import Forecast


class FinishReason(StrEnum):
    """Why an engine stopped decoding a candidate. The values are vLLM's."""

    STOP = "stop"  # natural end: an end-of-sequence token or a stop string
    LENGTH = "length"  # cut off at `max_completion_length`
    ABORT = "abort"  # cut off by us


class CandidateState(StrEnum):
    """Where a candidate is in its life. The last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    ABORTING = "aborting"
    FINISHED = "finished"
    ABORTED = "aborted"
    LOST = "lost"


FINAL_STATES = frozenset({CandidateState.FINISHED, CandidateState.ABORTED, CandidateState.LOST})
# Before Python 3.12, looking up a member in its class calls a function: too slow where each candidate is asked.
_WAITING, _RUNNING, _FINISHED = CandidateState.WAITING, CandidateState.RUNNING, CandidateState.FINISHED
_STOP = FinishReason.STOP


@dataclass(slots=True)
class Candidate:
    """
    One answer being sampled.

    `tokens` holds everything sampled so far, prior segments included; `logprobs` is as long, or `None` where the
    engine gives none. `segment` counts the submissions: an event of an older segment is stale and ignored.
    `num_empty_attempts` counts the submissions in a row that were lost without a new token. `started` and `ended` are
    when it was submitted first and when it ended, in seconds.
    """

    candidate_id: int
    group_id: int
    index: int
    tokens: Sequence[int] = ()  # a list of its own once there are tokens, or it has ended: a rollout has thousands
    logprobs: list[float] | None = None
    state: CandidateState = CandidateState.WAITING
    finish_reason: FinishReason | None = None
    engine_id: str | None = None
    segment: int = -1
    num_prior: int = 0  # tokens that it had when it was submitted last
    expected_rest: float = 0.0  # tokens that it was expected to need then
    num_empty_attempts: int = 0
    moving: bool = False  # whether it is aborted to go on on another engine
    stalled_on: str | None = None  # the engine that gave it no tokens: it goes on on another one, if there is one
    num_restarts: int = 0  # how often its tokens were thrown away, because they can't go on in another request
    started: float | None = None
    ended: float | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def complete(self) -> bool:
        """Whether it came to its natural end (and was not called off just before)."""
        return self.state is _FINISHED and self.finish_reason is _STOP


@dataclass(frozen=True, slots=True)
class PartialCandidate:
    """A candidate carried over from an earlier rollout."""

    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None  # `None` from an engine that gives none
    finish_reason: FinishReason | None = None  # set where it has come to its end: it is not resumed
    num_segments: int = 0  # how often it was submitted: an engine with a seed must not draw the same numbers again


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """
    What admission decided for one prompt. Its `resumed` candidates take the first indices, and the other
    `num_candidates - len(resumed)` start afresh.
    """

    group_id: int  # unique within the rollout
    num_candidates: int  # M'_i, at least the `num_generations` rows that the group must yield
    prompt_key: int = 0  # of the whole training, see `prompt_key` in admission.py
    num_prompt_tokens: int = 0
    resumed: tuple[PartialCandidate, ...] = ()
    expected_length: float | None = None  # tokens of one candidate, where something is known


@dataclass(slots=True)
class Group:
    """
    One prompt and its candidates. The counters are kept by the scheduler, so that policies decide in O(1). `error` is
    the engine's message where the group was dropped because it can't be completed.
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
    def settled(self) -> bool:
        """Whether its rows are chosen. Nothing that arrives later changes them."""
        return self.selected is not None

    @property
    def closed(self) -> bool:
        """Whether it is settled or dropped."""
        return self.selected is not None or self.error is not None

    @property
    def unfinished(self) -> list[Candidate]:
        """Candidates that wait or run, and are not called off."""
        return [c for c in self.candidates if c.state is _RUNNING or c.state is _WAITING]


class Timeline:
    """How many candidates ran, and since when. Two arrays: a long rollout has hundreds of thousands of entries."""

    __slots__ = ("running", "times")

    def __init__(self) -> None:
        self.times = array("d")  # seconds
        self.running = array("q")  # candidates running from then on

    def add(self, now: float, num_running: int) -> None:
        """Notes a change; of several at the same time, the last one counts."""
        times = self.times
        if times and times[-1] == now:
            self.running[-1] = num_running
        else:
            times.append(now)
            self.running.append(num_running)


@dataclass(slots=True)
class EngineLoad:
    """What placement sees of an engine."""

    engine_id: str
    capacity: int | None = None  # the most candidates at once; `None` for no limit
    num_running: int = 0
    expected_tokens: float = 0.0  # that those which it runs were expected to need when they were submitted
    tail: bool = False  # whether it is one of those that take over what is left

    @property
    def has_room(self) -> bool:
        return self.capacity is None or self.num_running < self.capacity


@dataclass(frozen=True, slots=True)
class GroupResult:
    """
    What a group yielded. `selected` are the indices of its `num_generations` rows in `candidates`, ascending. A group
    that was deferred is not `complete`: it has no rows, and its candidates carry what was sampled so far.
    """

    plan: GroupPlan
    candidates: list[Candidate]
    selected: list[int]
    complete: bool = True

    @property
    def rows(self) -> list[Candidate]:
        """The `num_generations` candidates that are trained on."""
        return [self.candidates[i] for i in self.selected]


@dataclass
class TailSwitch:
    """A switch to tail servers. It is made once, and counts what it moves."""

    num_unfinished: int  # candidates, when it was decided
    forecast: Forecast | None = None  # what was predicted of it, where layouts were measured
    begun: float = 0.0  # seconds on the engine's clock
    num_moved: int = 0
    num_tokens: int = 0  # that tail servers read anew, prompts included


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """
    What a rollout yielded: the groups in the order in which they were given, and how many candidates ran over time.
    `num_resumed` counts submissions that had to be made again because an engine was lost or gave no tokens. `dropped`
    has, by `group_id`, why a group could not be completed; there are none unless `drop_failed_groups` is set.
    `tail_switch` is set if tail servers took over.
    """

    groups: list[GroupResult]
    deferred: list[GroupResult]
    timeline: Timeline
    num_resumed: int = 0
    dropped: dict[int, str] = field(default_factory=dict)
    tail_switch: TailSwitch | None = None


# What engines report, and what they are told. `now` is in seconds on the engine's clock; `segment` is that of the
# command which an event answers.


@dataclass(slots=True)
class TokensArrived:
    """New tokens of a running candidate. `offset` is how many it had before, so that a repeated chunk does no harm."""

    candidate_id: int
    segment: int
    offset: int
    tokens: Sequence[int]
    logprobs: Sequence[float] | None
    now: float


@dataclass(slots=True)
class CandidateEnded:
    """A candidate stopped decoding, with its last tokens (those after `offset`)."""

    candidate_id: int
    segment: int
    offset: int
    tokens: Sequence[int]
    logprobs: Sequence[float] | None
    finish_reason: FinishReason
    now: float


@dataclass(slots=True)
class CandidateFailed:
    """An engine refused a candidate or broke while decoding it; `error` is its own message."""

    candidate_id: int
    segment: int
    error: str
    now: float


@dataclass(slots=True)
class CandidateStalled:
    """
    A candidate got no tokens for too long from an engine that decodes others; its request has been closed. It goes on
    elsewhere, and the engine stays.
    """

    candidate_id: int
    segment: int
    error: str
    now: float


@dataclass(slots=True)
class EngineLost:
    """An engine is gone, with everything that it was decoding. What it decoded goes on elsewhere, or waits."""

    engine_id: str
    error: str
    now: float


@dataclass(slots=True)
class EngineJoined:
    """An engine is ready to take candidates."""

    engine_id: str
    now: float
    capacity: int | None = None
    tail: bool = False


@dataclass(slots=True)
class EngineResized:
    """
    An engine takes more candidates at once than before, or fewer: 0 while it is drained. What it decodes goes on.
    """

    engine_id: str
    capacity: int | None
    now: float


@dataclass(slots=True)
class RolloutExpired:
    """Nothing more will come: a deadline has passed, or no engine is left. `error` says what."""

    error: str
    now: float


Event = (
    TokensArrived
    | CandidateEnded
    | CandidateFailed
    | CandidateStalled
    | EngineLost
    | EngineJoined
    | EngineResized
    | RolloutExpired
)


@dataclass(slots=True)
class Submit:
    """Decode a candidate, after its `prior_tokens` where there are any."""

    candidate_id: int
    group_id: int
    index: int
    engine_id: str
    segment: int
    prior_tokens: Sequence[int] = ()


@dataclass(slots=True)
class Abort:
    """Stop decoding a candidate and report what it has."""

    candidate_id: int
    engine_id: str
    segment: int


@dataclass(slots=True)
class TakeTurns:
    """Put the main engines to sleep, which decode nothing now, and wake the tail's on the same GPUs."""


Command = Submit | Abort | TakeTurns
