"""
The training script: TRL's `trl/scripts/grpo.py` with our trainer. Each process of a launch runs it, of `trl-darts
grpo` or of `accelerate launch examples/train_grpo.py`.
"""

import importlib
import os
import sys
from typing import Any, cast

import typer
from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import AutoConfig
from trl import get_dataset  # type: ignore[attr-defined]  # exported lazily

from ..data_checks import check_data
from ..errors import ConfigurationError
from ..recipes.recipe import Recipe, read_command_line
from ..recipes.script import MADE_DATASET, OVERLONG, ScriptArguments
from .exits import one_line, one_line_errors


def load_rewards(script_args: ScriptArguments, max_completion_length: int) -> list[Any]:
    """The reward model if there is one, then functions of TRL or of import paths, also of the working directory."""
    rewards: list[Any] = []
    if script_args.reward_model_name_or_path:
        rewards.append(script_args.reward_model_name_or_path)
    sys.path.insert(0, os.getcwd())
    for name in script_args.reward_funcs or []:
        module, _, function = name.rpartition(".")
        try:
            reward = getattr(importlib.import_module(module or "trl.rewards"), function)
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"`reward_funcs` ({name!r}) can't be imported: {error}. Correct it.") from error
        rewards.append(reward(max_completion_length, script_args.soft_punish_cache) if name == OVERLONG else reward)
    return rewards


def check_model(recipe: Recipe) -> None:
    """Reads the model's configuration, which is small."""
    name, revision = str(recipe.model.model_name_or_path), recipe.model.model_revision
    try:
        AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=recipe.config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"`model_name_or_path` ({name!r}) can't be loaded: {one_line(error)}") from error


def load_splits(recipe: Recipe) -> Any:
    """The data set's splits by name."""
    script_args = recipe.script
    if script_args.dataset_name == MADE_DATASET and not recipe.datasets.datasets:
        from ..tiny_reasoner.task import make_dataset

        seed = recipe.config.seed
        return {
            "train": make_dataset(cast(int, script_args.num_prompts), seed),
            "test": make_dataset(64, seed, split="test"),
        }
    try:
        if recipe.datasets.datasets:  # wins over `dataset_name`, as in TRL's script
            return get_dataset(recipe.datasets)
        name, streaming = script_args.dataset_config, script_args.dataset_streaming
        return load_dataset(script_args.dataset_name, name=name, streaming=streaming)
    except (OSError, ValueError, DatasetGenerationError) as error:
        reason = one_line((isinstance(error, DatasetGenerationError) and error.__cause__) or error)
        given = "`datasets`" if recipe.datasets.datasets else f"`dataset_name` ({script_args.dataset_name!r})"
        raise ConfigurationError(f"{given} can't be loaded: {reason}") from error


def split_of(splits: Any, field: str, script_args: ScriptArguments) -> Any:
    """One of the splits, with conversations."""
    name = getattr(script_args, field)
    if name not in splits:
        raise ConfigurationError(f"`{field}` ({name!r}) must be a split of the data set: {', '.join(splits)}.")
    return to_conversations(splits[name], script_args)


def to_conversations(dataset: Any, script_args: ScriptArguments) -> Any:
    """With the columns `prompt` and `solution`, made of those that the arguments name."""
    columns = {"prompt": script_args.prompt_column, "solution": script_args.solution_column}
    for name, column in columns.items():
        if column is not None and dataset.column_names is not None and column not in dataset.column_names:
            known = ", ".join(dataset.column_names)
            raise ConfigurationError(f"`{name}_column` ({column!r}) must be a column of the data set: {known}.")
    system = [{"role": "system", "content": script_args.system_prompt}] if script_args.system_prompt else []

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        made = {name: row[column] for name, column in columns.items() if column is not None}
        if "prompt" in made:
            made["prompt"] = [*system, {"role": "user", "content": made["prompt"]}]
        return made

    return dataset.map(convert) if any(columns.values()) else dataset


def make_trainer(words: list[str]) -> tuple[Any, ScriptArguments]:
    """The trainer that a command line describes, with all that can be checked before its first step."""
    recipe = read_command_line(words)
    script_args, training_args, model_args = recipe.script, recipe.config, recipe.model
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    check_model(recipe)
    rewards = load_rewards(script_args, training_args.max_completion_length)
    splits = load_splits(recipe)
    train_dataset, eval_dataset = split_of(splits, "dataset_train_split", script_args), None
    if training_args.eval_strategy != "no":
        eval_dataset = split_of(splits, "dataset_test_split", script_args)
    check_data(training_args, train_dataset, eval_dataset)
    # What they load, vLLM too, takes seconds.
    from trl import get_peft_config, get_quantization_config  # type: ignore[attr-defined]

    from ..trainer import DARTSGRPOTrainer

    trainer = DARTSGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=rewards,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    return trainer, script_args


def main() -> None:
    """Trains as `sys.argv` says."""
    try:
        with one_line_errors(ImportError, OSError, ValueError):  # of TRL, transformers and PEFT too
            trainer, script_args = make_trainer(sys.argv[1:])
        with one_line_errors():  # of other errors, a traceback says where they are from
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    except KeyboardInterrupt as stopped:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(f"\n{str(stopped) or 'Stopped before the first step.'}", err=True)
        sys.exit(130)  # as after Ctrl-C in a shell
    trainer.save_model(trainer.args.output_dir)
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
