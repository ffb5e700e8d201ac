"""
Plans which candidates are scored next, and how many tokens of each. The main process decides for all, without torch.

A candidate's log-probs are computed in chunks while it decodes. A chunk of n tokens has n inputs: from the token
before the first to the one before the last. Keys and values are cached, so that no token is computed twice.

Each group belongs to one process. If the model is sharded, a forward pass is a collective operation, and all processes
run the same passes. Otherwise the processes are independent.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..scheduling import Candidate, CandidateState, Group


Tokens = list[int]

MAX_TRIED = 512  # candidates considered for one pass: planning must not slow down the thread that reads responses
NUM_WIDTHS = 8
NEVER_KEPT = (CandidateState.ABORTING, CandidateState.ABORTED, CandidateState.LOST)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one candidate. A `final` chunk has its last ones."""

    candidate_id: int
    group_id: int
    tokens: Tokens
    final: bool


@dataclass(frozen=True, slots=True)
class ScoringRound:
    """The next work of one process. The first round of a new `rollout` clears its state."""

    rollout: int
    prompts: dict[int, Tokens] = field(default_factory=dict)  # of groups that are new to the process
    chunks: list[Chunk] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)  # candidates whose caches can be freed
    released: list[int] = field(default_factory=list)  # groups whose prompts can be freed after this round
    prefills: bool = False  # whether to run a forward pass of prompts; with a sharded model, if any process has one
    scores: bool = False  # the same for chunks

    def __bool__(self) -> bool:
        return bool(self.chunks or self.dropped or self.released or self.prefills or self.scores)


@dataclass(slots=True)
class Track:
    """Progress of scoring one candidate, until it is closed."""

    candidate_id: int
    group_id: int
    num_prompt: int
    available: int = 0  # tokens of the completion received so far
    scored: int = 0  # tokens with log-probs
    chance: float = 1.0  # see `keep_chance`
    final: bool = False  # no more tokens will arrive

    @property
    def pending(self) -> int:
        """Number of tokens without log-probs."""
        return self.available - self.scored

    @property
    def cached(self) -> int:
        """Number of tokens in its cache; 0 before its first chunk, when only the group's prompt is cached."""
        return self.cached_after(0) if self.scored else 0

    def cached_after(self, num_tokens: int) -> int:
        """Number of tokens in its cache after scoring `num_tokens` more."""
        return self.num_prompt - 1 + self.scored + num_tokens

    def due(self, chunk_tokens: int) -> bool:
        """Whether there are enough tokens for a chunk, or the candidate has ended."""
        return self.final or self.pending >= chunk_tokens


@dataclass(frozen=True)
class Limits:
    """Limits of one forward pass: the `stream_*` fields, and the number of tokens that fit in the cache."""

    chunk_tokens: int
    batch_tokens: int
    cache_tokens: int

    @property
    def room(self) -> int:
        """
        Number of tokens that can be stored, or padded to a batch: a third of the cache. The other two thirds hold the
        padded batch of a pass and its output, until the output replaces the stored tokens.
        """
        return self.cache_tokens // 3


def keep_chance(group: Group, candidate: Candidate, num_generations: int) -> float:
    """
    Estimates the probability that a candidate will be selected: 1 if it is selected, or complete and among the M
    shortest; 0 if it is discarded. Only the order of scoring depends on it.
    """
    if group.selected is not None:
        return float(candidate.index in group.selected)
    if group.error is not None or candidate.state in NEVER_KEPT:
        return 0.0
    if candidate.state is CandidateState.FINISHED:
        return 1.0 if bisect_left(group.complete_lengths, candidate.length) < num_generations else 0.25
    missing = max(0.5, num_generations - group.num_complete)  # one may still be selected for the long end
    return min(1.0, missing / max(1, group.num_unfinished))


def hopeless(tracks: Iterable[Track], limits: Limits) -> list[Track]:
    """Returns candidates that are too long even for a pass of their own. TRL computes their log-probs."""
    return [track for track in tracks if track.cached_after(track.pending) > limits.room]


def plan_batch(tracks: Iterable[Track], limits: Limits, prefixes: Mapping[int, int]) -> list[tuple[Track, int]]:
    """
    Plans the next forward pass of one process. Returns candidates with the number of tokens to score, 0 for one that
    has ended without tokens to score. `prefixes` has the number of cached prompt tokens by group.

    Candidates that have ended come first, because their caches are freed, then those most likely to be selected, and
    among them those with the most tokens. A candidate whose cache has no room to grow waits.
    """
    tracks = list(tracks)
    held = sum(track.cached for track in tracks) + sum(prefixes.values())
    due = [track for track in tracks if track.due(limits.chunk_tokens)]
    closing = [(track, 0) for track in due if not track.pending]
    due = [track for track in due if track.pending]
    due.sort(key=lambda track: (not track.final, -track.chance, -track.pending, track.candidate_id))
    due = due[:MAX_TRIED]
    # The width limits the number of rows. Several widths are tried, and the pass with the most tokens is chosen.
    widths = sorted({min(track.pending, limits.batch_tokens) for track in due}, reverse=True)
    batches = [_fill(due, width, limits, held, prefixes) for width in widths[:: max(1, len(widths) // NUM_WIDTHS)]]
    return closing + max(batches, key=lambda batch: sum(num for _, num in batch), default=[])


def _fill(
    due: Sequence[Track], width: int, limits: Limits, held: int, prefixes: Mapping[int, int]
) -> list[tuple[Track, int]]:
    """Fills a pass of this width with rows in order, as many as fit."""
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
        # A candidate that ends frees its cache, so it must not wait for that room.
        if padded > limits.room or (growth > 0 and held + growth > limits.room) or not fits_prompts:
            continue
        batch.append((track, num_tokens))
        held += growth
        context = max(context, track.cached_after(num_tokens))
        if first:
            new.add(track.group_id)
            prompt_width = max(prompt_width, track.num_prompt)
    return batch


class ScoringPlan:
    """Tracks the scoring of one rollout on all processes, and plans the next rounds."""

    def __init__(
        self,
        rollout: int,
        prompts: Mapping[int, Tokens],
        limits: Limits,
        num_generations: int,
        num_processes: int = 1,
        sharded: bool = False,
    ) -> None:
        self._rollout = rollout
        self._prompts = prompts  # by their groups' IDs
        self._places = {group_id: place for place, group_id in enumerate(prompts)}
        self._limits = limits
        self._num_generations = num_generations
        self._sharded = sharded
        self._candidates: dict[int, Candidate] = {}
        self._seen: dict[int, tuple[bool, int, CandidateState, bool, int]] = {}  # last state of each candidate
        self._closed: set[int] = set()
        self._tracks: list[dict[int, Track]] = [{} for _ in range(num_processes)]  # open candidates
        self._prefixes: list[dict[int, int]] = [{} for _ in range(num_processes)]  # cached prompt tokens by group
        self._dropped: list[list[int]] = [[] for _ in range(num_processes)]

    def note(self, candidate: Candidate, group: Group) -> None:
        """Updates the state of a candidate that may have changed."""
        # The engine's thread changes candidates concurrently. `ended` must be read before the tokens.
        now = (candidate.ended is not None, candidate.length, candidate.state, group.closed, candidate.num_restarts)
        key = candidate.candidate_id
        if key in self._closed or self._seen.get(key) == now:
            return
        self._seen[key] = now
        track = self._track(candidate)
        track.final, track.available = now[:2]
        track.chance = keep_chance(group, candidate, self._num_generations)
        # A restarted candidate was scored for tokens that were discarded. TRL computes its log-probs.
        if candidate.num_restarts or not track.chance or (track.final and not track.available):
            self._close(track)

    def finish(self, rows: Sequence[Candidate]) -> None:
        """Ends the rollout. The remaining tokens of `rows` will be scored, other candidates are closed."""
        kept = {row.candidate_id for row in rows}
        for track in self._open():
            if track.candidate_id not in kept:
                self._close(track)
        for row in rows:
            if row.candidate_id not in self._closed:
                track = self._track(row)
                track.available, track.final, track.chance = row.length, True, 1.0
        self._limits = replace(self._limits, chunk_tokens=1)

    def give_up(self) -> None:
        """Closes the remaining candidates, which do not fit in the cache together."""
        for track in self._open():
            self._close(track)

    def rounds(self, processes: Iterable[int]) -> dict[int, ScoringRound]:
        """Returns the next rounds of these processes, and marks their tokens as scored. Empty rounds are left out."""
        rounds = {process: self._round(process) for process in processes}
        if self._sharded:
            prefills, scores = any(r.prefills for r in rounds.values()), any(r.scores for r in rounds.values())
            rounds = {process: replace(r, prefills=prefills, scores=scores) for process, r in rounds.items()}
        return {process: work for process, work in rounds.items() if work}

    def _round(self, process: int) -> ScoringRound:
        tracks, prefixes = self._tracks[process], self._prefixes[process]
        for track in hopeless(tracks.values(), self._limits):
            self._close(track)
        batch = plan_batch(tracks.values(), self._limits, prefixes)
        new = {track.group_id for track, num_tokens in batch if num_tokens} - prefixes.keys()
        prompts = {group_id: list(self._prompts[group_id]) for group_id in sorted(new)}
        prefixes |= {group_id: len(prompt) - 1 for group_id, prompt in prompts.items()}
        chunks = [self._chunk(track, num_tokens) for track, num_tokens in batch]
        not_begun = {track.group_id for track in tracks.values() if not track.scored}
        released = [group_id for group_id in prefixes if group_id not in not_begun]
        for group_id in released:
            del prefixes[group_id]
        dropped, self._dropped[process] = self._dropped[process], []
        scores = any(num_tokens for _, num_tokens in batch)
        return ScoringRound(self._rollout, prompts, chunks, dropped, released, bool(prompts), scores)

    def _chunk(self, track: Track, num_tokens: int) -> Chunk:
        start, end = track.scored, track.scored + num_tokens
        track.scored = end
        final = track.final and end == track.available
        if final:
            self._close(track, scored=True)
        tokens = self._candidates[track.candidate_id].tokens
        return Chunk(track.candidate_id, track.group_id, list(tokens[start:end]), final)

    def _open(self) -> list[Track]:
        return [track for tracks in self._tracks for track in tracks.values()]

    def _process_of(self, group_id: int) -> int:
        return self._places[group_id] * len(self._tracks) // len(self._prompts)

    def _track(self, candidate: Candidate) -> Track:
        key, group_id = candidate.candidate_id, candidate.group_id
        self._candidates[key] = candidate
        tracks = self._tracks[self._process_of(group_id)]
        if key not in tracks:
            tracks[key] = Track(key, group_id, len(self._prompts[group_id]))
        return tracks[key]

    def _close(self, track: Track, scored: bool = False) -> None:
        """Stops scoring a candidate. Its cache is dropped unless it was scored completely."""
        process = self._process_of(track.group_id)
        self._closed.add(track.candidate_id)
        del self._tracks[process][track.candidate_id]
        if track.scored and not scored:
            self._dropped[process].append(track.candidate_id)
