"""The streams that a trainer's settings ask for, and the settings that can't work with them."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from accelerate.utils import is_peft_model
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from ..errors import ConfigurationError
from .log_probs import POLICY, REFERENCE, LogprobStream
from .rewards import RewardStream
from .streams import Streams
from .worker import ScoredModel


CACHED_LAYERS = {"full_attention", "sliding_attention"}
# Their positions, or what they make of them, depend on how long the text will be.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def make_streams(trainer: Any) -> Streams:
    """
    Builds what `stream_logprobs` and `stream_rewards` ask for.

    Args:
        trainer ([`DARTSGRPOTrainer`]):
            Once it is built.

    Returns:
        [`Streams`]: Empty where nothing is asked for.

    Raises:
        [`ConfigurationError`]: If model, data or other settings don't allow it. Names the setting.
    """
    args, accelerator = trainer.args, trainer.accelerator
    for name in ("stream_logprobs", "stream_rewards"):
        if getattr(args, name):
            _check_rollouts(trainer, name)
    where: dict[str, Any] = {
        "process_index": accelerator.process_index,
        "num_processes": accelerator.num_processes,
        "open_mailbox": lambda: trainer._conductor.agree.mailbox,
    }
    log_probs = rewards = None
    if args.stream_logprobs:
        _check_model(trainer)
        log_probs = LogprobStream(
            _scored_models(trainer),
            accelerator.device,
            args.num_generations,
            args.stream_chunk_tokens,
            args.stream_batch_tokens,
            args.stream_cache_gib,
            sharded=trainer.is_sharded,
            **where,
        )
    if args.stream_rewards:
        # No cycle: what it has started ends with the trainer.
        rewards = RewardStream(weakref.proxy(trainer), args.stream_reward_timeout_s)
        weakref.finalize(trainer, rewards.close)
    return Streams(log_probs, rewards, args.num_generations, **where)


def called_model(trainer: Any, model: Any) -> str:
    """Which model TRL means when it asks for log-probs: the policy without its adapter is the reference."""
    if model is trainer.ref_model:
        return REFERENCE
    unwrapped = trainer.accelerator.unwrap_model(model)
    if not is_peft_model(unwrapped):
        return POLICY
    status = unwrapped.get_model_status()
    return POLICY if status.enabled is True and "ref" not in status.active_adapters else REFERENCE


def _scored_models(trainer: Any) -> dict[str, ScoredModel]:
    models = {}
    config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
    routes = hasattr(config, "output_router_logits")
    if _asks_for_policy(trainer):
        models[POLICY] = ScoredModel(lambda **inputs: trainer.model(**inputs), lambda: _as_trl_scores(trainer), routes)
    if trainer.beta != 0.0:
        models[REFERENCE] = ScoredModel(
            lambda **inputs: _reference(trainer)(**inputs), lambda: _as_reference(trainer), routes
        )
    return models


def _reference(trainer: Any) -> Any:
    return trainer.model if trainer.ref_model is None else trainer.ref_model


def _asks_for_policy(trainer: Any) -> bool:
    """Whether TRL computes the policy's log-probs before the loss does."""
    args = trainer.args
    misaligned = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) != 0
    return misaligned or trainer.vllm_importance_sampling_correction


@contextmanager
def _as_trl_scores(trainer: Any) -> Iterator[None]:
    with (
        disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
        trainer.accelerator.autocast(),
    ):
        yield


@contextmanager
def _as_reference(trainer: Any) -> Iterator[None]:
    with _as_trl_scores(trainer), _without_adapter(trainer):
        yield


def _without_adapter(trainer: Any) -> AbstractContextManager[Any]:
    if trainer.ref_model is not None:
        return disable_gradient_checkpointing(trainer.ref_model, trainer.args.gradient_checkpointing_kwargs)
    model = trainer.accelerator.unwrap_model(trainer.model)
    return use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)


# What can't work


def _check_rollouts(trainer: Any, name: str) -> None:
    if trainer.rollout_func is not None:
        raise ConfigurationError(
            f"`{name}` (True) does not run with `rollout_func`, which generates by itself. Set it to `False`."
        )
    if trainer.tools or trainer.environment_factories is not None:
        raise ConfigurationError(
            f"`{name}` (True) does not run with tools or environments: what a server has written is not the whole "
            "completion. Set it to `False`."
        )
    if trainer._is_vlm:
        raise ConfigurationError(
            f"`{name}` (True) does not run with a vision-language model yet "
            f"({type(trainer.processing_class).__name__}). Set it to `False`."
        )


def _check_model(trainer: Any) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model)
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in [rope, *rope.values()] if isinstance(part, dict)} - {None}
    layers = set(getattr(config, "layer_types", None) or ())
    base = model.get_base_model() if is_peft_model(model) else model
    cause = None
    if getattr(base, "_is_stateful", False) or layers - CACHED_LAYERS:
        kinds_left = ", ".join(sorted(layers - CACHED_LAYERS)) or "all"
        cause = f"has layers whose keys and values can't be kept chunk by chunk ({kinds_left})"
    elif not kinds:
        cause = "has no rotary positions: TRL counts padding in the positions of others, and log-probs would differ"
    elif kinds & LENGTH_DEPENDENT_ROPE:
        cause = f"has positions that depend on how long the text will be ({', '.join(sorted(kinds))})"
    if cause is not None:
        raise ConfigurationError(
            f"`stream_logprobs` (True) does not run with this model: {type(base).__name__} {cause}. Set it to `False`."
        )
