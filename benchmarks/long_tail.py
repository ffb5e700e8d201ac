"""
A task whose tail stays: a Markov chain that GRPO trains, and a reward that hardly depends on length.

A prompt is a number and the letter of its kind. An answer thinks for a while, in one of three modes or without end,
and longer for some kinds than for others; then it grades itself. `+` is right; `-`, and no grade by the limit, are
wrong.
Each kind and mode has its own grade to learn. For half of the kinds longer answers are right a little more often, for
the other half a little less often.

Only the LM head is trained, which is the table of the chain's transitions. So what plain sampling would give after any
step is computed and not sampled, see [`Answers`].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.models import EOS_ID, VOCAB_SIZE, chain_model, make_tokenizer, save_model


KINDS = "ABCDEFGHIJKL"
MODES = (
    (0.695, 1.0),
    (0.25, 3.5),
    (0.05, 11.0),
)  # share of the answers, and lengths over the first mode's
ENDLESS_SHARE = 0.005
SHORTEST, LONGEST = 4.0, 14.0  # mean tokens of thinking in the first mode, of the first and the last kind
RIGHT_SHARE, SLOPE = 0.35, 0.05  # of the answers of a mode at first, and its change from mode to mode
EQUAL_LENGTH = 40
LIMIT = 256  # of an answer
TOKENIZER = make_tokenizer()
RIGHT, WRONG = TOKENIZER.convert_tokens_to_ids(["+", "-"])
_LETTERS = TOKENIZER.convert_tokens_to_ids([*KINDS])
_DIGITS = TOKENIZER.convert_tokens_to_ids([*"0123456789"])
_STATES = [i for i in range(3, VOCAB_SIZE) if i not in {RIGHT, WRONG, *_LETTERS, *_DIGITS}]  # the chain's own tokens


def right_shares() -> np.ndarray:
    """Share of right answers, `(kinds, modes)`."""
    signs = np.where(np.arange(len(KINDS)) % 2, 1, -1)[:, None]
    return RIGHT_SHARE + SLOPE * (np.arange(len(MODES)) - 0.5) * signs


def transitions(
    equal: bool = False, endless_share: float = ENDLESS_SHARE, shares: np.ndarray | None = None
) -> torch.Tensor:
    """
    Next-token probabilities, `(V, V)`, row = last token. With `equal`, all answers are equally long. `shares` replaces
    [`right_shares`].
    """
    shares = right_shares() if shares is None else shares
    table = torch.full((VOCAB_SIZE, VOCAB_SIZE), 1e-9)
    grades = torch.tensor([RIGHT, WRONG])
    table[grades, EOS_ID] = 1.0
    if equal:  # a count, and one grade
        for state, following in pairwise(_STATES[:EQUAL_LENGTH]):
            table[state, following] = 1.0
        table[_LETTERS, _STATES[0]] = 1.0
        table[_STATES[EQUAL_LENGTH - 1], grades] = torch.tensor([RIGHT_SHARE, 1 - RIGHT_SHARE])
        return table / table.sum(1, keepdim=True)
    endless, *states = _STATES
    table[endless, endless] = 1.0
    for kind, letter in enumerate(_LETTERS):
        table[letter, endless] = endless_share
        for mode, (share, factor) in enumerate(MODES):
            length = factor * SHORTEST * (LONGEST / SHORTEST) ** (kind / (len(KINDS) - 1))
            right = float(shares[kind, mode])
            think, grade = states[2 * (len(MODES) * kind + mode) :][:2]
            table[letter, think] = share * (1 - endless_share) / (1 - ENDLESS_SHARE)
            table[think, think], table[think, grade] = 1 - 1 / length, 1 / length
            table[grade, grades] = torch.tensor([right, 1 - right])
    return table / table.sum(1, keepdim=True)


def make_checkpoint(out_dir: str | Path, **world: Any) -> Path:
    """Writes the chain before any training. Keywords are those of [`transitions`]."""
    return save_model(chain_model(transitions(**world)), TOKENIZER, out_dir)


def load_model(checkpoint: str | Path) -> PreTrainedModel:
    """The chain with its LM head alone to train."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


def make_dataset(num_prompts: int) -> Dataset:
    """Prompts of all kinds in turn."""
    return Dataset.from_list([{"prompt": f"{i:03d}{KINDS[i % len(KINDS)]}"} for i in range(num_prompts)])


def grade_reward(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """1.0 for a right answer."""
    return [float(text.endswith("+")) for text in completions]


def half_reward(prompts: Sequence[str], completions: Sequence[str], **kwargs: Any) -> list[float]:
    """As [`grade_reward`] for every other dozen of prompts. The answers to the others are all worth the same."""
    teaches = [int(prompt[:3]) // len(KINDS) % 2 == 0 for prompt in prompts]
    return [own if taught else 0.0 for own, taught in zip(grade_reward(completions), teaches, strict=True)]


@torch.no_grad()
def probabilities(model: PreTrainedModel) -> np.ndarray:
    """Next-token probabilities of the model in its present state, `(V, V)`, row = last token."""
    logits = model(input_ids=torch.arange(VOCAB_SIZE, device=model.device)[:, None]).logits[:, 0]
    return logits.double().softmax(-1).cpu().numpy()


def ends(table: np.ndarray, limit: int = LIMIT) -> tuple[np.ndarray, np.ndarray]:
    """Shares of answers of plain sampling that end, and that are right, by kind and length - 1: `(kinds, limit)`."""
    now = table[_LETTERS]  # (kinds, V), after the first token
    ended, right = np.zeros((2, len(KINDS), limit))
    for place in range(limit):
        ended[:, place], now[:, EOS_ID] = now[:, EOS_ID], 0.0
        right[:, min(place + 1, limit - 1)] += now[:, RIGHT]
        now = now @ table
    return ended, right


@dataclass(frozen=True)
class Answers:
    """What plain sampling would give for prompts of all kinds, exactly."""

    reward: float
    mean: float  # length in tokens, `eos` included
    p50: float
    p99: float
    cut: float  # share that reaches the limit
    mean_right: float  # length
    mean_wrong: float

    @classmethod
    def of(cls, model: PreTrainedModel, limit: int = LIMIT) -> Answers:
        """Of a model in its present state."""
        ended, right = (by_kind.mean(0) for by_kind in ends(probabilities(model), limit))
        cut = 1 - ended.sum()
        ended[-1] += cut
        lengths, wrong = np.arange(1, limit + 1), ended - right
        p50, p99 = lengths[np.searchsorted(ended.cumsum(), (0.5, 0.99))]
        means = (float(own @ lengths / own.sum()) for own in (ended, right, wrong))
        mean, mean_right, mean_wrong = means
        return cls(float(right.sum()), mean, float(p50), float(p99), float(cut), mean_right, mean_wrong)
