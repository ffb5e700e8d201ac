"""
Computes log-probs while candidates still decode ([DARTS](https://huggingface.co/papers/2605.30859), Section 4.3.2 and
Appendix E), and returns them to TRL when it asks for them.

```
servers ──tokens──▶ ledger ──▶ ScoringPlan ──ScoringRound──▶ Scorer               this process
                                           ──ScoringRound──▶ mailbox ──▶ Scorer   the others
                                           ◀──done──
```
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object

from ..engines.mailbox import Mailbox
from ..errors import GenerationError
from ..scheduling import RolloutResult
from ..scheduling.ledger import Ledger
from .forward import Scorer, row_digest
from .plan import Limits, ScoringPlan, ScoringRound, Tokens


GIB = 2**30
POLICY, REFERENCE = "policy", "reference"
# TRL's `_get_per_token_logps_and_entropies` for some of the rows: from input IDs and attention mask to log-probs.
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

TURN_S = 0.5  # longest time of scoring before the thread shows progress and reconnects servers
POLL_S = 0.002
LOOK_PAUSES = 4  # pause after a look at the candidates, in multiples of its time
AHEAD = 2  # rounds queued on another process: with one, it would idle between rounds


@dataclass(frozen=True, slots=True)
class RoundDone:
    """A process's reply to a round, with an error if it failed."""

    rollout: int
    process: int
    error: str | None = None


class LogprobStream:
    """
    Scores the candidates of each rollout while they decode, with each model whose log-probs TRL needs: the policy, the
    reference, or both.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        num_generations: int,
        chunk_tokens: int,
        batch_tokens: int,
        cache_gib: float,
        num_processes: int = 1,
        mailbox: Mailbox | None = None,
        sharded: bool = False,
    ) -> None:
        self.scorers = scorers
        self.num_missed = 0  # rows that TRL had to compute in the last call of `log_probs`
        self._num_generations = num_generations
        self._chunk_tokens, self._batch_tokens = chunk_tokens, batch_tokens
        self._cache_bytes = int(cache_gib * GIB)
        self._num_processes = num_processes
        self._mailbox = mailbox
        self._sharded = sharded
        self._rollout = 0
        self._plan: ScoringPlan | None = None  # of the current rollout, on the main process
        self._outstanding = [0] * num_processes  # rounds without a reply
        self._active = False  # whether the log-probs belong to the current weights
        self._digests: list[bytes] | None = None  # of the rows that TRL requests
        self._known: dict[str, dict[bytes, torch.Tensor]] = {}
        # Seconds of scoring on the main process, while candidates decode and after the rollout's end.
        self._hidden_seconds = self._exposed_seconds = 0.0
        self._num_chunks = 0

    # While candidates decode

    def watch(self, prompts: Mapping[int, Tokens]) -> Callable[[Ledger], None]:
        """
        Starts a rollout of these prompts, by their groups' IDs, on the main process. Returns a function to call
        repeatedly while the rollout runs.
        """
        self._rollout += 1
        self._outstanding = [0] * self._num_processes
        if not self._bytes_per_token:
            # A first pass over a dummy token measures the cache's bytes per token.
            self._send({process: ScoringRound(self._rollout, prefills=True) for process in self._collective([0])})
        limits = Limits(self._chunk_tokens, self._batch_tokens, self._cache_bytes // self._bytes_per_token)
        self._plan = ScoringPlan(
            self._rollout, prompts, limits, self._num_generations, self._num_processes, self._sharded
        )
        return self._step

    def _step(self, ledger: Ledger) -> None:
        """Scores the tokens that have arrived, for at most `TURN_S`."""
        assert self._plan is not None
        deadline = time.perf_counter() + TURN_S
        while ledger.num_open and (start := time.perf_counter()) < deadline:
            for candidate in ledger.candidates:
                self._plan.note(candidate, ledger.groups[candidate.group_id])
            if self._advance(self._plan):
                self._hidden_seconds += time.perf_counter() - start
                continue
            if not any(self._outstanding):
                return
            # A look at 10,000 candidates takes 27 ms, which the engine's thread, with as many connections, needs too.
            time.sleep(max(POLL_S, LOOK_PAUSES * (time.perf_counter() - start)))

    def finish(self, result: RolloutResult, completion_ids: Sequence[Tokens] | None = None) -> None:
        """
        Scores the remaining tokens of the rows to train on, after the rollout, on the main process. `completion_ids`
        are these rows, if they are only some of the rollout's.
        """
        assert self._plan is not None
        plan, self._plan = self._plan, None
        end = result.timeline.times[-1] if result.timeline.times else time.perf_counter()
        rows = [row for group in result.groups for row in group.rows]
        if completion_ids is not None:
            trained = set(map(tuple, completion_ids))
            rows = [row for row in rows if tuple(row.tokens) in trained]
        plan.finish(rows)
        while self._advance(plan) or any(self._outstanding):
            if any(self._outstanding):
                time.sleep(POLL_S)
        plan.give_up()
        self._advance(plan)
        self._exposed_seconds = time.perf_counter() - end

    def _advance(self, plan: ScoringPlan) -> bool:
        """Starts one round on each process with tokens to score. Returns whether there was any."""
        self._count_done()
        free = [process for process, number in enumerate(self._outstanding) if number < AHEAD]
        rounds = plan.rounds(self._collective(free))
        self._send(rounds)
        return bool(rounds)

    def _collective(self, processes: list[int]) -> list[int]:
        return list(range(self._num_processes)) if self._sharded else processes

    def _send(self, rounds: Mapping[int, ScoringRound]) -> None:
        for process in sorted(rounds, reverse=True):  # this process last, because its pass blocks
            if process == 0:
                self._score(rounds[process])
            else:
                assert self._mailbox is not None
                self._outstanding[process] += 1
                self._mailbox.post(process, rounds[process])

    def _score(self, work: ScoringRound) -> None:
        for scorer in self.scorers.values():
            scorer.execute(work)
        self._num_chunks += sum(bool(chunk.tokens) for chunk in work.chunks)

    @property
    def _bytes_per_token(self) -> int:
        return sum(scorer.bytes_per_token for scorer in self.scorers.values())

    def _count_done(self) -> None:
        for message in self._mailbox.receive() if self._mailbox is not None else ():
            if isinstance(message, RoundDone) and message.rollout == self._rollout:
                if message.error is not None:
                    raise GenerationError(f"Streaming failed on process {message.process}: {message.error}")
                self._outstanding[message.process] -= 1

    def execute(self, work: ScoringRound) -> None:
        """Executes a round on another process."""
        assert self._mailbox is not None
        error = None
        try:
            self._score(work)
        except Exception as failure:  # reported to the main process, which waits for a reply
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            self._mailbox.post(0, RoundDone(work.rollout, self._mailbox.process_index, error))

    # When TRL requests log-probs

    def open(self) -> None:
        """Starts serving TRL's requests. Called on every process before a batch is generated."""
        self._active = True
        self._digests, self._known, self.num_missed = None, {}, 0
        self._hidden_seconds = self._exposed_seconds = 0.0
        self._num_chunks = 0

    def close(self) -> dict[str, float]:
        """Drops the rollout before the weights change. Returns its metrics on this process."""
        peak_bytes = sum(scorer.peak_tokens * scorer.bytes_per_token for scorer in self.scorers.values())
        self._active, self._known = False, {}
        for scorer in self.scorers.values():
            scorer.forget()
        return {
            "darts/stream/hidden_seconds": self._hidden_seconds,
            "darts/stream/exposed_seconds": self._exposed_seconds,
            "darts/stream/chunks": float(self._num_chunks),
            "darts/stream/cache_bytes": float(peak_bytes),
            "darts/stream/missed_rows": float(self.num_missed),
        }

    @property
    def active(self) -> bool:
        """Whether streamed log-probs can be used: before the loss, but not in it."""
        return self._active and not torch.is_grad_enabled()

    def log_probs(
        self, name: str, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_logits: int, compute: Compute
    ) -> torch.Tensor:
        """Returns the log-probs of a batch. Must be called on every process."""
        lengths = attention_mask[:, -num_logits:].sum(1).tolist()
        if self._digests is None:
            rows = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
            starts = [len(row) - length for row, length in zip(rows, lengths, strict=True)]
            self._digests = [row_digest(row[:start], row[start:]) for row, start in zip(rows, starts, strict=True)]
            self._known = self._with_others(self._digests)
        output = torch.zeros(len(lengths), num_logits, device=input_ids.device)
        missing = []
        for b, (length, digest) in enumerate(zip(lengths, self._digests, strict=True)):
            if length and digest in self._known[name]:
                output[b, :length] = self._known[name][digest].to(output.device)
            elif length:
                missing.append(b)
        self.num_missed = len(missing)
        if computed := self._filled_up(missing, len(lengths)):
            output[computed] = compute(input_ids[computed], attention_mask[computed]).to(output.dtype)
        return output

    def _with_others(self, digests: Sequence[bytes]) -> dict[str, dict[bytes, torch.Tensor]]:
        """Returns the log-probs scored here, and those of our rows scored elsewhere: a group can span processes."""
        local = {name: scorer.complete for name, scorer in self.scorers.items()}
        if self._num_processes == 1:
            return local
        missing = {digest for digest in digests if any(digest not in complete for complete in local.values())}
        wanted = set().union(*gather_object([missing]))
        found = {name: {d: complete[d] for d in wanted & complete.keys()} for name, complete in local.items()}
        shares = gather_object([found])
        return {name: {d: v for share in [*shares, local] for d, v in share[name].items()} for name in local}

    def _filled_up(self, missing: list[int], num_rows: int) -> list[int]:
        """Adds rows so that each process has the same number, if a forward pass is a collective operation."""
        if not self._sharded or self._num_processes == 1:
            return missing
        most = max(gather_object([len(missing)]))
        others = [b for b in range(num_rows) if b not in missing]
        return [*missing, *others[: most - len(missing)]]
