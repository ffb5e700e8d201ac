"""
Recipes: YAML files for `examples/train_grpo.py`. Reads one as the script does, on a machine that need not have its
GPUs: what it comes to, and what the trainer would refuse.
"""

import math
import os
from argparse import Action, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast, get_type_hints

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from trl import DatasetMixtureConfig, ModelConfig, TrlParser  # type: ignore[attr-defined]  # exported lazily

from ..checks import other_model
from ..config import OWN_CLASSES, DARTSGRPOConfig
from ..errors import ConfigurationError, did_you_mean
from ..training.resume import checkpoint_to_resume
from ..trl_compat import GRPOScriptArguments, is_math_verify_available
from .files import read_yaml, split_command_line
from .hub import resolve_config_arguments


MADE_DATASET = "tiny_reasoner"  # the script makes it, with examples/tiny_reasoner
OVERLONG = "get_soft_overlong_punishment"
MATH_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward")
REWARDS = (*MATH_REWARDS, "think_format_reward", OVERLONG)  # those that TRL's script knows by name
# Set for the check alone: with `use_cpu`, transformers looks for no GPU that can do bfloat16. For TF32 it always does.
WITHOUT_DEVICE = {"use_cpu": True, "tf32": None}


@dataclass
class ScriptArguments(GRPOScriptArguments):
    """TRL's arguments of a GRPO script, and what brings a data set and a reward into the form that TRL wants."""

    num_prompts: int | None = field(
        default=None, metadata={"help": "Prompts of the made data set `tiny_reasoner`, 512 by default."}
    )
    prompt_column: str | None = field(
        default=None,
        metadata={"help": "Column with the question, which becomes the user's message of a conversation in `prompt`."},
    )
    solution_column: str | None = field(
        default=None, metadata={"help": "Column with the answer, which becomes the column `solution`."}
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "First message of each conversation. Only with `prompt_column`."}
    )
    soft_punish_cache: int | None = field(
        default=None,
        metadata={
            "help": "Tokens before `max_completion_length` in which `get_soft_overlong_punishment` falls from 0 to -1 "
            "(DAPO, Eq. 13). Needed with that reward, and only with it."
        },
    )

    def __post_init__(self) -> None:
        is_made, count, cache = self.dataset_name == MADE_DATASET, self.num_prompts, self.soft_punish_cache
        _refuse(
            self.system_prompt is not None and self.prompt_column is None,
            f"`system_prompt` ({self.system_prompt!r:.60}) only has an effect with `prompt_column`. Set that, or "
            "leave it out.",
        )
        _refuse(
            count is not None and (count < 1 or not is_made),
            f"`num_prompts` ({count}) must be at least 1, and is only for `dataset_name` {MADE_DATASET!r}, which the "
            "script makes. Leave it out.",
        )
        unknown = [name for name in self.reward_funcs or [] if name not in REWARDS and not _is_import_path(name)]
        _refuse(
            bool(unknown),
            f"`reward_funcs` ({unknown}) must be among {', '.join(REWARDS)}, or import paths such as "
            "'my_package.rewards.my_reward'. Correct them.",
        )
        _refuse(
            (OVERLONG in (self.reward_funcs or [])) != (cache is not None and cache > 0),
            f"`soft_punish_cache` ({cache}) must be at least 1 with {OVERLONG!r}, and left out without it.",
        )
        self.num_prompts = 512 if is_made and count is None else count


def _is_import_path(name: str) -> bool:
    return "." in name and all(part.isidentifier() for part in name.split("."))


ARGUMENTS: list[Any] = [ScriptArguments, DARTSGRPOConfig, ModelConfig, DatasetMixtureConfig]  # what the script takes


@dataclass(frozen=True)
class Recipe:
    """A recipe, parsed, as one of the planned processes sees it."""

    script: ScriptArguments
    config: Any  # a `DARTSGRPOConfig`, with what its annotations call optional filled in
    model: ModelConfig
    datasets: DatasetMixtureConfig

    @property
    def prompts_per_generation(self) -> int:
        """Prompts that one generation takes from the data loader."""
        return int(self.config.generation_batch_size // self.config.num_generations)

    @property
    def prompts_per_step(self) -> float:
        """Prompts of one optimizer step; no whole number where a step ends within a prompt's rows."""
        passes = self.config.steps_per_generation / self.config.gradient_accumulation_steps
        return float(self.prompts_per_generation / passes)

    def rows(self, num_prompts: int | None = None) -> dict[str, str]:
        """What the recipe comes to, by name. The number of prompts is the data set's, where it is known."""
        config, prompts = self.config, self.prompts_per_generation
        made = self.script.num_prompts
        _refuse(
            made is not None and num_prompts not in (None, made),
            f"`--num-prompts` ({num_prompts}) must be the recipe's `num_prompts` ({made}). Leave it out.",
        )
        num_prompts = made or num_prompts
        steps = None if num_prompts is None else steps_per_epoch(num_prompts, prompts, config)
        in_all = None if steps is None else math.ceil(config.num_train_epochs * steps)
        in_all = config.max_steps if config.max_steps > 0 else in_all
        # Some schedules start more prompts than they train on, with every generation.
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

    def warnings(self, is_fsdp: bool = False) -> Iterator[str]:
        """What runs, and should not be so."""
        config = self.config
        if config.steps_per_generation % config.gradient_accumulation_steps:
            yield (
                f"`steps_per_generation` ({config.steps_per_generation}) is no multiple of "
                f"`gradient_accumulation_steps` ({config.gradient_accumulation_steps}): some optimizer steps mix rows "
                "of two generations. Make it one."
            )
        if self.prompts_per_step % 1:
            yield (
                f"An optimizer step has {self.prompts_per_step:g} prompts: the rows of one are split over two steps. "
                "Change `per_device_train_batch_size`, `gradient_accumulation_steps` or the number of processes."
            )
        kwargs = config.accelerator_config.gradient_accumulation_kwargs or {}
        if is_fsdp and config.gradient_accumulation_steps > 1 and not kwargs.get("sync_each_batch"):
            yield (
                f"`gradient_accumulation_steps` ({config.gradient_accumulation_steps}) keeps whole gradients on each "
                "GPU with FSDP2. Set `accelerator_config.gradient_accumulation_kwargs.sync_each_batch` to `true`."
            )
        warning = other_model(config.load_latency_curve(), config.latency_curve, self.model.model_name_or_path)
        if warning is not None:
            yield warning
        math_rewards = [name for name in self.script.reward_funcs or [] if name in MATH_REWARDS]
        if math_rewards and not is_math_verify_available():
            yield (
                f"`reward_funcs` ({math_rewards[0]!r}) needs math-verify where the training runs, and it is not "
                "installed here: pip install 'trl-darts[math]'"
            )


def steps_per_epoch(num_prompts: int, prompts_per_generation: int, config: Any) -> int:
    """Optimizer steps of one pass through the data. TRL leaves out prompts that do not fill a last generation."""
    if num_prompts < prompts_per_generation:
        raise ConfigurationError(
            f"`num_prompts` ({num_prompts}) must be at least the prompts of one generation "
            f"({prompts_per_generation}), or nothing is trained on. Take a larger data set, or a smaller batch."
        )
    passes = num_prompts // prompts_per_generation * config.steps_per_generation * config.num_iterations
    return -(-int(passes) // int(config.gradient_accumulation_steps))


def read_fields(path: str | Path) -> dict[str, Any]:
    """The fields of a recipe, with names and types checked. `env` holds environment variables."""
    values = read_yaml(path)
    for name, value in values.items():
        if name == "env" and isinstance(value, dict):
            continue
        if name not in _actions():
            raise _no_field(name, f"{path}: ")
        values[name] = _checked(name, value, _actions()[name])
    return values


def print_own_fields() -> None:
    """Prints the help of the fields that are ours: `--help` lists over 300 of others."""
    parser = ArgumentParser(usage="train_grpo.py --FIELD VALUE …", add_help=False)
    names = {name for cls in OWN_CLASSES for name in cls.__annotations__}
    for own in sorted((own for own in fields(DARTSGRPOConfig) if own.name in names), key=lambda own: own.name):
        text = f"{own.metadata['help']} [{own.default!r}]".replace("%", "%%")
        parser.add_argument(f"--{own.name}", help=text, metavar="")
    parser.print_help()


def read_recipe(path: str | Path, num_processes: int = 1) -> Recipe:
    """Reads a recipe as `examples/train_grpo.py` does, and refuses what the trainer would refuse."""
    values = {name: value for name, value in read_fields(path).items() if name != "env"}
    classes: list[Any] = [ScriptArguments, _planned(num_processes), ModelConfig, DatasetMixtureConfig]
    return _parse(classes, {**values, **WITHOUT_DEVICE})


def read_command_line(words: Sequence[str]) -> Recipe:
    """Reads what `examples/train_grpo.py` is given: the file of `--config`, and fields beside it, which win."""
    words, origin = resolve_config_arguments(words)
    words, path = split_command_line(words)
    values = {} if path is None else read_fields(path)
    for name, value in values.pop("env", {}).items():
        os.environ[str(name)] = str(value)
    recipe = _parse(ARGUMENTS, values, words)
    config = recipe.config
    config.origin = origin
    config.resume_from_checkpoint = checkpoint_to_resume(config.resume_from_checkpoint, config.output_dir)
    return recipe


def _parse(classes: list[Any], values: dict[str, Any], words: Sequence[str] = ()) -> Recipe:
    parser = _Parser(classes)
    parser.set_defaults_with_config(**values)
    try:
        recipe = Recipe(*parser.parse_args_into_dataclasses(args=list(words), look_for_args_file=False))
    except ConfigurationError:
        raise
    except (ValueError, TypeError, ZeroDivisionError) as error:  # TRL's, or those of transformers
        raise ConfigurationError(" ".join(str(error).split())) from error
    recipe.config.check_start()
    _check_recipe(recipe)
    return recipe


class _Parser(TrlParser):
    """TRL's parser. It raises its errors, and refuses unknown names before any config is made."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(
            f"{message[:1].upper()}{message[1:].rstrip('.')}. Correct it; `--help` lists the arguments."
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, others = super().parse_known_args(args, namespace)
        for word in others:
            if word.startswith("--"):
                raise _no_field(word.removeprefix("--").partition("=")[0].replace("-", "_"))
        return found, others


def _no_field(name: str, where: str = "") -> ConfigurationError:
    remedy = did_you_mean(name, sorted(_actions())) or " Remove it."
    return ConfigurationError(f"{where}`{name}` is not a field of the script, the trainer or the model.{remedy}")


def check_lengths(recipe: Recipe, max_prompt_length: int, max_model_len: int | None) -> None:
    """Refuses prompts and completions that are longer than the engine takes together."""
    config = recipe.config
    limits = {"--max-model-len": max_model_len, "vllm_max_model_length": config.vllm_max_model_length}
    for name, limit in limits.items():
        if limit is not None and config.max_completion_length + max(max_prompt_length, 1) > limit:
            raise ConfigurationError(
                f"`{name}` ({limit}) must be at least prompt and completion together: {max_prompt_length or 1} + "
                f"`max_completion_length` ({config.max_completion_length}). Raise it, or lower that."
            )


def _check_recipe(recipe: Recipe) -> None:
    """What no class's own check sees."""
    script, config, model = recipe.script, recipe.config, recipe.model
    num_rewards = len(script.reward_funcs or []) + bool(script.reward_model_name_or_path)
    weights, length, cache = config.reward_weights, config.max_completion_length, script.soft_punish_cache
    _refuse(not model.model_name_or_path, "`model_name_or_path` (empty) must be a model of the Hub, or a directory.")
    _check_directory("model_name_or_path", model.model_name_or_path)
    _check_directory("reward_model_name_or_path", script.reward_model_name_or_path)
    _refuse(
        not (script.dataset_name or recipe.datasets.datasets),
        f"`dataset_name` (empty) must be a data set of the Hub, a directory or {MADE_DATASET!r}. Or set `datasets`.",
    )
    _refuse(num_rewards == 0, "`reward_funcs` (empty) must name a reward. Or set `reward_model_name_or_path`.")
    _refuse(
        weights is not None and len(weights) != num_rewards,
        f"`reward_weights` ({weights}) must be as many as the rewards ({num_rewards}): the reward model if there is "
        "one, then `reward_funcs`. Correct it, or leave it out.",
    )
    _refuse(not length or length < 1, f"`max_completion_length` ({length}) must be at least 1. Set it.")
    _refuse(
        (cache or 0) > length, f"`soft_punish_cache` ({cache}) must be at most `max_completion_length` ({length})."
    )
    _refuse(
        recipe.prompts_per_generation < 1,
        f"The generation batch ({config.generation_batch_size} rows) must have at least one prompt. Raise "
        "`per_device_train_batch_size`.",
    )
    parallel = config.vllm_tensor_parallel_size
    _refuse(
        config.colocates and (parallel < 1 or config.world_size % parallel > 0),
        f"`vllm_tensor_parallel_size` ({parallel}) must divide the processes ({config.world_size}) with "
        "`vllm_mode='colocate'`. Change one of them.",
    )
    for name in ("load_in_8bit", "load_in_4bit"):
        _refuse(
            getattr(model, name) and not model.use_peft,
            f"`{name}` (True) needs `use_peft`: quantized weights can't be trained. Set that, or leave it out.",
        )
    _refuse(
        config.sync_ref_model and model.use_peft,
        "`sync_ref_model` (True) does not run with `use_peft` (True), whose reference is the model without its "
        "adapter. Leave one of them out.",
    )


def _refuse(is_broken: bool, message: str) -> None:
    if is_broken:
        raise ConfigurationError(message)


def _check_directory(name: str, model: str | None) -> None:
    _refuse(
        bool(model) and not _may_be_on_hub(model) and not Path(str(model), "config.json").is_file(),
        f"`{name}` ({model!r}) must be a directory with a model, which has a config.json, or a name on the Hub such "
        "as 'org/name'. Correct it.",
    )


def _may_be_on_hub(name: str | None) -> bool:
    try:
        validate_repo_id(str(name))
    except HFValidationError:
        return False
    return True


@cache
def _actions() -> dict[str, Action]:
    """What the command line makes of each field. `--no_x` comes after `--x`."""
    return {action.dest: action for action in reversed(TrlParser(ARGUMENTS)._actions) if action.dest != "help"}


@cache
def _hints() -> dict[str, Any]:
    """The annotation of each field. The fields' own types won't do: a parser that is built changes those."""
    return {name: hint for cls in ARGUMENTS for name, hint in get_type_hints(cls).items()}


def _checked(name: str, value: Any, action: Action) -> Any:
    """The value, if its type is right. The parser converts text such as `1e-6`, but not in a list."""
    hint = str(getattr(_hints()[name], "__name__", _hints()[name]))
    is_list, convert = isinstance(value, list), cast(Callable[[str], Any], action.type)
    is_name = isinstance(value, str) and name.startswith("lora_target")  # PEFT takes one name as well as a list
    try:
        if value is None or isinstance(value, dict):
            # A field may say `int` and be filled in later: its default is what `null` stands for.
            fits = ("None" if value is None else "dict") in hint or (value is None and action.default is None)
        elif is_list != (action.nargs == "+") and not is_name:
            fits = False
        else:
            converted = [convert(str(item)) for item in (value if is_list else [value])]
            fits = action.choices is None or all(item in action.choices for item in converted)
    except (ValueError, TypeError, ArgumentTypeError):
        fits = False
    if not fits:
        choices = "" if action.choices is None else f" and among {', '.join(map(str, action.choices))}"
        hint = f"{hint}{choices}" + (", in brackets" if action.nargs == "+" and not is_list else "")
        raise ConfigurationError(f"`{name}` ({value!r:.60}) must be of type {hint}. Correct it, or leave it out.")
    return [convert(item) if isinstance(item, str) else item for item in value] if is_list else value


def _planned(num_processes: int) -> type[DARTSGRPOConfig]:
    """A config whose batches are those of processes that are not there."""

    class Planned(DARTSGRPOConfig):
        @property
        def world_size(self) -> int:
            return num_processes

    return Planned
