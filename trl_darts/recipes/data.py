"""Data sets in the form that TRL's math rewards want: a conversation in `prompt`, and the answer in `solution`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigurationError
from .arguments import MADE_DATASET, ScriptArguments
from .rewards import CHAT_REWARDS, MATH_REWARDS


def check_dataset(arguments: ScriptArguments) -> None:
    """[`ConfigurationError`] unless the arguments name a data set."""
    if not arguments.dataset_name:
        raise ConfigurationError(
            f"`dataset_name` (empty) must be a data set of the Hub, a directory with one, or {MADE_DATASET!r}. Set it."
        )


def take_split(splits: Mapping[str, Any], argument: str, arguments: ScriptArguments) -> Any:
    """
    One split of a data set, in the form that the rewards want. The others need not be in it.

    Args:
        splits (`Mapping[str, Dataset]`):
            All splits by name.
        argument (`str`):
            Which: `"dataset_train_split"` or `"dataset_test_split"`.
        arguments ([`ScriptArguments`]):
            With its name, and what [`to_conversations`] reads.

    Returns:
        [`~datasets.Dataset`] or [`~datasets.IterableDataset`]: The split.

    Raises:
        [`ConfigurationError`]: If there is no such split, or it can't be brought into this form.
    """
    name = getattr(arguments, argument)
    if name not in splits:
        raise ConfigurationError(
            f"`{argument}` ({name!r}) must be a split of the data set, which has {', '.join(map(repr, splits))}. "
            "Take one of them."
        )
    return to_conversations(splits[name], arguments)


def to_conversations(dataset: Any, arguments: ScriptArguments) -> Any:
    """
    Makes the columns `prompt` and `solution` of those that the arguments name.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            One split.
        arguments ([`ScriptArguments`]):
            With `prompt_column`, `solution_column` and `system_prompt`.

    Returns:
        [`~datasets.Dataset`] or [`~datasets.IterableDataset`]: With these columns in addition, or as it was if the
        arguments name none.

    Raises:
        [`ConfigurationError`]: If the data set has no such column, or lacks what one of TRL's rewards reads.
    """
    _check_columns(dataset, arguments)
    if arguments.prompt_column is None and arguments.solution_column is None:
        return dataset
    system = [] if arguments.system_prompt is None else [{"role": "system", "content": arguments.system_prompt}]

    def columns(row: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if arguments.prompt_column is not None:
            made["prompt"] = [*system, {"role": "user", "content": row[arguments.prompt_column]}]
        if arguments.solution_column is not None:
            made["solution"] = row[arguments.solution_column]
        return made

    return dataset.map(columns)


def _check_columns(dataset: Any, arguments: ScriptArguments) -> None:
    if dataset.column_names is None:
        return  # a streamed data set that knows its columns once it is read
    names = {"prompt_column": arguments.prompt_column, "solution_column": arguments.solution_column}
    for argument, column in names.items():
        if column is not None and column not in dataset.column_names:
            raise ConfigurationError(
                f"`{argument}` ({column!r}) must be a column of the data set, which has "
                f"{', '.join(dataset.column_names)}."
            )
    rewards = arguments.reward_funcs or []
    chat = next((name for name in rewards if name in CHAT_REWARDS), None)
    prompt = (dataset.features or {}).get("prompt")
    if chat and arguments.prompt_column is None and getattr(prompt, "dtype", None) == "string":
        raise ConfigurationError(
            f"`reward_funcs` ({chat!r}) reads conversations, and the column 'prompt' has plain text. Set "
            "`prompt_column='prompt'`, which makes conversations of it."
        )
    math = next((name for name in rewards if name in MATH_REWARDS), None)
    if math and arguments.solution_column is None and "solution" not in dataset.column_names:
        raise ConfigurationError(
            f"`reward_funcs` ({math!r}) reads the column 'solution', and the data set has "
            f"{', '.join(dataset.column_names)}. Set `solution_column` to the one with the answer."
        )
