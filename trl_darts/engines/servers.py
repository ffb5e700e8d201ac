"""vLLM servers as a trainer's engine: prompts become requests, from the main process."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from accelerate.utils import gather_object

from ..errors import ConfigurationError, WeightsLostError
from ..scheduling import Admission, RolloutResult, SchedulePolicies, Scheduler, Submit, UniformAdmission
from ..scheduling.ledger import Ledger
from ..training.rows import KeptRows, Tokens
from .batch import PromptBatch
from .connection import open_engine
from .engine import Engine, OnProgress, RolloutPlan
from .pool import State, shows_weights
from .sampling import not_carried
from .vllm_api import ServerPrompt
from .vllm_generation import SyncedGeneration
from .vllm_rollout import Overrides


class ServerEngine(Engine):
    """An [`Engine`] on vLLM servers. The main process asks them; in later turns of a tool loop each process does."""

    def __init__(self, generation: SyncedGeneration) -> None:
        self.overrides: Overrides | None = None  # more fields for one candidate: benchmarks replay lengths with it
        self._generation = generation
        self._main = generation.main
        self._in_flight = False  # whether `launch` has started a rollout that has not been waited for
        self._launched: Any = None  # its plan and its future, on the main process

    def placement(self, admission: Admission, batch: PromptBatch) -> None:
        """Servers take candidates at any time, so the schedule places them."""

    def run(
        self,
        plan: RolloutPlan | None,
        batch: PromptBatch,
        on_progress: OnProgress | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> RolloutResult | None:
        """See [`Engine`]."""
        images = gather_object(batch.images or [None] * batch.sizes[self._main.index]) if batch.multimodal else None
        self._in_flight = False
        result: RolloutResult | None = self._main.run(lambda: self._run(plan, batch, images, on_progress), meanwhile)
        if self._main.num_processes > 1:
            up = self._main.broadcast(lambda: self._generation.engine.up)
            if not self._main.is_here:
                self._own_engine.follow(*up)
        return result

    @property
    def _own_engine(self) -> Any:
        """The `VLLMServerEngine` of this process: others than the main one ask the servers in later turns alone."""
        if self._generation.engine is None:
            self._generation.engine = open_engine(self._generation.settings, shows_weights)
        return self._generation.engine

    def launch(self, plan: RolloutPlan | None, batch: PromptBatch) -> None:
        """See [`Engine`]."""
        self._main.run(lambda: self._launch(plan, batch))
        self._in_flight = True

    def _launch(self, plan: Any, batch: PromptBatch) -> None:
        self._bring_back()
        self._launched = plan, self._own_engine.start(*self._request(plan, batch))

    def drain(self) -> None:
        """See [`Engine`]. Servers run one rollout at a time."""
        if self._in_flight:
            self._main.run(self._drain)
            self._in_flight = False

    def _drain(self) -> None:
        plan, rollout = self._launched
        try:
            self._wait_launched(plan, rollout)
        except WeightsLostError as error:
            failed: Future[RolloutResult] = Future()
            failed.set_exception(error)
            self._launched = plan, failed  # for `run`

    def cancel(self) -> None:
        """See [`Engine`]."""
        if self._launched is not None:
            self._launched[1].cancel()
        self._in_flight, self._launched = False, None

    def settle(self) -> None:
        """See [`Engine`]."""
        self._own_engine.call(self._own_engine.idle())

    def later_turn(self, batch: PromptBatch) -> KeptRows:
        """
        The next turn of a tool loop on this process alone: tool loops differ in length. A prompt is a whole
        conversation here, and TRL trains on what fits.
        """
        admission = UniformAdmission(batch.num_generations).plan(batch.infos)
        carries_tokens = not not_carried(self._request_body())
        scheduler = Scheduler(SchedulePolicies(), batch.num_generations, carries_tokens=carries_tokens)
        plan = RolloutPlan(admission, admission.plans(batch.infos), scheduler)
        return KeptRows.of_result(self._run(plan, batch, batch.images, room=1), batch.num_generations)

    def check_prompts(
        self, prompts: Sequence[Tokens], where: str, first_index: int = 0, room: int | None = None
    ) -> None:
        """Refuses prompts that leave no room for a completion."""
        max_completion_length = self._generation.max_completion_length
        room = max_completion_length if room is None else room
        limit = self._generation.facts.max_model_len - room
        lengths = {first_index + i: len(prompt) for i, prompt in enumerate(prompts) if len(prompt) > limit}
        if lengths:
            first = ", ".join(f"prompt {index} has {length}" for index, length in list(lengths.items())[:5])
            raise ConfigurationError(
                f"{len(lengths)} prompts of {where} are longer than {limit} tokens ({first}): {room} more (of "
                f"`max_completion_length`, {max_completion_length}) would pass the server's `max_model_len` "
                f"({self._generation.facts.max_model_len}). Filter the data set, lower `max_completion_length`, or "
                "restart the server with a larger `--max-model-len`."
            )

    def _run(
        self,
        plan: Any,
        batch: PromptBatch,
        images: Sequence[Any] | None,
        on_progress: OnProgress | None = None,
        room: int | None = None,
    ) -> RolloutResult:
        """One rollout from this process; with `room`, a completion may be cut short where the server's limit is."""
        if self._launched is not None and self._launched[0] is plan:
            (_, rollout), self._launched = self._launched, None
            return self._wait_launched(plan, rollout, on_progress)
        self._bring_back()

        def tend(ledger: Ledger) -> None:
            if on_progress is not None:
                on_progress(ledger)
            self._bring_back()

        result: RolloutResult = self._own_engine.run(*self._request(plan, batch, images, room), on_progress=tend)
        return result

    def _bring_back(self) -> None:
        if self._main.is_here:
            self._generation.bring_back()

    def _wait_launched(
        self, plan: RolloutPlan, rollout: Future[RolloutResult], on_progress: OnProgress | None = None
    ) -> RolloutResult:
        """The trainer has other weights by now: a server that comes back without those of the rollout waits."""

        def tend() -> None:
            if on_progress is not None:
                on_progress(plan.scheduler.ledger)
            members = self._own_engine.members.values()
            if any(member.waits for member in members) and not any(member.state is State.UP for member in members):
                raise WeightsLostError(
                    "The vLLM servers came back without the weights that a rollout was launched with, and the trainer "
                    "has others by now. With `weight_sync='filesystem'` they get them from files."
                )

        result: RolloutResult = self._own_engine.wait(rollout, tend)
        return result

    def _request(
        self, plan: RolloutPlan, batch: PromptBatch, images: Sequence[Any] | None = None, room: int | None = None
    ) -> tuple[Any, ...]:
        """What the servers are asked for: arguments of [`VLLMServerEngine.run`]."""
        self.check_prompts(batch.longest, "this batch", room=room)

        def overrides(command: Submit) -> dict[str, Any]:
            own = dict(self.overrides(command)) if self.overrides is not None else {}
            if room is None:
                return own
            prompt = batch.rows[batch.row_of(command.group_id, command.index)]
            left = self._generation.facts.max_model_len - len(prompt)
            return {"max_tokens": min(self._generation.max_completion_length, left), **own}

        prompts = self._server_prompts(batch, images)
        return plan.scheduler, plan.groups, prompts, self._request_body(), overrides

    def _server_prompts(self, batch: PromptBatch, images: Sequence[Any] | None) -> list[list[ServerPrompt]]:
        """The prompt of each group, or of each of its rows where they differ."""
        size = batch.num_generations
        rows = [
            range(start, start + (size if mixed else 1))
            for start, mixed in zip(range(0, len(batch.rows), size), batch.mixed, strict=True)
        ]
        flat = [row for group in rows for row in group]
        features: dict[int, Any] = {}
        if images is not None and any(images):
            processed = self._generation.image_features([images[row] for row in flat])
            placed = map(self._generation._place_features, processed, (batch.rows[row] for row in flat))
            features = dict(zip(flat, placed, strict=True))
        return [[ServerPrompt(batch.rows[row], features.get(row)) for row in group] for group in rows]

    def _request_body(self) -> dict[str, Any]:
        """The fields that all completion requests share: TRL's sampling options under the server's names."""
        own = self._generation
        body = {
            "model": own.facts.model,
            "max_tokens": own.max_completion_length,
            "temperature": own.temperature,
            "top_p": own.top_p,
            "top_k": own.top_k,
            "min_p": 0.0 if own.min_p is None else own.min_p,
            "repetition_penalty": own.repetition_penalty,
            "logprobs": 0,  # the sampled token's alone
        }
        if own.structured_outputs_regex is not None:
            body["structured_outputs"] = {"regex": own.structured_outputs_regex}
        return body | own.generation_kwargs
