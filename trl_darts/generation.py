"""TRL's generation with vLLM, with our engines in the place of its one blocking call."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate.utils import gather_object
from trl.trainer import grpo_trainer

from .distributed import PromptBatch, Share, Slot
from .engines.hf_generate import replaced
from .engines.pool import State
from .engines.preflight import ServerFacts, check_server
from .engines.vllm_api import ServerPrompt
from .engines.vllm_server import VLLMServerEngine
from .errors import ConfigurationError
from .metrics import RolloutRecord
from .rollout import RolloutConductor, Turn
from .rows import KeptRows
from .scheduling import Submit
from .servers import ServerSettings
from .synced_generation import SyncedGeneration
from .weights.client import SyncedVLLMClient


class RolloutGeneration(SyncedGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] whose rollouts are ours: with `vllm_mode="server"` prompts go to
    our engine candidate by candidate, with `vllm_mode="colocate"` the engine inside this process is driven step by
    step.

    Overrides `generate`.

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
        self.facts = facts
        self.conductor: RolloutConductor | None = None  # set by the trainer, once it has an accelerator
        self._left_out: list[str] = []  # servers that the main process did not use in its last rollout
        super().__init__(*args, settings=settings, engine=engine, **kwargs)

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

    # Servers that come and go

    def add_server(self, url: str) -> None:
        """
        Takes in one more server between two steps, for example in a callback. Called on every process at once.

        It gets the current weights before it is asked for a token. With FSDP or ZeRO-3 that is in the next weight
        sync, unless `weight_sync="filesystem"`.

        Args:
            url (`str`):
                Its address.

        Raises:
            [`ConfigurationError`]: If it can't serve this training, or is one of the servers already.
            [`ServerUnreachableError`]: If it does not answer within `vllm_server_timeout`.
        """
        url = url.strip().rstrip("/")

        def take_in() -> ServerFacts:
            facts = self.engine.add(url, lambda server: check_server(server, self.settings.requirements))
            try:
                if facts.model != self.facts.model:
                    raise ConfigurationError(
                        f"The vLLM server at {url} serves {facts.model!r}, and the others {self.facts.model!r}. Start "
                        "it with the same model or `--served-model-name`."
                    )
                self.vllm_client.add(url)
            except BaseException:
                self.engine.remove(url)
                raise
            return replace(self.facts, max_model_len=min(facts.max_model_len, self.facts.max_model_len))

        self.facts = self.conductor.agree(take_in)
        self._renew_engine([*self.settings.base_urls, url])

    def remove_server(self, url: str) -> None:
        """
        Lets a server go between two steps. Called on every process at once.

        Args:
            url (`str`):
                Its address.

        Raises:
            [`ConfigurationError`]: If it is none of the servers, or the last.
        """
        url = url.strip().rstrip("/")

        def let_go() -> None:
            self.engine.remove(url)
            self.vllm_client.remove(url)

        self.conductor.agree(let_go)
        self._renew_engine([known for known in self.settings.base_urls if known != url])

    def _renew_engine(self, base_urls: list[str]) -> None:
        """The other processes have engines for the later turns of a tool loop, and make them when they need them."""
        self.settings = replace(self.settings, base_urls=base_urls)
        if not self.accelerator.is_main_process:
            vars(self).pop("vllm_client", None)  # of images
            if self.engine is not None:
                self.engine.close()
                self.engine = None

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
        if conductor.turn is Turn.TRAINING and conductor.rounds is not None:
            rounds = conductor.rounds  # which has the prompts
            with profiler:
                rounds.harvested = conductor.share(lambda: self._rollout(rounds.batch(), None))
            rows = rounds.harvested.kept
        else:
            batch = conductor.gather(prompts, images, {}, num_generations)
            all_images = gather_object(images or [None] * len(prompts)) if batch.multimodal else None
            with profiler:
                rows = conductor.share(lambda: self._rollout(batch, all_images))[batch.mine]
        states = conductor.agree(lambda: self.engine.states())
        self._left_out = [url for url, state in states.items() if state is not State.UP]
        return rows

    def _rollout(self, batch: PromptBatch, images: list[list | None] | None) -> tuple[KeptRows, RolloutRecord]:
        # In a later turn, a "prompt" is the whole conversation, and TRL trains on what fits.
        later = self.conductor.turn is Turn.LATER
        groups = range(0, len(batch.rows), batch.num_generations)
        longest = [max(batch.rows[start : start + batch.num_generations], key=len) for start in groups]
        self.check_prompts(longest, "this batch", room=1 if later else self.max_completion_length)
        if self.engine is None:  # a process other than the main one, in the later turns of a tool loop
            self.engine = VLLMServerEngine(self.settings.base_urls, self.settings.deadlines, self.settings.api_key)
            self.engine.refresh = self.refresh
        if later and not self.accelerator.is_main_process:
            self._follow_the_main_process()
        prompts = self._server_prompts(batch, images)
        overrides = partial(self._room, batch) if later else None
        return self.conductor.on_servers(self.engine, prompts, batch, self.request_body(), overrides)

    def _follow_the_main_process(self) -> None:
        """Uses the servers that it used in its last rollout: they have the weights."""
        for url, state in self.engine.states().items():
            if url in self._left_out and state is State.UP:
                self.engine.lose(url, "the main process has left it out")
            elif url not in self._left_out and state is State.RETURNED:
                self.engine.join(url)

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
