"""
The task of the tiny reasoner: arithmetic with intermediate steps.

There are two families of prompts, one for each pattern of long tails in the DARTS paper (section 3.2.2):

- `"sum"` (Pattern I, longer is more often wrong): `s:37+58=` is solved column by column in one short line,
  `7+8=15,3+5+1=9#95`. The writer may doubt: `?` begins one more line, `!` begins a panic of many lines. Each new line
  copies the one before and sometimes corrupts a column, so that longer solutions are less often right.
- `"chain"` (Pattern II, longer is more often right): `c:13+8+5+9=` needs a running sum, `+8=21+5=26+9=35#35`. The
  writer may guess at once or give up half-way, which is short and mostly wrong. A check (`?` or `!`) adds the terms
  again, with fewer mistakes than the first pass.

The writer is a random process that doubts more often if the prompt has many digits 7, 8 and 9. Prompts therefore
differ in the spread of their lengths, as an allocation by length variance requires. The answer is the text after the
last `#`.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset


FAMILIES = ("sum", "chain")
DIFFICULTIES = ("easy", "hard")
SPLITS = ("train", "test")
ALPHABET = "0123456789+=:,?!#sc"

# Number of digits of both addends ("sum") and number of terms ("chain"), inclusive ranges.
SIZES = {("sum", "easy"): (2, 2), ("sum", "hard"): (3, 4), ("chain", "easy"): (3, 6), ("chain", "hard"): (7, 9)}


@dataclass(frozen=True)
class Problem:
    """
    A prompt with its answer.

    Args:
        family (`str`):
            `"sum"` or `"chain"`.
        terms (`tuple[int, ...]`):
            Numbers to add.
    """

    family: str
    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """Input of the model, such as `s:37+58=`."""
        return f"{self.family[0]}:{'+'.join(map(str, self.terms))}="

    @property
    def answer(self) -> str:
        """Digits of the right answer."""
        return str(sum(self.terms))

    @property
    def distrust(self) -> int:
        """Number of digits 7, 8 and 9 in the prompt, which the writer distrusts."""
        return sum(char in "789" for char in self.prompt)

    @property
    def split(self) -> str:
        """`"test"` for one prompt in eight, by its text, otherwise `"train"`."""
        return "test" if zlib.crc32(self.prompt.encode()) % 8 == 0 else "train"


def draw_problem(rng: random.Random, family: str, difficulty: str = "easy") -> Problem:
    """
    Draws a problem.

    Args:
        rng (`random.Random`):
            Source of randomness.
        family (`str`):
            `"sum"` or `"chain"`.
        difficulty (`str`, *optional*, defaults to `"easy"`):
            `"easy"`, or `"hard"` for more digits (`"sum"`) or more terms (`"chain"`).

    Returns:
        [`Problem`]: The problem.
    """
    _check_choice("family", family, FAMILIES)
    _check_choice("difficulty", difficulty, DIFFICULTIES)
    size = rng.randint(*SIZES[family, difficulty])
    if family == "sum":
        terms = tuple(rng.randint(10 ** (size - 1), 10**size - 1) for _ in range(2))
    else:
        # With distinct digits and sums of two digits, two layers suffice to find the next term.
        terms = (rng.randint(10, 39), *rng.sample(range(1, 10), size - 1))
    return Problem(family, terms)


def make_dataset(
    num_prompts: int, seed: int, family: str | None = None, difficulty: str = "easy", split: str = "train"
) -> Dataset:
    """
    Builds a data set of distinct prompts in TRL's standard format.

    Args:
        num_prompts (`int`):
            Number of rows.
        seed (`int`):
            Seed: the same arguments give the same rows.
        family (`str`, *optional*):
            `"sum"` or `"chain"`. By default, the two alternate.
        difficulty (`str`, *optional*, defaults to `"easy"`):
            `"easy"`, or `"hard"` for more digits or more terms.
        split (`str`, *optional*, defaults to `"train"`):
            `"train"`, or `"test"` for prompts that are neither in the pretraining texts nor in `"train"`.

    Returns:
        [`~datasets.Dataset`]: Columns `prompt`, `answer` and `family`.

    Raises:
        [`ValueError`]: If an argument is out of range, or there are fewer distinct prompts.
    """
    if num_prompts < 1:
        raise ValueError(f"`num_prompts` ({num_prompts}) must be at least 1.")
    _check_choice("split", split, SPLITS)
    rng = random.Random(f"{seed}-{difficulty}-{split}")
    families = FAMILIES if family is None else (family,)
    problems: dict[Problem, None] = {}
    for _ in range(100 * num_prompts + 1000):
        if len(problems) == num_prompts:
            break
        problem = draw_problem(rng, families[len(problems) % len(families)], difficulty)
        if problem.split == split:
            problems.setdefault(problem)
    else:
        raise ValueError(f"`num_prompts` ({num_prompts}) is more than there are distinct prompts. Lower it.")
    rows = [{"prompt": p.prompt, "answer": p.answer, "family": p.family} for p in problems]
    return Dataset.from_list(rows)


def accuracy_reward(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **kwargs: Any
) -> list[float]:
    """
    Reward function for right answers, with TRL's arguments.

    Args:
        prompts (`Sequence[str]`):
            Prompts. Not used.
        completions (`Sequence[str]`):
            Texts of the model. The answer is the text after the last `#`.
        answer (`Sequence[str]`):
            Right answers.
        **kwargs:
            Other columns. Not used.

    Returns:
        `list[float]`: 1.0 for a right answer, otherwise 0.0.
    """
    return [float(text.rpartition("#")[1:] == ("#", right)) for text, right in zip(completions, answer, strict=True)]


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` ({value!r}) must be one of {', '.join(map(repr, choices))}.")
