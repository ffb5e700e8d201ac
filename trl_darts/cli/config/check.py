"""`trl-darts config check`: what a recipe comes to, before any GPU is paid for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...errors import ConfigurationError
from ..exits import USAGE_ERROR, fail


if TYPE_CHECKING:
    from ...recipes import MemoryEstimate, Recipe, Sharding


# typer reads annotations at run time, also on Python 3.10.
MaybeInt: TypeAlias = Optional[int]  # noqa: UP045
MaybeFloat: TypeAlias = Optional[float]  # noqa: UP045
whole = partial(typer.Option, min=1)


@dataclass(frozen=True)
class _Place:
    """Where a recipe is to run, as far as it is known."""

    num_processes: int
    sharding: Sharding
    num_prompts: int | None
    max_prompt_length: int | None
    max_model_len: int | None
    num_parameters: float | None
    gpu_memory: float | None


def check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Recipes: YAML files for `examples/train_grpo.py`.")
    ],
    num_processes: Annotated[
        MaybeInt, whole(help="Processes that train. Default: the accelerate config's, or 1.")
    ] = None,
    accelerate_config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="What `accelerate launch --config_file` gets. Default: nothing is sharded."),
    ] = None,
    num_prompts: Annotated[
        MaybeInt, whole(help="Prompts in the data set, where the recipe has no `num_prompts`.")
    ] = None,
    max_prompt_length: Annotated[MaybeInt, whole(help="Tokens of the longest prompt in the data set.")] = None,
    max_model_len: Annotated[MaybeInt, whole(help="What `trl-darts serve --max-model-len` gets.")] = None,
    num_parameters: Annotated[
        MaybeFloat, typer.Option(min=1, help="Parameters, such as 7.6e9, where the model's config can't be read.")
    ] = None,
    gpu_memory: Annotated[MaybeFloat, typer.Option(min=0, help="GiB of one GPU: does the estimate fit?")] = None,
) -> None:
    """
    Check recipes: fields, batch arithmetic, lengths, and an estimate of memory.

    Nothing is loaded but the model's config, and no GPU is needed. Exit code 2 if a training would fail.

    Example:

        trl-darts config check configs/tiny_reasoner.yaml --num-processes 2 --gpu-memory 80
    """
    sharding = _sharding(accelerate_config)
    processes = num_processes or sharding.num_processes or 1
    place = _Place(processes, sharding, num_prompts, max_prompt_length, max_model_len, num_parameters, gpu_memory)
    passed = [_check(path, place) for path in files]  # all of them, also after one that fails
    if not all(passed):
        raise typer.Exit(USAGE_ERROR)


def _sharding(accelerate_config: Path | None) -> Sharding:
    # torch and TRL take seconds to load, for which `--help` should not wait.
    from ...recipes import Sharding, read_sharding

    try:
        return Sharding() if accelerate_config is None else read_sharding(accelerate_config)
    except ConfigurationError as error:
        fail(str(error))


def _check(path: Path, place: _Place) -> bool:
    """Prints what is to be said of one file; whether a training would run."""
    from ...recipes import find, read_recipe

    try:
        recipe = read_recipe(path, place.num_processes)
        rows = {**_batch_rows(recipe), **_step_rows(recipe, place), **_length_rows(recipe, place)}
        memory, memory_rows = _memory(recipe, place)
    except ConfigurationError as error:
        typer.echo(f"Error: {path}: {error}", err=True)
        return False
    console = Console()
    console.print(escape(str(path)), style="italic", highlight=False, soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in {**rows, **memory_rows}.items():
        table.add_row(name, escape(value))  # an error may have brackets: pip install 'trl-darts[peft]'
    console.print(table, "")
    findings = find(recipe, memory, place.gpu_memory, place.max_prompt_length, place.max_model_len)
    for finding in findings:
        typer.echo(f"{'Error' if finding.fails else 'Warning'}: {path}: {finding.text}", err=True)
    return not any(finding.fails for finding in findings)


def _batch_rows(recipe: Recipe) -> dict[str, str]:
    plan, config = recipe.plan, recipe.config
    # Schedules that start more prompts than they train on do so with every generation.
    more = (config.prompt_oversampling or 1) * (config.sorted_group_batches or 1)
    least = round(plan.generation_batch_size * more)
    target = config.target_redundancy if config.over_provisions else 1
    most = round(least * config.pool_ratio)
    return {
        "processes": f"{plan.num_processes}",
        "per-device batch": f"{plan.per_device_batch_size:,}",
        "gradient accumulation": f"{plan.gradient_accumulation_steps:,}",
        "generation batch": f"{plan.generation_batch_size:,} rows: {plan.prompts_per_generation:,} prompts × "
        f"{plan.num_generations}",
        "optimizer step": f"{plan.prompts_per_step:g} prompts; steps per generation: {plan.steps_of_generation:g}",
        "candidates": f"{least:,} to {most:,} per generation, {round(least * target):,} on average",
        "tokens at most": f"{most * recipe.max_completion_length:,} per generation",
    }


def _step_rows(recipe: Recipe, place: _Place) -> dict[str, str]:
    plan, config, num_prompts = recipe.plan, recipe.config, _num_prompts(recipe, place)
    per_epoch = None if num_prompts is None else plan.steps_per_epoch(num_prompts)
    in_all = plan.num_steps(num_prompts, config.num_train_epochs, config.max_steps)
    counts = ("unknown (--num-prompts)" if number is None else f"{number:,}" for number in (per_epoch, in_all))
    return {"optimizer steps": "{} per epoch, {} in all".format(*counts)}


def _num_prompts(recipe: Recipe, place: _Place) -> int | None:
    """Size of the data set, if it is known: that of one that is made stands in the recipe."""
    made, given = recipe.num_made_prompts, place.num_prompts
    if made is not None and given not in (None, made):
        raise ConfigurationError(
            f"`--num-prompts` ({given}) must be the recipe's `num_prompts` ({made}), of which its data set is made. "
            "Leave it out, or change `num_prompts` there."
        )
    return given if made is None else made


def _length_rows(recipe: Recipe, place: _Place) -> dict[str, str]:
    completion, prompt, limit = recipe.max_completion_length, place.max_prompt_length, place.max_model_len
    words = f"{'unknown (--max-prompt-length)' if prompt is None else f'{prompt:,}'} + {completion:,} tokens"
    if limit is not None:
        words += f", and the server takes {limit:,}"
    return {"prompt and completion": words}


def _memory(recipe: Recipe, place: _Place) -> tuple[MemoryEstimate | None, dict[str, str]]:
    """The estimate, and its rows of the table."""
    from ...recipes import ModelSize, UnreadableModelError, estimate_memory, read_model_size
    from ...recipes.memory import GIB

    try:
        size = read_model_size(recipe.model) if place.num_parameters is None else ModelSize(place.num_parameters)
    except (UnreadableModelError, ImportError) as error:
        return None, {"memory per GPU": f"unknown. {error}"}
    memory = estimate_memory(
        size, recipe.config, recipe.model, place.sharding, place.num_processes, place.max_prompt_length or 0
    )
    parts = {f"  {name}": f"{value / GIB:7.1f} GiB" for name, value in {**memory.states, **memory.rough}.items()}
    total = f"{memory.total_bytes / GIB:7.1f} GiB, an estimate for {size.num_parameters:.4g} parameters"
    notes = {"  not counted": "; ".join(memory.notes)} if memory.notes else {}
    return memory, {"memory per GPU": f"{total} with {place.sharding.name}", **parts, **notes}
