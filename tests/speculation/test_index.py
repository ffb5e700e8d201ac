"""Proposals of the index and their cost."""

from hypothesis import given
from hypothesis import strategies as st

from trl_darts.speculation.index import GRAM, MAX_MATCH, MAX_PLACES, SuffixIndex


def index_of(*texts):
    index = SuffixIndex()
    return index, [index.add(text) for text in texts]


def test_what_followed_the_longest_suffix():
    index, (*_, text) = index_of([1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 7, 8], [1, 2, 3, 4])
    assert index.propose(text, 8) == [5, 6]
    assert index.propose(text, 1) == [5]


def test_the_most_frequent_then_the_newest():
    index, (*_, text) = index_of([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3])
    assert index.propose(text, 1) == [4]
    index, (*_, text) = index_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3])
    assert index.propose(text, 1) == [5]


def test_texts_grow_and_see_each_other():
    index, (first, second) = index_of([], [])
    for token in (1, 2, 3, 4, 5):
        index.extend(first, [token])
        assert index.propose(second, 4) == []
    index.extend(second, [1, 2, 3])
    assert index.propose(second, 4) == [4, 5]
    index.extend(first, [6])
    assert index.propose(second, 4) == [4, 5, 6]
    index.extend(first, [1, 2, 3])
    assert index.propose(first, 2) == [4, 5]


def test_siblings_at_the_same_place_hide_nothing():
    index, (*_, text) = index_of([1, 2, 3, 4], *([1, 2, 3] for _ in range(2 * MAX_PLACES)))
    assert index.propose(text, 1) == [4]


tokens = st.lists(st.integers(0, 2), max_size=24)


@given(st.lists(tokens, min_size=1, max_size=4), st.integers(1, 8), st.randoms())
def test_a_draft_is_a_continuation_of_the_longest_match(texts, num_tokens, random):
    """Compared with a search of all texts, in any interleaving."""
    index, names = index_of(*([] for _ in texts))
    rest = {name: list(text) for name, text in zip(names, texts, strict=True)}
    while any(rest.values()):
        name = random.choice([name for name in names if rest[name]])
        count = random.randint(1, len(rest[name]))
        index.extend(name, rest[name][:count])
        rest[name] = rest[name][count:]
    target = texts[0]
    draft = index.propose(names[0], num_tokens)
    matches = {
        (length, tuple(text[end:]))
        for text in texts
        for end in range(1, len(text))
        for length in range(GRAM, min(end, len(target), MAX_MATCH) + 1)
        if text[end - length : end] == target[len(target) - length :]
    }
    assert len(draft) <= num_tokens
    assert bool(draft) == bool(matches)
    if draft and sum(map(len, texts)) <= MAX_PLACES:
        longest = max(length for length, _ in matches)
        assert any(rest[: len(draft)] == tuple(draft) for length, rest in matches if length == longest)
