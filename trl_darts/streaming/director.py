"""
The main process's side of streaming: it sees tokens arrive, plans what each process scores next, and sends it there.

```
servers ──tokens──▶ ledger ──▶ StreamDirector ──Round──▶ StreamWorker          this process
                                              ──Round──▶ mailbox ──▶ StreamWorker   the others
                                              ◀──done──
```

Each group belongs to one process. Where the model is sharded, a forward pass is a collective, and all processes go
through the same rounds; otherwise each has its own pace.
"""

import time
from collections.abc import Sequence

from ..engines.mailbox import Mailbox
from ..errors import GenerationError
from ..scheduling import Candidate, CandidateState, RolloutResult, Scheduler
from ..scheduling.ledger import Ledger
from .plan import Limits, Track, hopeless, keep_chance, plan_batch
from .rounds import Chunk, Round, RoundDone, Tokens
from .worker import StreamWorker


# The thread that scores is the one that shows progress and takes back servers: it returns to that this often.
TURN_S = 0.5
POLL_S = 0.002
# Rounds that another process may have in front of it: with one, it would wait for the next.
AHEAD = 2


class StreamDirector:
    """
    Plans the scoring of one rollout.

    Args:
        rollout (`int`):
            Its number, from 1.
        scheduler ([`Scheduler`]):
            The rollout's.
        prompts (`Sequence[list[int]]` of shape `(N,)`):
            Tokens of each group's prompt, by `group_id`.
        num_generations (`int`):
            M, rows per group.
        chunk_tokens (`int`):
            See [`Limits`].
        batch_tokens (`int`):
            See [`Limits`].
        cache_bytes (`int`):
            For the keys and values of each process.
        worker ([`StreamWorker`]):
            This process's.
        mailbox ([`Mailbox`], *optional*):
            To the others; `None` where there are none.
        num_processes (`int`, *optional*, defaults to `1`):
            How many there are.
        sharded (`bool`, *optional*, defaults to `False`):
            Whether a forward pass is a collective.
    """

    def __init__(
        self,
        rollout: int,
        scheduler: Scheduler,
        prompts: Sequence[Tokens],
        num_generations: int,
        chunk_tokens: int,
        batch_tokens: int,
        cache_bytes: int,
        worker: StreamWorker,
        mailbox: Mailbox | None = None,
        num_processes: int = 1,
        sharded: bool = False,
    ) -> None:
        self._rollout = rollout
        self._scheduler = scheduler
        self._prompts = prompts
        self._num_generations = num_generations
        self._worker = worker
        self._mailbox = mailbox
        self._sharded = sharded
        num = num_processes
        self._tracks: list[dict[int, Track]] = [{} for _ in range(num)]  # by process and candidate; the open ones
        self._seen: dict[int, tuple[int, CandidateState, bool]] = {}  # candidates as they were noted last
        self._closed: set[int] = set()
        self._prefixes: list[dict[int, int]] = [{} for _ in range(num)]  # tokens of prompts, by process and group
        self._dropped: list[list[int]] = [[] for _ in range(num)]
        self._outstanding = [0] * num
        self._hidden = True
        if not worker.bytes_per_token:
            self._measure()
        self._limits = Limits(chunk_tokens, batch_tokens, cache_bytes // worker.bytes_per_token)

    def _measure(self) -> None:
        """A first forward pass with a token that means nothing: how many bytes one takes."""
        for process in reversed(range(len(self._tracks) if self._sharded else 1)):
            self._send(process, [], True, False)

    def step(self, ledger: Ledger) -> None:
        """Scores what has arrived, for at most half a second; called again and again while the rollout runs."""
        deadline = time.perf_counter() + TURN_S
        while not self._scheduler.done and time.perf_counter() < deadline:
            for candidate in ledger.candidates:
                self._note(ledger, candidate)
            if self._advance(self._limits):
                continue
            if not any(self._outstanding):
                return
            time.sleep(POLL_S)

    def finish(self, result: RolloutResult, completion_ids: Sequence[Tokens] | None = None) -> float:
        """
        Scores what is left of the rows that are trained on, on all processes, and lets go of the rest.

        Args:
            result ([`RolloutResult`]):
                The rollout.
            completion_ids (`Sequence[list[int]]` of shape `(N·M,)`, *optional*):
                What is trained on, where that is not all that the rollout yielded.

        Returns:
            `float`: Seconds for which the end of the rollout had to wait, from its last event on.
        """
        self._hidden = False
        end = result.timeline.times[-1] if result.timeline.times else time.perf_counter()
        rows = [row for group in result.groups for row in group.rows]
        if completion_ids is not None:
            trained = set(map(tuple, completion_ids))
            rows = [row for row in rows if tuple(row.tokens) in trained]
        kept = {row.candidate_id for row in rows}
        for tracks in self._tracks:
            for track in [track for track in tracks.values() if track.candidate_id not in kept]:
                self._close(track)
        for row in rows:
            if row.candidate_id not in self._closed:
                track = self._track(row)
                track.available, track.final, track.chance = row.length, True, 1.0
        limits = Limits(1, self._limits.batch_tokens, self._limits.cache_tokens)
        while self._advance(limits) or any(self._outstanding):
            if any(self._outstanding):
                time.sleep(POLL_S)
        for tracks in self._tracks:  # too much at once, whatever the order
            for track in list(tracks.values()):
                self._close(track)
        self._advance(limits)
        return time.perf_counter() - end

    def _track(self, candidate: Candidate) -> Track:
        tracks = self._tracks[self._process_of(candidate.group_id)]
        track = tracks.get(candidate.candidate_id)
        if track is None:
            num_prompt = len(self._prompts[candidate.group_id])
            track = tracks[candidate.candidate_id] = Track(candidate.candidate_id, candidate.group_id, num_prompt)
        return track

    def _process_of(self, group_id: int) -> int:
        return group_id * len(self._tracks) // len(self._prompts)

    def _note(self, ledger: Ledger, candidate: Candidate) -> None:
        # The engine's thread goes on meanwhile: an end that is seen comes with all of its tokens.
        group, key = ledger.groups[candidate.group_id], candidate.candidate_id
        ended = candidate.ended is not None
        now = (candidate.length, candidate.state, group.closed)
        if key in self._closed or self._seen.get(key) == now:
            return
        self._seen[key] = now
        if not candidate.length:
            if ended:
                self._closed.add(key)
            return
        track = self._track(candidate)
        track.available, track.final = now[0], ended
        track.chance = keep_chance(group, candidate, self._num_generations)
        if not track.chance:
            self._close(track)

    def _close(self, track: Track, scored: bool = False) -> None:
        """It needs no more scoring. Where it is not scored as a whole, its cache is of no use any more."""
        process = self._process_of(track.group_id)
        self._closed.add(track.candidate_id)
        del self._tracks[process][track.candidate_id]
        if track.scored and not scored:
            self._dropped[process].append(track.candidate_id)

    def _advance(self, limits: Limits) -> bool:
        """One round on each process that has something to do; whether there was any."""
        self._count_done()
        free = [p for p, number in enumerate(self._outstanding) if self._sharded or number < AHEAD]
        batches = {process: self._batch(process, limits) for process in free}
        new = {process: self._new_prompts(process, batch) for process, batch in batches.items()}
        prefills = {process: bool(prompts) for process, prompts in new.items()}
        scores = {process: any(num for _, num in batch) for process, batch in batches.items()}
        if self._sharded:
            prefills = dict.fromkeys(free, any(prefills.values()))
            scores = dict.fromkeys(free, any(scores.values()))
        advanced = False
        for process in reversed(free):  # this process last: its pass takes time, or waits for the others
            if batches[process] or prefills[process] or scores[process] or self._idle(process):
                self._send(process, batches[process], prefills[process], scores[process])
                advanced = True
        return advanced

    def _batch(self, process: int, limits: Limits) -> list[tuple[Track, int]]:
        for track in hopeless(self._tracks[process].values(), limits):
            self._close(track)
        return plan_batch(self._tracks[process].values(), limits, self._prefixes[process])

    def _idle(self, process: int) -> bool:
        """Whether the process keeps what is not needed any more."""
        return bool(self._dropped[process] or self._released(process))

    def _released(self, process: int) -> list[int]:
        return [group_id for group_id in self._prefixes[process] if self._all_begun(process, group_id)]

    def _all_begun(self, process: int, group_id: int) -> bool:
        for candidate in self._scheduler.ledger.groups[group_id].candidates:
            track = self._tracks[process].get(candidate.candidate_id)
            if track is not None and not track.scored:
                return False
            # One without a token has no track; it will have none once the rollout is over.
            if track is None and candidate.candidate_id not in self._closed and not self._scheduler.done:
                return False
        return True

    def _new_prompts(self, process: int, batch: Sequence[tuple[Track, int]]) -> dict[int, Tokens]:
        groups = {track.group_id for track, num_tokens in batch if num_tokens} - self._prefixes[process].keys()
        return {group_id: list(self._prompts[group_id]) for group_id in sorted(groups)}

    def _send(self, process: int, batch: Sequence[tuple[Track, int]], prefills: bool, scores: bool) -> None:
        prompts = self._new_prompts(process, batch)
        self._prefixes[process] |= {group_id: len(prompt) - 1 for group_id, prompt in prompts.items()}
        chunks = []
        for track, num_tokens in batch:
            tokens = self._scheduler.ledger.candidates[track.candidate_id].tokens
            end = track.scored + num_tokens
            final = track.final and end == track.available
            chunks.append(Chunk(track.candidate_id, track.group_id, list(tokens[track.scored : end]), final))
            track.scored = end
            if final:
                self._close(track, scored=True)
        dropped, self._dropped[process] = self._dropped[process], []
        released = self._released(process)
        for group_id in released:
            del self._prefixes[process][group_id]
        work = Round(self._rollout, prompts, chunks, dropped, released, prefills, scores, self._hidden)
        if process == 0:
            self._worker.execute(work)
        else:
            self._outstanding[process] += 1
            self._mailbox.post(process, work)

    def _count_done(self) -> None:
        if self._mailbox is None:
            return
        for message in self._mailbox.receive():
            if isinstance(message, RoundDone) and message.rollout == self._rollout:
                if message.error is not None:
                    raise GenerationError(f"Streaming failed on process {message.process}: {message.error}")
                self._outstanding[message.process] -= 1
