"""
Compares the servers' log-probs with the trainer's after a weight sync.

A server with wrong weights answers 200, shows the new version, and samples from another policy, which no loss curve
shows. Its weights can be wrong because vLLM processed only a part of them again (packed copies, quantized or sharded
layers), because names differ, or because somebody else has updated them. So each server completes a short prompt, and
the trainer's own forward pass computes the log-probs of the same tokens.
"""

import asyncio
import logging
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..engines.failures import FAILURES, describe
from ..engines.main_process import MainProcess
from ..engines.pool import Member, State
from ..engines.server_metrics import num_engines
from ..engines.vllm_api import CompletionRequest, ServerPrompt
from ..engines.vllm_server import VLLMServerEngine
from ..errors import WeightSyncError


TEXT = "The weather in spring is mild, and people walk in the park. In summer"
MAX_PROMPT, NUM_TOKENS = 48, 32
INTERVAL = 50  # syncs
TIMEOUT_S = 60.0  # a full server answers once one of its requests has ended
BATCH = 4  # rows of a forward pass

# Largest mean difference of a sound server, relative to the standard deviation of the logits, by the coarser dtype of
# both sides. Rounding is relative to what is rounded, so the same share fits random models (standard deviation 0.2)
# and trained ones (3.6). With bfloat16, means over 32 tokens are 0.003 to 0.012, and 0.018 at worst; other weights are
# above 0.2. float32 is 3e-6 on a CPU, but matrix products on a GPU may use TF32, with the precision of float16.
TOLERANCES = {"float32": 0.01, "float16": 0.02, "bfloat16": 0.08}
MIN_DEVIATION = 0.01  # of a model whose tokens are all equally likely
QUANTIZED = 0.5  # with quantized weights, or keys and values

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """A completion of a server's engine, of which it has several with data parallelism."""

    url: str
    rank: int | None
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Difference:
    """Mean difference of a server's log-probs from the trainer's, and the standard deviation of the logits."""

    url: str
    rank: int | None
    mean: float
    deviation: float
    tolerance: float = math.inf  # of their ratio
    reason: str = ""  # for the tolerance

    @property
    def limit(self) -> float:
        """Largest mean difference of a sound server."""
        return self.tolerance * max(self.deviation, MIN_DEVIATION)

    @property
    def is_wrong(self) -> bool:
        return self.mean > self.limit

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" (data-parallel rank {self.rank})"
        return (
            f"The vLLM server at {self.url}{rank} does not have the trainer's weights after a sync: its log-probs of "
            f"{NUM_TOKENS} tokens differ from the trainer's by {self.mean:.3g} on average, in two completions, where "
            f"{self.reason} explains at most {self.limit:.2g}. Likely causes: it was started with another model, "
            "another run updates it too, or vLLM can't load this architecture or quantization while it runs. Restart "
            "it for this run alone, with the model that you train and without `--quantization`, or set "
            "`compare_weights=False` if the difference is expected."
        )


def compare(sample: Sample, own: Sequence[float], deviation: float) -> Difference | None:
    """
    Compares a server's log-probs with the trainer's, given the standard deviation of its logits. `None` if the trainer
    has no log-probs because its own weights are not finite.
    """
    if not all(map(math.isfinite, [*own, deviation])):
        return None
    mean = sum(abs(a - b) for a, b in zip(sample.logprobs, own, strict=True)) / len(own)
    return Difference(sample.url, sample.rank, mean if math.isfinite(mean) else math.inf, deviation)


def coarsest(dtypes: Iterable[str | None]) -> str:
    """Returns the dtype with the largest tolerance, of those that are known."""
    known = {str(dtype).removeprefix("torch.") for dtype in dtypes} & TOLERANCES.keys()
    return max(known or {"bfloat16"}, key=TOLERANCES.__getitem__)


def tolerance(
    dtype: str, is_quantized: bool, vllm_config: Mapping[str, Any], temperature: float = 1.0
) -> tuple[float, str]:
    """
    Returns the tolerance for a trainer and a server, and its reason. Infinite if the server's log-probs are not those
    of the sampling distribution.
    """
    model = vllm_config.get("model_config") or {}
    mode = str(model.get("logprobs_mode"))
    if "logits" in mode or (mode.startswith("raw") and temperature != 1.0):
        return math.inf, "`--logprobs-mode`"
    cache = str((vllm_config.get("cache_config") or {}).get("cache_dtype") or "auto")
    if is_quantized or model.get("quantization") or cache not in ("auto", "float16", "bfloat16", "float32"):
        return QUANTIZED, "quantization"
    dtype = coarsest([dtype, model.get("dtype")])
    return TOLERANCES[dtype], dtype


class Canary:
    """
    Compares servers after the first sync, every 50th, and after they have joined. Raises [`WeightSyncError`] for a
    server that differs from the trainer in two completions. A server that does not answer is left to the others that
    use it.
    """

    def __init__(self, engine: VLLMServerEngine | None, main: MainProcess) -> None:
        self._engine: Any = engine  # `None` on other processes than the main one
        self._main = main
        self._num_syncs = 0
        self._checked: dict[str, int] = {}  # number of losses by address

    def check(self, trainer: Any) -> dict[str, float]:
        """Runs after each sync, on every process at once. Returns metrics if servers were compared."""
        urls = self._main.broadcast(self._due)
        found = self._differences(trainer, urls)
        if any(difference.is_wrong for difference in found):
            # Sound servers exceed the tolerance by chance, for example if another expert is chosen for a token.
            again = self._differences(trainer, sorted({d.url for d in found if d.is_wrong}))
            if (wrong := next((difference for difference in again if difference.is_wrong), None)) is not None:
                raise WeightSyncError(str(wrong))
        return {"darts/sync/logp_difference": max(d.mean for d in found)} if found else {}

    def _due(self) -> list[str]:
        if self._num_syncs % INTERVAL == 0:
            self._checked.clear()
        self._num_syncs += 1
        up = {url: m.num_losses for url, m in self._engine.members.items() if m.state is State.UP}
        due = [url for url, num_losses in up.items() if self._checked.get(url) != num_losses]
        self._checked |= {url: up[url] for url in due}
        return due

    def _differences(self, trainer: Any, urls: Sequence[str]) -> list[Difference]:
        """Returns the differences of all servers that answered, the same on every process."""
        if not urls:
            return []
        prompt = prompt_of(trainer.processing_class)
        samples = self._main.broadcast(lambda: self._engine.call(self._ask(trainer, urls, prompt)))
        if not samples:
            return []
        own, deviation = own_logprobs(trainer, prompt, [sample.tokens for sample in samples])

        def judge() -> list[Difference]:
            pairs = zip(samples, own.tolist(), deviation.tolist(), strict=True)
            found = [difference for pair in pairs if (difference := compare(*pair)) is not None]
            return [self._engine.call(self._with_tolerance(trainer, difference)) for difference in found]

        return self._main.broadcast(judge)

    async def _ask(self, trainer: Any, urls: Sequence[str], prompt: list[int]) -> list[Sample]:
        """Has servers that decode complete the prompt. Those that share GPUs are woken up in turns, main ones last."""
        pool, samples = await self._engine.pool(), []
        for tail in (True, False) if pool.takes_turns else (None,):
            if tail is not None:
                await pool.take_turns(tail)
            members = [m for url in urls if (m := pool.members.get(url)) is not None and m.decodes]
            answers = await asyncio.gather(*(_complete(member, prompt, trainer) for member in members))
            samples += [sample for answer in answers for sample in answer]
        return samples

    async def _with_tolerance(self, trainer: Any, found: Difference) -> Difference:
        dtype, is_quantized = precision(trainer)
        known = coarsest([dtype, trainer.vllm_generation.facts.dtype])
        found = replace(found, tolerance=TOLERANCES[known], reason=known)
        if not found.is_wrong:
            return found
        # A server that says more is asked only now, because its answer takes seconds. Stubs have none.
        member = (await self._engine.pool()).members.get(found.url)
        config = None if member is None else await _vllm_config(member)
        limit = (math.inf, "") if config is None else tolerance(dtype, is_quantized, config, trainer.temperature)
        return replace(found, tolerance=limit[0], reason=limit[1])


async def _complete(member: Member, prompt: list[int], trainer: Any) -> list[Sample]:
    """Returns one completion of each engine of a server, none if it does not answer."""
    facts, server = trainer.vllm_generation.facts, member.server
    # TRL's forward pass has the run's temperature, and no other sampling options.
    model = member.model_name(member.version) or facts.model
    options = {"model": model, "max_tokens": min(NUM_TOKENS, facts.max_model_len - len(prompt)), "logprobs": 0}
    options |= {"temperature": trainer.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    options["ignore_eos"] = True

    async def ask(rank: int | None) -> Sample | None:
        request = CompletionRequest.of(f"canary-{uuid.uuid4().hex}", ServerPrompt(prompt), [], options)
        try:
            answer = await server.complete(request, TIMEOUT_S, rank)
        except (*FAILURES, ValueError, KeyError) as error:
            logger.info(
                "The weights of the vLLM server at %s were not compared with the trainer's: %s",
                server.base_url,
                describe(error, f"a completion after {TIMEOUT_S:g} s"),
            )
            return None
        is_whole = len(answer.tokens) == options["max_tokens"] and answer.logprobs is not None
        return Sample(server.base_url, rank, answer.tokens, answer.logprobs or []) if is_whole else None

    engines = await num_engines(server)
    found = await asyncio.gather(*map(ask, range(engines) if engines > 1 else [None]))
    return [sample for sample in found if sample is not None]


async def _vllm_config(member: Member) -> Mapping[str, Any] | None:
    """Returns a server's configuration, `None` for a stub without one."""
    try:
        info = await member.server.get("/server_info?config_format=json", TIMEOUT_S)
    except FAILURES:
        return None
    return (info or {}).get("vllm_config")


def prompt_of(processing_class: Any) -> list[int]:
    """Returns the tokens of the prompt, without images."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return list(tokenizer(TEXT)["input_ids"])[:MAX_PROMPT]


def precision(trainer: Any) -> tuple[str, bool]:
    """Returns the dtype of the trainer's forward pass, and whether its weights are quantized."""
    mixed = trainer.accelerator.mixed_precision
    dtypes = [{"bf16": "bfloat16", "fp16": "float16"}.get(mixed), *(p.dtype for p in trainer.model.parameters())]
    is_quantized = mixed == "fp8" or getattr(trainer.model.config, "quantization_config", None) is not None
    return coarsest(dtypes[:1] if dtypes[0] else dtypes), is_quantized


def own_logprobs(
    trainer: Any, prompt: list[int], completions: Sequence[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the trainer's log-probs of completions of one length, `(N, T)`, and the standard deviation of its logits,
    `(N,)`. Called on every process at once, because a sharded model's forward pass is a collective. It is TRL's, since
    ZeRO-3 needs the same order of layers in each.
    """
    ids = torch.tensor([[*prompt, *tokens] for tokens in completions], device=trainer.accelerator.device)  # (N, P + T)
    with torch.no_grad(), evaluating(trainer.model):
        logps, entropies, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), len(completions[0]), batch_size=BATCH, compute_entropy=True
        )
    # V normally distributed logits with standard deviation s have the entropy log V - s^2 / 2.
    most = math.log(trainer.model.config.get_text_config().vocab_size)
    deviations = (2 * (most - entropies.float()).clamp(min=0)).sqrt().mean(1)
    return logps.float().cpu(), deviations.cpu()


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Turns dropout off inside the context. Modules return to their own modes."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
