"""What the main process asks the processes to score."""

from dataclasses import dataclass, field


Tokens = list[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """
    New tokens of one candidate.

    Args:
        candidate_id (`int`):
            Of the rollout.
        group_id (`int`):
            Its prompt.
        tokens (`list[int]`):
            Those that follow the ones that were sent before.
        final (`bool`):
            Whether they are its last.
    """

    candidate_id: int
    group_id: int
    tokens: Tokens
    final: bool


@dataclass(frozen=True, slots=True)
class RoundDone:
    """A process's answer to a round: done, or what went wrong."""

    rollout: int
    process: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """
    One round of scoring on one process.

    Args:
        rollout (`int`):
            Number of the rollout. A new one begins with nothing.
        prompts (`dict[int, list[int]]`, *optional*, defaults to `{}`):
            Prompts of the groups that are new to the process, by `group_id`.
        chunks (`list[Chunk]`, *optional*, defaults to `[]`):
            What to score.
        dropped (`list[int]`, *optional*, defaults to `[]`):
            Candidates whose caches can go.
        released (`list[int]`, *optional*, defaults to `[]`):
            Groups whose prompts are not needed any more after this round: all their candidates have begun.
        prefills (`bool`, *optional*, defaults to `False`):
            Whether there is a forward pass of prompts, on any process: of a sharded model, each takes part in it.
        scores (`bool`, *optional*, defaults to `False`):
            Whether there is a forward pass of chunks, on any process.
        hidden (`bool`, *optional*, defaults to `True`):
            Whether candidates still decode meanwhile.
    """

    rollout: int
    prompts: dict[int, Tokens] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    prefills: bool = False
    scores: bool = False
    hidden: bool = True
