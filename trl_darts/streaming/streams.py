"""What is done while candidates decode, on all processes: one object for the trainer and its rollouts."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from ..engines.mailbox import Mailbox
from ..errors import ConfigurationError
from ..positions import LENGTH_DEPENDENT_ROPE, rope_kinds, uncached_layers
from ..scheduling import RolloutResult
from ..scheduling.ledger import Ledger
from .forward import Scorer
from .log_probs import POLICY, REFERENCE, LogprobStream
from .plan import Round, Tokens
from .rewards import RewardStream, SettledRows


class Streams:
    """The streams of a trainer. Without any, all of this does nothing."""

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

    # Of the trainer, on every process

    @contextmanager
    def serving(self, input_of: Callable[[int], dict[str, Any]] | None) -> Iterator[dict[str, float]]:
        """
        Inside, TRL generates and scores a batch, and is served with what is ready by then. `input_of` has the data of
        a row by its number, see [`RewardStream`]. `None` in evaluation: nothing is done. The metrics are filled in at
        the end, see `docs/metrics.md`.
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
        """Inside, TRL calls reward functions for all these rows, and is given their results for groups."""
        return nullcontext() if self.rewards is None else self.rewards.serving(rows)

    def owners(self) -> Mapping[int, int]:
        """Which process has begun to score which group of a buffer, on the main process."""
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
        """What TRL's `_get_per_token_logps_and_entropies`, `compute`, returns, from what was scored already."""
        stream = self.log_probs
        if stream is None or not stream.active or (name := called_model(trainer, model)) not in stream.scorers:
            return compute(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

        def rest(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return compute(model, ids, mask, logits_to_keep, *args, **kwargs)[0]

        return stream.log_probs(name, input_ids, attention_mask, logits_to_keep, rest), None, None

    def close(self) -> None:
        """Ends the threads of reward functions."""
        if self.rewards is not None:
            self.rewards.close()

    # On the main process

    def watch(
        self,
        prompts: Sequence[Tokens],
        progress: Callable[[Ledger], None],
        entry_ids: Sequence[int] | None = None,
    ) -> Callable[[Ledger], None]:
        """
        Begins a rollout of these prompts, by `group_id`, with their IDs in a buffer. What it returns calls `progress`
        and the streams, and is to be called again and again while the rollout runs. Meanwhile the ledger may change in
        another thread.
        """
        steps = [progress]
        if self.rewards is not None:
            steps.append(self.rewards.watch(len(prompts), entry_ids))
        if self.log_probs is not None:
            steps.append(self.log_probs.watch(prompts))

        def step(ledger: Ledger) -> None:
            for each in steps:
                each(ledger)

        return step

    def finish(self, result: RolloutResult, completion_ids: Sequence[Tokens] | None = None) -> None:
        """
        Ends the rollout: all that is trained on is scored, and all reward functions are called. `completion_ids` are
        the rows that are trained on, where they are not all that the rollout gave.
        """
        if self.rewards is not None:
            self.rewards.finish(result)
        if self.log_probs is not None:
            self.log_probs.finish(result, completion_ids)

    # On the others

    def follow(self) -> None:
        """Does what the main process has sent. Called again and again while that runs the rollout, and once after."""
        for message in self._mailbox.receive() if self._mailbox is not None else ():
            if isinstance(message, Round) and self.log_probs is not None:
                self.log_probs.execute(message)
            elif isinstance(message, SettledRows) and self.rewards is not None:
                self.rewards.submit(message)


def make_streams(trainer: Any) -> Streams:
    """
    Builds what `stream_logprobs` and `stream_rewards` ask for, or refuses it where model, data or other settings don't
    allow it. Called on every process at once.
    """
    args, accelerator = trainer.args, trainer.accelerator
    asked = [name for name in ("stream_logprobs", "stream_rewards") if getattr(args, name)]
    for name in asked:
        _check_rollouts(trainer, name)
    num_processes = accelerator.num_processes
    mailbox = trainer._main.mailbox if asked and num_processes > 1 else None
    log_probs = rewards = None
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
            trainer.is_sharded,
        )
    if args.stream_rewards:
        # No cycle: the threads end with the trainer.
        rewards = RewardStream(weakref.proxy(trainer), args.stream_reward_timeout_s, num_processes, mailbox)
        weakref.finalize(trainer, rewards.close)
    return Streams(log_probs, rewards, mailbox)


def called_model(trainer: Any, model: Any) -> str:
    """Which model TRL means when it asks for log-probs: the policy without its adapter is the reference."""
    if model is trainer.ref_model:
        return REFERENCE
    unwrapped = trainer.accelerator.unwrap_model(model)
    if not is_peft_model(unwrapped):
        return POLICY
    status = unwrapped.get_model_status()
    return POLICY if status.enabled is True and "ref" not in status.active_adapters else REFERENCE


def _scorers(trainer: Any) -> dict[str, Scorer]:
    """For what TRL will ask for before the loss does. Models are looked up in each pass: training wraps them."""
    args = trainer.args
    misaligned = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) != 0
    asked = {POLICY: misaligned or trainer.vllm_importance_sampling_correction, REFERENCE: trainer.beta != 0.0}
    config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
    fields = trainer.accelerator.device, trainer.is_sharded, hasattr(config, "output_router_logits")
    return {
        name: Scorer(partial(_forward, trainer, name), partial(_as_trl_scores, trainer, name), *fields)
        for name, wanted in asked.items()
        if wanted
    }


def _forward(trainer: Any, name: str, **inputs: Any) -> Any:
    own = name == REFERENCE and trainer.ref_model is not None
    return (trainer.ref_model if own else trainer.model)(**inputs)


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


# What can't work


def _check_rollouts(trainer: Any, name: str) -> None:
    cause = None
    if trainer.rollout_func is not None:
        cause = "`rollout_func`, which generates by itself"
    elif trainer.tools or trainer.environment_factories is not None:
        cause = "tools or environments: what a server has written is not the whole completion"
    elif trainer._is_vlm:
        cause = f"a vision-language model yet ({type(trainer.processing_class).__name__})"
    if cause is not None:
        raise ConfigurationError(f"`{name}` (True) does not run with {cause}. Set it to `False`.")


def check_model(model: Any) -> None:
    """Refuses models whose log-probs can't be computed chunk by chunk."""
    kinds, layers = rope_kinds(model.config.get_text_config()), uncached_layers(model)
    cause = None
    if layers is None or layers:
        names = ", ".join(sorted(layers or ())) or "all"
        cause = f"has layers whose keys and values can't be kept chunk by chunk ({names})"
    elif not kinds:
        cause = "has no rotary positions: TRL counts padding in the positions of others, and log-probs would differ"
    elif kinds & LENGTH_DEPENDENT_ROPE:
        cause = f"has positions that depend on how long the text will be ({', '.join(sorted(kinds))})"
    if cause is not None:
        base = model.get_base_model() if is_peft_model(model) else model
        raise ConfigurationError(
            f"`stream_logprobs` (True) does not run with this model: {type(base).__name__} {cause}. Set it to `False`."
        )
