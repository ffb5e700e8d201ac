"""
Fields of the config that can't work, refused when it is made. Those of the schedule check themselves, and whole
combinations are checked by the trainer.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import ConfigurationError
from .scheduling.schedules import check_choice
from .weights import WEIGHT_SYNCS


if TYPE_CHECKING:
    from .config import DARTSGRPOConfig

DEADLINES = (
    "vllm_request_timeout_s",
    "vllm_connect_timeout_s",
    "vllm_first_token_timeout_s",
    "vllm_token_timeout_s",
    "vllm_health_timeout_s",
    "vllm_rollout_timeout_s",
)
GENERATION_ERRORS = ("raise", "drop_group")
STREAM_BOUNDS = {"stream_chunk_tokens": 1, "stream_batch_tokens": 1}
# TRL compares these strings where it computes, without a list of them; other values end a training in its first step.
TRL_CHOICES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "scale_rewards": ("group", "batch", "none"),
}
# The same, of what only vLLM reads.
TRL_VLLM_CHOICES = {
    "vllm_mode": ("server", "colocate"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
# TRL hands these on as they are, and the engines of vLLM and transformers refuse what is out of bounds.
SAMPLING_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 < value < math.inf, "positive and finite: log-probs are of logits divided by it"),
    "top_p": (lambda value: 0 < value <= 1, "greater than 0 and at most 1, which leaves all tokens in"),
    "min_p": (lambda value: 0 <= value <= 1, "between 0 and 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "positive and finite, and 1 is none"),
}
VESPO_SAMPLING_MODES = ("token_truncate", "token_mask")
NOT_RESUMABLE = ("stop", "frequency_penalty", "presence_penalty", "structured_outputs")


def check_fields(config: "DARTSGRPOConfig") -> None:
    """
    Refuses settings that can't work.

    Args:
        config ([`DARTSGRPOConfig`]):
            With its defaults filled in.

    Raises:
        [`ConfigurationError`]: Names the field, its value, the rule and a remedy.
    """
    _check_trl(config)
    _check_sampling(config)
    _check_servers(config)
    _check_engine(config)
    _check_resumable(config)
    _check_streams(config)


def _check_trl(config: "DARTSGRPOConfig") -> None:
    """What TRL and PyTorch refuse too, but later: when the model is loaded, or the first rollout is paid for."""
    for name, choices in (TRL_CHOICES | TRL_VLLM_CHOICES if config.use_vllm else TRL_CHOICES).items():
        check_choice(name, getattr(config, name), choices)
    if config.max_steps <= 0 and not 0 < config.num_train_epochs < math.inf:
        raise ConfigurationError(
            f"`num_train_epochs` ({config.num_train_epochs}) must be positive and finite where `max_steps` "
            f"({config.max_steps}) does not say when the training ends. Correct it, or set `max_steps`."
        )
    if not config.learning_rate < math.inf:
        raise ConfigurationError(f"`learning_rate` ({config.learning_rate}) must be finite. Lower it.")
    for name in ("learning_rate", "epsilon", "epsilon_high"):
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise ConfigurationError(f"`{name}` ({value}) must be at least 0.")
    if config.sync_ref_model and config.beta == 0:
        raise ConfigurationError(
            f"`sync_ref_model` (True) needs a reference model, and with `beta` ({config.beta}) there is none. Set "
            "`beta` to a positive value, or leave it out."
        )
    mode = config.vllm_importance_sampling_mode
    corrects = config.use_vllm and config.vllm_importance_sampling_correction
    if config.loss_type == "vespo" and corrects and mode not in VESPO_SAMPLING_MODES:
        raise ConfigurationError(
            f"`vllm_importance_sampling_mode` ({mode!r}) must be one of {', '.join(map(repr, VESPO_SAMPLING_MODES))} "
            "with `loss_type='vespo'`, which weights sequences itself."
        )


def _check_sampling(config: "DARTSGRPOConfig") -> None:
    for name, (is_taken, rule) in SAMPLING_RULES.items():
        value = getattr(config, name)
        if value is None and name != "temperature":
            continue  # the engine's own default
        if value is None or not is_taken(value):
            raise ConfigurationError(f"`{name}` ({value}) must be {rule}. Correct it, or leave it out.")
    least = -1 if config.use_vllm else 0  # vLLM takes -1 for 0, and transformers does not
    if config.top_k is not None and config.top_k < least:
        raise ConfigurationError(
            f"`top_k` ({config.top_k}) must be at least 1, or 0, which leaves all tokens in. Correct it, or leave it "
            "out."
        )


def _check_servers(config: "DARTSGRPOConfig") -> None:
    for name in DEADLINES:
        if not getattr(config, name) > 0:
            raise ConfigurationError(f"`{name}` ({getattr(config, name)}) must be positive, in seconds.")
    check_choice("on_generation_error", config.on_generation_error, GENERATION_ERRORS)
    if config.on_generation_error != "raise" and not config.uses_servers:
        raise ConfigurationError(
            f"`on_generation_error` ({config.on_generation_error!r}) only has an effect with vLLM servers: an "
            "engine in the trainer's own process takes the training along. Leave it out, or set `use_vllm=True` and "
            "`vllm_mode='server'`."
        )
    check_choice("weight_sync", config.weight_sync, WEIGHT_SYNCS)
    if config.weight_sync_dir is not None and config.weight_sync != "filesystem":
        raise ConfigurationError(
            f"`weight_sync_dir` ({config.weight_sync_dir!r}) is only used with `weight_sync='filesystem'`, not "
            f"{config.weight_sync!r}. Set that, or leave it unset."
        )
    if config.uses_servers and not config.server_urls:
        raise ConfigurationError(f"`vllm_server_base_url` ({config.vllm_server_base_url!r}) names no server.")
    if config.uses_servers and len(set(config.server_urls)) < len(config.server_urls):
        raise ConfigurationError(
            f"`vllm_server_base_url` ({config.vllm_server_base_url!r}) names a server twice. Each address once."
        )
    if config.num_long_servers and not (config.uses_servers and config.num_long_servers < len(config.server_urls)):
        raise ConfigurationError(
            f"`num_long_servers` ({config.num_long_servers}) must be less than the number of vLLM servers "
            f"({len(config.server_urls) if config.uses_servers else 0}): the others take what is not long. Name more "
            "in `vllm_server_base_url`, or leave it out."
        )
    if (config.generation_kwargs or {}).get("n", 1) != 1:
        raise ConfigurationError(
            f"`generation_kwargs['n']` ({config.generation_kwargs['n']}) must be left out. The number of "
            "completions per prompt is `num_generations`, and of candidates `max_num_generations`."
        )


def _check_resumable(config: "DARTSGRPOConfig") -> None:
    """A candidate that goes on is a new request: what a server keeps count of within one begins anew."""
    if not config.schedule_settings.keeps_tokens:
        return
    counted = {name: (config.generation_kwargs or {}).get(name) for name in NOT_RESUMABLE}
    counted["vllm_structured_outputs_regex"] = config.vllm_structured_outputs_regex
    for name, value in counted.items():
        if value:
            raise ConfigurationError(
                f"`{name}` ({value!r}) does not run with `schedule` ({config.schedule!r}), whose unfinished "
                "completions go on in another request: the server would begin it anew there. Leave it out, or use a "
                "schedule that keeps no tokens."
            )


def _check_engine(config: "DARTSGRPOConfig") -> None:
    if config.schedule == "grpo" or config.use_vllm:
        return
    remedies = {
        "stop_strings": "Leave it out, or set `schedule='grpo'`, or use vLLM with `stop`.",
        "eos_token_id": "Set it in the `generation_config` of the model, or set `schedule='grpo'`.",
    }
    for name, remedy in remedies.items():
        if value := (config.generation_kwargs or {}).get(name):
            raise ConfigurationError(
                f"`generation_kwargs[{name!r}]` ({value!r}) does not run with `schedule` ({config.schedule!r}) on "
                "the transformers engines: a completion is complete at an end-of-sequence token of the model. "
                f"{remedy}"
            )


def _check_streams(config: "DARTSGRPOConfig") -> None:
    for name, least in STREAM_BOUNDS.items():
        if not getattr(config, name) >= least:
            raise ConfigurationError(f"`{name}` ({getattr(config, name)}) must be at least {least}.")
    for name in ("stream_cache_gib", "stream_reward_timeout_s"):
        if not getattr(config, name) > 0:
            raise ConfigurationError(f"`{name}` ({getattr(config, name)}) must be positive.")
    for name in ("stream_logprobs", "stream_rewards"):
        if getattr(config, name) and not config.uses_servers:
            raise ConfigurationError(
                f"`{name}` (True) only has an effect on vLLM servers: an engine in the trainer's own process leaves "
                "it no time. Set it to `False`, or set `use_vllm=True` and `vllm_mode='server'`."
            )
    if config.stream_rewards and config.schedule_settings.rounds(1) is not None:
        raise ConfigurationError(
            f"`stream_rewards` (True) does not run with `schedule` ({config.schedule!r}): which groups are trained on "
            "is only known when the rollout is over. Set it to `False`, or use `schedule='darts'` or `'grpo'`."
        )
    if config.stream_batch_tokens < config.stream_chunk_tokens:
        raise ConfigurationError(
            f"`stream_batch_tokens` ({config.stream_batch_tokens}) must be at least `stream_chunk_tokens` "
            f"({config.stream_chunk_tokens}): a forward pass takes whole chunks. Raise it, or lower that."
        )
