"""Tests which rows and tokens are masked in the loss."""

import math
import pickle

import numpy as np
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.training.rows import BufferedRows, KeptRows, forget_stale_logprobs, mask_stale


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


ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1)), max_size=12)


@given(ROWS, st.booleans(), st.integers(1, 4))
def test_rows_travel_as_arrays(completion_ids, has_logprobs, num_processes):
    """Each process gets its rows as TRL takes them, with log-probs in the precision of its tensors."""
    logprobs = [[-float(token) / 7 for token in ids] for ids in completion_ids] if has_logprobs else None
    rows = KeptRows(completion_ids, logprobs, frozenset({1}))
    share, rest = divmod(len(completion_ids), num_processes)
    sizes = [share + (process < rest) for process in range(num_processes)]
    arrived = [pickle.loads(pickle.dumps(own)) for own in rows.shares(sizes)]
    assert [len(own.completion_ids) for own in arrived] == sizes
    assert [ids for own in arrived for ids in own.completion_ids] == completion_ids
    assert all(own.fillers == {1} for own in arrived)
    if logprobs is not None:
        values = [value for own in arrived for row in own.logprobs for value in row]
        assert values == np.float32([value for row in logprobs for value in row]).tolist()
    else:
        assert all(own.logprobs is None for own in arrived)


def test_rows_of_a_buffer_keep_their_other_fields():
    rows = BufferedRows([[1, 2], [3]], None, entry_ids=[7], left=[7], ages=[[(0, 2)], [(1, 1)]])
    assert pickle.loads(pickle.dumps(rows)) == rows


def test_rows_travel_in_a_tenth_of_the_memory_of_lists():
    rows = KeptRows([list(range(100_000, 103_000)) for _ in range(8)], [[-0.5] * 3000 for _ in range(8)])
    assert len(pickle.dumps(rows)) < 8 * 3000 * 8 + 2000
