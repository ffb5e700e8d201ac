"""
Which candidates are scored next, and with how many tokens: decisions without torch, made on the main process for all.

A candidate's log-probs are computed in chunks while it decodes. A chunk of n tokens takes n inputs: the token before
the first, up to the one before the last. Its keys and values stay in a cache, so that no token is computed twice.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ..scheduling import Candidate, CandidateState, Group


@dataclass(slots=True)
class Track:
    """
    How far the scoring of one candidate is.

    Args:
        candidate_id (`int`):
            Of the rollout.
        group_id (`int`):
            Its prompt.
        num_prompt (`int`):
            Tokens of the prompt.
        available (`int`, *optional*, defaults to `0`):
            Tokens of the completion that have arrived.
        scored (`int`, *optional*, defaults to `0`):
            Those of them that have log-probs.
        chance (`float`, *optional*, defaults to `1.0`):
            How likely it is to be kept, see [`keep_chance`].
        final (`bool`, *optional*, defaults to `False`):
            Whether no token will be added.
        closed (`bool`, *optional*, defaults to `False`):
            Whether it needs no more scoring: all is scored, or it was dropped or set aside.
    """

    candidate_id: int
    group_id: int
    num_prompt: int
    available: int = 0
    scored: int = 0
    chance: float = 1.0
    final: bool = False
    closed: bool = False

    @property
    def pending(self) -> int:
        """Tokens that wait for their log-probs."""
        return self.available - self.scored

    @property
    def cached(self) -> int:
        """Tokens in its cache; none before its first chunk, whose prompt belongs to the whole group."""
        return 0 if self.closed or not self.scored else self.num_prompt - 1 + self.scored

    def cached_after(self, num_tokens: int) -> int:
        """Tokens in its cache once that many more are scored."""
        return self.num_prompt - 1 + self.scored + num_tokens

    def due(self, chunk_tokens: int) -> bool:
        """Whether it is worth a place in a batch."""
        return not self.closed and (self.final or self.pending >= chunk_tokens)


def keep_chance(group: Group, candidate: Candidate, num_generations: int) -> float:
    """
    How likely a candidate is to be among its group's rows, whatever they are selected by. Only the order of scoring
    depends on it.

    Args:
        group ([`Group`]):
            As it is now.
        candidate ([`Candidate`]):
            One of its candidates.
        num_generations (`int`):
            M, rows that the group yields.

    Returns:
        `float`: 1 for what is selected, or complete and among the M shortest; 0 for what is discarded; the share of
        rows still to come for what runs.
    """
    if group.selected is not None:
        return float(candidate.index in group.selected)
    if group.error is not None or candidate.state in (
        CandidateState.ABORTING,
        CandidateState.ABORTED,
        CandidateState.LOST,
    ):
        return 0.0
    if candidate.state is CandidateState.FINISHED:
        return 1.0 if bisect_left(group.complete_lengths, candidate.length) < num_generations else 0.25
    missing = max(0.5, num_generations - group.num_complete)  # a long end may still take one
    return min(1.0, missing / max(1, group.num_unfinished))


@dataclass(frozen=True)
class Limits:
    """
    Bounds of one forward pass.

    Args:
        chunk_tokens (`int`):
            Fewest new tokens of a candidate that goes on decoding.
        batch_tokens (`int`):
            Most tokens of a forward pass, padding included.
        cache_tokens (`int`):
            Tokens whose keys and values fit. Half of them are for what is kept, half for the batch in work.
    """

    chunk_tokens: int
    batch_tokens: int
    cache_tokens: int


def set_aside(tracks: Sequence[Track], limits: Limits) -> list[Track]:
    """
    The candidates that lose their cache, and wait for the end: the longest first, until the others fit.

    Args:
        tracks (`Sequence[Track]`):
            All of one process.
        limits ([`Limits`]):
            Its bounds.

    Returns:
        `list[Track]`: Some of them; none where all fits.
    """
    room = limits.cache_tokens // 2
    open_tracks = sorted((track for track in tracks if not track.closed), key=lambda track: track.cached)
    chosen = []
    held = sum(track.cached for track in open_tracks)
    while open_tracks and held > room:
        longest = open_tracks.pop()
        held -= longest.cached
        chosen.append(longest)
    # One whose own batch of a single row does not fit any more.
    return chosen + [track for track in open_tracks if track.due(limits.chunk_tokens) and track.cached_after(1) > room]


def plan_batch(tracks: Sequence[Track], limits: Limits) -> list[tuple[Track, int]]:
    """
    The next forward pass of one process.

    Candidates that are likely to be kept come first, and among them those with most to do: neighbours in that order
    have similar numbers of tokens, and little is padded.

    Args:
        tracks (`Sequence[Track]`):
            All of the process.
        limits ([`Limits`]):
            Its bounds.

    Returns:
        `list[tuple[Track, int]]`: Candidates with the number of tokens to score. Zero for one that has come to its end
        with nothing left to score.
    """
    due = [track for track in tracks if track.due(limits.chunk_tokens)]
    due.sort(key=lambda track: (-track.chance, -track.pending, track.candidate_id))
    batch: list[tuple[Track, int]] = []
    width = context = 0
    room = limits.cache_tokens // 2
    for track in due:
        if not track.pending:
            batch.append((track, 0))
            continue
        rows = 1 + sum(num > 0 for _, num in batch)
        new_width = width or min(track.pending, limits.batch_tokens)
        # What it has in its cache, and what it will have: neither may make the padded batch too large.
        num_tokens = min(track.pending, new_width, max(1, room - track.cached_after(0)))
        new_context = max(context, track.cached_after(num_tokens))
        if rows > 1 and (rows * new_width > limits.batch_tokens or rows * new_context > room):
            continue
        batch.append((track, num_tokens))
        width, context = max(width, num_tokens), new_context
    return batch
