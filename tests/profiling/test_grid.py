"""Which points are measured: few, and only what every server can hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.errors import ConfigurationError
from trl_darts.profiling import make_grid
from trl_darts.profiling.grid import MIN_COMPLETION

from .builders import facts


def lengths(grid) -> list[int]:
    return sorted({point.context_length for point in grid.points})


def sizes(grid) -> list[int]:
    return sorted({point.batch_size for point in grid.points})


@given(st.integers(2, 200_000), st.integers(1, 2_000), st.integers(400, 3_000_000))
def test_every_point_fits(max_model_len: int, max_num_seqs: int, cache: int) -> None:
    server = facts(max_model_len=max_model_len, max_num_seqs=max_num_seqs, kv_cache_tokens=cache)
    grid = make_grid([server])
    for point in grid.points:
        assert 1 <= point.batch_size <= max_num_seqs
        assert point.context_length + point.max_tokens <= max_model_len
        assert point.batch_size * (point.context_length + point.max_tokens) <= cache
        assert point.max_tokens >= min(MIN_COMPLETION, max_model_len // 2)
    assert all(length < max_model_len for length in grid.prefill_lengths)


def test_the_default_grid_of_a_gpu() -> None:
    grid = make_grid([facts(max_model_len=40_960, max_num_seqs=256, kv_cache_tokens=400_000)])
    assert sizes(grid) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert lengths(grid) == [128, 512, 2048, 8192, 32768]
    assert 30 <= len(grid.points) <= 40
    assert max(point.batch_size * point.context_length for point in grid.points) == 131_072


def test_the_largest_batch_is_measured_whatever_it_is() -> None:
    assert sizes(make_grid([facts(max_num_seqs=48)]))[-2:] == [32, 48]
    assert sizes(make_grid([facts(max_num_seqs=48)], max_batch_size=9)) == [1, 2, 4, 8, 9]


def test_a_short_model_is_measured_to_its_end() -> None:
    assert lengths(make_grid([facts(max_model_len=2048)])) == [128, 512, 1920]
    assert lengths(make_grid([facts(max_model_len=64)])) == [32]


def test_the_smallest_server_decides() -> None:
    grid = make_grid([facts(), facts(max_num_seqs=4, kv_cache_tokens=3_000)])
    assert sizes(grid) == [1, 2, 4]
    assert max(point.batch_size * point.context_length for point in grid.points) < 2_700


def test_a_server_that_tells_nothing() -> None:
    grid = make_grid([facts(max_num_seqs=None, kv_cache_tokens=None)])
    assert sizes(grid)[-1] == 256
    assert max(point.batch_size * point.context_length for point in grid.points) <= 131_072


def test_what_is_asked_for() -> None:
    grid = make_grid([facts()], batch_sizes=[8, 2, 2], context_lengths=[100, 3000], max_context_tokens=8_000)
    assert [(p.batch_size, p.context_length) for p in grid.points] == [(2, 100), (8, 100), (2, 3000)]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"max_batch_size": 0}, r"`max_batch_size` \(0\)"),
        ({"max_batch_size": 65}, r"`max_batch_size` \(65\) must be at most 64.*--max-num-seqs 65"),
        ({"batch_sizes": [1, 100]}, r"`batch_sizes` \(100\) must be at most 64"),
        ({"batch_sizes": [0]}, r"`batch_sizes` \(0\)"),
        ({"context_lengths": [4000]}, r"`context_lengths` \(4000\) must be at most 3968"),
        ({"context_lengths": [0, 5]}, r"`context_lengths` \(0,5\)"),
        (
            {"context_lengths": [100], "max_context_tokens": 50},
            r"leave nothing to measure.*`max_context_tokens` \(50\)",
        ),
        ({"max_context_tokens": -1}, r"`max_context_tokens` \(-1\)"),
    ],
)
def test_impossible_grids_are_named(wanted: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_grid([facts()], **wanted)
