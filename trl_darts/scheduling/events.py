"""
What engines report, and what they are told.

`now` is in seconds on the engine's clock; `segment` is that of the command which an event answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .types import FinishReason


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


@dataclass(slots=True)
class EngineResized:
    """
    An engine takes more candidates at once than before, or fewer: those that are too many are called back. With a
    capacity of 0 it takes no new ones, and those that it has go on.
    """

    engine_id: str
    capacity: int | None
    now: float


@dataclass(slots=True)
class RolloutExpired:
    """Nothing more will come: a deadline has passed, or no engine is left. `error` says what."""

    error: str
    now: float


Event = TokensArrived | CandidateEnded | CandidateFailed | EngineLost | EngineJoined | EngineResized | RolloutExpired


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


Command = Submit | Abort
