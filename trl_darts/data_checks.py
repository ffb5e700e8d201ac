"""
Checks the data that users bring, as TRL's loader will hand it out: a transform may make its rows on the fly. Only a
few rows are made. Streams are not read before the training, since that can take long or lose rows: their first batch
is checked.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from datasets import Dataset, IterableDataset
from trl import is_conversational  # type: ignore[attr-defined]  # exported lazily

from .errors import ConfigurationError
from .training.reward_checks import check_functions


MAX_CHECKED_PROMPTS = 100_000  # tokenized within seconds
NUM_MADE = 4  # rows that a transform may have to make
Row = dict[str, Any]


def some_rows(dataset: Any) -> list[Row]:
    """Returns the first rows of a data set as TRL's loader makes them; none of a stream."""
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return []
    places = list(range(min(NUM_MADE, len(dataset))))
    if places and hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(places))
    return [dataset[place] for place in places]


def columns_of(dataset: Any) -> list[str] | None:
    """Returns the columns of a data set's rows, or `None` if they are unknown, as a stream's may be."""
    if isinstance(dataset, IterableDataset):
        return dataset.column_names
    return next((list(row) for row in some_rows(dataset)), None)


def check_data(args: Any, train_dataset: Any, eval_dataset: Any = None, reward_funcs: Any = None) -> None:
    """
    Raises for data without prompts, or with too few for one generation, before the model is loaded, and for reward
    functions that need other columns. `reward_funcs` is `None` where a `rollout_func` may add their arguments.
    """
    if isinstance(train_dataset, list):
        raise _no_data("train_dataset", train_dataset)
    named = {"train_dataset": train_dataset}
    named |= eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
    for name, dataset in named.items():
        if dataset is not None:
            _check_dataset(name, dataset)
    needed = args.generation_batch_size // args.num_generations
    if isinstance(train_dataset, Dataset) and len(train_dataset) < needed:
        raise ConfigurationError(
            f"`train_dataset` ({len(train_dataset)} prompts) must have at least the prompts of one generation "
            f"({needed}). Use a larger data set, or a smaller batch."
        )
    check_functions(reward_funcs, columns_of(train_dataset))


def _check_dataset(name: str, dataset: Any) -> None:
    if isinstance(dataset, str | dict):
        raise _no_data(name, dataset)
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ConfigurationError(f"`{name}` (0 prompts) must have at least one. Leave it out, or use another.")
    if (columns := columns_of(dataset)) is not None:
        _check_columns(name, columns)
    for index, row in enumerate(some_rows(dataset)):
        _check_prompt(name, index, row["prompt"])
    # All messages of a data set have the same form, so a few conversations suffice.
    if isinstance(dataset, Dataset) and not _is_made(dataset) and _is_text(dataset):
        for start, prompts in prompts_of(dataset):
            for index, prompt in enumerate(prompts, start):
                _check_prompt(name, index, prompt)


def _no_data(name: str, dataset: Any) -> ConfigurationError:
    splits = f" Choose a split: {', '.join(map(repr, dataset))}." if isinstance(dataset, dict) else ""
    return ConfigurationError(
        f"`{name}` ({type(dataset).__name__}) must be a `Dataset` or an `IterableDataset`.{splits or ' Make one.'}"
    )


def _check_columns(name: str, columns: Sequence[str]) -> None:
    if "prompt" not in columns:
        raise ConfigurationError(
            f"`{name}` must have a column 'prompt', and has {', '.join(map(repr, columns))}. Rename one: "
            "`dataset.rename_column(…, 'prompt')`, or `prompt_column` of examples/train_grpo.py."
        )


def _check_prompt(name: str, index: int, prompt: Any) -> None:
    """Raises unless a prompt is text or a conversation. A tokenizer's error would not name the row."""
    is_chat = isinstance(prompt, list) and bool(prompt) and is_conversational({"prompt": prompt})
    if not isinstance(prompt, str) and not is_chat:
        raise ConfigurationError(
            f"`{name}` must have text or a list of messages with `role` and `content` in each 'prompt', and "
            f"row {index} has {prompt!r:.60}. Correct the row, or filter it out."
        )


def _is_made(dataset: Dataset) -> bool:
    """Whether a transform makes the rows, which can take long."""
    return bool(dataset.format["type"] == "custom")


def _is_text(dataset: Dataset) -> bool:
    return getattr(dataset.features["prompt"], "dtype", None) in ("string", "large_string")


def prompts_of(dataset: Dataset) -> Iterator[tuple[int, list[Any]]]:
    """Yields prompts, with the index of the first: all of them, or those of a few rows if a transform makes them."""
    if _is_made(dataset):
        yield 0, [row["prompt"] for row in some_rows(dataset)]
        return
    stored = dataset.with_format(None).select_columns("prompt")
    for start in range(0, min(len(dataset), MAX_CHECKED_PROMPTS), 1000):
        yield start, stored[start : start + 1000]["prompt"]


def has_images(dataset: Any) -> bool | None:
    """Whether a data set has image columns, or messages with images in its first rows. `None` if that is unknown."""
    if isinstance(dataset, IterableDataset):
        return True if {"image", "images"} & {*(dataset.column_names or ())} else None
    return any(map(_has_images, some_rows(dataset)))


def _has_images(row: Row) -> bool:
    if {"image", "images"} & row.keys():
        return True
    prompt = row.get("prompt")
    messages = prompt if isinstance(prompt, list) else []
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return any(part.get("type") == "image" and part.get("image") is not None for parts in contents for part in parts)


def unsaved_column(row: Row) -> str | None:
    """Returns why checkpoints can't save a row of the data set, which a buffer may keep. `None` if they can."""
    for column, value in row.items():
        try:
            json.dumps(value)
        except TypeError as error:
            cause = f"the column {column!r} ({type(value).__name__}) of the data set, which checkpoints can't save"
            return f"{cause}: {error}"
    return None


class FirstBatch:
    """TRL's collator for a stream. Raises if the rows of the first batch can't be trained on."""

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        self._collate = trainer.data_collator
        self._has_prompts = trainer.environment_factories is None
        self._reward_funcs = trainer.reward_funcs if self._has_prompts and trainer.rollout_func is None else None
        self._saves = f"{args.own_prompts} with" if args.buffers_prompts and args.save_strategy != "no" else None
        self._is_checked = False

    def __call__(self, rows: list[Row]) -> Any:
        if rows and not self._is_checked:
            self._check(rows)
            self._is_checked = True
        return self._collate(rows)

    def __reduce__(self) -> Any:  # for another loader's workers: functions may not be picklable
        return partial, (self._collate,)

    def _check(self, rows: list[Row]) -> None:
        if self._has_prompts:
            _check_columns("train_dataset", list(rows[0]))
            for index, row in enumerate(rows):
                _check_prompt("train_dataset", index, row["prompt"])
        check_functions(self._reward_funcs, list(rows[0]))
        if self._saves is not None and (cause := unsaved_column(rows[0])) is not None:
            raise ConfigurationError(
                f"{self._saves} {cause}. Convert it to text or numbers, or set `save_strategy='no'`."
            )
