"""
One rollout from the trainer's side: admission on the main process, decoding wherever the engine is, the same rows on
every process.

```
rows of all processes ──▶ prompts ──▶ admission (main process) ──▶ scheduler + engine ──▶ kept rows, record
        gather                         M'_i per prompt              on the main process (servers), or on each
                                                                    process for its own prompts (transformers)
```
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from .engines.hf_generate import SchedulerCriterion
from .engines.vllm_server import Overrides, VLLMServerEngine
from .errors import ConfigurationError
from .metrics import RolloutRecord
from .progress import RolloutProgress
from .scheduling import (
    Admission,
    AdmissionPolicy,
    GroupPlan,
    GroupSummary,
    Occupancy,
    PromptInfo,
    RolloutResult,
    SchedulePolicies,
    Scheduler,
    UniformAdmission,
    prompt_key,
)


Tokens = list[int]


@dataclass
class KeptRows:
    """The rows that TRL trains on, group by group; `logprobs` is `None` where the engine gives none."""

    completion_ids: list[Tokens]  # (N·M, ≤ max_completion_length)
    logprobs: list[list[float]] | None

    @classmethod
    def of(cls, result: RolloutResult) -> "KeptRows":
        """The kept rows of a result, in the order of its groups."""
        rows = [row for group in result.groups for row in group.rows]
        given = all(row.logprobs is not None for row in rows)
        return cls([row.tokens for row in rows], [row.logprobs or [] for row in rows] if given else None)


class RolloutConductor:
    """
    Runs a trainer's rollouts.

    Args:
        accelerator (`Accelerator`):
            The trainer's.
        policies ([`SchedulePolicies`]):
            The schedule's decisions.
        admission ([`AdmissionPolicy`]):
            Candidates per prompt. Used and taught on the main process only.
        num_generations (`int`):
            M, rows per prompt in training.
        show_progress (`bool`, *optional*, defaults to `True`):
            Whether to show a line while a rollout runs.
        schedule (`str`, *optional*, defaults to `"grpo"`):
            The schedule's name. Any other than `"grpo"` refuses batches that it can't run.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        policies: SchedulePolicies,
        admission: AdmissionPolicy,
        num_generations: int,
        show_progress: bool = True,
        schedule: str = "grpo",
    ) -> None:
        self.accelerator = accelerator
        self.schedule = schedule
        self.policies = policies
        self.admission = admission
        self.num_generations = num_generations
        self.show_progress = show_progress
        self.over_provision = False  # whether the next rollout is one of training: set by the trainer
        self.record: RolloutRecord | None = None  # of the last over-provisioned rollout, on every process
        self.overrides: Overrides | None = None  # further request fields per candidate: benchmarks replay lengths

    def gather(
        self, prompt_rows: Sequence[Tokens], multimodal: bool, num_generations: int
    ) -> list[list[Tokens]] | None:
        """
        The rows of all processes. Called on every process at once.

        Args:
            prompt_rows (`Sequence[list[int]]` of shape `(B, ≤ P)`):
                This process's rows.
            multimodal (`bool`):
                Whether this process's rows come with images or other fields than tokens.
            num_generations (`int`):
                How often each prompt stands in a row.

        Returns:
            `list[list[list[int]]]`: The rows by process; `None` where this batch must take TRL's own way.

        Raises:
            [`ConfigurationError`]: If it must, and the schedule over-provisions.
        """
        shares = gather_object([(list(prompt_rows), multimodal)])
        rows = [row for share, _ in shares for row in share]
        if any(other for _, other in shares):
            problem = "prompts with images or other multimodal fields"
        elif any(row != rows[index - index % num_generations] for index, row in enumerate(rows)):
            problem = "prompts that differ within a group, as from environments that reset each row on its own"
        else:
            return [share for share, _ in shares]
        if self.over_provision and self.schedule != "grpo":
            raise ConfigurationError(
                f"`schedule` ({self.schedule!r}) does not run with {problem} yet. Set `schedule='grpo'`."
            )
        return None

    def on_servers(
        self, engine: VLLMServerEngine, prompts: Sequence[Tokens], num_generations: int, body: Mapping[str, Any]
    ) -> tuple[KeptRows, RolloutRecord]:
        """
        Runs a rollout on vLLM servers. Called on the main process only.

        Args:
            engine ([`VLLMServerEngine`]):
                The servers.
            prompts (`Sequence[list[int]]` of shape `(N, ≤ P)`):
                Token IDs of each prompt of the batch, once.
            num_generations (`int`):
                Rows that each prompt must yield.
            body (`Mapping[str, Any]`):
                Fields of the completion requests.

        Returns:
            `tuple[KeptRows, RolloutRecord]`: What is trained on, and what is known of the rest.
        """
        admission, plans = self._plan(prompts, num_generations)
        scheduler = self._scheduler(num_generations)
        with self._progress() as progress:
            result = engine.run(scheduler, plans, dict(enumerate(prompts)), body, self.overrides, progress)
        summaries = [GroupSummary.of(group) for group in result.groups]
        record = RolloutRecord(admission, summaries, [Occupancy.of(result)], num_generations)
        self._learn(record)
        return KeptRows.of(result), record

    def in_process(
        self,
        shares: Sequence[Sequence[Tokens]],
        generate: Callable[[list[Tokens], SchedulerCriterion], list[Tokens]],
        eos_token_ids: Sequence[int],
        collective: bool,
    ) -> list[Tokens]:
        """
        Runs a rollout with `generate` on every process. Each decodes the prompts whose first row is its own.

        Args:
            shares (`Sequence[Sequence[list[int]]]`):
                The rows of each process: in the whole, each prompt stands `num_generations` times in a row.
            generate (`Callable`):
                Decodes rows of token IDs under a stopping criterion and returns the completions.
            eos_token_ids (`Sequence[int]`):
                Tokens that end a completion.
            collective (`bool`):
                Whether `generate` must be called on all processes at once (sharded models).

        Returns:
            `list[list[int]]` of shape `(B, ≤ T)`: Completions of this process's rows.

        Raises:
            [`ConfigurationError`]: If the model is sharded and a process has no prompt of its own.
        """
        first_rows, offset = [], 0
        for share in shares:  # rows of the batch at which this process's part begins
            first_rows.append(offset)
            offset += len(share)
        prompts = [row for share in shares for row in share][:: self.num_generations]
        owners = [_owner(index * self.num_generations, first_rows) for index in range(len(prompts))]
        if collective and set(owners) != set(range(len(shares))):
            raise ConfigurationError(
                f"A generation batch of {len(prompts)} prompts leaves some of the {len(shares)} processes without "
                "one, and a sharded model must generate on all. Raise `per_device_train_batch_size` or "
                "`steps_per_generation`, or set `use_vllm=True` with `vllm_mode='server'`."
            )
        admission, plans = self.agree(lambda: self._plan(prompts, self.num_generations))
        mine = [plan for plan, owner in zip(plans, owners, strict=True) if owner == self.accelerator.process_index]
        outcome = self._generate(mine, prompts, generate, eos_token_ids)
        outcomes: list[tuple[list[GroupSummary], Occupancy, list[Tokens]]] = gather_object([outcome])
        summaries = [summary for group_summaries, _, _ in outcomes for summary in group_summaries]
        self.record = RolloutRecord(admission, summaries, [o for _, o, _ in outcomes], self.num_generations)
        if self.accelerator.is_main_process:
            self._learn(self.record)
        rows = [row for _, _, completions in outcomes for row in completions]
        start = first_rows[self.accelerator.process_index]
        return rows[start : start + len(shares[self.accelerator.process_index])]

    def share(self, compute: Callable[[], tuple[KeptRows, RolloutRecord]]) -> KeptRows:
        """
        Computes on the main process; every process gets the rows, remembers the record, or raises the error.

        Args:
            compute (`Callable`):
                The rollout.

        Returns:
            [`KeptRows`]: The rows of the whole batch.
        """
        rows, record = self.agree(compute)
        self.record = record if self.over_provision else None
        return rows

    def _generate(
        self,
        plans: Sequence[GroupPlan],
        prompts: Sequence[Tokens],
        generate: Callable[[list[Tokens], SchedulerCriterion], list[Tokens]],
        eos_token_ids: Sequence[int],
    ) -> tuple[list[GroupSummary], Occupancy, list[Tokens]]:
        if not plans:
            return [], Occupancy(0, 0.0, 0.0), []
        with self._progress() as progress:
            criterion = SchedulerCriterion(self._scheduler(self.num_generations), plans, eos_token_ids, progress)
            rows = [prompts[plan.group_id] for plan in plans for _ in range(plan.num_candidates)]
            result = criterion.finish(generate(rows, criterion))
        summaries = [GroupSummary.of(group) for group in result.groups]
        return summaries, Occupancy.of(result), KeptRows.of(result).completion_ids

    def _plan(self, prompts: Sequence[Tokens], num_generations: int) -> tuple[Admission, list[GroupPlan]]:
        infos = [PromptInfo(prompt_key(prompt), len(prompt)) for prompt in prompts]
        policy = self.admission if self.over_provision else UniformAdmission(num_generations)
        admission = policy.plan(infos)
        plans = [
            GroupPlan(index, count, info.key, info.num_tokens)
            for index, (info, count) in enumerate(zip(infos, admission.num_candidates, strict=True))
        ]
        return admission, plans

    def _scheduler(self, num_generations: int) -> Scheduler:
        return Scheduler(self.policies if self.over_provision else SchedulePolicies(), num_generations)

    def _learn(self, record: RolloutRecord) -> None:
        if self.over_provision:
            self.admission.observe(record.summaries, record.seconds)

    def _progress(self) -> RolloutProgress:
        return RolloutProgress(self.show_progress and self.accelerator.is_main_process)

    def agree(self, compute: Callable[[], Any]) -> Any:
        """
        Computes on the main process. Called on every process at once.

        Args:
            compute (`Callable`):
                What to compute.

        Returns:
            `Any`: The main process's value, on every process. Its error is raised on every process too, so that none
            waits for one that failed.
        """
        box: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                box[0] = compute()
            except Exception as error:
                box[1] = error
        if self.accelerator.num_processes > 1:
            broadcast_object_list(box, from_process=0)
        if box[1] is not None:
            raise box[1]
        return box[0]


def _owner(row: int, first_rows: Sequence[int]) -> int:
    """The process whose part of the batch holds a row."""
    return max(process for process, first in enumerate(first_rows) if first <= row)
