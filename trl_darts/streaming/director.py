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
from dataclasses import replace

from ..distributed import Mailbox
from ..scheduling import Candidate, RolloutResult, Scheduler
from ..scheduling.ledger import Ledger
from .plan import Limits, Track, keep_chance, plan_batch, set_aside
from .rounds import Chunk, Round, Tokens
from .worker import StreamWorker


# The thread that scores is the one that shows progress and takes back servers: it returns to that this often.
TURN_S = 0.5
POLL_S = 0.002
# Rounds that another process may have in front of it: with one, it would wait for the next.
AHEAD = 2
DONE = "stream"


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
        self._tracks: list[dict[int, Track]] = [{} for _ in range(num_processes)]  # by process and candidate
        self._sent_prompts: list[set[int]] = [set() for _ in range(num_processes)]
        self._dropped: list[list[int]] = [[] for _ in range(num_processes)]
        self._outstanding = [0] * num_processes
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
            if not self._advance(self._limits):
                return

    def finish(self, result: RolloutResult) -> None:
        """Scores what is left of the rows that are kept, on all processes, and lets go of the rest."""
        self._hidden = False
        kept = {row.candidate_id: row for group in result.groups for row in group.rows}
        for process, tracks in enumerate(self._tracks):
            for track in tracks.values():
                if track.candidate_id not in kept and not track.closed:
                    self._drop(process, track)
        for row in kept.values():
            track = self._track(row)
            track.available, track.final, track.chance = row.length, True, 1.0
        limits = Limits(1, self._limits.batch_tokens, self._limits.cache_tokens)
        while self._advance(limits) or any(self._outstanding):
            time.sleep(POLL_S if any(self._outstanding) else 0)
        for process, prompts in enumerate(self._sent_prompts):
            if prompts or self._dropped[process]:
                self._send(process, [], False, False)

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
        if not candidate.length:
            return
        track = self._track(candidate)
        if track.closed:
            return
        group = ledger.groups[candidate.group_id]
        track.available = candidate.length
        track.chance = keep_chance(group, candidate, self._num_generations)
        track.final = candidate.ended is not None
        if not track.chance:
            self._drop(self._process_of(candidate.group_id), track)

    def _drop(self, process: int, track: Track) -> None:
        track.closed = True
        if track.scored:
            self._dropped[process].append(track.candidate_id)

    def _advance(self, limits: Limits) -> bool:
        """One round where there is something to do; whether to look again at once."""
        self._count_done()
        free = [p for p, number in enumerate(self._outstanding) if self._sharded or number < AHEAD]
        batches = {process: self._batch(process, limits) for process in free}
        if self._sharded:
            prefills = any(self._new_prompts(process, batch) for process, batch in batches.items())
            scores = any(num for batch in batches.values() for _, num in batch)
            if not any(batches.values()):
                return False
            for process in reversed(free):  # this process last: its forward pass waits for the others
                self._send(process, batches[process], prefills, scores)
            return True
        for process in reversed(free):
            if batch := batches[process]:
                self._send(process, batch, bool(self._new_prompts(process, batch)), any(num for _, num in batch))
        return bool(batches.get(0))

    def _batch(self, process: int, limits: Limits) -> list[tuple[Track, int]]:
        tracks = list(self._tracks[process].values())
        prompts = sum(len(self._prompts[group_id]) - 1 for group_id in self._sent_prompts[process])
        limits = replace(limits, cache_tokens=max(0, limits.cache_tokens - 2 * prompts))  # out of what is kept
        for track in set_aside(tracks, limits):
            self._drop(process, track)
        batch = plan_batch(tracks, limits)
        new: dict[int, int] = {}
        fitting = []
        for track, num_tokens in batch:
            if num_tokens and track.group_id not in self._sent_prompts[process] and track.group_id not in new:
                width = max([track.num_prompt, *new.values()])
                if new and width * (len(new) + 1) > limits.batch_tokens:
                    continue
                new[track.group_id] = track.num_prompt
            fitting.append((track, num_tokens))
        return fitting

    def _new_prompts(self, process: int, batch: Sequence[tuple[Track, int]]) -> dict[int, Tokens]:
        groups = {track.group_id for track, num_tokens in batch if num_tokens} - self._sent_prompts[process]
        return {group_id: list(self._prompts[group_id]) for group_id in sorted(groups)}

    def _send(self, process: int, batch: Sequence[tuple[Track, int]], prefills: bool, scores: bool) -> None:
        prompts = self._new_prompts(process, batch)
        self._sent_prompts[process] |= prompts.keys()
        chunks = []
        for track, num_tokens in batch:
            tokens = self._scheduler.ledger.candidates[track.candidate_id].tokens
            end = track.scored + num_tokens
            final = track.final and end == track.available
            chunks.append(Chunk(track.candidate_id, track.group_id, list(tokens[track.scored : end]), final))
            track.scored, track.closed = end, final
        dropped, self._dropped[process] = self._dropped[process], []
        released = [group_id for group_id in self._sent_prompts[process] if self._all_begun(process, group_id)]
        self._sent_prompts[process].difference_update(released)
        work = Round(self._rollout, prompts, chunks, dropped, released, prefills, scores, self._hidden)
        if process == 0:
            self._worker.execute(work)
        else:
            self._outstanding[process] += 1
            self._mailbox.post(process, work)

    def _all_begun(self, process: int, group_id: int) -> bool:
        tracks = self._tracks[process]
        candidates = self._scheduler.ledger.groups[group_id].candidates
        begun = (tracks.get(candidate.candidate_id) for candidate in candidates)
        # One without a token has no track; it will have none once the rollout is over.
        return all(track.scored or track.closed if track else self._scheduler.done for track in begun)

    def _count_done(self) -> None:
        if self._mailbox is not None:
            for message in self._mailbox.receive():
                if isinstance(message, tuple) and message[0] == DONE and message[1] == self._rollout:
                    self._outstanding[message[2]] -= 1
