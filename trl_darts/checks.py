"""Checks combinations of arguments before any GPU time is spent. The config checks single fields."""

from collections.abc import Callable, Sequence
from inspect import iscoroutinefunction
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback

from .buffer.make import plays_tools
from .buffer.session_source import SessionRollout
from .config import DARTSGRPOConfig
from .data_checks import MAX_CHECKED_PROMPTS, FirstBatch, has_images, prompts_of, unsaved_column
from .engines.sampling import user_seed
from .errors import ConfigurationError, did_you_mean
from .policy.siblings import SiblingCheck
from .scheduling import RolloutResult
from .scheduling.policies import AUTO
from .scheduling.settings import Facts
from .trl_compat import check_trl, has_fused_lm_head, is_sharded


logger = get_logger(__name__)

LIMITS = ("tool_timeout_s", "conversation_timeout_s", "stop_tools")  # of conversations that run each by itself
ENDED = ", whose conversations end with their rollout"  # tools or environments
LONG_END_ROLLOUTS = 8  # rollouts before the warning about long ends
GREEDY = 1e-5  # vLLM does not sample below this temperature
# Sampling options that change probabilities, with values that don't.
UNCHANGED: dict[str, tuple[Any, ...]] = {
    **{"top_k": (-1,), "top_p": (1,), "repetition_penalty": (1,)},
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), ()),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs"), ()),
    "vllm_structured_outputs_regex": (),
}


def check_arguments(args: Any, rollout_func: Callable[..., Any] | None, turns: str | None = None) -> None:
    """
    Raises for arguments of the trainer that can't work. `rollout_func` is the user's own generation. `turns` is the
    argument that makes a completion a conversation, if one does: unless candidates are whole conversations, they would
    be chosen by their first turn.
    """
    if not isinstance(args, DARTSGRPOConfig):
        raise ConfigurationError(
            f"`args` ({type(args).__name__}) must be a `DARTSGRPOConfig`. Replace the class, which has all fields of "
            "`GRPOConfig`."
        )
    check_trl()
    if args.stream_logprobs and not has_fused_lm_head():
        raise ConfigurationError(
            "`stream_logprobs` (True) needs TRL 1.15 or newer, whose `trl.trainer.utils.add_fused_lm_head` the "
            "installed one lacks. Upgrade TRL, or set it to `False`."
        )
    if turns and args.reuse_answers:
        raise ConfigurationError(
            f"`reuse_answers` (True) verifies answers that are a prompt's only turn, and does not run with `{turns}`. "
            "Set it to `False`."
        )
    args.resolve(Facts(no_deferral=f"`{turns}`{ENDED}") if turns else None)
    if rollout_func is not None:
        _check_rollout_func(args, rollout_func)
    if turns and args.over_provisions and not args.plays_conversations(turns == "environment_factory"):
        reason = f"`{turns}`, with which candidates would be chosen by the first turn of their conversations"
        args.resolve(Facts(whole_groups=reason))
        logger.warning(
            f"With `{turns}`, candidates would be chosen by the first turn of their conversations. So no more are "
            f"sampled than are trained on, {args.num_generations} per prompt, and all are waited for, as with "
            f"`schedule='grpo'`.{_split_groups(args)}"
        )
    args.check_start()


def _split_groups(args: Any) -> str:
    """Returns the remedy where environments of a group would be on several processes."""
    if not (args.plays_conversations(with_environments=False) and args.splits_groups):
        return ""
    return (
        f" Environments stay on their process: to choose among them, make its {args.rows_per_process} rows "
        "(`per_device_train_batch_size` × `steps_per_generation`) a multiple of `num_generations` "
        f"({args.num_generations})."
    )


def _check_rollout_func(args: Any, rollout_func: Callable[..., Any]) -> None:
    leads = iscoroutinefunction(rollout_func)
    if not leads and args.schedule != "grpo":
        raise ConfigurationError(
            f"`rollout_func` generates by itself, and `schedule` ({args.schedule!r}) would have no effect. Set "
            "`schedule='grpo'`, or make it a coroutine function of a `Session`, which leads one conversation."
        )
    if leads and not args.uses_servers:
        name = getattr(rollout_func, "__name__", rollout_func)
        raise ConfigurationError(
            f"`rollout_func` ({name!r}) is a coroutine, whose turns vLLM servers decode. Set `use_vllm=True` and "
            "`vllm_mode='server'`."
        )
    if args.tail_urls or args.buffers_prompts:
        given = f"`vllm_tail_server_url` ({args.vllm_tail_server_url!r}) does not run"
        given = given if args.tail_urls else args.own_prompts
        raise ConfigurationError(
            f"{given} with `rollout_func`, which generates its batch by itself. Leave one of them out."
        )


def check_objects(model: Any, callbacks: Any) -> None:
    """Raises for arguments of the trainer that are of another type, and would fail without their name."""
    if not isinstance(model, str) and not hasattr(model, "config"):
        raise ConfigurationError(
            f"`model` ({model!r:.60}) must be a name on the Hub, a directory, or a model of transformers. Correct it."
        )
    classes = [callback if isinstance(callback, type) else type(callback) for callback in callbacks or []]
    if wrong := [cls.__name__ for cls in classes if not issubclass(cls, TrainerCallback)]:
        raise ConfigurationError(
            f"`callbacks` ({', '.join(dict.fromkeys(wrong))}) must be a list of `TrainerCallback`s. Correct it."
        )


def other_model(args: Any, model: str | None) -> str | None:
    """Returns a warning if the curve was measured with another model. Not an error: names of checkpoints differ."""
    curve = args.load_latency_curve()
    if curve is None or curve.is_of(model):
        return None
    return (
        f"`latency_curve` ({args.latency_curve!r}) was measured with {curve.metadata.get('model')!r}, and the model "
        f"is {model!r}. Unless one is a checkpoint of the other, budgets follow another model's costs. Measure a "
        "curve with `trl-darts profile`."
    )


def warn_of_other_model(args: Any, model: str | None) -> None:
    if (warning := other_model(args, model)) is not None:
        logger.warning(warning)


def warn_of_cut_long_ends(args: Any, ratios: Sequence[float]) -> None:
    """
    Warns once, after the first rollouts, if `long_end_patience="auto"` mostly aborted the long end of the hardest
    prompts. `ratios` are the values of `darts/selection/long_end_ratio` so far.
    """
    cuts = args.keeps_long_end and args.long_end_patience == AUTO
    cuts = cuts and args.long_end_every is None and not args.defers_groups
    mean = sum(ratios) / max(1, len(ratios))
    if cuts and len(ratios) == LONG_END_ROLLOUTS and mean < 0.5:
        logger.warning(
            "`darts/selection/long_end_ratio` was %.2f over the first %d rollouts: with %d prompts per batch, "
            "`long_end_patience` ('auto') mostly aborts the longest answers to the hardest prompts. If these matter, "
            "use more prompts per batch, or set `long_end_every`.",
            mean,
            LONG_END_ROLLOUTS,
            args.generation_batch_size // args.num_generations,
        )


def tells_chance(args: Any) -> bool:
    """Whether log-probs are those of the sampling distribution. vLLM's are not where it takes the likeliest token."""
    given = (args.generation_kwargs or {}).get("temperature")
    return bool(args.vllm_importance_sampling_correction and (args.temperature if given is None else given) >= GREEDY)


def warn_of_twins(check: SiblingCheck, result: RolloutResult) -> bool:
    """Warns if kept rows of a group are equal beyond chance, and returns whether it did."""
    found = (check.find([(row.tokens, row.logprobs) for row in group.rows]) for group in result.groups)
    twins = next(filter(None, found), None)
    if twins is None:
        return False
    logger.warning(
        "Two answers to one prompt share their first %d tokens, whose log-prob of %.1f makes that all but impossible "
        "by chance: engines sample with the same random numbers, so that siblings spread less in rewards and lengths. "
        "Start the servers with `trl-darts serve`, or each with a `--seed` of its own and with this version of "
        "trl_darts in its environment.",
        twins.num_tokens,
        twins.logprob,
    )
    return True


def warn_of_lost_gradient(args: Any) -> None:
    """
    Warns if TRL's correction multiplies each answer's gradient by almost nothing. It compares vLLM's probability of a
    token among those that a sampling option leaves with the trainer's among all, so each token's ratio is below 1 by
    what the option takes away, and the product over an answer falls towards 0.
    """
    corrects = args.use_vllm and args.vllm_importance_sampling_correction
    if not corrects or not args.vllm_importance_sampling_mode.startswith("sequence"):
        return
    own = {name: getattr(args, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")}
    regex = {"vllm_structured_outputs_regex": args.vllm_structured_outputs_regex}
    given = {**own, **(args.generation_kwargs or {}), **regex}
    changed = [name for name, neutral in UNCHANGED.items() if given.get(name) and given[name] not in neutral]
    if changed:
        name = changed[0]
        logger.warning(
            f"`{name}` ({given[name]!r}) changes the probabilities that vLLM samples from, and the trainer's are not "
            f"changed. With `vllm_importance_sampling_mode` ({args.vllm_importance_sampling_mode!r}), which "
            "multiplies the ratios of an answer's tokens, long answers get almost no gradient: look at "
            "`sampling/importance_sampling_ratio/mean`. Set `vllm_importance_sampling_mode='token_truncate'` or "
            f"`vllm_importance_sampling_correction=False`, or leave `{name}` out."
        )


def check_path(trainer: Any) -> None:
    """Raises for combinations of model, data, processes and engine that can't work, once the trainer is built."""
    args = trainer.args
    _check_turns(trainer)
    _check_seed(trainer)
    _guard(trainer)
    _check_rounds(trainer)
    if args.use_transformers_continuous_batching and not args.use_vllm:
        gathered = trainer.is_deepspeed_enabled and args.ds3_gather_for_generation
        if is_sharded(trainer) and not gathered:
            raise ConfigurationError(
                "`use_transformers_continuous_batching` (True) does not run with a sharded model on "
                f"{trainer.accelerator.num_processes} processes: their numbers of forward passes differ, and each is "
                "a collective. Set it to `False`, or use `ds3_gather_for_generation=True` with DeepSpeed, or DDP."
            )
    patched = next((type(m).__name__ for m in trainer.model.modules() if _call_is_vllms(type(m))), None)
    if args.colocates and patched is not None:
        raise ConfigurationError(
            f"`vllm_model_impl` ({args.vllm_model_impl!r}) makes vLLM patch {patched} of transformers for the whole "
            "process, so that the trainer's model can't run. Set `vllm_model_impl='vllm'`, or use "
            "`vllm_mode='server'`."
        )
    takes_images = trainer._is_vlm and has_images(trainer.train_dataset)
    if args.uses_servers and takes_images and getattr(trainer.processing_class, "image_token_id", None) is None:
        raise ConfigurationError(
            f"`processing_class` ({type(trainer.processing_class).__name__}) has no `image_token_id`, which is needed "
            "to place a server's image features. Set it on the processor, or use `vllm_mode='colocate'` or "
            "`use_vllm=False`."
        )
    if isinstance(trainer.train_dataset, IterableDataset):
        trainer.data_collator = FirstBatch(trainer)
    warn_of_lost_gradient(args)


def check_prompt_lengths(trainer: Any) -> None:
    """Raises for prompts that are too long for the engine, before training starts. Called on the main process."""
    dataset = trainer.train_dataset
    known = isinstance(dataset, Dataset) and not trainer._is_vlm and trainer.environment_factories is None
    # Colocated vLLM rejects prompts itself, and engines on servers check each batch.
    if not known or trainer.args.colocates or len(dataset) > MAX_CHECKED_PROMPTS:
        return
    for start, prompts in prompts_of(dataset):
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        if [] in prompt_ids:
            raise ConfigurationError(
                f"Prompt {start + prompt_ids.index([])} of the training data set must have at least one token, and is "
                "empty. Filter it out."
            )
        trainer._engine.check_prompts(prompt_ids, "the training data set", start)


def _check_turns(trainer: Any) -> None:
    """
    Raises for conversations that can't be chosen among, and if the later turns of a tool loop would be collective
    operations: their number differs between processes. TRL does not check this and deadlocks.
    """
    args = trainer.args
    if trainer._is_vlm and trainer.tools and args.over_provisions:
        raise ConfigurationError(
            f"`schedule` ({args.schedule!r}) chooses among conversations of text, and does not run with `tools` and a "
            "vision-language model, whose tools may answer with images. Set `schedule='grpo'`."
        )
    _check_limits(trainer)
    if trainer.accelerator.num_processes == 1 or not (trainer.tools or trainer.environment_factories):
        return
    cause = None
    if args.colocates and args.vllm_tensor_parallel_size > 1:
        cause = f"`vllm_tensor_parallel_size` ({args.vllm_tensor_parallel_size})"
    elif is_sharded(trainer) and not args.use_vllm:
        cause = "a sharded model (FSDP or ZeRO-3) that generates"
    elif is_sharded(trainer) and args.colocates and args.vllm_enable_sleep_mode:
        cause = "`vllm_enable_sleep_mode` (True), which syncs a sharded model's weights in each turn,"
    if cause is not None:
        raise ConfigurationError(
            f"Tools and environments do not run with {cause} on {trainer.accelerator.num_processes} processes: tool "
            "loops differ in length, and each of their turns would be a collective. Use `vllm_mode='server'`."
        )


def _check_limits(trainer: Any) -> None:
    """Raises for limits of conversations that would have no effect."""
    args, names = trainer.args, [tool.__name__ for tool in trainer.tools or []]
    if unknown := [name for name in args.stop_tools or [] if name not in names]:
        raise ConfigurationError(
            f"`stop_tools` ({unknown[0]!r}) must be names of `tools`, or of methods of environments: {names}."
            f"{did_you_mean(unknown[0], names) or ' Correct it.'}"
        )
    if args.max_concurrent_conversations is not None and not _plays_conversations(trainer):
        raise ConfigurationError(
            f"`max_concurrent_conversations` ({args.max_concurrent_conversations}) has no effect where candidates are "
            "not whole conversations: it needs vLLM servers and tools, environments with whole groups on each "
            "process, or a coroutine as `rollout_func`. Leave it unset."
        )
    limits = [name for name in LIMITS if getattr(args, name) is not None]
    if limits and (trainer._is_vlm or not names):
        cause = "with a vision-language model, whose tool loop is TRL's" if names else "without tools"
        raise ConfigurationError(
            f"`{limits[0]}` ({getattr(args, limits[0])!r}) has no effect {cause}. Leave it unset."
        )


def _plays_conversations(trainer: Any) -> bool:
    leads = isinstance(trainer.rollout_func, SessionRollout) and not trainer._is_vlm
    return leads or plays_tools(trainer)


def _check_seed(trainer: Any) -> None:
    """Raises for a seed with which TRL would generate the later turns of all rows from the same random numbers."""
    args = trainer.args
    has_turns = bool(trainer.tools or trainer.environment_factories)
    if args.colocates and has_turns and (seed := user_seed(args.generation_kwargs)) is not None:
        raise ConfigurationError(
            f"`generation_kwargs['seed']` ({seed}) does not run with tools or environments and `vllm_mode` "
            "('colocate'): the later turns of all rows would have the same seed, so that equal rows stay equal. Leave "
            "it out, or use `vllm_mode='server'`."
        )


def _guard(trainer: Any) -> None:
    """Resolves the settings with what is known of the data, and logs why groups are not deferred by default."""
    args = trainer.args
    if args.defer_unsettled_groups is not None or not args.bounds_wait:  # not with tools, with which all are kept
        return
    no_deferral = _not_buffered(trainer)[0]
    args.resolve(Facts(no_deferral))
    cause = args.cannot_defer or no_deferral
    if cause is None:
        return
    instead = f"Instead, one rollout in {args.long_end_every} waits for all answers (`long_end_every`)."
    if args.is_continuous:
        instead = "If rare, long answers are the right ones, `schedule='grpo'` keeps them."
    logger.warning(
        f"Groups whose rewards are all equal are not deferred, which does not run with {cause}. {instead} Set "
        "`defer_unsettled_groups=False` if long answers don't matter."
    )


def _check_rounds(trainer: Any) -> None:
    """Raises for schedules with a prompt buffer if the rows can't be stored in it."""
    if not trainer.args.buffers_prompts:
        return
    cause, remedy = _not_buffered(trainer)
    if cause is not None:
        raise ConfigurationError(f"{trainer.args.own_prompts} with {cause}. {remedy}.")


def _not_buffered(trainer: Any) -> tuple[str | None, str]:
    """Returns why prompts can't be stored in a buffer, or `None`, and a remedy."""
    args = trainer.args
    if trainer.environment_factories is not None:
        return "`environment_factory`, which creates the prompts of each batch", "Leave one of them out"
    turns = "tools" if trainer.tools else "rollout_func" if trainer.rollout_func else None
    if args.over_provisions and turns is not None:
        return f"`{turns}`{ENDED}", "Set `defer_unsettled_groups=False`"
    if (args.drop_uniform_groups or args.scores_early) and trainer.tools:
        return "`tools`: rewards are only known after the tool loops", "Leave one of them out"
    if args.kv_after_update == "keep" and trainer.tools:
        cause = "`kv_after_update` ('keep') and `tools`, whose later turns could read keys and values of older weights"
        return cause, "Use `kv_after_update='recompute'`"
    if trainer._is_vlm and has_images(trainer.train_dataset) is not False:  # unknown of a stream
        return "images yet", "Leave it unset, or use a data set without images"
    unsaved = None if args.save_strategy == "no" else unsaved_column(trainer.train_dataset)  # of deferred prompts
    if unsaved is not None:
        return unsaved, "Convert it to text or numbers, or set `save_strategy='no'`"
    return None, ""


def _call_is_vllms(module_class: type) -> bool:
    return module_class.__call__.__module__.startswith("vllm.")
