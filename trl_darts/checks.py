"""Combinations that can't work, refused before any GPU time is spent. Single fields are checked by the config."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset

from .config import DARTSGRPOConfig
from .errors import ConfigurationError
from .policy import LatencyCurve
from .scheduling.policies import AUTO


logger = get_logger(__name__)

# Tokenizing this many prompts takes seconds.
MAX_CHECKED_PROMPTS = 100_000
LONG_END_ROLLOUTS = 8  # after so many it is clear whether long ends are kept


def check_arguments(args: Any, rollout_func: Callable[..., Any] | None) -> None:
    """Refuses arguments of the trainer that can't work. `rollout_func` is a user's own generation."""
    if not isinstance(args, DARTSGRPOConfig):
        raise ConfigurationError(
            f"`args` ({type(args).__name__}) must be a `DARTSGRPOConfig`. Replace the class's name: all of "
            "`GRPOConfig`'s fields stay."
        )
    if rollout_func is not None and args.schedule != "grpo":
        raise ConfigurationError(
            f"`rollout_func` generates by itself, and `schedule` ({args.schedule!r}) would have no effect. Set "
            "`schedule='grpo'`, or leave `rollout_func` out."
        )
    if rollout_func is not None and args.tail_urls:
        raise ConfigurationError(
            f"`vllm_tail_server_url` ({args.vllm_tail_server_url!r}) does not run with `rollout_func`, which "
            "generates by itself. Leave one of them out."
        )
    if rollout_func is not None and args.buffers_prompts:
        raise ConfigurationError(
            f"{args.own_prompts} with `rollout_func`, which generates by itself when its batch comes. Set "
            f"{args.without_own_prompts}."
        )
    args.check_start()


def check_datasets(args: Any, train_dataset: Any, eval_dataset: Any = None) -> None:
    """Refuses data without prompts, or with fewer than one generation takes, before the model is loaded."""
    named = {"train_dataset": train_dataset}
    named |= eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
    for name, dataset in named.items():
        columns = None if dataset is None else getattr(dataset, "column_names", None) or list(next(iter(dataset), {}))
        if columns and "prompt" not in columns:
            raise ConfigurationError(
                f"`{name}` must have a column 'prompt', and has {', '.join(map(repr, columns))}. Rename one: "
                "`dataset.rename_column(…, 'prompt')`, or `prompt_column` of examples/train_grpo.py."
            )
    needed = args.generation_batch_size // args.num_generations
    if isinstance(train_dataset, Dataset) and len(train_dataset) < needed:
        raise ConfigurationError(
            f"`train_dataset` ({len(train_dataset)} prompts) must have at least the prompts of one generation "
            f"({needed}), or nothing is trained on. Take a larger data set, or a smaller batch."
        )


def other_model(curve: LatencyCurve | None, path: str | None, model: str | None) -> str | None:
    """The warning of a curve of another model. It is no error: a checkpoint has another directory's name."""
    if curve is None or curve.is_of(model):
        return None
    return (
        f"`latency_curve` ({path!r}) was measured with {curve.metadata.get('model')!r}, and the model is {model!r}. "
        "If one is not a checkpoint of the other, budgets follow another model's costs: measure a curve with "
        "`trl-darts profile`."
    )


def warn_of_cut_long_ends(args: Any, ratios: Sequence[float]) -> None:
    """
    Warns once, after the first rollouts, where a wait that follows the batch mostly ended before the hardest prompts
    had their long end. `ratios` are those of all rollouts so far that have one.
    """
    cuts = args.keeps_long_end and args.long_end_patience == AUTO and args.long_end_every is None
    mean = sum(ratios) / max(1, len(ratios))
    if cuts and len(ratios) == LONG_END_ROLLOUTS and mean < 0.5:
        logger.warning(
            "`darts/selection/long_end_ratio` was %.2f over the first %d rollouts: with %d prompts per batch, "
            "`long_end_patience` ('auto') mostly aborts the longest answers of the hardest. Where those matter, use "
            "more prompts per batch, or set `long_end_every`.",
            mean,
            LONG_END_ROLLOUTS,
            args.generation_batch_size // args.num_generations,
        )


def has_images(dataset: Any) -> bool:
    """Whether a data set has TRL's columns of images, or messages with images in its first row."""
    if dataset is None:
        return False
    row: dict[str, Any] = next(iter(dataset), {})
    if {"image", "images"} & row.keys():
        return True
    prompt = row.get("prompt")
    messages = prompt if isinstance(prompt, list) else []
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return any(part.get("type") == "image" and part.get("image") is not None for parts in contents for part in parts)


def check_path(trainer: Any) -> None:
    """Refuses combinations of model, data, processes and engine that can't work, once the trainer is built."""
    args = trainer.args
    _check_turns(trainer)
    _check_rounds(trainer)
    if args.use_transformers_continuous_batching and not args.use_vllm:
        gathered = trainer.is_deepspeed_enabled and args.ds3_gather_for_generation
        if trainer.is_sharded and not gathered:
            raise ConfigurationError(
                "`use_transformers_continuous_batching` (True) does not run with a sharded model on "
                f"{trainer.accelerator.num_processes} processes: their numbers of forward passes differ, and each is "
                "a collective. Set it to `False`, or use `ds3_gather_for_generation=True` with DeepSpeed, or DDP."
            )
    patched = next((type(m).__name__ for m in trainer.model.modules() if _call_is_vllms(type(m))), None)
    if args.colocates and patched is not None:
        raise ConfigurationError(
            f"`vllm_model_impl` ({args.vllm_model_impl!r}) has vLLM change {patched} of transformers for the whole "
            "process, and the trainer's own model, which is one, can't run any more. Set `vllm_model_impl='vllm'`, or "
            "use `vllm_mode='server'`."
        )
    takes_images = trainer._is_vlm and has_images(trainer.train_dataset)
    if args.uses_servers and takes_images and getattr(trainer.processing_class, "image_token_id", None) is None:
        raise ConfigurationError(
            f"`processing_class` ({type(trainer.processing_class).__name__}) has no `image_token_id`, by which a "
            "server's images are put into the prompt. Set it on the processor, or use `vllm_mode='colocate'` or "
            "`use_vllm=False`."
        )


def check_positions(config: Any, prompts: Sequence[Sequence[int]], where: str, first_index: int = 0) -> None:
    """Refuses prompts that fill all positions of a model, on the transformers engines. As an engine's own check."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    lengths = {first_index + i: len(prompt) for i, prompt in enumerate(prompts) if len(prompt) >= limit}
    if lengths:
        first = ", ".join(f"prompt {index} has {length}" for index, length in list(lengths.items())[:5])
        raise ConfigurationError(
            f"{len(lengths)} prompts of {where} leave no room for a completion ({first} tokens): the model has "
            f"{limit} positions (`max_position_embeddings`). Filter the data set, or take a model for longer texts."
        )


def check_prompt_lengths(trainer: Any, check_prompts: Callable[[list[list[int]], str, int], None]) -> None:
    """
    Looks for prompts that the engine can't take now, not at the step in which they come up, with `check_prompts`. On
    the main process.
    """
    dataset = trainer.train_dataset
    known = isinstance(dataset, Dataset) and not trainer._is_vlm and trainer.environment_factories is None
    if not known or len(dataset) > MAX_CHECKED_PROMPTS:
        return  # servers' engines check each batch all the same
    for start in range(0, len(dataset), 1000):
        prompt_ids, _, _ = trainer._tokenize_prompts(dataset[start : start + 1000]["prompt"])
        check_prompts(prompt_ids, "the training data set", start)


def _check_turns(trainer: Any) -> None:
    """
    The later turns of a tool loop are as many as the process's own rows need, so none of them may be a collective.
    TRL does not look, and stands still.
    """
    args = trainer.args
    if trainer.accelerator.num_processes == 1 or not (trainer.tools or trainer.environment_factories):
        return
    cause = None
    if args.colocates and args.vllm_tensor_parallel_size > 1:
        cause = f"`vllm_tensor_parallel_size` ({args.vllm_tensor_parallel_size})"
    elif trainer.is_sharded and not args.use_vllm:
        cause = "a sharded model (FSDP or ZeRO-3) that generates"
    elif trainer.is_sharded and args.colocates and args.vllm_enable_sleep_mode:
        cause = "`vllm_enable_sleep_mode` (True), which syncs a sharded model's weights in each turn,"
    if cause is not None:
        raise ConfigurationError(
            f"Tools and environments do not run with {cause} on {trainer.accelerator.num_processes} processes: tool "
            "loops differ in length, and each of their turns would be a collective. Use `vllm_mode='server'`."
        )


def _check_rounds(trainer: Any) -> None:
    """Schedules that choose their prompts need rows that are nothing but text."""
    args = trainer.args
    if not args.buffers_prompts:
        return
    start, remedy = args.own_prompts, args.without_own_prompts
    if trainer.environment_factories is not None:
        raise ConfigurationError(
            f"{start} with `environment_factory`, whose prompts are made when their batch comes. Use {remedy}."
        )
    if args.drop_uniform_groups and trainer.tools:
        raise ConfigurationError(f"{start} with `tools`: rewards are known once tool loops are over. Use {remedy}.")
    if trainer._is_vlm and has_images(trainer.train_dataset):
        raise ConfigurationError(f"{start} with images yet. Use {remedy}, or a data set without images.")
    _check_rows(trainer, start)


def _check_rows(trainer: Any, start: str) -> None:
    """Prompts that are left over go into checkpoints, as JSON."""
    if trainer.args.save_strategy == "no":
        return
    for column, value in next(iter(trainer.train_dataset), {}).items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ConfigurationError(
                f"{start} with the column {column!r} ({type(value).__name__}) of the data set: {error}, and prompts "
                "that are left over go into checkpoints. Convert it to text or numbers, or set `save_strategy='no'`."
            ) from error


def _call_is_vllms(module_class: type) -> bool:
    return module_class.__call__.__module__.startswith("vllm.")
