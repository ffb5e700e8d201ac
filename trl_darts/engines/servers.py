"""Decodes a trainer's rollouts on vLLM servers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from accelerate.utils import gather_object

from ..errors import ConfigurationError, WeightsLostError
from ..scheduling import Admission, GroupPlan, RolloutResult, SchedulePolicies, Scheduler, Submit, UniformAdmission
from ..scheduling.ledger import Ledger
from ..training.rows import KeptRows, Tokens
from .answers import TOP
from .batch import PromptBatch
from .engine import Engine, OnProgress, RolloutPlan
from .pool import State
from .sampling import RolloutSeed, not_carried, request_body, user_seed
from .turns import TurnRun
from .vllm_api import ServerPrompt
from .vllm_generation import SyncedGeneration
from .vllm_rollout import Overrides
from .vllm_server import VLLMServerEngine


Request = tuple[Scheduler, list[GroupPlan], dict[int, list[ServerPrompt]], dict[str, Any], Overrides, RolloutSeed]


class ServerEngine(Engine):
    """
    An [`Engine`] on vLLM servers. The main process sends the requests of all processes, except those of later turns of
    tool loops, which each process sends itself.
    """

    def __init__(self, generation: SyncedGeneration) -> None:
        self._generation = generation
        self._main = generation.main
        self._in_flight = False  # whether a launched rollout was not waited for yet
        self._launched: Any = None  # plan and future of the launched rollout, on the main process
        self._continuous: Any = None  # the rollout without an end and its future, on the main process
        self._step = 0  # version of the servers' weights
        self._num_rollouts = 0  # of this process

    def overrides(self, command: Submit) -> Mapping[str, Any]:
        """Returns additional fields for a candidate's request: none. Benchmarks replace this to replay lengths."""
        return {}

    def placement(self, admission: Admission, batch: PromptBatch) -> None:
        """Returns nothing: candidates can start at any time, so the schedule places them."""

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
        self._tell_state()
        return result

    def _tell_state(self) -> None:
        """Tells all processes what the main process knows of the servers."""
        if self._main.num_processes > 1:
            state = self._main.broadcast(lambda: self._generation.engine.state)
            if not self._main.is_here:
                self._generation.own_engine.follow(*state)

    def launch(self, plan: RolloutPlan | None, batch: PromptBatch) -> None:
        """See [`Engine`]."""
        self._main.run(lambda: self._launch(plan, batch))
        self._in_flight = True

    def _launch(self, plan: Any, batch: PromptBatch) -> None:
        self.bring_back()
        self._launched = plan, self._generation.own_engine.start(*self._request(plan, batch), plan.reuse)

    def extend(self, plan: RolloutPlan, batch: PromptBatch) -> None:
        """See [`Engine`]."""
        self.bring_back()
        scheduler, groups, prompts, body, fields, seed = self._request(plan, batch)
        engine = self._generation.own_engine
        if self._continuous is None:
            self._continuous = engine.open(scheduler, body, fields, self._step, plan.keeps_kv, seed, plan.on_group)

        async def add() -> None:
            self._continuous[0].add(groups, prompts)

        engine.call(add())

    def _take(self, plan: RolloutPlan, on_progress: OnProgress | None) -> RolloutResult:
        run, _ = self._continuous
        engine = self._generation.own_engine

        def tend() -> None:
            if on_progress is not None:
                on_progress(plan.scheduler.ledger)
            self.bring_back()
            self._check_weights()

        return engine.wait(engine.submit(run.take(plan.takes)), tend)

    def drain(self, step: int) -> None:
        """See [`Engine`]. Servers run one launched rollout at a time."""
        self._step = step
        if self._continuous is not None:
            self._continuous[0].step = step
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
        if self._continuous is not None:
            self._continuous[1].cancel()
        self._in_flight, self._launched, self._continuous = False, None, None

    def wait_for_aborts(self) -> None:
        """See [`Engine`]."""
        engine = self._generation.own_engine
        engine.call(engine.idle())

    def later_turn(self, batch: PromptBatch) -> KeptRows:
        """
        See [`Engine`]. There is no collective, because tool loops differ in length. Each prompt is a whole
        conversation, so completions may be cut at the server's limit.
        """
        admission = UniformAdmission(batch.num_generations).plan(batch.infos)
        carries_tokens = not not_carried(self._request_body())
        scheduler = Scheduler(SchedulePolicies(), batch.num_generations, carries_tokens=carries_tokens)
        plan = RolloutPlan(admission, admission.plans(batch.infos), scheduler)
        return KeptRows.of_result(self._run(plan, batch, batch.images, room=1), batch.num_generations)

    @contextmanager
    def turns(self, num_conversations: int) -> Iterator["ServerTurns"]:
        """See [`Engine`]. There is no collective, because conversations differ in their turns."""
        engine, body = self._generation.own_engine, self._request_body()
        run, future = engine.open_turns(num_conversations, not not_carried(body), body, self._next_seed())
        try:
            yield ServerTurns(self, engine, run, num_conversations)
        finally:
            future.cancel()
            engine.call(engine.idle())

    def converse(
        self,
        num_conversations: int,
        play: Callable[["ServerTurns"], RolloutResult],
        meanwhile: Callable[[], None] | None = None,
    ) -> RolloutResult | None:
        """See [`Engine`]."""

        def run() -> RolloutResult:
            self.bring_back()
            with self.turns(num_conversations) as turns:
                return play(turns)

        result: RolloutResult | None = self._main.run(run, meanwhile)
        self._tell_state()
        return result

    def room_after(self, prompt: Tokens) -> int:
        """Returns the most tokens that can follow the tokens of a conversation. Raises if there is no room."""
        self.check_prompts([prompt], "this batch", room=1)
        return min(self._generation.max_completion_length, self._generation.facts.max_model_len - len(prompt))

    def check_prompts(
        self, prompts: Sequence[Tokens], where: str, first_index: int = 0, room: int | None = None
    ) -> None:
        """See [`Engine`]. `room` is the number of tokens to leave, `max_completion_length` by default."""
        limit, rule = self._longest_prompt(room)
        lengths = {first_index + i: len(prompt) for i, prompt in enumerate(prompts) if len(prompt) > limit}
        if lengths:
            first = ", ".join(f"prompt {index} has {length}" for index, length in list(lengths.items())[:5])
            raise ConfigurationError(
                f"{len(lengths)} prompts of {where} are longer than {limit} tokens ({first}): {rule}"
            )

    def _longest_prompt(self, room: int | None = None) -> tuple[int, str]:
        """Returns the most tokens of a prompt, and why there may not be more. See `check_prompts` for `room`."""
        most, limit = self._generation.max_completion_length, self._generation.facts.max_model_len
        room = most if room is None else room
        return limit - room, (
            f"{room} more (of `max_completion_length`, {most}) would exceed the server's `max_model_len` ({limit}). "
            "Filter the data set, lower `max_completion_length`, or restart the server with a larger "
            "`--max-model-len`."
        )

    def _run(
        self,
        plan: Any,
        batch: PromptBatch,
        images: Sequence[Any] | None,
        on_progress: OnProgress | None = None,
        room: int | None = None,
    ) -> RolloutResult:
        """Runs a rollout from this process, or waits for a running one. See `check_prompts` for `room`."""
        if plan.takes is not None:
            return self._take(plan, on_progress)
        if self._launched is not None and self._launched[0] is plan:
            (_, rollout), self._launched = self._launched, None
            return self._wait_launched(plan, rollout, on_progress)
        self.bring_back()

        def tend(ledger: Ledger) -> None:
            if on_progress is not None:
                on_progress(ledger)
            self.bring_back()

        scheduler, groups, prompts, body, fields, seed = self._request(plan, batch, images, room)
        return self._generation.own_engine.run(scheduler, groups, prompts, body, fields, tend, seed, plan.reuse)

    def bring_back(self) -> None:
        """Sends the weights to servers that reconnected. Called in the main thread."""
        if self._main.is_here:
            self._generation.bring_back()

    def _wait_launched(
        self, plan: RolloutPlan, rollout: Future[RolloutResult], on_progress: OnProgress | None = None
    ) -> RolloutResult:
        """Waits for a launched rollout. The trainer no longer has its weights to send to servers that reconnect."""

        def tend() -> None:
            if on_progress is not None:
                on_progress(plan.scheduler.ledger)
            self._check_weights()

        return self._generation.own_engine.wait(rollout, tend)

    def _check_weights(self) -> None:
        members = self._generation.own_engine.members.values()
        if any(member.waits for member in members) and not any(member.state is State.UP for member in members):
            raise WeightsLostError(
                "The vLLM servers reconnected without the weights of a running rollout, which the trainer can't send "
                "now. With `weight_sync='filesystem'`, servers load them from files."
            )

    def _request(
        self, plan: RolloutPlan, batch: PromptBatch, images: Sequence[Any] | None = None, room: int | None = None
    ) -> Request:
        """Returns the arguments of [`VLLMServerEngine.start`]."""
        drops = plan.scheduler.drop_failed_groups
        if not drops:
            self.check_prompts(list(batch.longest.values()), "this batch", room=room)

        def fields(command: Submit) -> Mapping[str, Any]:
            if room is None:
                return self.overrides(command)
            prompt = batch.rows[batch.row_of(command.group_id, command.index)]
            return {"max_tokens": self.room_after(prompt), **self.overrides(command)}

        prompts = self._server_prompts(batch, images)
        if drops:
            prompts = {group_id: [self._marked(prompt) for prompt in own] for group_id, own in prompts.items()}
        body = self._request_body()
        if plan.reuse is not None:
            body["logprobs"] = TOP
        return plan.scheduler, plan.groups, prompts, body, fields, self._next_seed()

    def _next_seed(self) -> RolloutSeed:
        """Returns the seed of the next rollout. The step tells it from those of this run before it was resumed."""
        own = self._generation
        self._num_rollouts += 1
        given = user_seed(own.generation_kwargs)
        rollout = self._main.index, self._step, self._num_rollouts
        return RolloutSeed(own.settings.seed if given is None else given, rollout, always=given is not None)

    def _marked(self, prompt: ServerPrompt) -> ServerPrompt:
        """Marks a prompt that is too long, so that only its group is dropped."""
        (limit, rule), length = self._longest_prompt(), len(prompt.tokens)
        if length <= limit:
            return prompt
        return replace(prompt, problem=f"it has {length} tokens, and may have {limit}: {rule}")

    def _server_prompts(self, batch: PromptBatch, images: Sequence[Any] | None) -> dict[int, list[ServerPrompt]]:
        """Returns the prompt of each group, or of each of its rows if they differ, by the group's ID."""
        size = batch.num_generations
        rows = {
            group_id: range(place * size, place * size + (size if batch.mixed[place] else 1))
            for group_id, place in batch.places.items()
        }
        flat = [row for own in rows.values() for row in own]
        features: dict[int, Any] = {}
        if images is not None and any(images):
            found = self._generation.image_features([images[row] for row in flat], [batch.rows[row] for row in flat])
            features = dict(zip(flat, found, strict=True))
        return {i: [ServerPrompt(batch.rows[row], features.get(row)) for row in own] for i, own in rows.items()}

    def _request_body(self) -> dict[str, Any]:
        own = self._generation
        body = request_body(own.facts.model, own, own.structured_outputs_regex)
        body.pop("seed", None)  # each candidate has its own
        return body


class ServerTurns:
    """Decodes turns of conversations on servers, for [`Conversations`]."""

    def __init__(self, owner: ServerEngine, engine: VLLMServerEngine, run: TurnRun, num_conversations: int) -> None:
        self._owner = owner
        self._engine = engine
        self._run = run
        self._num_conversations = num_conversations

    def decode(self, conversation: int, turn: int, prompt: Tokens) -> tuple[Tokens, list[float] | None]:
        """Decodes a turn of a conversation whose tokens so far are `prompt`. Called in any thread."""
        return self._engine.wait(self.start(conversation, turn, prompt))

    def start(
        self, conversation: int, turn: int, prompt: Tokens, most: int | None = None
    ) -> Future[tuple[Tokens, list[float] | None]]:
        """Starts to decode a turn, of at most so many tokens."""
        room = self._owner.room_after(prompt)

        async def decode() -> tuple[Tokens, list[float] | None]:
            group_id = turn * self._num_conversations + conversation
            row = await self._run.decode(group_id, ServerPrompt(prompt), room if most is None else min(room, most))
            return list(row.tokens), row.logprobs

        return self._engine.submit(decode())

    def tend(self) -> None:
        """Called in the main thread while turns decode."""
        self._owner.bring_back()
