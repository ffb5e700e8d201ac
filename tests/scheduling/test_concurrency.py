"""Tests the invariants of `trl_darts/scheduling/concurrency.py` under the names in its docstring."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trl_darts.scheduling.concurrency import FULL_CACHE, HEADROOM, HEADROOM_SHARE, ConcurrencyLimit, ServerLoad


slots = st.none() | st.integers(1, 2048)
most = st.integers(1, 65_536)
loads = st.builds(
    ServerLoad,
    num_running=st.integers(0, 3000),
    num_waiting=st.integers(0, 3000),
    num_preemptions=st.integers(0, 5),
    kv_cache_usage=st.floats(0, 1),
    num_tokens=st.just(0),
)
looks = st.lists(st.tuples(loads, st.integers(0, 3000)), max_size=30)
syncs = st.lists(st.booleans(), min_size=30, max_size=30)  # whether there was a weight sync before each look


@given(slots, most, looks)
def test_bounded(slots, most, looks):
    limit = ConcurrencyLimit(slots, most)
    for load, num_held in looks:
        limit.observe(load, num_held)
        assert 1 <= int(limit) <= most
        assert slots is None or int(limit) <= slots + HEADROOM + slots // HEADROOM_SHARE


@given(slots, most, looks, syncs)
def test_only_under_pressure(slots, most, looks, syncs):
    limit, preemptions = ConcurrencyLimit(slots, most), None
    for place, ((load, num_held), sync) in enumerate(zip(looks, syncs, strict=False)):
        before = int(limit)
        if sync:
            limit.rebase()
        limit.observe(load, num_held)
        if int(limit) < before:
            assert not any(syncs[max(0, place - 1) : place + 1])
            preempted = preemptions is not None and load.num_preemptions > preemptions
            assert preempted or (load.kv_cache_usage >= FULL_CACHE and load.num_waiting > HEADROOM)
        preemptions = load.num_preemptions


@given(slots, most, looks)
def test_recovers(slots, most, looks):
    limit = ConcurrencyLimit(slots, most)
    for load, num_held in looks:
        limit.observe(load, num_held)
    for _ in range(most if limit.highest < 64 else 40):
        limit.observe(ServerLoad(int(limit), 0, 5, 0.5, 0), int(limit))
    assert int(limit) == limit.highest


def test_a_preemption_leaves_four_fifths_of_what_runs_and_is_followed_by_one_cut():
    limit = ConcurrencyLimit(256, 10_000)
    assert int(limit) == 256 + 18
    limit.observe(ServerLoad(256, 18, 0, 0.99, 0), 274)
    assert int(limit) == 274  # the cache is full, but the queue is not longer than the headroom
    limit.observe(ServerLoad(200, 74, 3, 0.99, 0), 274)
    assert int(limit) == 160
    limit.observe(ServerLoad(190, 60, 6, 0.99, 0), 250)  # the last decrease has not taken effect yet
    assert int(limit) == 160
    limit.observe(ServerLoad(158, 2, 6, 0.8, 0), 160)
    assert int(limit) == 160 + 17
    limit.observe(ServerLoad(100, 0, 6, 0.5, 0), 100)  # below its limit
    assert int(limit) == 177


def test_a_weight_sync_is_no_pressure():
    """It preempts all 256 requests. The server counts them with its next step, at or after the first look."""
    for counted_late in (False, True):
        limit = ConcurrencyLimit(256, 10_000)
        limit.observe(ServerLoad(256, 18, 0, 0.9, 0), 274)
        limit.rebase()
        limit.observe(ServerLoad(20, 254, 0 if counted_late else 256, 0.96, 0), 274)
        limit.observe(ServerLoad(120, 154, 256, 0.5, 0), 274)
        limit.observe(ServerLoad(256, 18, 256, 0.9, 0), 274)
        assert int(limit) == 274
        limit.observe(ServerLoad(200, 74, 260, 0.9, 0), 274)
        assert int(limit) == 160


def test_a_server_that_was_started_again_counts_anew():
    limit = ConcurrencyLimit(4, 100)
    limit.observe(ServerLoad(4, 0, 7, 0.5, 0), 4)
    limit.observe(ServerLoad(4, 0, 0, 0.5, 0), 4)
    assert int(limit) == limit.highest
