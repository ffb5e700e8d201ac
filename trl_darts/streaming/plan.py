"""
Which candidates are scored next, and with how many tokens: decisions without torch, made on the main process for all.

A candidate's log-probs are computed in chunks while it decodes. A chunk of n tokens takes n inputs: the token before
the first, up to the one before the last. Its keys and values stay in a cache, so that no token is computed twice.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..scheduling import Candidate, CandidateState, Group


# Planning is done beside the thread that reads what servers send: it looks at no more candidates than a pass can take.
MAX_TRIED = 512
NUM_WIDTHS = 8


@dataclass(slots=True)
class Track:
    """
    How far the scoring of one candidate is, as long as there is something to score.

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
    """

    candidate_id: int
    group_id: int
    num_prompt: int
    available: int = 0
    scored: int = 0
    chance: float = 1.0
    final: bool = False

    @property
    def pending(self) -> int:
        """Tokens that wait for their log-probs."""
        return self.available - self.scored

    @property
    def cached(self) -> int:
        """Tokens in its cache; none before its first chunk, whose prompt belongs to the whole group."""
        return self.cached_after(0) if self.scored else 0

    def cached_after(self, num_tokens: int) -> int:
        """Tokens in its cache once that many more are scored."""
        return self.num_prompt - 1 + self.scored + num_tokens

    def due(self, chunk_tokens: int) -> bool:
        """Whether it is worth a place in a batch."""
        return self.final or self.pending >= chunk_tokens


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
            Tokens whose keys and values fit. A third is for what is kept, the rest for a pass: the rows padded to one
            batch, and what comes out of it before it replaces what was kept.
    """

    chunk_tokens: int
    batch_tokens: int
    cache_tokens: int

    @property
    def room(self) -> int:
        """Tokens that can be kept, or padded to a batch."""
        return self.cache_tokens // 3


def hopeless(tracks: Iterable[Track], limits: Limits) -> list[Track]:
    """Candidates that are too long for a pass, even alone. TRL computes them as without streaming."""
    return [track for track in tracks if track.cached_after(track.pending) > limits.room]


def plan_batch(tracks: Iterable[Track], limits: Limits, prefixes: Mapping[int, int]) -> list[tuple[Track, int]]:
    """
    The next forward pass of one process.

    First come candidates that have ended, whose caches are freed, then those that are likely to be kept, and among
    them those with most to do. One whose cache has no room to grow waits with what it has; at its end it needs none.

    Args:
        tracks (`Iterable[Track]`):
            Those of the process that are open.
        limits ([`Limits`]):
            Its bounds.
        prefixes (`Mapping[int, int]`):
            Tokens that it keeps of prompts, by group.

    Returns:
        `list[tuple[Track, int]]`: Candidates with the number of tokens to score. Zero for one that has come to its end
        with nothing left to score.
    """
    tracks = list(tracks)
    held = sum(track.cached for track in tracks) + sum(prefixes.values())
    due = [track for track in tracks if track.due(limits.chunk_tokens)]
    closing = [(track, 0) for track in due if not track.pending]
    due = [track for track in due if track.pending]
    due.sort(key=lambda track: (not track.final, -track.chance, -track.pending, track.candidate_id))
    due = due[:MAX_TRIED]
    # The width decides how many rows there can be: a few are tried, and the pass with most to do is taken.
    widths = sorted({min(track.pending, limits.batch_tokens) for track in due}, reverse=True)
    batches = [_fill(due, width, limits, held, prefixes) for width in widths[:: max(1, len(widths) // NUM_WIDTHS)]]
    return closing + max(batches, key=lambda batch: sum(num for _, num in batch), default=[])


def _fill(
    due: Sequence[Track], width: int, limits: Limits, held: int, prefixes: Mapping[int, int]
) -> list[tuple[Track, int]]:
    """As many rows as fit a pass of this width, in order."""
    batch: list[tuple[Track, int]] = []
    context, new, prompt_width = 0, set[int](), 0
    for track in due:
        if (len(batch) + 1) * width > limits.batch_tokens:
            break
        num_tokens = min(track.pending, width)
        ends = track.final and num_tokens == track.pending
        if not track.final and num_tokens < limits.chunk_tokens:
            continue
        first = track.group_id not in prefixes and track.group_id not in new
        growth = (0 if ends else track.cached_after(num_tokens)) - track.cached + first * (track.num_prompt - 1)
        padded = (len(batch) + 1) * max(context, track.cached_after(num_tokens))
        new_prompts = (len(new) + first) * max(prompt_width, first * track.num_prompt)
        fits_prompts = new_prompts <= min(limits.batch_tokens, limits.room) or not first or not new
        # One that ends frees its cache: it may not wait for the room that it takes itself.
        if padded > limits.room or (growth > 0 and held + growth > limits.room) or not fits_prompts:
            continue
        batch.append((track, num_tokens))
        held += growth
        context = max(context, track.cached_after(num_tokens))
        if first:
            new.add(track.group_id)
            prompt_width = max(prompt_width, track.num_prompt)
    return batch
