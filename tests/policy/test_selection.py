"""Compares selections with their definition, from which the invariants follow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.policy import select_dual_end, select_shortest


POOLS = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=12)


def as_arguments(pool: list[tuple[int, bool]]) -> tuple[list[int], list[bool]]:
    return [length for length, _ in pool], [done for _, done in pool]


def by_definition(lengths: list[int], complete: list[bool], num_shortest: int, num_longest: int) -> list[int]:
    """Selects one candidate at a time, as defined in the paper."""
    left, chosen = set(range(len(lengths))), []
    for _ in range(num_shortest):
        pool = [i for i in left if complete[i]]
        chosen += [min(pool, key=lambda i: (lengths[i], i))] if pool else []
        left -= set(chosen)
    for _ in range(num_longest):
        pool = [i for i in left if complete[i]]
        chosen += [min(pool, key=lambda i: (-lengths[i], i))] if pool else []
        left -= set(chosen)
    while len(chosen) < num_shortest + num_longest:
        chosen.append(min((i for i in left if not complete[i]), key=lambda i: (lengths[i], i)))
        left -= set(chosen)
    return sorted(chosen)


@given(POOLS, st.data())
def test_dual_end_is_its_definition(pool: list[tuple[int, bool]], data: st.DataObject) -> None:
    lengths, complete = as_arguments(pool)
    num_shortest = data.draw(st.integers(0, len(pool)))
    num_longest = data.draw(st.integers(0, len(pool) - num_shortest))
    selected = select_dual_end(lengths, complete, num_shortest, num_longest)
    assert selected == by_definition(lengths, complete, num_shortest, num_longest)
    assert select_shortest(lengths, complete, num_shortest) == by_definition(lengths, complete, num_shortest, 0)


@pytest.mark.parametrize(
    ("lengths", "complete", "num_shortest", "num_longest", "expected"),
    [
        ([50, 10, 40, 30, 20], [True] * 5, 2, 1, [0, 1, 4]),
        ([50, 10, 40, 30, 20], [False, True, True, True, True], 2, 1, [1, 2, 4]),  # the longest hit the limit
        ([5, 9, 9, 1], [True] * 4, 1, 1, [1, 3]),
        ([5, 3, 8, 2], [False, True, False, False], 2, 1, [0, 1, 3]),  # filled up with the shortest incomplete ones
        ([5, 3, 8, 2], [True, True, True, False], 2, 1, [0, 1, 2]),  # a short incomplete one is not short
    ],
)
def test_dual_end_examples(
    lengths: list[int], complete: list[bool], num_shortest: int, num_longest: int, expected: list[int]
) -> None:
    assert select_dual_end(lengths, complete, num_shortest, num_longest) == expected
    as_arrays = np.array(lengths), np.array(complete)
    assert select_dual_end(*as_arrays, num_shortest, num_longest) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("complete", "num_shortest", "num_longest", "message"),
    [
        ([True, True], 2, 1, r"`lengths` \(2 candidates\) must have at least 3"),
        ([True], 1, 0, "`complete` has 1 entries and `lengths` has 2"),
        ([True, True], -1, 1, r"`num_shortest` \(-1\)"),
        ([True, True], 1, -1, r"`num_longest` \(-1\)"),
    ],
)
def test_impossible_selections_are_named(
    complete: list[bool], num_shortest: int, num_longest: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        select_dual_end([4, 5], complete, num_shortest, num_longest)
