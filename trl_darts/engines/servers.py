"""vLLM servers as a trainer's engine: prompts become requests, from the main process."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from accelerate.utils import gather_object

from ..errors import ConfigurationError
from ..rows import KeptRows
from ..scheduling import Admission, RolloutResult, SchedulePolicies, Scheduler, Submit, UniformAdmission
from ..scheduling.ledger import Ledger
from .batch import PromptBatch
from .connection import open_engine
from .engine import OnProgress, RolloutPlan
from .pool import State
from .vllm_api import ServerPrompt
from .vllm_generation import SyncedGeneration
from .vllm_rollout import Overrides


class ServerEngine:
    """An [`Engine`] on vLLM servers. The main process asks them; in later turns of a tool loop each process does."""

    def __init__(self, generation: SyncedGeneration) -> None:
        self.overrides: Overrides | None = None  # more fields for one candidate: benchmarks replay lengths with it
        self._generation = generation
        self._main = generation.main
        self._left_out: list[str] = []  # servers that the main process did not use in its last rollout
        self._in_flight = False  # whether `launch` has started a rollout that has not been waited for
        self._launched: Any = None  # its plan and its future, on the main process

    def placement(self, admission: Admission, batch: PromptBatch) -> None:
        """Servers take candidates at any time: the schedule's own placement."""
        return None

    def run(
        self,
        plan: Any,
        batch: PromptBatch,
        on_progress: OnProgress | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        """See [`Engine`]."""
        images = gather_object(batch.images or [None] * batch.sizes[self._main.index]) if batch.multimodal else None
        result = self._main.run(lambda: self._run(plan, batch, images, on_progress), meanwhile)
        self._in_flight = False
        if self._main.num_processes > 1:
            self._left_out = self._main.broadcast(self._lost_servers)
        return result

    def launch(self, plan: Any, batch: PromptBatch) -> None:
        """
        Starts a rollout of text, and returns at once: `run` with the same plan is then the wait for it. Called on
        every process at once.
        """
        self._main.run(lambda: self._launch(plan, batch))
        self._in_flight = True

    def _launch(self, plan: RolloutPlan, batch: PromptBatch) -> None:
        self._launched = plan, self._generation.engine.start(*self._request(plan, batch))

    def drain(self) -> None:
        """
        Waits for what was launched, and keeps it for `run`: weights must not change while it is under way, and servers
        run one rollout at a time. Called on every process at once.
        """
        if self._in_flight:
            self._main.run(lambda: self._wait(*self._launched))
            self._in_flight = False

    def cancel(self) -> None:
        """Ends what was launched, and its requests."""
        if self._launched is not None:
            self._launched[1].cancel()
        self._in_flight, self._launched = False, None

    def later_turn(self, batch: PromptBatch) -> KeptRows:
        """
        The next turn of a tool loop on this process alone: tool loops differ in length. A prompt is a whole
        conversation here, and TRL trains on what fits.
        """
        if self._generation.engine is None:  # a process other than the main one
            self._generation.engine = open_engine(self._generation.settings)
        if not self._main.is_here:
            self._follow_the_main_process()
        admission = UniformAdmission(batch.num_generations).plan(batch.infos)
        scheduler = Scheduler(SchedulePolicies(), batch.num_generations)
        plan = RolloutPlan(admission, admission.plans(batch.infos), scheduler)
        return KeptRows.of_result(self._run(plan, batch, batch.images, room=1), batch.num_generations)

    def check_prompts(
        self, prompts: Sequence[Sequence[int]], where: str, first_index: int = 0, room: int | None = None
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
        plan: RolloutPlan,
        batch: PromptBatch,
        images: Sequence[Any] | None,
        on_progress: OnProgress | None = None,
        room: int | None = None,
    ) -> RolloutResult:
        """One rollout from this process; with `room`, a completion may be cut short where the server's limit is."""
        if self._launched is not None and self._launched[0] is plan:
            (_, rollout), self._launched = self._launched, None
            return self._wait(plan, rollout, on_progress)
        request = self._request(plan, batch, images, room)
        return self._generation.engine.run(*request, on_progress=lambda ledger: self._tend(ledger, on_progress))

    def _wait(
        self, plan: RolloutPlan, rollout: Future[RolloutResult], on_progress: OnProgress | None = None
    ) -> RolloutResult:
        ledger = plan.scheduler.ledger
        return self._generation.engine.wait(rollout, lambda: self._tend(ledger, on_progress))

    def _tend(self, ledger: Ledger, on_progress: OnProgress | None) -> None:
        """What is done while a rollout is waited for."""
        if on_progress is not None:
            on_progress(ledger)
        self._generation.bring_back()

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

        self._generation.bring_back()
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

    def _lost_servers(self) -> list[str]:
        return [url for url, state in self._generation.engine.states().items() if state is not State.UP]

    def _follow_the_main_process(self) -> None:
        """Uses the servers that the main process used in its last rollout: they have the weights."""
        engine = self._generation.engine
        for url, state in engine.states().items():
            if url in self._left_out and state is State.UP:
                engine.lose(url, "the main process has left it out")
            elif url not in self._left_out and state is State.RETURNED:
                engine.join(url)
