"""The points to measure: few, and only those that fit into every server."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.analysis.profile import ProfileOptions
from trl_darts.analysis.profile.grid import MIN_COMPLETION, Grid, make_grid
from trl_darts.analysis.profile.profiled_server import ProfiledServer
from trl_darts.errors import ConfigurationError

from .builders import facts


def grid_of(*servers: ProfiledServer, **wanted: Any) -> Grid:
    return make_grid(servers, ProfileOptions(("http://localhost:8000",), **wanted))


def lengths(grid: Grid) -> list[int]:
    return sorted({point.context_length for point in grid.points})


def sizes(grid: Grid) -> list[int]:
    return sorted({point.batch_size for point in grid.points})


@given(st.integers(2, 200_000), st.integers(1, 2_000), st.integers(400, 3_000_000))
def test_every_point_fits(max_model_len: int, max_num_seqs: int, cache: int) -> None:
    grid = grid_of(facts(max_model_len=max_model_len, max_num_seqs=max_num_seqs, kv_cache_tokens=cache))
    for point in grid.points:
        assert 1 <= point.batch_size <= max_num_seqs
        assert point.context_length + point.max_tokens <= max_model_len
        assert point.batch_size * (point.context_length + point.max_tokens) <= cache
        assert point.max_tokens >= min(MIN_COMPLETION, max_model_len // 2)
    assert all(length < max_model_len for length in grid.prefill_lengths)


def test_the_default_grid_of_a_gpu() -> None:
    grid = grid_of(facts(max_model_len=40_960, max_num_seqs=256, kv_cache_tokens=400_000))
    assert sizes(grid) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert lengths(grid) == [128, 512, 2048, 8192, 32768]
    assert 30 <= len(grid.points) <= 40
    assert max(point.batch_size * point.context_length for point in grid.points) == 131_072


def test_the_ends_are_measured_whatever_they_are() -> None:
    assert sizes(grid_of(facts(max_num_seqs=48)))[-2:] == [32, 48]
    assert sizes(grid_of(facts(max_num_seqs=48), max_batch_size=9)) == [1, 2, 4, 8, 9]
    assert lengths(grid_of(facts(max_model_len=2048))) == [128, 512, 1920]
    assert lengths(grid_of(facts(max_model_len=64))) == [32]


def test_the_smallest_server_decides() -> None:
    grid = grid_of(facts(), facts(max_num_seqs=4, kv_cache_tokens=3_000))
    assert sizes(grid) == [1, 2, 4]
    assert sizes(grid_of(facts(max_num_seqs=None, kv_cache_tokens=None)))[-1] == 256  # no server reports its limits
    assert max(point.batch_size * point.context_length for point in grid.points) < 2_700


def test_what_is_asked_for() -> None:
    grid = grid_of(facts(), batch_sizes=(8, 2, 2), context_lengths=(100, 3000), max_context_tokens=8_000)
    assert [(p.batch_size, p.context_length) for p in grid.points] == [(2, 100), (8, 100), (2, 3000)]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"max_batch_size": 65}, r"`max_batch_size` \(65\) must be at most 64.*--max-num-seqs 65"),
        ({"batch_sizes": (1, 100)}, r"`batch_sizes` \(100\) must be at most 64"),
        ({"context_lengths": (4000,)}, r"`context_lengths` \(4000\) must be at most 3968"),
        ({"context_lengths": (100,), "max_context_tokens": 50}, r"leave nothing.*`max_context_tokens` \(50\)"),
    ],
)
def test_impossible_grids_are_named(wanted: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        grid_of(facts(), **wanted)
