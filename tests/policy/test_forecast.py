"""Tests predictions of a switch: by hand, with PAT's numbers, and for random lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_darts.policy import (
    EngineTimes,
    LatencyCurve,
    LatencySurface,
    PrefillCurve,
    TailTimes,
    remaining_lengths,
    rollout_time,
)
from trl_darts.policy.forecast import HANDOVER_S, MIN_GAIN, Forecast


# PAT, Figure 4: LLaMA-3.1-8B on eight A40, as four engines of two GPUs and as one of eight.
TP_2 = EngineTimes(LatencyCurve([1, 32], [0.01537, 0.02441]), PrefillCurve(0.0, 1e-4))
TP_8 = EngineTimes(LatencyCurve([1, 128], [0.00964, 0.03087]), PrefillCurve(0.0, 1e-4))
PAT = TailTimes(TP_2, TP_8, switch_seconds=5.52)
work = st.lists(st.tuples(st.integers(1, 5_000), st.integers(1, 5_000)), min_size=1, max_size=12)


def arrays(pairs):
    contexts, remaining = np.array(pairs, float).reshape(-1, 2).T
    return contexts, remaining


NOTHING = arrays([])


@given(work)
def test_decoding_takes_as_long_as_the_closed_form(pairs):
    """Eq. 4 of DARTS, if contexts take no time."""
    contexts, remaining = arrays(pairs)
    assert TP_2.decode((contexts, remaining)) == pytest.approx(rollout_time(remaining, TP_2.latency))


def test_contexts_grow_while_they_decode():
    surface = LatencySurface([1, 2], [1.0, 1.0], [0.01, 0.01], [1e6, 1e6])
    # Two sequences for 10 steps (110 + 2·5 tokens in the middle), then one for 20 (70 + 10 in the middle).
    seconds = EngineTimes(surface).decode(arrays([(50, 10), (60, 30)]))
    assert seconds == pytest.approx(10 * (1 + 0.01 * 120) + 20 * (1 + 0.01 * 80))


def test_more_than_an_engine_decodes_at_once_take_turns():
    own = arrays([(0, 10)] * 64)
    full = EngineTimes(TP_2.latency, max_num_seqs=32)
    assert full.decode(own) == pytest.approx(2 * full.decode(arrays([(0, 10)] * 32)))
    assert EngineTimes(TP_2.latency, max_num_seqs=64).decode(own) == TP_2.decode(own)


@pytest.mark.parametrize(("num", "pays"), [(128, False), (8, True), (1, True)])
def test_pats_numbers(num, pays):
    """A few long candidates move, unless a switch of 5.52 s takes too long."""
    here = [arrays([(2_000, 8_000)] * len(range(engine, num, 4))) for engine in range(4)]
    assert PAT.faster_now([own[0] for own in here], [NOTHING[0]]) == pays
    forecast = PAT.forecast(here, [NOTHING])
    assert forecast.pays == pays
    short = [(contexts, np.minimum(remaining, 900.0)) for contexts, remaining in here]
    assert not PAT.forecast(short, [NOTHING]).pays


@settings(max_examples=200)
@given(st.lists(work, min_size=1, max_size=3), st.lists(work, min_size=1, max_size=2), st.floats(0, 30))
def test_a_switch_that_pays_saves_more_than_the_predictor_errs(here, there, seconds):
    times = TailTimes(TP_2, TP_8, seconds)
    own, others = [arrays(pairs) for pairs in here], [arrays(pairs) for pairs in there]
    forecast = times.forecast(own, others)
    assert forecast.pays == (forecast.here - forecast.there > MIN_GAIN * forecast.here)
    assert forecast.there >= seconds + min(TP_8.decode(pair) for pair in others)
    # If both layouts are equal, only the switch, the prefill and the better balance make a difference.
    alone = TailTimes(TP_2, EngineTimes(TP_2.latency), seconds).forecast(own[:1], [NOTHING])
    assert alone.there == pytest.approx(alone.here + seconds + HANDOVER_S)
    assert not alone.pays
    assert not Forecast(1.0, 1.0 - MIN_GAIN / 2).pays


@st.composite
def rollouts(draw):
    count = draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(0, 1_000), min_size=count, max_size=count))
    running = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    complete = [not own and draw(st.booleans()) for own in running]
    expected = draw(st.lists(st.floats(0, 1e4), min_size=count, max_size=count))
    return lengths, running, complete, expected


@settings(max_examples=200)
@given(rollouts())
def test_remaining_lengths_are_positive_and_within_the_limit(rollout):
    lengths, running, _, _ = rollout
    rest = remaining_lengths(*rollout, limit=1_000)
    own = np.array(lengths)[np.array(running, bool)]
    assert rest.shape == own.shape
    assert (rest >= 1).all()
    assert (own + rest <= np.maximum(1_000, own + 1)).all()


def test_what_is_left_follows_the_tail_and_the_prompt(rng):
    tail = np.exp(6 + rng.standard_normal(500)).astype(int)
    now = int(np.quantile(tail, 0.95))
    seen, running = np.minimum(tail, now), tail > now
    rest = remaining_lengths(seen, running, ~running, np.ones(500), 1 << 20)
    assert np.median(rest) == pytest.approx(np.median(tail[running] - now), rel=0.35)
    equal = np.array([299] * 455 + [298] * 57)
    running = equal < 299
    assert remaining_lengths(equal, running, ~running, np.ones(512), 1 << 20).max() < 10  # a flat tail
    expected = np.where(tail > now, 2.0, 1.0)  # the running ones were expected to be twice as long
    longer = remaining_lengths(seen, tail > now, tail <= now, expected, 1 << 20)
    assert np.median(longer) > 1.1 * np.median(rest)  # as in a heavy tail
