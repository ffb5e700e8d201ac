"""TRL's generation with vLLM, with our engines in the place of its one blocking call."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from accelerate.utils import gather_object
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from .distributed import PromptBatch, Share, Slot
from .engines.hf_generate import replaced
from .engines.pool import State
from .engines.preflight import ServerFacts
from .engines.vllm_api import ServerPrompt
from .engines.vllm_server import VLLMServerEngine
from .errors import ConfigurationError, WeightSyncError
from .metrics import RolloutRecord
from .rollout import KeptRows, RolloutConductor, Turn
from .scheduling import Submit
from .servers import ServerSettings
from .weights import FleetVLLMClient, make_client
from .weights.client import SyncedVLLMClient
from .weights.rounds import get


logger = logging.getLogger(__name__)


class RolloutGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] whose rollouts are ours: with `vllm_mode="server"` prompts go to
    our engine candidate by candidate and weights through our clients, with `vllm_mode="colocate"` the engine inside
    this process is driven step by step.

    Overrides `_init_vllm`, `sync_weights` and `generate`.

    Args:
        settings ([`ServerSettings`], *optional*):
            What we need to know of servers.
        engine ([`VLLMServerEngine`], *optional*):
            The engine of servers, on the main process.
        facts ([`ServerFacts`], *optional*):
            What it learned about them.
        pool_ratio (`float`, *optional*, defaults to `1.0`):
            Candidates per row at most. TRL has a colocated engine decode as many at once as there are rows; the others
            would wait in its queue.
        kwargs:
            TRL's own arguments.
    """

    def __init__(
        self,
        *args: Any,
        settings: ServerSettings | None,
        engine: VLLMServerEngine | None,
        facts: ServerFacts | None,
        pool_ratio: float = 1.0,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("max_num_seqs") is not None:
            kwargs["max_num_seqs"] = math.ceil(kwargs["max_num_seqs"] * pool_ratio)
        self.settings = settings
        self.engine = engine
        self.facts = facts
        self.conductor: RolloutConductor | None = None  # set by the trainer, once it has an accelerator
        self._sync_seconds: float | None = None
        self._num_syncs = 0
        self.is_sharded: Callable[[], bool] = lambda: False  # set by the trainer
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self.mode != "server":
            super()._init_vllm()
            from .engines.vllm_colocated import keep_expanded_images  # imports vLLM

            keep_expanded_images(self.llm)
            return
        if self.accelerator.is_main_process:
            self.vllm_client = make_client(
                self.settings.base_urls,
                self.settings.weight_sync,
                device=self.accelerator.device,
                group_port=self.group_port,
                connection_timeout=self.server_timeout,
                sync_dir=self.settings.weight_sync_dir,
                api_key=self.settings.api_key,
            )
            if not isinstance(self.vllm_client, FleetVLLMClient):
                self.vllm_client = FleetVLLMClient([self.vllm_client])
            self.vllm_client.init_communicator(device=self.accelerator.device)
        if self.engine is not None:
            self.engine.refresh = self.refresh
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """TRL's sync, timed. Servers that don't take the weights are left out until they do, unless none does."""
        start = time.perf_counter()
        self._num_syncs += 1
        # Layers on a CPU multiply with packed copies of their weights, which loading in place leaves as they were.
        packed = self.mode == "colocate" and self.accelerator.device.type == "cpu"
        with reloaded_layers(self.llm) if packed else nullcontext(), self._servers_left_out():
            super().sync_weights()
        if self.mode == "colocate":  # TRL drops the prompts' KV cache alone, and not what the old encoder saw
            self.llm.llm_engine.reset_encoder_cache()
        self._sync_seconds = time.perf_counter() - start

    @contextmanager
    def _servers_left_out(self) -> Iterator[None]:
        """Inside, a sync goes to the servers that are up; those that fail are taken out of the rollouts."""
        if self.mode != "server" or not self.accelerator.is_main_process:
            yield
            return
        states = self.engine.states()
        self.vllm_client.excluded = {url for url, state in states.items() if state is not State.UP}
        words = ""
        try:
            yield
        except WeightSyncError as error:
            words = str(error)
            logger.warning("%s", words)
        for url in self.vllm_client.behind:
            if states[url] is State.UP:
                self.engine.lose(url, words)

    def refresh(self, url: str) -> bool:
        """
        Brings a server that has come back to the weights of the last sync.

        Args:
            url (`str`):
                Its address.

        Returns:
            `bool`: Whether it has them. Parameters of a sharded model can't be sent while the other processes wait for
            a rollout, so such a server waits for the next sync, unless `weight_sync="filesystem"`.

        Raises:
            [`WeightSyncError`]: If it does not take them.
        """
        if self._num_syncs == 0:
            return True
        if not self.accelerator.is_main_process:  # the main process sees to it
            client = SyncedVLLMClient(base_url=url, api_key=self.settings.api_key)
            return get(client, "/weight_info")["weight_version"] == f"v{self._num_syncs}"
        params = None if self.is_sharded() else self._iter_named_params()
        return self.vllm_client.refresh(url, self._weight_metadata, params)

    def take_sync_seconds(self) -> float | None:
        """Seconds of the last weight sync, once; `None` if there was none since the last call."""
        seconds, self._sync_seconds = self._sync_seconds, None
        return seconds

    def generate(
        self, prompts: list[list[int]], images: list[list | None] | None, num_generations: int, profiler: Any = None
    ) -> tuple:
        """
        Runs a rollout.

        Args:
            prompts (`list[list[int]]` of shape `(B, ≤ P)`):
                This process's rows; over all processes, `num_generations` in a row are a group.
            images (`list[list | None]`, *optional*):
                Images of each row.
            num_generations (`int`):
                Rows per group.
            profiler (`ContextManager`, *optional*):
                Entered around the rollout.

        Returns:
            `tuple`: `(prompt_ids, completion_ids, logprobs, None)`, where log-probs have the shape `(B, T, 1)`. TRL's
            last item, the token IDs of the log-probs, is not used by its trainer.

        Raises:
            [`ConfigurationError`]: If a prompt does not fit.
            [`GenerationError`]: If an engine fails. The message has its own words.
        """
        if self.conductor is None or self.conductor.turn is None:  # a user's own `rollout_func` asks, not the trainer
            return super().generate(prompts, images, num_generations, profiler)
        if self.mode == "server":
            kept = self._on_servers(prompts, images, num_generations, profiler or nullcontext())
        elif self.conductor.turn is Turn.TRAINING:
            kept = self._colocated(prompts, images, num_generations, profiler)
        else:
            return super().generate(prompts, images, num_generations, profiler)
        logprobs = [[[logprob] for logprob in row] for row in kept.logprobs]
        return prompts, kept.completion_ids, logprobs, None

    # Colocated

    def _colocated(
        self, prompts: list[list[int]], images: list[list | None] | None, num_generations: int, profiler: Any
    ) -> KeptRows:
        from .engines.vllm_colocated import SteppedLLM  # imports vLLM

        conductor = self.conductor
        batch = conductor.gather(prompts, images, {}, num_generations)
        first_row = batch.mine.start

        def decode(share: Share, feed: list[Slot]) -> None:
            rows = [batch.row_of(slot.group_id, slot.index) for slot in feed]
            own_images = None if images is None else [images[row - first_row] for row in rows]
            with replaced(self, "llm", SteppedLLM(self.llm, share)):
                super(RolloutGeneration, self).generate(
                    [batch.rows[row] for row in rows], own_images, num_generations, profiler
                )

        tp_size = self.tensor_parallel_size
        return conductor.in_process(batch, decode, tp_size, self.tp_group if tp_size > 1 else None)

    # Servers

    def _on_servers(
        self, prompts: list[list[int]], images: list[list | None] | None, num_generations: int, profiler: Any
    ) -> KeptRows:
        conductor = self.conductor
        if conductor.turn is Turn.LATER:
            # The processes' tool loops differ in length, so each asks the servers by itself.
            batch = PromptBatch.alone(prompts, images, num_generations)
            return self._rollout(batch, images)[0]
        batch = conductor.gather(prompts, images, {}, num_generations)
        all_images = gather_object(images or [None] * len(prompts)) if batch.multimodal else None
        with profiler:
            return conductor.share(lambda: self._rollout(batch, all_images))[batch.mine]

    def _rollout(self, batch: PromptBatch, images: list[list | None] | None) -> tuple[KeptRows, RolloutRecord]:
        # In a later turn, a "prompt" is the whole conversation, and TRL trains on what fits.
        later = self.conductor.turn is Turn.LATER
        groups = range(0, len(batch.rows), batch.num_generations)
        longest = [max(batch.rows[start : start + batch.num_generations], key=len) for start in groups]
        self.check_prompts(longest, "this batch", room=1 if later else self.max_completion_length)
        if self.engine is None:  # a process other than the main one, in the later turns of a tool loop
            self.engine = VLLMServerEngine(self.settings.base_urls, self.settings.deadlines, self.settings.api_key)
            self.engine.refresh = self.refresh
        prompts = self._server_prompts(batch, images)
        overrides = partial(self._room, batch) if later else None
        return self.conductor.on_servers(self.engine, prompts, batch, self.request_body(), overrides)

    def _room(self, batch: PromptBatch, command: Submit) -> dict[str, Any]:
        """As many tokens as a server still takes for a candidate, and at most a whole completion."""
        prompt = batch.rows[batch.row_of(command.group_id, command.index)]
        return {"max_tokens": min(self.max_completion_length, self.facts.max_model_len - len(prompt))}

    def _server_prompts(self, batch: PromptBatch, images: list[list | None] | None) -> list[list[ServerPrompt]]:
        size = batch.num_generations
        rows = [
            range(start, start + (size if mixed else 1))
            for start, mixed in zip(range(0, len(batch.rows), size), batch.mixed, strict=True)
        ]
        flat = [row for group in rows for row in group]
        features: dict[int, Any] = {}
        if images is not None and any(images):
            processed = self._feature_client().image_features([images[row] for row in flat])
            placed = map(self._place_features, processed, (batch.rows[row] for row in flat))
            features = dict(zip(flat, placed, strict=True))
        return [[ServerPrompt(batch.rows[row], features.get(row)) for row in group] for group in rows]

    def _feature_client(self) -> Any:
        if not hasattr(self, "vllm_client"):
            self.vllm_client = SyncedVLLMClient(self.settings.base_urls[0], api_key=self.settings.api_key)
        return self.vllm_client

    def check_prompts(
        self, prompts: list[list[int]], where: str, first_index: int = 0, room: int | None = None
    ) -> None:
        """
        Refuses prompts that leave no room for a completion.

        Args:
            prompts (`list[list[int]]` of shape `(N, ≤ P)`):
                Token IDs.
            where (`str`):
                What they belong to, for the message.
            first_index (`int`, *optional*, defaults to `0`):
                Index of the first one there.
            room (`int`, *optional*):
                Tokens that must be left. A whole completion unless given.

        Raises:
            [`ConfigurationError`]: If one is too long. Names the first five by index.
        """
        room = self.max_completion_length if room is None else room
        limit = self.facts.max_model_len - room
        lengths = {first_index + i: len(prompt) for i, prompt in enumerate(prompts) if len(prompt) > limit}
        if lengths:
            words = ", ".join(f"prompt {index} has {length}" for index, length in list(lengths.items())[:5])
            raise ConfigurationError(
                f"{len(lengths)} prompts of {where} are longer than {limit} tokens ({words}): {room} more (of "
                f"`max_completion_length`, {self.max_completion_length}) would pass the server's `max_model_len` "
                f"({self.facts.max_model_len}). Filter the data set, lower `max_completion_length`, or restart the "
                "server with a larger `--max-model-len`."
            )

    def request_body(self) -> dict[str, Any]:
        """The fields that all completion requests share: TRL's sampling options under the server's names."""
        body = {
            "model": self.facts.model,
            "max_tokens": self.max_completion_length,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0 if self.min_p is None else self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "logprobs": 0,  # the sampled token's alone
        }
        if self.structured_outputs_regex is not None:
            body["structured_outputs"] = {"regex": self.structured_outputs_regex}
        return body | self.generation_kwargs


@contextmanager
def rollout_generation(
    settings: ServerSettings | None, engine: VLLMServerEngine | None, facts: ServerFacts | None, pool_ratio: float
) -> Iterator[None]:
    """
    Inside, TRL's `GRPOTrainer.__init__` builds a [`RolloutGeneration`] where it would build its `VLLMGeneration`.

    The class is looked up as a global of TRL's module, and there is no other way to hand it another one; building
    TRL's first would open its NCCL communicator, which fails without CUDA. It can go when TRL takes the class as an
    argument.
    """
    make = partial(RolloutGeneration, settings=settings, engine=engine, facts=facts, pool_ratio=pool_ratio)
    with replaced(grpo_trainer, "VLLMGeneration", make):
        yield


@contextmanager
def reloaded_layers(llm: Any) -> Iterator[None]:
    """Inside, weights that are loaded into a colocated engine take effect layer by layer; see `weights/reload.py`."""
    from .weights.reload import finish_reload, initialize_layerwise_reload  # imports vLLM

    worker = llm.llm_engine.model_executor.driver_worker.model_runner
    initialize_layerwise_reload(worker.model)
    yield
    finish_reload(worker.model, worker.model_config)
