"""What a check says about a recipe that parses: what ends a training, and what one should know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trl.import_utils import is_math_verify_available

from ..checks import check_combinations
from ..errors import ConfigurationError
from .memory import GIB, QUANTIZED_BYTES, MemoryEstimate
from .reading import Recipe
from .rewards import MATH_REWARDS, reward_models


@dataclass(frozen=True)
class Finding:
    """
    One finding.

    Args:
        fails (`bool`):
            Whether a training would fail.
        text (`str`):
            Argument, value, rule and remedy.
    """

    fails: bool
    text: str


def find(
    recipe: Recipe,
    memory: MemoryEstimate | None = None,
    gpu_memory: float | None = None,
    max_prompt_length: int | None = None,
    max_model_len: int | None = None,
) -> list[Finding]:
    """
    Looks at a recipe beside what its place has to offer.

    Args:
        recipe ([`Recipe`]):
            The recipe.
        memory ([`MemoryEstimate`], *optional*):
            What it takes on each GPU.
        gpu_memory (`float`, *optional*):
            GiB that each GPU has.
        max_prompt_length (`int`, *optional*):
            Tokens of the data set's longest prompt.
        max_model_len (`int`, *optional*):
            Tokens of prompt and completion that a vLLM server takes.

    Returns:
        `list[Finding]`: Those that end a training first.
    """
    found = [
        *_combinations(recipe),
        *_refused(recipe),
        *_divisions(recipe),
        *_lengths(recipe, max_prompt_length or 0, max_model_len),
        *_memory(recipe, memory, gpu_memory),
        *_installed(recipe),
    ]
    return sorted(found, key=lambda finding: not finding.fails)


def _combinations(recipe: Recipe) -> Iterator[Finding]:
    """What the trainer refuses of the config alone, in its words."""
    try:
        check_combinations(recipe.config)
    except ConfigurationError as error:
        yield Finding(True, str(error))


def _refused(recipe: Recipe) -> Iterator[Finding]:
    """What the trainer refuses when it is made, with the model at hand."""
    script, config, model = recipe.script, recipe.config, recipe.model
    num_rewards = len(reward_models(script)) + len(script.reward_funcs or [])
    if config.reward_weights is not None and len(config.reward_weights) != num_rewards:
        yield Finding(
            True,
            f"`reward_weights` ({config.reward_weights}) must be as many as the rewards ({num_rewards}): "
            "`reward_model_name_or_path` if it is set, then `reward_funcs`. Correct it, or leave it out.",
        )
    processes, parallel = recipe.plan.num_processes, config.vllm_tensor_parallel_size
    if config.colocates and (parallel < 1 or processes % parallel):
        yield Finding(
            True,
            f"`vllm_tensor_parallel_size` ({parallel}) must divide the processes ({processes}), whose GPUs vLLM "
            "shares with `vllm_mode='colocate'`. Change one of them.",
        )
    for name in QUANTIZED_BYTES:
        if getattr(model, name) and not model.use_peft:
            yield Finding(
                True,
                f"`{name}` (True) needs `use_peft`: quantized weights can't be trained, only an adapter beside them. "
                "Set that, or leave it out.",
            )
    if config.sync_ref_model and model.use_peft:
        yield Finding(
            True,
            "`sync_ref_model` (True) does not run with `use_peft` (True): the reference is the model without its "
            "adapter, which never changes. Leave one of them out.",
        )


def _divisions(recipe: Recipe) -> Iterator[Finding]:
    plan = recipe.plan
    if plan.steps_per_generation % plan.gradient_accumulation_steps:
        yield Finding(
            False,
            f"`steps_per_generation` ({plan.steps_per_generation}) is no multiple of `gradient_accumulation_steps` "
            f"({plan.gradient_accumulation_steps}): some optimizer steps mix rows of two generations. Make it one.",
        )
    if plan.prompts_per_step % 1:
        yield Finding(
            False,
            f"An optimizer step has {plan.prompts_per_step:g} prompts: the rows of one are split over two steps. Make "
            f"`per_device_train_batch_size` × processes × `gradient_accumulation_steps` a multiple of "
            f"`num_generations` ({plan.num_generations}).",
        )


def _lengths(recipe: Recipe, max_prompt_length: int, max_model_len: int | None) -> Iterator[Finding]:
    config = recipe.config
    limits = {"`--max-model-len`": max_model_len}
    if config.colocates:
        limits["`vllm_max_model_length`"] = config.vllm_max_model_length
    completion = recipe.max_completion_length
    for name, limit in limits.items():
        if limit is not None and completion + max(max_prompt_length, 1) > limit:
            yield Finding(
                True,
                f"{name} ({limit}) must be at least prompt and completion together: "
                f"{max_prompt_length or 'at least 1'} + `max_completion_length` ({completion}). Raise it, or "
                "lower that.",
            )


def _memory(recipe: Recipe, memory: MemoryEstimate | None, gpu_memory: float | None) -> Iterator[Finding]:
    if memory is None or gpu_memory is None:
        return
    config = recipe.config
    shared = config.colocates and not config.vllm_enable_sleep_mode
    free = gpu_memory * (1 - config.vllm_gpu_memory_utilization if shared else 1)
    remedy = "Use more processes with ZeRO-3 or FSDP2, LoRA, a smaller model or larger GPUs."
    beside = f" that vLLM leaves of {gpu_memory:g} GiB" if shared else ""
    if memory.state_bytes / GIB > free:
        yield Finding(
            True,
            f"Weights, gradients and optimizer states take {memory.state_bytes / GIB:.1f} GiB per GPU, and must fit "
            f"into {free:.1f} GiB{beside}. {remedy}",
        )
    elif memory.total_bytes / GIB > free:
        yield Finding(
            False,
            f"The estimate of {memory.total_bytes / GIB:.1f} GiB per GPU is over {free:.1f} GiB{beside}. Lower "
            f"`per_device_train_batch_size` or `max_completion_length`, or: {remedy}",
        )


def _installed(recipe: Recipe) -> Iterator[Finding]:
    names = [name for name in recipe.script.reward_funcs or [] if name in MATH_REWARDS]
    if names and not is_math_verify_available():
        yield Finding(
            False,
            f"`reward_funcs` ({names[0]!r}) needs math-verify where the training runs, and it is not installed here: "
            "pip install 'trl-darts[math]'",
        )
