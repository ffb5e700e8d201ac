"""Tests moving averages, state and memory of `LengthTracker`."""

import math
import os
import statistics
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.errors import ConfigurationError, StateMismatchError
from trl_darts.policy import LengthTracker, PromptLengthPrior
from trl_darts.policy.lengths import HALF_LIFE


steps = st.lists(
    st.lists(
        st.tuples(st.integers(-3, 3), st.lists(st.tuples(st.integers(0, 500), st.booleans()), min_size=1, max_size=5)),
        max_size=4,
    ),
    max_size=5,
)


def feed(tracker: LengthTracker, step: list[tuple[int, list[tuple[int, bool]]]]) -> None:
    for key, group in step:
        tracker.update(key, [length for length, _ in group], [flag for _, flag in group], 10 ** (key + 3))
    tracker.end_step()


def observables(tracker: LengthTracker) -> list[float]:
    per_prompt = [value for key in range(-3, 4) for value in (tracker.mean(key), tracker.std(key))]
    typical = [*(tracker.prior.typical_stds() or ()), tracker.prior.typical_spread()]
    return [tracker.rho, *per_prompt, *tracker.prior.predict(50), *typical]


def test_variance_and_mean_are_moving_averages_over_epochs() -> None:
    tracker = LengthTracker(ema=0.25)
    assert math.isnan(tracker.std(7))
    assert math.isnan(tracker.mean(7))
    assert len(tracker) == 0
    tracker.update(7, [10, 30])  # variance 200, mean 20: initialises
    assert (tracker.mean(7), tracker.std(7)) == pytest.approx((20, math.sqrt(200)))
    tracker.update(7, [60, 60])
    assert tracker.mean(7) == pytest.approx(0.75 * 20 + 0.25 * 60)
    assert tracker.std(7) == pytest.approx(math.sqrt(0.75 * 200))  # of the variance, not of the standard deviation
    tracker.update(8, [1])
    assert (tracker.std(8), len(tracker)) == (0, 2)


def test_a_heavy_tail_is_not_forgotten_over_pruned_epochs() -> None:
    """Complete once, later aborted at the 8th of 16 in each epoch, it stays far above a calm complete prompt."""
    rng = np.random.default_rng(0)
    tracker, naive = LengthTracker(), LengthTracker()
    for epoch in range(8):
        heavy = rng.lognormal(6, 1.0, 16).astype(int) + 1
        bound = np.sort(heavy)[7] if epoch else heavy.max()
        lengths, censored = np.minimum(heavy, bound).tolist(), (heavy > bound).tolist()
        tracker.update("heavy", lengths, censored)
        naive.update("heavy", [length for length, flag in zip(lengths, censored, strict=True) if not flag])
        calm = rng.normal(800, 150, 12).astype(int)
        tracker.update("calm", calm.tolist())
        naive.update("calm", calm.tolist())
    print(f"heavy {tracker.std('heavy'):.0f}, calm {tracker.std('calm'):.0f}; naive heavy {naive.std('heavy'):.0f}")
    assert tracker.std("heavy") > 2 * tracker.std("calm")
    assert naive.std("heavy") < naive.std("calm")  # which would have reduced the prompt's budget


def test_rho_is_the_data_sets_and_includes_the_pending_step() -> None:
    tracker = LengthTracker(ema=0.5)
    assert math.isnan(tracker.rho)
    tracker.end_step()
    assert math.isnan(tracker.rho)
    assert math.isnan(tracker.dataset_mean)
    tracker.update(1, [10, 20])
    tracker.update(2, [30, 40, 50])
    pooled = [10, 20, 30, 40, 50]
    assert tracker.rho == pytest.approx(statistics.pstdev(pooled) / statistics.fmean(pooled))
    tracker.end_step()
    before = tracker.rho
    assert before == pytest.approx(statistics.pstdev(pooled) / statistics.fmean(pooled))
    tracker.update(1, [100, 100])
    pending = tracker.rho
    tracker.end_step()
    assert tracker.rho == pending
    mean, square = (30 + 100) / 2, (1100 + 10_000) / 2
    assert pending == pytest.approx(math.sqrt(square - mean**2) / mean)
    assert pending != before
    assert tracker.dataset_mean == mean


@given(steps, st.randoms())
def test_the_order_of_the_groups_within_a_step_does_not_matter(
    history: list[list[tuple[int, list[tuple[int, bool]]]]], random: Random
) -> None:
    one, other = LengthTracker(), LengthTracker()
    for step in history:
        groups = list({key: (key, group) for key, group in step}.values())  # each prompt once per step
        feed(one, groups)
        shuffled = list(groups)
        random.shuffle(shuffled)
        feed(other, shuffled)
    assert observables(other) == pytest.approx(observables(one), nan_ok=True, abs=1e-4)


@given(steps, steps)
def test_a_restored_tracker_goes_on_exactly(
    before: list[list[tuple[int, list[tuple[int, bool]]]]], after: list[list[tuple[int, list[tuple[int, bool]]]]]
) -> None:
    tracker, restored = LengthTracker(), LengthTracker()
    for step in before:
        feed(tracker, step)
    tracker.update(99, [5, 6, 9], [False, False, True])  # pending
    state = tracker.state_dict()
    copies = {name: array.copy() for name, array in state.items()}
    restored.load_state_dict(state)
    for step in after:
        feed(tracker, step)
        feed(restored, step)
    np.testing.assert_array_equal(observables(restored), observables(tracker))
    for name, array in state.items():  # later updates did not change the returned state
        np.testing.assert_array_equal(array, copies[name])


def test_file_round_trip_to_exactly_the_given_path(tmp_path: Path) -> None:
    tracker = LengthTracker()
    for key in ("a prompt", 3, -1, 2**64 - 2):
        tracker.update(key, [3, 5, 10], [False, False, True])
    tracker.end_step()
    tracker.update(4, [7])
    path = tmp_path / "lengths.bin"
    tracker.save(path)
    assert os.listdir(tmp_path) == ["lengths.bin"]
    restored = LengthTracker()
    restored.load(path)
    for name, array in tracker.state_dict().items():
        np.testing.assert_array_equal(restored.state_dict()[name], array)


def test_keys() -> None:
    tracker = LengthTracker()
    tracker.update(np.int64(5), [3, 5])
    assert tracker.mean(5) == 4
    tracker.update(-1, [7])
    assert tracker.mean(2**64 - 1) == 7  # the same 64 bits
    with pytest.raises(ValueError, match="64 bits"):
        tracker.update(2**64, [1])
    with pytest.raises(ValueError, match="64 bits"):
        tracker.mean(-(2**63) - 1)
    with pytest.raises(TypeError):
        tracker.update(1.5, [1])  # type: ignore[arg-type]
    assert len(tracker) == 2
    tracker.update("prompt", [9])  # hashed to the same number in every process
    assert tracker.mean(14832251758147735480) == 9


def test_other_states_are_rejected_by_name() -> None:
    tracker = LengthTracker()
    tracker.update(1, [3, 5])
    state = tracker.state_dict()
    twice = {name: np.repeat(array, 2, axis=0) if array.ndim else array for name, array in state.items()}
    for other, message in [
        ({"keys": state["keys"], "extra": 1}, r"`state` \({'extra'"),
        ({**state, "means": np.zeros(3)}, r"'means': \(3,\)"),
        (twice, "1 distinct prompts"),
    ]:
        with pytest.raises(StateMismatchError, match=message):
            tracker.load_state_dict(other)
    assert tracker.mean(1) == 4


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), (b"nonsense", "not in NumPy's .npz format"), (b"PK\x03\x04broken", "not in NumPy's")],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "lengths.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=rf"LengthTracker\.save.*{reason}") as caught:
        LengthTracker().load(path)
    assert str(path) in str(caught.value)


def test_lengths_of_another_source_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.npz"
    own = LengthTracker(source="qwen2 24×896, tokenizer 1")
    own.update(1, [3, 5])
    own.save(path)
    LengthTracker(source=own.source).load(path)
    LengthTracker().load(path)  # unknown sources are accepted
    with pytest.raises(StateMismatchError, match=r"\(qwen2 24×896, tokenizer 1\) must be that of .* \(llama 2×8"):
        LengthTracker(source="llama 2×8, tokenizer 1").load(path)


# The prior by prompt length


observations = st.lists(
    st.tuples(st.integers(0, 1 << 24), st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=30
)


def fed(prompts: list[tuple[int, float, float]]) -> PromptLengthPrior:
    prior = PromptLengthPrior()
    for prompt in prompts:
        prior.update(*prompt)
    prior.end_step()
    return prior


@given(observations, st.integers(0, 1 << 24))
def test_a_prediction_is_no_further_out_than_what_was_seen(
    prompts: list[tuple[int, float, float]], num_prompt_tokens: int
) -> None:
    for quantity, predicted in enumerate(fed(prompts).predict(num_prompt_tokens), start=1):
        values = [prompt[quantity] for prompt in prompts]
        spread, mean = statistics.pstdev([math.log(max(value, 1)) for value in values]), statistics.fmean(values)
        assert predicted >= mean * math.exp(-2 * spread - spread**2 / 2) * (1 - 1e-6)
        assert predicted <= mean * math.exp(2 * spread) * (1 + 1e-6)


@given(st.integers(1, 1 << 20), st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=30))
def test_prompts_of_one_length_predict_their_mean(tokens: int, moments: list[tuple[float, float]]) -> None:
    prior = fed([(tokens, *pair) for pair in moments])
    for other in (tokens, 1, 1 << 24):
        expected = [statistics.fmean(column) for column in zip(*moments, strict=True)]
        assert prior.predict(other) == pytest.approx(expected, rel=1e-3)


def test_nothing_is_predicted_from_nothing() -> None:
    assert all(map(math.isnan, PromptLengthPrior().predict(10)))
    assert PromptLengthPrior().typical_stds() is None
    assert math.isnan(PromptLengthPrior().typical_spread())


def test_a_trend_is_found_and_the_level_is_that_of_the_prompts_seen(rng: np.random.Generator) -> None:
    tokens = np.exp(rng.normal(5, 1, 2000)).astype(int) + 1
    means, stds = 10 * tokens**0.7 * rng.lognormal(0, 0.3, 2000), 20 * tokens**0.5 * rng.lognormal(0, 0.3, 2000)
    prior = fed(list(zip(tokens.tolist(), means.tolist(), stds.tolist(), strict=True)))
    for quantity, (truth, slope) in enumerate(((means, 0.7), (stds, 0.5))):
        predicted = [prior.predict(n)[quantity] for n in tokens.tolist()]
        assert np.mean(predicted) == pytest.approx(truth.mean(), rel=0.1)
        assert prior.predict(400)[quantity] / prior.predict(100)[quantity] == pytest.approx(4**slope, rel=0.05)
    assert prior.typical_spread() == pytest.approx(stds.mean() / means.mean())
    low, high = prior.typical_stds()
    assert np.mean((low < stds) & (stds < high)) > 0.9


def test_few_prompts_say_little_of_others() -> None:
    pairs = [(50, 100.0, 10.0), (400, 800.0, 80.0)]
    ratios = [fed(pairs * repeats).predict(400)[0] / fed(pairs * repeats).predict(50)[0] for repeats in (1, 4, 64)]
    assert ratios == sorted(ratios)
    assert ratios[0] < 2
    assert ratios[-1] > 6


def test_what_was_known_long_ago_fades() -> None:
    prior = fed([(10, 100.0, 10.0)] * HALF_LIFE)
    for _ in range(10):
        for _ in range(HALF_LIFE // 10):
            prior.update(10, 400.0, 40.0)
        prior.end_step()
    new = 0.5 / math.log(2)  # weight of the later observations
    assert prior.predict(10)[0] == pytest.approx((0.5 * 100 + new * 400) / (0.5 + new), rel=0.01)
