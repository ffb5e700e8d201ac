"""
Reads recipes, the YAML files of `trl-darts grpo --config`. A recipe can be checked on a machine without GPUs: its
batch sizes and numbers of steps, and the errors that the trainer would raise.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers.utils import logging
from trl import DatasetMixtureConfig, ModelConfig, TrlParser  # type: ignore[attr-defined]  # exported lazily

from ..checks import other_model
from ..config import DARTSGRPOConfig
from ..errors import ConfigurationError
from ..training.resume import checkpoint_to_resume
from ..trl_compat import is_math_verify_available
from .fields import ARGUMENTS, Parser, checked
from .files import lines_of, read_yaml, split_command_line
from .hub import resolve_config_arguments
from .script import MADE_DATASET, MATH_REWARDS, ScriptArguments


logger = logging.get_logger(__name__)  # accelerate's needs a state, which does not exist when a script starts

SHIPPED_MODELS = {"tiny_reasoner": Path(__file__).parents[1] / "tiny_reasoner" / "checkpoint"}
# Only for the check: transformers looks for a GPU with bfloat16 unless `use_cpu` is set, and always for one with TF32.
WITHOUT_DEVICE = {"use_cpu": True, "tf32": None}


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe, for one of the planned processes."""

    script: ScriptArguments
    config: Any  # a `DARTSGRPOConfig`
    model: ModelConfig
    datasets: DatasetMixtureConfig

    @property
    def prompts_per_generation(self) -> int:
        """Prompts that one generation takes from the data loader."""
        return int(self.config.generation_batch_size // self.config.num_generations)

    @property
    def prompts_per_step(self) -> float:
        """Prompts of one optimizer step. It is fractional if a step ends within a prompt's rows."""
        passes = self.config.steps_per_generation / self.config.gradient_accumulation_steps
        return float(self.prompts_per_generation / passes)

    def rows(self, num_prompts: int | None = None) -> dict[str, str]:
        """Returns batch sizes and numbers of steps by name. `num_prompts` is the size of the data set, if known."""
        config, prompts = self.config, self.prompts_per_generation
        made = self.script.num_prompts
        if made is not None and num_prompts not in (None, made):
            raise ConfigurationError(
                f"`--num-prompts` ({num_prompts}) must be the recipe's `num_prompts` ({made}). Leave it out."
            )
        num_prompts = made or num_prompts
        steps = None if num_prompts is None else steps_per_epoch(num_prompts, prompts, config)
        in_all = None if steps is None else math.ceil(config.num_train_epochs * steps)
        in_all = config.max_steps if config.max_steps > 0 else in_all
        # Some schedules start more prompts per generation than they train on.
        least = config.generation_batch_size * (config.prompt_oversampling or 1) * (config.sorted_group_batches or 1)
        most = least * config.pool_ratio
        mean = least * (config.target_redundancy if config.pool_ratio > 1 else 1)
        passes = config.steps_per_generation * config.num_iterations / config.gradient_accumulation_steps
        return {
            "processes": f"{config.world_size}",
            "generation batch": f"{config.generation_batch_size:,} rows: {prompts:,} prompt{'s' * (prompts != 1)} × "
            f"{config.num_generations}",
            "optimizer step": f"{self.prompts_per_step:g} prompt{'s' * (self.prompts_per_step != 1)}; "
            f"{passes:g} step{'s' * (passes != 1)} per generation",
            "candidates": f"{least:,.0f} to {most:,.0f} per generation, {mean:,.0f} on average",
            "tokens at most": f"{most * config.max_completion_length:,.0f} per generation",
            "optimizer steps": "{} per epoch, {} in all".format(
                *("unknown (--num-prompts)" if number is None else f"{number:,}" for number in (steps, in_all))
            ),
        }

    def other_processes(self) -> str | None:
        """Returns a warning if the recipe is meant for another number of processes: its batches change with it."""
        meant, planned = self.script.num_processes, self.config.world_size
        if meant in (None, planned):
            return None
        return (
            f"`num_processes` ({meant}) must be the number of training processes ({planned}): an optimizer step has "
            f"{self.prompts_per_step:g} prompts instead of {self.prompts_per_step * meant / planned:g}. Launch with "
            f"`accelerate launch --num_processes {meant}`, or change it together with `gradient_accumulation_steps`."
        )

    def warnings(self, is_fsdp: bool = False) -> Iterator[str]:
        """Yields warnings about settings that run but are probably a mistake."""
        config = self.config
        if (warning := self.other_processes()) is not None:
            yield warning
        if config.steps_per_generation % config.gradient_accumulation_steps:
            yield (
                f"`steps_per_generation` ({config.steps_per_generation}) is not a multiple of "
                f"`gradient_accumulation_steps` ({config.gradient_accumulation_steps}): some optimizer steps mix rows "
                "of two generations. Change one of them."
            )
        if self.prompts_per_step % 1:
            yield (
                f"An optimizer step has {self.prompts_per_step:g} prompts: the rows of one are split over two steps. "
                "Change `per_device_train_batch_size`, `gradient_accumulation_steps` or the number of processes."
            )
        kwargs = config.accelerator_config.gradient_accumulation_kwargs or {}
        if is_fsdp and config.gradient_accumulation_steps > 1 and not kwargs.get("sync_each_batch"):
            yield (
                f"`gradient_accumulation_steps` ({config.gradient_accumulation_steps}) keeps unsharded gradients on "
                "each GPU with FSDP2. Set `accelerator_config.gradient_accumulation_kwargs.sync_each_batch` to `true`."
            )
        warning = other_model(config, self.model.model_name_or_path)
        if warning is not None:
            yield warning
        math_rewards = [name for name in self.script.reward_funcs or [] if name in MATH_REWARDS]
        if math_rewards and not is_math_verify_available():
            yield (
                f"`reward_funcs` ({math_rewards[0]!r}) needs math-verify on the machine that trains, and it is not "
                "installed here: pip install 'trl-darts[math]'"
            )


def steps_per_epoch(num_prompts: int, prompts_per_generation: int, config: Any) -> int:
    """Returns the optimizer steps of one epoch. TRL drops the last prompts if they don't fill a generation."""
    if num_prompts < prompts_per_generation:
        raise ConfigurationError(
            f"`num_prompts` ({num_prompts}) must be at least the prompts of one generation "
            f"({prompts_per_generation}), or nothing is trained on. Take a larger data set, or a smaller batch."
        )
    passes = num_prompts // prompts_per_generation * config.steps_per_generation * config.num_iterations
    return -(-int(passes) // int(config.gradient_accumulation_steps))


def read_fields(path: str | Path) -> dict[str, Any]:
    """Reads a recipe and checks its names and types. `env` holds environment variables."""
    values = read_yaml(path)
    fields, problems, _ = _checked_fields(values)
    if problems:
        raise _broken(path, problems)
    return fields


def _checked_fields(values: dict[str, Any]) -> tuple[dict[str, Any], list[str], set[str]]:
    """Returns the fields with a known name and a right type, all problems of the others, and their names."""
    fields, problems = {}, []
    for name, value in values.items():
        try:
            is_env = name == "env" and isinstance(value, dict)
            fields[name] = value if is_env else checked(name, value)
        except ConfigurationError as error:
            problems.append(str(error))
    return fields, problems, values.keys() - fields.keys()


def _broken(path: str | Path, problems: Sequence[str]) -> ConfigurationError:
    """Returns one error for all problems of a file, with the line of the field that each names first."""
    lines, told = lines_of(path), []
    for problem in problems:
        named = next((name for name in _named(problem) if name in lines), None)
        told.append(problem if named is None else f"{problem} (line {lines[named]})")
    if len(told) == 1:
        return ConfigurationError(f"{path}: {told[0]}")
    return ConfigurationError(f"{path}: {len(told)} errors:" + "".join(f"\n  {problem}" for problem in told))


def _named(message: str) -> list[str]:
    """Returns the fields that an error names."""
    return re.findall(r"`([\w.]+)`", message)


def _build(
    build: Callable[[dict[str, Any]], Recipe], values: dict[str, Any], left_out: set[str]
) -> tuple[Recipe | None, list[str]]:
    """
    Builds a recipe, or returns what is wrong with its values together. A config raises its first error, so the fields
    that it names are left out until none is raised. Errors that come from this, or name a field that was `left_out`
    before, don't count.
    """
    problems: list[str] = []
    while True:
        try:
            recipe = build(values)
            return None if problems else recipe, problems
        except ConfigurationError as error:
            raised = str(error).split("\n")
            problems += [problem for problem in raised if left_out.isdisjoint(_named(problem))]
            blamed = set(_named(str(error))) & values.keys()
            left_out = left_out | blamed
            if not blamed:
                return None, problems
            values = {name: value for name, value in values.items() if name not in blamed}


def read_recipe(path: str | Path, num_processes: int | None = None) -> Recipe:
    """
    Reads a recipe as the training command does, for the number of processes that it is meant for if no other is given.
    Raises the errors that the trainer would raise, all of them in one error.
    """
    values, problems, left_out = _checked_fields(read_yaml(path))
    values.pop("env", None)
    planned_processes = num_processes or max(values.get("num_processes") or 1, 1)
    planned = type("Planned", (DARTSGRPOConfig,), {"world_size": planned_processes})  # and batch sizes of as many
    classes: list[Any] = [ScriptArguments, planned, ModelConfig, DatasetMixtureConfig]
    recipe, others = _build(lambda fields: _parse(classes, {**fields, **WITHOUT_DEVICE}), values, left_out)
    if problems or recipe is None:
        raise _broken(path, [*problems, *others])
    return recipe


def read_command_line(words: Sequence[str]) -> Recipe:
    """Reads the arguments of the training script: the file of `--config`, and fields that override it."""
    words, origin = resolve_config_arguments(words)
    words, path = split_command_line(words)
    values, problems, left_out = _checked_fields({} if path is None else read_yaml(path))
    for name, value in values.pop("env", {}).items():
        os.environ[str(name)] = str(value)
    recipe, others = _build(lambda fields: _parse(ARGUMENTS, fields, words), values, left_out)
    if path is not None and problems:
        raise _broken(path, [*problems, *others])
    if recipe is None:
        raise ConfigurationError("\n".join(others))
    config = recipe.config
    if config.process_index == 0 and (warning := recipe.other_processes()) is not None:
        logger.warning(warning)
    recipe.model.model_name_or_path = shipped_model(str(recipe.model.model_name_or_path))
    config.origin = origin
    config.resume_from_checkpoint = checkpoint_to_resume(config.resume_from_checkpoint, config.output_dir)
    return recipe


def shipped_model(name: str) -> str:
    """Returns the directory of a model that comes with the package, or the name of another."""
    return name if Path(name).is_dir() else str(SHIPPED_MODELS.get(name, name))


def words_of_others(words: Sequence[str]) -> list[str]:
    """Returns the words that are neither a field of the script nor its value. Values of fields are checked."""
    parser = Parser(ARGUMENTS, allow_abbrev=False)
    return TrlParser.parse_known_args(parser, list(words))[1]


def _parse(classes: list[Any], values: dict[str, Any], words: Sequence[str] = ()) -> Recipe:
    parser = Parser(classes)
    parser.set_defaults_with_config(**values)
    try:
        recipe = Recipe(*parser.parse_args_into_dataclasses(args=list(words), look_for_args_file=False))
    except ConfigurationError:
        raise
    except (ValueError, TypeError, ZeroDivisionError) as error:  # raised by TRL or transformers
        raise ConfigurationError(" ".join(str(error).split())) from error
    problems = list(_problems(recipe))
    try:
        recipe.config.check_start()
    except ConfigurationError as error:
        problems.insert(0, str(error))
    if problems:
        raise ConfigurationError("\n".join(problems))
    return recipe


def check_lengths(recipe: Recipe, max_prompt_length: int, max_model_len: int | None) -> None:
    """Raises if prompt and completion together can exceed the engine's limit."""
    config = recipe.config
    limits = {"--max-model-len": max_model_len, "vllm_max_model_length": config.vllm_max_model_length}
    for name, limit in limits.items():
        if limit is not None and config.max_completion_length + max(max_prompt_length, 1) > limit:
            raise ConfigurationError(
                f"`{name}` ({limit}) must be at least prompt and completion together: {max_prompt_length or 1} + "
                f"`max_completion_length` ({config.max_completion_length}). Raise it, or lower that."
            )


def _problems(recipe: Recipe) -> Iterator[str]:
    """Yields what is wrong with values of several classes together."""
    script, config, model = recipe.script, recipe.config, recipe.model
    num_rewards = len(script.reward_funcs or []) + bool(script.reward_model_name_or_path)
    weights, length, cache = config.reward_weights, config.max_completion_length, script.soft_punish_cache
    if not model.model_name_or_path:
        yield "`model_name_or_path` (empty) must be a model of the Hub, or a directory."
    yield from _no_directory("model_name_or_path", model.model_name_or_path)
    yield from _no_directory("reward_model_name_or_path", script.reward_model_name_or_path)
    if not (script.dataset_name or recipe.datasets.datasets):
        yield (
            f"`dataset_name` (empty) must be a data set of the Hub, a directory or {MADE_DATASET!r}. Or set "
            "`datasets`."
        )
    if num_rewards == 0:
        yield "`reward_funcs` (empty) must name a reward. Or set `reward_model_name_or_path`."
    if weights is not None and len(weights) != num_rewards:
        yield (
            f"`reward_weights` ({weights}) must be as many as the rewards ({num_rewards}): the reward model if there "
            "is one, then `reward_funcs`. Correct it, or leave it out."
        )
    if (cache or 0) > length:
        yield f"`soft_punish_cache` ({cache}) must be at most `max_completion_length` ({length})."
    parallel = config.vllm_tensor_parallel_size
    if config.colocates and (parallel < 1 or config.world_size % parallel > 0):
        yield (
            f"`vllm_tensor_parallel_size` ({parallel}) must divide the processes ({config.world_size}) with "
            "`vllm_mode='colocate'`. Change one of them."
        )
    for name in ("load_in_8bit", "load_in_4bit"):
        if getattr(model, name) and not model.use_peft:
            yield f"`{name}` (True) needs `use_peft`: quantized weights can't be trained. Set that, or leave it out."
    if config.weight_sync == "adapter" and not model.use_peft:
        yield "`weight_sync` ('adapter') needs `use_peft`: it sends a LoRA adapter. Set that, or leave it out."
    if config.sync_ref_model and model.use_peft:
        yield (
            "`sync_ref_model` (True) does not run with `use_peft` (True), whose reference is the model without its "
            "adapter. Leave one of them out."
        )


def _no_directory(name: str, model: str | None) -> Iterator[str]:
    if model and not Path(model, "config.json").is_file():
        try:
            validate_repo_id(model)
        except HFValidationError:
            yield (
                f"`{name}` ({model!r}) must be a directory with a model, which has a config.json, or a name on the "
                "Hub such as 'org/name'. Correct it."
            )
