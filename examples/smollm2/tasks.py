"""
The tasks of this folder: prompts of [reasoning-gym](https://pypi.org/project/reasoning-gym/), rewarded by its scorers.

`measure.py` shows how the families were chosen.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset

from trl_darts.errors import ConfigurationError, did_you_mean


FOLDER = Path(__file__).parent / "tasks"
SPLITS = {"test": 16, "train": 64}  # prompts of each family; no prompt is in both
SEED = 0
# The settings of each family that differ from reasoning-gym's.
FAMILIES: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_value": 2, "max_value": 40},
    "letter_counting": {"min_words": 1, "max_words": 3},
}
TEMPERATURE = 0.7  # at 1.0, a model of this size often writes nonsense
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def load_gym() -> Any:
    """Imports reasoning-gym, which takes seconds. Raises with the command that installs it if it is missing."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "The tasks of examples/smollm2 need reasoning-gym. Install it with `pip install reasoning-gym==0.1.25`, "
            "or run `make smollm2`."
        ) from error
    return reasoning_gym


def draw(family: str, settings: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, list[dict[str, str]]]:
    """Returns a family's prompts by split, without duplicates, for splits of these sizes."""
    gym = load_gym()
    from reasoning_gym.factory import DATASETS

    if family not in DATASETS:
        raise ConfigurationError(
            f"`family` ({family!r}) must be a data set of reasoning-gym.{did_you_mean(family, DATASETS)}"
        )
    needed = sum(sizes.values())
    entries = {
        entry["question"]: entry for entry in gym.create_dataset(family, seed=SEED, size=16 * needed, **settings)
    }
    if len(entries) < needed:
        raise ConfigurationError(
            f"`family` ({family!r}) must have {needed} different prompts, and has {len(entries)} with the settings "
            f"{dict(settings)}. Widen them."
        )
    rows = (
        {"question": question, "family": family, "entry": json.dumps(entry)} for question, entry in entries.items()
    )
    return {split: list(islice(rows, size)) for split, size in sizes.items()}


def make_dataset(num_prompts: int, split: str = "train") -> Dataset:
    """
    Loads prompts in TRL's conversational format. The families alternate.

    Args:
        num_prompts (`int`):
            Number of rows, from the first on.
        split (`str`, *optional*, defaults to `"train"`):
            `"train"`, or `"test"` for prompts that are not in `"train"`.

    Returns:
        [`~datasets.Dataset`]: Columns `prompt`, `family` and `entry`, which holds what the scorer needs as JSON.

    Raises:
        [`ConfigurationError`]: If an argument is out of range, or the tasks were not made yet.
    """
    if split not in SPLITS:
        raise ConfigurationError(f"`split` ({split!r}) must be one of {', '.join(map(repr, SPLITS))}.")
    path = FOLDER / f"{split}.jsonl"
    if not path.exists():
        raise ConfigurationError(f"`split` ({split!r}) has no file {str(path)!r} yet. Run `make smollm2`.")
    lines = path.read_text().splitlines()
    if not 1 <= num_prompts <= len(lines):
        raise ConfigurationError(
            f"`num_prompts` ({num_prompts}) must be between 1 and {len(lines)}, as in {path.name}."
        )
    rows = [json.loads(line) for line in lines[:num_prompts]]
    return Dataset.from_list(
        [{"prompt": to_prompt(row["question"]), "family": row["family"], "entry": row["entry"]} for row in rows]
    )


def to_prompt(question: str) -> list[dict[str, str]]:
    """Returns the conversation that asks a question."""
    return [{"role": "user", "content": question}]


def accuracy_reward(
    completions: Sequence[Sequence[Mapping[str, str]]], family: Sequence[str], entry: Sequence[str], **kwargs: Any
) -> list[float]:
    """
    Reward function with TRL's arguments: the score that reasoning-gym gives to the last number of each completion.

    Args:
        completions (`Sequence[Sequence[Mapping[str, str]]]`):
            Conversations of one message each.
        family (`Sequence[str]`):
            Data set of reasoning-gym that each prompt is from.
        entry (`Sequence[str]`):
            Its entries, as JSON.
        **kwargs:
            Other columns. Not used.

    Returns:
        `list[float]`: 1.0 for a right answer, otherwise 0.0.
    """
    gym = load_gym()
    rows = zip(completions, family, entry, strict=True)
    return [
        float(gym.get_score_answer_fn(name)(final_number(completion[0]["content"]), json.loads(text)) == 1.0)
        for completion, name, text in rows
    ]


def final_number(text: str) -> str:
    """Returns the last number of a text: small models seldom keep to a format. Empty if there is none."""
    numbers = NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else ""
