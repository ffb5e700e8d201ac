"""A stub engine for tests of reward functions, data and schedules without a server."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from . import trainer as trainer_module
from .analysis.simulation import ClusterSpec, SimulatedCluster
from .analysis.simulation.continuous import VirtualContinuous
from .engines.batch import PromptBatch
from .engines.engine import Engine, OnGroup, OnProgress, RolloutPlan
from .engines.main_process import MainProcess
from .engines.preflight import ServerFacts
from .policy import LatencyCurve
from .scheduling import Admission, GroupPlan, RolloutResult
from .training.rows import UNKNOWN, KeptRows, Tokens
from .trl_compat import grpo_trainer, replaced


Write = Callable[[Tokens, int], Tokens]


class StubEngine(Engine):
    """
    Decodes scripted completions in virtual time, one token per candidate and step, with the trainer's schedule. Their
    log-probs are unknown (NaN), so that TRL's importance sampling correction leaves their gradient as it is.

    Args:
        write (`Callable[[list[int], int], list[int]]`):
            Returns the tokens of a candidate, given its prompt's tokens and its index in the group. The same arguments
            must give the same tokens.
        max_completion_length (`int`):
            Length at which completions are cut off.
        main ([`MainProcess`]):
            Runs the rollout on the main process.
    """

    def __init__(self, write: Write, max_completion_length: int, main: MainProcess) -> None:
        self._write = write
        self._limit = max_completion_length
        self._main = main
        self._continuous: VirtualContinuous | None = None
        self._completions: dict[int, list[Tokens]] = {}  # by group of the rollout without an end
        self._on_group: OnGroup | None = None  # of this rollout
        self._step = 0
        self._cluster = SimulatedCluster(ClusterSpec(LatencyCurve([1], [1.0])))

    def check_prompts(self, prompts: Sequence[Tokens], where: str, first_index: int = 0) -> None: ...

    def placement(self, admission: Admission, batch: PromptBatch) -> None: ...

    def launch(self, plan: RolloutPlan | None, batch: PromptBatch) -> None:
        """Does nothing: `run` decodes the rollout, because virtual time needs no head start."""

    def extend(self, plan: RolloutPlan, batch: PromptBatch) -> None:
        """See [`Engine`]."""
        if self._continuous is None:
            self._continuous = VirtualContinuous(self._cluster, plan.scheduler, self._limit, self._step)
            self._on_group = plan.on_group
        own = self._write_all(batch, plan.groups)
        self._completions |= own
        self._continuous.add(plan.groups, [[len(tokens) for tokens in rows] for rows in own.values()])

    def drain(self, step: int) -> None:
        """See [`Engine`]."""
        self._step = step
        if self._continuous is not None:
            self._continuous.update(step)

    def cancel(self) -> None:
        """See [`Engine`]."""
        self._continuous = None

    def later_turn(self, batch: PromptBatch) -> KeptRows:
        """See [`Engine`]."""
        rows = [self._write(prompt, 0)[: self._limit] for prompt in batch.rows]
        return KeptRows(rows, [[UNKNOWN] * len(row) for row in rows])

    def run(
        self,
        plan: RolloutPlan | None,
        batch: PromptBatch,
        on_progress: OnProgress | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> RolloutResult | None:
        """See [`Engine`]."""
        result: RolloutResult | None = self._main.run(lambda: self._run(plan, batch), meanwhile)
        return result

    def _run(self, plan: Any, batch: PromptBatch) -> RolloutResult:
        if plan.takes is not None:
            assert self._continuous is not None
            completions, result = self._completions, self._continuous.take(plan.takes)
        else:
            completions = self._write_all(batch, plan.groups)
            lengths = {group_id: [len(tokens) for tokens in rows] for group_id, rows in completions.items()}
            result = self._cluster.run(plan.scheduler, plan.groups, lengths, self._limit)
        for group in result.groups:
            own = completions.pop(group.plan.group_id)
            for row in group.rows:
                row.tokens = own[row.index][: self._limit]
                row.logprobs = [UNKNOWN] * len(row.tokens)
            if plan.takes is not None and self._on_group is not None:
                self._on_group(group)
        return result

    def _write_all(self, batch: PromptBatch, groups: Sequence[GroupPlan]) -> dict[int, list[Tokens]]:
        return {
            group.group_id: [
                self._write(batch.rows[batch.row_of(group.group_id, index)], index)
                for index in range(group.num_candidates)
            ]
            for group in groups
        }


class _StubGeneration:
    """Stub of TRL's vLLM generation."""

    engine = None
    num_main_servers = 1

    def __init__(self, *args: Any, accelerator: Any, **kwargs: Any) -> None:
        self.main = MainProcess(accelerator)
        self.facts = ServerFacts("stub", 2**31, False, None, None)
        self.vllm_client = self

    def get_server_info(self) -> Any:
        """TRL asks for the kind of log-probs, if it corrects with them."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def sync_weights(self) -> None: ...

    def pop_sync(self) -> None: ...

    def drafted(self) -> None: ...

    def pop_share(self) -> None: ...


@contextmanager
def stub_servers(write: Write) -> Iterator[None]:
    """
    Inside this context, trainers with `vllm_mode="server"` are built with a [`StubEngine`] instead of servers.
    Schedules, reward functions, masks and metrics run as usual. Tool loops get one completion per turn.

    Args:
        write (`Callable[[list[int], int], list[int]]`):
            See [`StubEngine`].

    Example, with a `model`, its `tokenizer`, reward functions and a data set of `prompts` of your own:

    ```python
    from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
    from trl_darts.testing import stub_servers

    def write(prompt_ids, index):  # the third candidate of each prompt is long
        return [5] * (200 if index == 2 else 20) + [tokenizer.eos_token_id]

    args = DARTSGRPOConfig(use_cpu=True, use_vllm=True, vllm_mode="server", schedule="tail_batching", max_steps=2)
    with stub_servers(write):
        trainer = DARTSGRPOTrainer(model, my_reward, args, prompts, processing_class=tokenizer)
    trainer.train()
    ```
    """

    def make_engine(trainer: Any, main: MainProcess, generate: Any) -> StubEngine:
        return StubEngine(write, trainer.args.max_completion_length, main)

    @contextmanager
    def no_servers(*_: Any) -> Iterator[None]:
        with replaced(grpo_trainer, "VLLMGeneration", _StubGeneration):
            yield

    with ExitStack() as stack:
        stack.enter_context(replaced(trainer_module, "make_engine", make_engine))
        stack.enter_context(replaced(trainer_module, "synced_generation", no_servers))
        yield
