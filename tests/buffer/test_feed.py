"""The look ahead in the loader: the loop gets what it would have got, and each batch of prompts is pulled once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from trl_darts.buffer.feed import EndlessFeed, PromptFeed


def items(num_batches: int, repeats: int) -> list[list[dict]]:
    return [[{"prompt": batch}] for batch in range(num_batches) for _ in range(repeats)]


@given(st.integers(1, 6), st.integers(1, 3), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 2))
def test_look_ahead(num_batches, repeats, pulls, epochs):
    feed = PromptFeed(repeats)
    for _ in range(epochs):
        source = iter(items(num_batches, repeats))
        seen, pulled, wanted = [], [], iter(pulls)
        while (item := next(feed.follow(source), None)) is not None:
            seen.append(item)
            assert feed.position == len(seen)
            pulled += feed.arrived()
            for _ in range(next(wanted, 0)):
                batch = feed.pull()
                pulled += [] if batch is None else [batch]
            assert feed.num_taken == len(pulled)
            assert len(pulled) * repeats >= len(seen)  # never behind the loop
        assert seen == items(num_batches, repeats)
        assert pulled == items(num_batches, 1)
        assert feed.pull() is None


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 17), st.integers(0, 4))
def test_resumed_in_the_middle(num_batches, repeats, stop_at, ahead):
    """What had been pulled is not pulled again, and what had not is; whatever part of it the loop had got."""
    everything = items(num_batches, repeats)
    stop_at %= len(everything)
    first = PromptFeed(repeats)
    source, pulled = iter(everything), []
    for _ in range(stop_at):
        next(first.follow(source))
        pulled += first.arrived()
    for _ in range(ahead if stop_at else 0):
        batch = first.pull()
        pulled += [] if batch is None else [batch]
    again = PromptFeed(repeats)
    next(again.follow(iter(everything)))  # it may have been in use before
    again.pull()
    again.restore(**first.state(mid_epoch=True))
    source = iter(everything[stop_at:])
    rest = []
    while (item := next(again.follow(source), None)) is not None:
        rest.append(item)
        pulled += again.arrived()
    assert rest == everything[stop_at:]
    assert pulled == items(num_batches, 1)
    other = iter(items(2, repeats))  # the next epoch begins anew
    next(again.follow(other))
    assert again.arrived() == items(1, 1)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 12), st.integers(0, 11))
def test_pass_after_pass(num_batches, repeats, num_pulls, stop_at):
    """Wherever it is interrupted, and however many ticks the loop has got."""
    loader = items(num_batches, repeats)
    feed = EndlessFeed(repeats, 1, lambda: loader)
    pulled = []
    for place in range(num_pulls):
        if place == stop_at:
            state, feed = feed.state(mid_epoch=True), EndlessFeed(repeats, 1, lambda: loader)
            feed.restore(**state)
        assert len(next(feed.follow(iter([])))) == 1
        assert feed.arrived() == []
        pulled.append(feed.pull())
    assert pulled == (items(num_batches, 1) * num_pulls)[:num_pulls]


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 12))
def test_a_limit(num_batches, repeats, limit):
    loader = items(num_batches, repeats)
    feed = EndlessFeed(repeats, 1, lambda: loader, lambda: limit)
    pulled = [feed.pull() for _ in range(limit + 2)]
    assert pulled == [*(items(num_batches, 1) * limit)[:limit], None, None]


@pytest.mark.parametrize("epoch", [0.0, 0.25, 1.0, 2.75])
def test_resumed_without_its_state(tmp_path, epoch):
    """As from a checkpoint of a schedule that trains on the loader's batches: after those that were due."""
    loader, due = items(4, 2), round(4 * epoch)
    TrainerState(epoch=epoch).save_to_json(str(tmp_path / TRAINER_STATE_NAME))
    for state in ({}, {"position": 3, "num_taken": 2}):
        feed = EndlessFeed(2, 1, lambda: loader, lambda: 16)
        feed.resume(tmp_path, state)
        pulled = [feed.pull() for _ in range(17 - due)]
        assert pulled == [*(items(4, 1) * 4)[due:], None]


def test_a_loader_without_batches():
    assert EndlessFeed(1, 1, list).pull() is None
