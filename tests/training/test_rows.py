"""Tests which rows and tokens are masked in the loss."""

import math

import torch
from accelerate import Accelerator

from trl_darts.training.rows import KeptRows, forget_stale_logprobs, mask_stale


AGES = [[(3, 2), (1, 1), (0, 2)], [(0, 4)]]  # (age, number of tokens)


def test_stale_tokens_lose_their_weight_and_their_logprobs():
    rows = KeptRows([[1] * 5, [1] * 4, [1] * 2], [[-1.0] * 5, [-1.0] * 4, [-1.0] * 2])
    forget_stale_logprobs(rows, AGES, max_age=0)
    assert [[math.isnan(value) for value in row] for row in rows.logprobs] == [
        [True] * 3 + [False] * 2,
        [False] * 4,
        [False] * 2,  # a repeated row has no ages
    ]
    output = {
        "completion_mask": torch.tensor([[1] * 5, [1] * 4 + [0], [0] * 5]),
        "sampling_per_token_logps": torch.full((3, 5), torch.nan),
    }
    mask_stale(output, AGES, 1, Accelerator(cpu=True))
    assert output["tool_mask"].tolist() == [[0, 0, 1, 1, 1], [1] * 5, [1] * 5]
    assert output["num_items_in_batch"] == 3 + 4
    assert output["sampling_per_token_logps"].isnan().sum() == 13


def test_what_a_tool_wrote_stays_masked():
    output = {"completion_mask": torch.ones(1, 5, dtype=torch.long), "tool_mask": torch.tensor([[1, 1, 1, 0, 1]])}
    mask_stale(output, [[(2, 1), (0, 2)]], 1, Accelerator(cpu=True))
    assert output["tool_mask"].tolist() == [[0, 1, 1, 0, 1]]
    assert output["num_items_in_batch"] == 3
