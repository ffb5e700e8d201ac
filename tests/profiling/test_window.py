"""The invariant of `trl_darts/profiling/window.py`, and the clock that is read when the window says so."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.profiling import DecodeWindow
from trl_darts.profiling.clock import Reading

from .builders import metrics


chunks = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=120)


@given(chunks, chunks)
def test_complete_when_each_sequence_has_decoded_enough_since_it_was_opened(
    before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    window = DecodeWindow(4, 32)
    counts = [0] * 4
    for sequence, num_tokens in before:
        window.add(sequence, num_tokens)
        counts[sequence] += num_tokens
        assert window.began == (min(counts) > 0)
        assert not window.over  # whatever came: it was not opened
    window.open()
    marks = list(counts)
    for sequence, num_tokens in after:
        if not window.over:
            counts[sequence] += num_tokens
        window.add(sequence, num_tokens)
        assert window.complete == all(n - m >= 32 for n, m in zip(counts, marks, strict=True))
    assert window.completion_tokens == (sum(marks) + sum(counts)) / 2
    assert not window.failed


def test_a_batch_that_shrinks_fails() -> None:
    window = DecodeWindow(2, 8)
    window.add(0, 1)
    window.add(0, 7, finished=True)
    assert window.failed
    assert window.over
    window.add(1, 100)
    assert not window.complete


def test_one_that_ends_with_an_empty_chunk_fails_too() -> None:
    window = DecodeWindow(1, 8)
    window.add(0, 0, finished=True)
    assert window.failed


def test_one_that_ends_when_all_were_measured_does_not_fail() -> None:
    window = DecodeWindow(1, 2)
    window.add(0, 1)
    window.open()
    window.add(0, 2, finished=True)
    assert window.complete
    window.add(0, 0, finished=True)
    assert not window.failed


def test_seconds_per_token_of_all_sequences() -> None:
    early = Reading.parse(metrics(seconds=10.0, generated=100))
    late = Reading.parse(metrics(seconds=12.0, generated=500, running=4))
    assert late.seconds_per_token_since(early) == pytest.approx(0.005)
    assert late.load.num_running == 4
    assert math.isnan(early.seconds_per_token_since(early))


def test_engines_of_one_server_add_up() -> None:
    text = metrics(seconds=10.0, generated=100)
    both = Reading.parse(text + text.replace('engine="0"', 'engine="1"'))
    assert (both.seconds, both.tokens) == (20.0, 200.0)


@pytest.mark.parametrize("name", ["inter_token_latency_seconds_sum", "generation_tokens_total"])
def test_a_clock_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"no `vllm:{name}`"):
        Reading.parse("\n".join(line for line in metrics().splitlines() if name not in line))
