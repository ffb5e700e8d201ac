"""
Log-probs that are computed while answers are still being written
([DARTS](https://huggingface.co/papers/2605.30859), Section 4.3.2 and Appendix E), and served to TRL when it asks for
them.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from accelerate.utils import gather_object

from ..engines.mailbox import Mailbox
from ..scheduling import RolloutResult, Scheduler
from ..scheduling.ledger import Ledger
from .director import StreamDirector
from .rounds import Round, RoundDone, Tokens
from .worker import LogProbs, ScoredModel, StreamWorker, row_digest


GIB = 2**30
POLICY, REFERENCE = "policy", "reference"
# TRL's `_get_per_token_logps_and_entropies`, for some of the rows: input IDs and attention mask to log-probs.
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LogprobStream:
    """
    Scores the candidates of each rollout while they decode.

    Args:
        models (`Mapping[str, ScoredModel]`):
            Whose log-probs TRL will ask for: `"policy"`, `"reference"`, or both.
        device (`torch.device`):
            Of the models.
        num_generations (`int`):
            M, rows per group.
        chunk_tokens (`int`):
            Fewest new tokens of a candidate that goes on decoding.
        batch_tokens (`int`):
            Most tokens of a forward pass, padding included.
        cache_gib (`float`):
            For keys and values on each process.
        process_index (`int`, *optional*, defaults to `0`):
            This process.
        num_processes (`int`, *optional*, defaults to `1`):
            How many there are.
        sharded (`bool`, *optional*, defaults to `False`):
            Whether a forward pass is a collective.
        open_mailbox (`Callable[[], Mailbox]`, *optional*):
            Gives the mailbox; needed where there are several processes.
    """

    def __init__(
        self,
        models: Mapping[str, ScoredModel],
        device: torch.device,
        num_generations: int,
        chunk_tokens: int,
        batch_tokens: int,
        cache_gib: float,
        process_index: int = 0,
        num_processes: int = 1,
        sharded: bool = False,
        open_mailbox: Callable[[], Mailbox] | None = None,
    ) -> None:
        self.worker = StreamWorker(models, device, sharded)
        self._names = frozenset(models)
        self._num_generations = num_generations
        self._limits = (chunk_tokens, batch_tokens, int(cache_gib * GIB))
        self._process_index = process_index
        self._num_processes = num_processes
        self._sharded = sharded
        self._open_mailbox = open_mailbox
        self._num_rollouts = 0
        self._director: StreamDirector | None = None
        self._active = False  # whether what was scored is of the weights that TRL asks about
        self._digests: list[bytes] | None = None
        self._borrowed: dict[bytes, LogProbs] = {}
        self._num_missed = 0
        self._exposed_seconds = 0.0  # of the end of the rollout, on the main process

    # While candidates decode

    def watch(self, scheduler: Scheduler, prompts: Sequence[Tokens]) -> Callable[[Ledger], None]:
        """
        Begins a rollout, on the main process.

        Args:
            scheduler ([`Scheduler`]):
                The rollout's.
            prompts (`Sequence[list[int]]` of shape `(N,)`):
                Tokens of each group's prompt, by `group_id`.

        Returns:
            `Callable[[Ledger], None]`: To be called again and again while it runs.
        """
        self._num_rollouts += 1
        several = self._num_processes > 1
        self._director = StreamDirector(
            self._num_rollouts,
            scheduler,
            prompts,
            self._num_generations,
            *self._limits,
            worker=self.worker,
            mailbox=self._open_mailbox() if several else None,
            num_processes=self._num_processes,
            sharded=self._sharded,
        )
        return self._director.step

    def finish(self, result: RolloutResult, completion_ids: Sequence[Tokens] | None = None) -> None:
        """Scores what is left of the rows that are trained on, once the rollout is over. On the main process."""
        self._exposed_seconds = self._director.finish(result, completion_ids)
        self._director = None

    def execute(self, work: Round) -> None:
        """What the other processes do: a round that the main one has planned."""
        error = None
        try:
            self.worker.execute(work)
        except Exception as failure:  # the main process waits for an answer
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            self._open_mailbox().post(0, RoundDone(work.rollout, self._process_index, error))

    # When TRL asks

    def open(self) -> None:
        """From now on, TRL is served when it asks. Called on every process before a batch is generated."""
        self._active = True
        self._digests, self._borrowed, self._num_missed, self._exposed_seconds = None, {}, 0, 0.0

    def close(self) -> dict[str, float]:
        """
        Forgets the rollout: the weights will change.

        Returns:
            `dict[str, float]`: Its metrics on this process, see `docs/metrics.md`. Zeros where there was no rollout.
        """
        worker = self.worker
        metrics = {
            "darts/stream/hidden_seconds": worker.hidden_seconds,
            "darts/stream/exposed_seconds": self._exposed_seconds,
            "darts/stream/chunks": float(worker.num_chunks),
            "darts/stream/cache_bytes": float(worker.peak_bytes),
            "darts/stream/missed_rows": float(self._num_missed),
        }
        self._active, self._borrowed = False, {}
        worker.forget()
        return metrics

    @property
    def active(self) -> bool:
        """Whether TRL may be asking for what was streamed: before the loss, and not in it."""
        return self._active and not torch.is_grad_enabled()

    def serves(self, name: str) -> bool:
        """Whether to ask for these log-probs here."""
        return self.active and name in self._names

    def log_probs(
        self, name: str, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_logits: int, compute: Compute
    ) -> torch.Tensor:
        """
        The log-probs of a batch, called on every process at once.

        Args:
            name (`str`):
                `"policy"` or `"reference"`.
            input_ids (`torch.Tensor` of shape `(B, P+C)`):
                Prompts, padded on the left, and completions, padded on the right.
            attention_mask (`torch.Tensor` of shape `(B, P+C)`):
                Zero for padding.
            num_logits (`int`):
                C.
            compute (`Callable`):
                TRL's own way, for the rows that were not scored.

        Returns:
            `torch.Tensor` of shape `(B, C)`: Log-probs; zero for padding.
        """
        rows = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        lengths = attention_mask[:, -num_logits:].sum(1).tolist()
        if self._digests is None:
            pairs = [(row[: len(row) - n], row[len(row) - n :]) for row, n in zip(rows, lengths, strict=True)]
            self._digests = [row_digest(*pair) for pair in pairs]
            self._borrow()
        known = {**self._borrowed, **self.worker.complete}
        missing = [b for b, digest in enumerate(self._digests) if lengths[b] and digest not in known]
        self._num_missed = len(missing)
        output = torch.zeros(len(rows), num_logits, device=input_ids.device)
        for b, digest in enumerate(self._digests):
            if lengths[b] and digest in known:
                output[b, : lengths[b]] = known[digest][name].to(output.device)
        if asked := self._padded(missing):
            output[asked] = compute(input_ids[asked], attention_mask[asked]).to(output.dtype)
        return output

    def _borrow(self) -> None:
        """Rows of this process whose groups belong to another one."""
        if self._num_processes == 1:
            return
        wanted = gather_object([set(self._digests) - self.worker.complete.keys()])
        own = self.worker.complete
        lent = {
            digest: {name: values.cpu() for name, values in own[digest].items()}
            for process, digests in enumerate(wanted)
            if process != self._process_index
            for digest in digests & own.keys()
        }
        for share in gather_object([lent]):
            self._borrowed |= {digest: share[digest] for digest in share.keys() & set(self._digests)}

    def _padded(self, missing: list[int]) -> list[int]:
        """As many rows on each process, where a forward pass is a collective."""
        if not self._sharded or self._num_processes == 1:
            return missing
        most = max(gather_object([len(missing)]))
        others = [b for b in range(len(self._digests)) if b not in set(missing)]
        return [*missing, *others[: most - len(missing)]]
