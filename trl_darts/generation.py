"""TRL's server-mode generation, with our engine in the place of its one blocking request."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from .engines.preflight import Requirements, ServerFacts, check_server
from .engines.vllm_server import VLLMServerEngine
from .errors import ConfigurationError
from .rollout import RolloutConductor
from .weights import make_client


@dataclass(frozen=True)
class ServerSettings:
    """
    What our server-mode generation needs beyond TRL's own arguments.

    Args:
        base_urls (`list[str]`):
            The servers.
        weight_sync (`str`):
            See `DARTSGRPOConfig.weight_sync`.
        weight_sync_dir (`str`, *optional*):
            See `DARTSGRPOConfig.weight_sync_dir`.
        request_timeout_s (`float`):
            Deadline of one candidate.
        requirements ([`Requirements`]):
            What each server must be.
    """

    base_urls: list[str]
    weight_sync: str
    weight_sync_dir: str | None
    request_timeout_s: float
    requirements: Requirements


class ServerGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] for `vllm_mode="server"`: prompts go to our engine candidate by
    candidate, weights through our clients. Other modes are TRL's, unchanged.

    Overrides `_init_vllm`, `sync_weights` and `generate`.

    Args:
        settings ([`ServerSettings`]):
            What we need to know.
        engine ([`VLLMServerEngine`], *optional*):
            The engine, on the main process.
        facts ([`ServerFacts`], *optional*):
            What it learned about the servers.
        kwargs:
            TRL's own arguments.
    """

    def __init__(
        self,
        *args: Any,
        settings: ServerSettings,
        engine: VLLMServerEngine | None,
        facts: ServerFacts | None,
        **kwargs: Any,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.facts = facts
        self.conductor: RolloutConductor | None = None  # set by the trainer, once it has an accelerator
        self._sync_seconds: float | None = None
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self.mode != "server":
            super()._init_vllm()
            return
        if self.accelerator.is_main_process:
            self.vllm_client = make_client(
                self.settings.base_urls,
                self.settings.weight_sync,
                device=self.accelerator.device,
                group_port=self.group_port,
                connection_timeout=self.server_timeout,
                sync_dir=self.settings.weight_sync_dir,
            )
            self.vllm_client.init_communicator(device=self.accelerator.device)
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """TRL's sync, timed."""
        start = time.perf_counter()
        super().sync_weights()
        self._sync_seconds = time.perf_counter() - start

    def take_sync_seconds(self) -> float | None:
        """Seconds of the last weight sync, once; `None` if there was none since the last call."""
        seconds, self._sync_seconds = self._sync_seconds, None
        return seconds

    def generate(
        self, prompts: list[list[int]], images: list[list | None] | None, num_generations: int, profiler: Any = None
    ) -> tuple:
        """
        Runs a rollout on the servers.

        Args:
            prompts (`list[list[int]]` of shape `(B, ≤ P)`):
                This process's rows; over all processes, each prompt stands `num_generations` times in a row.
            images (`list[list | None]`, *optional*):
                Images per row. Such a batch takes TRL's own way.
            num_generations (`int`):
                Rows per prompt.
            profiler (`ContextManager`, *optional*):
                Entered around the rollout.

        Returns:
            `tuple`: `(prompt_ids, completion_ids, logprobs, None)`, where log-probs have the shape `(B, T, 1)`. TRL's
            last item, the token IDs of the log-probs, is not used by its trainer.

        Raises:
            [`ConfigurationError`]: If a prompt does not fit, or has images while the schedule over-provisions.
            [`GenerationError`]: If a server fails. The message has its own words.
        """
        if self.mode != "server" or self.conductor is None:
            return super().generate(prompts, images, num_generations, profiler)
        shares = self.conductor.gather(prompts, images is not None, num_generations)
        if shares is None:
            return super().generate(prompts, images, num_generations, profiler)
        rows = [row for share in shares for row in share]
        with profiler or nullcontext():
            kept = self.conductor.share(lambda: self._rollout(rows[::num_generations], num_generations))
        start = sum(len(share) for share in shares[: self.accelerator.process_index])
        mine = slice(start, start + len(prompts))
        logprobs = [[[logprob] for logprob in row] for row in kept.logprobs[mine]]
        return prompts, kept.completion_ids[mine], logprobs, None

    def _rollout(self, prompts: list[list[int]], num_generations: int) -> tuple:
        self.check_prompts(prompts, "this batch")
        return self.conductor.on_servers(self.engine, prompts, num_generations, self.request_body())

    def check_prompts(self, prompts: list[list[int]], where: str, first_index: int = 0) -> None:
        """
        Refuses prompts that leave no room for a whole completion.

        Args:
            prompts (`list[list[int]]` of shape `(N, ≤ P)`):
                Token IDs.
            where (`str`):
                What they belong to, for the message.
            first_index (`int`, *optional*, defaults to `0`):
                Index of the first one there.

        Raises:
            [`ConfigurationError`]: If one is too long. Names the first five by index.
        """
        limit = self.facts.max_model_len - self.max_completion_length
        lengths = {first_index + i: len(prompt) for i, prompt in enumerate(prompts) if len(prompt) > limit}
        if lengths:
            words = ", ".join(f"prompt {index} has {length}" for index, length in list(lengths.items())[:5])
            raise ConfigurationError(
                f"{len(lengths)} prompts of {where} are longer than {limit} tokens ({words}): `max_completion_length` "
                f"({self.max_completion_length}) more would pass the server's `max_model_len` "
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
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if self.structured_outputs_regex is not None:
            body["structured_outputs"] = {"regex": self.structured_outputs_regex}
        return body | self.generation_kwargs


def connect(settings: ServerSettings) -> tuple[VLLMServerEngine, ServerFacts]:
    """
    Connects to the servers and checks them.

    Args:
        settings ([`ServerSettings`]):
            Their addresses, and what they must be.

    Returns:
        `tuple[VLLMServerEngine, ServerFacts]`: The engine, and what requests need to know.

    Raises:
        [`ConfigurationError`]: If one can't serve this training, or they serve under different names.
        [`ServerUnreachableError`]: If one does not answer.
    """
    engine = VLLMServerEngine(settings.base_urls, settings.request_timeout_s)
    try:
        facts = engine.query(lambda server: check_server(server, settings.requirements))
    except BaseException:
        engine.close()
        raise
    names = sorted({fact.model for fact in facts})
    if len(names) > 1:
        engine.close()
        raise ConfigurationError(
            f"The servers of `vllm_server_base_url` serve under different names ({', '.join(map(repr, names))}). "
            "Start them with the same model or `--served-model-name`."
        )
    return engine, ServerFacts(names[0], min(fact.max_model_len for fact in facts))


@contextmanager
def server_generation(
    settings: ServerSettings, engine: VLLMServerEngine | None, facts: ServerFacts | None
) -> Iterator[None]:
    """
    Inside, TRL's `GRPOTrainer.__init__` builds a [`ServerGeneration`] where it would build its `VLLMGeneration`.

    The class is looked up as a global of TRL's module, and there is no other way to hand it another one; building
    TRL's first would open its NCCL communicator, which fails without CUDA. It can go when TRL takes the class as an
    argument.
    """
    original = grpo_trainer.VLLMGeneration
    grpo_trainer.VLLMGeneration = partial(ServerGeneration, settings=settings, engine=engine, facts=facts)
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = original
