"""Rows of a data set in a checkpoint: what was saved is restored, and what can't be is found by its column."""

from datetime import datetime

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from hypothesis import example, given
from hypothesis import strategies as st

from trl_darts.buffer.codec import decode, encode, unsaved
from trl_darts.data_checks import unsaved_column


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.text(), JSON))
@example({"__numpy__": []})
@example({"a": [{"__torch__": "int64", "values": [1]}, {"__pairs__": {"__pairs__": None}}]})
def test_plain_rows(row):
    assert decode(encode(row)) == row


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("values", [1, [1, 0], [[1], [0]]])
def test_tensors(dtype, values):
    value = torch.tensor(values).to(dtype)
    again = decode(encode({"column": value}))["column"]
    assert again.dtype == dtype
    assert torch.equal(again, value)


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(3), np.array([1.5, 2.5]), np.array([[True], [False]])])
def test_arrays(value):
    again = decode(encode([value]))[0]
    assert type(again) is type(value)
    assert again.dtype == value.dtype
    assert np.array_equal(again, value)


@pytest.mark.parametrize(
    ("feature", "kind"),
    [
        (Value("timestamp[s]"), "timestamp[s]"),
        (List(Value("binary")), "binary"),
        ({"inner": Value("date32")}, "date32"),
        (Image(), "PIL.Image.Image"),
    ],
)
def test_columns_are_found_by_their_features(feature, kind):
    """The first rows may have no value there."""
    features = Features({"prompt": Value("string"), "column": feature})
    dataset = Dataset.from_list([{"prompt": "1", "column": None}], features=features)
    cause = unsaved_column(dataset)
    assert cause == f"the column 'column' ({kind}) of the data set, which checkpoints can't save"
    assert unsaved_column(dataset.select_columns("prompt")) is None


def test_columns_of_made_rows_are_found_by_their_values():
    dataset = Dataset.from_list([{"question": "1"}])
    dataset.set_transform(lambda rows: {"prompt": rows["question"], "when": [datetime(2026, 1, 1)] * 1})
    assert unsaved_column(dataset) == "the column 'when' (datetime) of the data set, which checkpoints can't save"


def test_features_that_are_saved():
    plain = {"a": Value("int8"), "b": List(Value("float64")), "c": {"d": Value("large_string")}, "e": Value("null")}
    assert unsaved({}, Features(plain)) is None
