"""The streams of log-probs and rewards behind one object, on all processes."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model

from ..engines.batch import PromptBatch
from ..engines.engine import OnGroup
from ..engines.mailbox import Mailbox
from ..errors import ConfigurationError
from ..scheduling import RolloutResult
from ..scheduling.ledger import Ledger
from ..training.positions import LENGTH_DEPENDENT_ROPE, rope_kinds, uncached_layers
from ..trl_compat import disable_gradient_checkpointing, is_sharded, use_adapter
from .continuous_rewards import ContinuousRewards
from .forward import Scorer
from .logprob_stream import POLICY, REFERENCE, LogprobStream
from .plan import ScoringRound, Tokens
from .reward_stream import FinalRows, RewardStream


class Streams:
    """The streams of a trainer. All methods do nothing if there is no stream."""

    def __init__(
        self,
        log_probs: LogprobStream | None = None,
        rewards: RewardStream | None = None,
        mailbox: Mailbox | None = None,
    ) -> None:
        self.log_probs = log_probs
        self.rewards = rewards
        self._mailbox = mailbox

    def __bool__(self) -> bool:
        return self.log_probs is not None or self.rewards is not None

    # On every process

    @contextmanager
    def serving(self, input_of: Callable[[int], dict[str, Any]] | None) -> Iterator[dict[str, float]]:
        """
        Inside this context, TRL generates and scores a batch, and gets the streamed results. `input_of` returns the
        data of a row by its number, see [`RewardStream`]. It is `None` in evaluation, which is not streamed. The
        yielded metrics are filled at the end, see `docs/metrics.md`.
        """
        metrics: dict[str, float] = {}
        if input_of is None:
            yield metrics
            return
        if self.rewards is not None:
            self.rewards.begin(input_of)
        if self.log_probs is not None:
            self.log_probs.open()
        try:
            yield metrics
        finally:
            if self.log_probs is not None:
                metrics |= self.log_probs.close()
            if self.rewards is not None:
                metrics |= self.rewards.metrics()

    def serving_rewards(self, rows: Sequence[int] | None = None) -> AbstractContextManager[None]:
        """Inside this context, TRL's calls of reward functions for `rows` return the streamed rewards."""
        return nullcontext() if self.rewards is None else self.rewards.serving(rows)

    def pausing_rewards(self) -> AbstractContextManager[None]:
        """Inside this context, only the caller runs reward functions that are not async: some are not thread-safe."""
        return self.rewards.paused() if isinstance(self.rewards, ContinuousRewards) else nullcontext()

    def clear(self) -> None:
        """Forgets the rewards of a rollout that is given up."""
        if self.rewards is not None:
            self.rewards.clear()

    def owners(self) -> Mapping[int, int]:
        """Returns the process that scores each group of a buffer, by entry ID, on the main process."""
        return {} if self.rewards is None else self.rewards.owners

    def per_token_logps(
        self,
        trainer: Any,
        compute: Callable[..., Any],
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Returns streamed log-probs in place of `compute`, TRL's `_get_per_token_logps_and_entropies`."""
        stream = self.log_probs
        serves = stream is not None and stream.active and not kwargs.get("compute_entropy")
        if stream is None or not serves or (name := called_model(trainer, model)) not in stream.scorers:
            return compute(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

        def rest(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return compute(model, ids, mask, logits_to_keep, *args, **kwargs)[0]

        return stream.log_probs(name, input_ids, attention_mask, logits_to_keep, rest), None, None

    # On the main process

    def follow_groups(self, data_of: Callable[[int], tuple[dict[str, Any], Tokens]]) -> OnGroup | None:
        """Starts a rollout without an end. Returns what its engine calls with each complete group."""
        return self.rewards.follow(data_of) if isinstance(self.rewards, ContinuousRewards) else None

    def watch(
        self,
        batch: PromptBatch,
        progress: Callable[[Ledger], None],
    ) -> Callable[[Ledger], None]:
        """
        Starts a rollout of a batch. Returns a function that calls `progress` and the streams; call it repeatedly while
        the rollout runs. Another thread may change the ledger meanwhile.
        """
        steps = [progress]
        if self.rewards is not None:
            steps.append(self.rewards.watch(batch.group_ids, from_buffer=batch.ids is not None))
        if self.log_probs is not None:
            steps.append(self.log_probs.watch(batch.longest))

        def step(ledger: Ledger) -> None:
            for each in steps:
                each(ledger)

        return step

    def finish(self, result: RolloutResult, completion_ids: Sequence[Tokens] | None = None) -> None:
        """
        Ends the rollout: scores the remaining tokens and submits the remaining groups. `completion_ids` are the rows
        to train on, if they are only some of the rollout's.
        """
        if self.rewards is not None:
            self.rewards.finish(result)
        if self.log_probs is not None:
            self.log_probs.finish(result, completion_ids)

    # On the other processes

    def follow(self) -> None:
        """Executes messages from the main process. Call it repeatedly during the rollout, and once afterwards."""
        for message in self._mailbox.receive() if self._mailbox is not None else ():
            if isinstance(message, ScoringRound) and self.log_probs is not None:
                self.log_probs.execute(message)
            elif isinstance(message, FinalRows) and self.rewards is not None:
                self.rewards.submit(message)


def make_streams(trainer: Any) -> Streams:
    """
    Builds the streams for `stream_logprobs` and `stream_rewards`. Raises if the model, the data or other settings do
    not support them. Must be called on every process.
    """
    args, accelerator = trainer.args, trainer.accelerator
    enabled = [name for name in ("stream_logprobs", "stream_rewards") if getattr(args, name)]
    for name in enabled:
        _check_rollouts(trainer, name)
    num_processes = accelerator.num_processes
    mailbox = trainer._main.mailbox if enabled and num_processes > 1 else None
    log_probs: LogprobStream | None = None
    if args.stream_logprobs:
        check_model(accelerator.unwrap_model(trainer.model))
        log_probs = LogprobStream(
            _scorers(trainer),
            args.num_generations,
            args.stream_chunk_tokens,
            args.stream_batch_tokens,
            args.stream_cache_gib,
            num_processes,
            mailbox,
            is_sharded(trainer),
        )
    rewards = _reward_stream(trainer, num_processes, mailbox) if args.stream_rewards else None
    return Streams(log_probs, rewards, mailbox)


def _reward_stream(trainer: Any, num_processes: int, mailbox: Mailbox | None) -> RewardStream:
    # A proxy avoids a reference cycle, so that the threads end with the trainer.
    own, timeout_s = weakref.proxy(trainer), trainer.args.stream_reward_timeout_s
    if not trainer.args.is_continuous:
        stream = RewardStream(own, timeout_s, num_processes, mailbox)
    elif num_processes == 1:
        stream = ContinuousRewards(own, timeout_s)
    else:
        raise ConfigurationError(
            f"`stream_rewards` (True) does not run with `rollout_ahead` ('continuous') on {num_processes} processes: "
            "only the main one has groups before their batch is taken. Set it to `False`."
        )
    weakref.finalize(trainer, stream.close)
    return stream


def called_model(trainer: Any, model: Any) -> str:
    """Returns whether TRL requests the policy or the reference, which can be the policy without its adapter."""
    if model is trainer.ref_model:
        return REFERENCE
    unwrapped = trainer.accelerator.unwrap_model(model)
    if not is_peft_model(unwrapped):
        return POLICY
    status = unwrapped.get_model_status()
    return POLICY if status.enabled is True and "ref" not in status.active_adapters else REFERENCE


def _scorers(trainer: Any) -> dict[str, Scorer]:
    """Builds scorers for the log-probs that TRL needs before the loss. They look up models late: TRL wraps them."""
    args, trainer = trainer.args, weakref.proxy(trainer)  # no cycle
    misaligned = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) != 0
    needed = {POLICY: misaligned or trainer.vllm_importance_sampling_correction, REFERENCE: trainer.beta != 0.0}
    config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
    fields = trainer.accelerator.device, is_sharded(trainer), hasattr(config, "output_router_logits")
    return {
        name: Scorer(partial(_forward, trainer, name), partial(_as_trl_scores, trainer, name), *fields)
        for name, is_needed in needed.items()
        if is_needed
    }


def _forward(trainer: Any, name: str, **inputs: Any) -> Any:
    has_model = name == REFERENCE and trainer.ref_model is not None
    return (trainer.ref_model if has_model else trainer.model)(**inputs)


@contextmanager
def _as_trl_scores(trainer: Any, name: str) -> Iterator[None]:
    kwargs = trainer.args.gradient_checkpointing_kwargs
    with ExitStack() as stack:
        stack.enter_context(disable_gradient_checkpointing(trainer.model, kwargs))
        stack.enter_context(trainer.accelerator.autocast())
        if name == REFERENCE and trainer.ref_model is not None:
            stack.enter_context(disable_gradient_checkpointing(trainer.ref_model, kwargs))
        elif name == REFERENCE:
            model = trainer.accelerator.unwrap_model(trainer.model)
            stack.enter_context(use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None))
        yield


# Checks


def _check_rollouts(trainer: Any, name: str) -> None:
    cause = None
    if trainer.rollout_func is not None:
        cause = "`rollout_func`, which generates by itself"
    elif trainer.tools or trainer.environment_factories is not None:
        cause = "tools or environments, whose completions contain more than the server's output"
    elif trainer._is_vlm:
        cause = f"vision-language models yet ({type(trainer.processing_class).__name__})"
    if cause is not None:
        raise ConfigurationError(f"`{name}` (True) does not support {cause}. Set it to `False`.")


def check_model(model: Any) -> None:
    """Raises for models whose log-probs can't be computed chunk by chunk."""
    kinds, layers = rope_kinds(model.config.get_text_config()), uncached_layers(model)
    cause = None
    if layers is None or layers:
        names = ", ".join(sorted(layers or ())) or "all"
        cause = f"has layers whose keys and values can't be cached chunk by chunk ({names})"
    elif not kinds:
        cause = "has no rotary positions. TRL counts padding in other positions, and log-probs would differ"
    elif kinds & LENGTH_DEPENDENT_ROPE:
        cause = f"has positions that depend on the final length ({', '.join(sorted(kinds))})"
    if cause is not None:
        base = model.get_base_model() if is_peft_model(model) else model
        raise ConfigurationError(
            f"`stream_logprobs` (True) does not support this model: {type(base).__name__} {cause}. Set it to `False`."
        )
