"""The order of the data, over random passes, looks ahead and resumes: pulled_once, resumed_as_saved, epochs_end."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from trl_darts.buffer.feed import PromptFeed
from trl_darts.buffer.loop import LoopPosition


TICK = [{}]


class Stream(IterableDataset):
    """Data without a length, in another order in each epoch."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.epoch = items, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(self.items)


def prepare(data: Any) -> Any:
    """Prepares a loader as TRL does."""
    config = DataLoaderConfiguration(dispatch_batches=False)
    return Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(data, batch_size=1, collate_fn=list))


def make_loader(num_batches: int, repeats: int, has_length: bool = True) -> Any:
    items = [{"prompt": batch} for batch in range(num_batches) for _ in range(repeats)]
    data: Any = items if has_length else Stream(items)
    return prepare(data)


def make_feed(loop: LoopPosition, **fields: Any) -> PromptFeed:
    feed = PromptFeed(loop, **fields)
    feed.begin()
    return feed


def make_loop(num_batches: int, repeats: int, has_length: bool = True, accumulation: int = 1) -> LoopPosition:
    loop = LoopPosition(repeats, accumulation)
    loop.loader = make_loader(num_batches, repeats, has_length)
    return loop


def prompts(batches: list[Any]) -> list[int]:
    return [batch[0]["prompt"] for batch in batches]


def train(loop: LoopPosition, feed: PromptFeed, num_items: int) -> list[Any]:
    """Trains on so many items, as transformers' loop takes them, over as many epochs as they need."""
    items: list[Any] = []
    for _ in range(num_items):  # an epoch without an item ends the training
        source = iter(())
        start = len(items)
        while len(items) < num_items:
            if loop.has_length and len(items) > start and loop.num_items % len(loop.loader) == 0:
                break
            item = next(feed.follow(source), None)
            if item is None:
                break
            items.append(item)
            loop.advance(ends_step=True)
    return items


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(1, 30), st.integers(0, 29))
def test_resumed_as_saved(num_batches, repeats, has_length, num_items, stop_at):
    """The loop gets the batches, each `repeats` times, wherever it was interrupted: also within a batch."""
    expected = [i // repeats % num_batches for i in range(num_items)]
    loop = make_loop(num_batches, repeats, has_length)
    feed = make_feed(loop)
    items = train(loop, feed, min(stop_at, num_items))
    again = make_loop(num_batches, repeats, has_length)
    resumed = PromptFeed(again)
    again.begin(loop.num_done)
    resumed.restore(**feed.state(loop.num_done // repeats))
    resumed.begin()
    items += train(again, resumed, num_items - len(items))
    assert prompts(items) == expected


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 11))
def test_resumed_without_its_state(num_batches, repeats, has_length, num_done):
    """As from a checkpoint of TRL's class: after the batches that were due."""
    loop = make_loop(num_batches, repeats, has_length)
    feed = PromptFeed(loop)
    loop.begin(num_done * repeats)
    feed.restore_after(num_done)
    feed.begin()
    assert prompts(train(loop, feed, 9 * repeats))[::repeats] == [
        i % num_batches for i in range(num_done, num_done + 9)
    ]


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 12), st.integers(0, 11), st.booleans())
def test_pulled_once(num_batches, repeats, num_pulls, stop_at, has_length):
    """An endless feed goes from pass to pass, whatever the loop has got, and the loop gets ticks."""
    loop = make_loop(num_batches, repeats, has_length)
    feed = make_feed(loop, tick=TICK, endless=True)
    pulled = []
    for place in range(num_pulls):
        if place == stop_at:
            state, feed = feed.state(0), make_feed(loop, tick=TICK, endless=True)
            feed.restore(**state)
            feed.begin()
        assert next(feed.follow(object())) is TICK
        pulled.append(feed.pull())
    assert prompts(pulled) == [i % num_batches for i in range(num_pulls)]


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(1, 3))
def test_a_pass_begins_when_the_last_one_was_trained_on(num_batches, repeats, has_length, passes):
    loop = make_loop(num_batches, repeats, has_length)
    feed = make_feed(loop, tick=TICK)
    for _ in range(passes):
        pulled = [feed.pull() for _ in range(num_batches + 2)]
        assert prompts(pulled[:-2]) == list(range(num_batches))
        assert pulled[-2:] == [None, None]
        assert train(loop, feed, num_batches * repeats) == [TICK] * (num_batches * repeats)


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 3))
def test_epochs_end(num_batches, repeats, takes_batches, endless, ahead):
    """Without a length, an epoch ends with its pass, also if later passes were pulled."""
    loop = make_loop(num_batches, repeats, has_length=False)
    feed = make_feed(loop, **({} if takes_batches else {"tick": TICK, "endless": endless}))
    for epoch in range(3):
        source, count = object(), 0
        while next(feed.follow(source), None) is not None:
            if not takes_batches and count % repeats == 0:
                for _ in range(1 + (ahead if endless else 0)):
                    feed.pull()
            loop.advance(ends_step=True)
            count += 1
            assert count <= num_batches * repeats, epoch
        assert count == num_batches * repeats


def test_a_stream_is_shuffled_by_the_number_of_its_pass():
    loop = LoopPosition(1, 1)
    stream = Stream([{"prompt": 0}])
    loop.loader = prepare(stream)
    feed = make_feed(loop, tick=TICK, endless=True)
    epochs = []
    for _ in range(3):
        feed.pull()
        epochs.append(stream.epoch)
    assert epochs == [0, 1, 2]


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 12))
def test_a_limit(num_batches, repeats, limit):
    feed = make_feed(make_loop(num_batches, repeats), tick=TICK, endless=True, limit=lambda: limit)
    pulled = [feed.pull() for _ in range(limit + 2)]
    assert prompts(pulled[:-2]) == [i % num_batches for i in range(limit)]
    assert pulled[-2:] == [None, None]


def test_a_loader_without_batches():
    loop = make_loop(0, 1, has_length=False)
    assert make_feed(loop, tick=TICK, endless=True).pull() is None
    assert next(make_feed(loop).follow("epoch"), None) is None


def test_an_epoch_that_a_callback_ends():
    loop = make_loop(4, 1)
    feed = make_feed(loop)
    first = [next(feed.follow("first")) for _ in range(2)]
    feed.end_pass()
    assert prompts([*first, next(feed.follow("second"))]) == [0, 1, 0]


@pytest.mark.parametrize("has_length", [True, False])
def test_a_restored_pass_draws_no_random_number(has_length):
    """The uninterrupted run drew it before the checkpoint, whose random state the resumed run has."""
    loop = make_loop(4, 1, has_length)
    feed = PromptFeed(loop)
    feed.restore(0, 2, 2)
    feed.begin()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert prompts([feed.pull(), feed.pull()]) == [2, 3]
    assert torch.equal(torch.get_rng_state(), before)
    feed.pull()
    assert not torch.equal(torch.get_rng_state(), before)


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 20))
def test_items_are_those_of_the_loop(num_batches, repeats, accumulation, num_steps):
    """transformers' loop takes fewer items in the last step of an epoch."""
    loop = make_loop(num_batches, repeats, accumulation=accumulation)
    length = num_batches * repeats
    sizes = [accumulation] * (length // accumulation) + [length % accumulation] * (length % accumulation > 0)
    assert loop.items(num_steps) == sum(itertools.islice(itertools.cycle(sizes), num_steps))
    assert loop.epochs(num_steps) == num_steps // len(sizes)
    assert loop.num_batches(num_steps) == -(-loop.items(num_steps) // repeats)
