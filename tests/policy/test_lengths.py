"""`LengthTracker`: moving averages per prompt and of the data set, state, memory."""

import math
import os
import statistics
import subprocess
import sys
import tracemalloc
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.errors import ConfigurationError, StateMismatchError
from trl_darts.policy import LengthTracker, group_moments


steps = st.lists(
    st.lists(
        st.tuples(st.integers(-3, 3), st.lists(st.tuples(st.integers(0, 500), st.booleans()), min_size=1, max_size=5)),
        max_size=4,
    ),
    max_size=5,
)


def feed(tracker: LengthTracker, step: list[tuple[int, list[tuple[int, bool]]]]) -> None:
    for key, group in step:
        tracker.update(key, [length for length, _ in group], [flag for _, flag in group])
    tracker.end_step()


def observables(tracker: LengthTracker) -> list[float]:
    return [tracker.rho, *[value for key in range(-3, 4) for value in (tracker.mean(key), tracker.std(key))]]


def test_variance_and_mean_are_moving_averages_over_epochs() -> None:
    tracker = LengthTracker(ema=0.25)
    assert math.isnan(tracker.std(7))
    assert math.isnan(tracker.mean(7))
    assert tracker.epochs(7) == len(tracker) == 0
    tracker.update(7, [10, 30])  # variance 200, mean 20: initialises
    assert (tracker.mean(7), tracker.std(7)) == pytest.approx((20, math.sqrt(200)))
    tracker.update(7, [60, 60])
    assert tracker.mean(7) == pytest.approx(0.75 * 20 + 0.25 * 60)
    assert tracker.std(7) == pytest.approx(math.sqrt(0.75 * 200))  # of the variance, not of the standard deviation
    assert tracker.epochs(7) == 2
    tracker.update(8, [1])
    assert (tracker.std(8), len(tracker)) == (0, 2)


def test_censored_lengths_are_lower_bounds() -> None:
    tracker = LengthTracker()
    lengths, censored = [100, 150, 210, 400, 400], [False, False, False, True, True]
    tracker.update("heavy", lengths, censored)
    assert tracker.mean("heavy") == pytest.approx(group_moments(lengths, censored).mean)
    assert tracker.std("heavy") > statistics.stdev(lengths)


def test_a_heavy_tail_is_not_forgotten_over_pruned_epochs() -> None:
    """Seen whole once, then aborted at the 8th of 16 each epoch: still far above a calm prompt that is seen whole."""
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
    assert naive.std("heavy") < naive.std("calm")  # what would have taken the prompt's budget away


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


def test_rho_of_constant_lengths_is_zero() -> None:
    tracker = LengthTracker()
    for _ in range(5):
        tracker.update(1, [1000] * 7)
        tracker.end_step()
    assert tracker.rho == pytest.approx(0, abs=1e-6)
    empty = LengthTracker()
    empty.update(1, [0, 0])
    assert empty.rho == 0


@given(steps, st.randoms())
def test_the_order_of_the_groups_within_a_step_does_not_matter(
    history: list[list[tuple[int, list[tuple[int, bool]]]]], random: Random
) -> None:
    one, other = LengthTracker(), LengthTracker()
    for step in history:
        groups = list({key: (key, group) for key, group in step}.values())  # each prompt once a step
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
    state, rho = tracker.state_dict(), tracker.rho
    copies = {name: array.copy() for name, array in state.items()}
    restored.load_state_dict(state)
    for step in after:
        feed(tracker, step)
        feed(restored, step)
    np.testing.assert_array_equal(observables(restored), observables(tracker))
    for name, array in state.items():  # going on did not change the state that was handed out
        np.testing.assert_array_equal(array, copies[name])
    third = LengthTracker()
    third.load_state_dict(state)
    assert third.rho == rho
    assert len(third) == len({key for step in before for key, _ in step} | {99})


def test_file_round_trip_to_exactly_the_given_path(tmp_path: Path) -> None:
    tracker = LengthTracker(ema=0.3)
    for key in ("a prompt", 3, -1, 2**64 - 2):
        tracker.update(key, [3, 5, 10], [False, False, True])
    tracker.end_step()
    tracker.update(4, [7])
    path = tmp_path / "lengths.bin"
    tracker.save(path)
    assert os.listdir(tmp_path) == ["lengths.bin"]
    restored = LengthTracker(ema=0.3)
    restored.load(path)
    assert len(restored) == 5
    for key in ("a prompt", 3, -1, 2**64 - 2, 4):
        assert (restored.mean(key), restored.std(key)) == (tracker.mean(key), tracker.std(key))
    assert restored.rho == tracker.rho
    with np.load(path, allow_pickle=False) as archive:
        assert set(archive.files) == set(tracker.state_dict())


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


def test_string_keys_are_the_same_in_every_process() -> None:
    code = (
        "from trl_darts.policy import LengthTracker; t = LengthTracker(); t.update('ünïcode', [1]); "
        "print(t.state_dict()['keys'][0])"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(keys) == 1


def test_other_states_are_rejected_by_name() -> None:
    tracker = LengthTracker()
    tracker.update(1, [3, 5])
    state = tracker.state_dict()
    with pytest.raises(StateMismatchError, match=r"'dataset', 'epochs'.*this one has \['extra', 'keys'\]"):
        tracker.load_state_dict({"keys": state["keys"], "extra": 1})
    with pytest.raises(StateMismatchError, match=r"'means': \(3,\)"):
        tracker.load_state_dict({**state, "means": np.zeros(3)})
    with pytest.raises(StateMismatchError, match="1 distinct prompts"):
        tracker.load_state_dict({name: np.repeat(array, 2, axis=0) for name, array in state.items()})
    assert tracker.mean(1) == 4


@pytest.mark.parametrize("content", [None, b"", b"nonsense", b"PK\x03\x04broken"])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "lengths.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"LengthTracker\.save") as caught:
        LengthTracker().load(path)
    assert str(path) in str(caught.value)


def test_files_of_something_else_are_named(tmp_path: Path) -> None:
    path = tmp_path / "array.npy"
    np.save(path, np.arange(3))
    with pytest.raises(ConfigurationError, match=r"LengthTracker\.save"):
        LengthTracker().load(path)
    np.savez(tmp_path / "other.npz", weights=np.arange(3))
    with pytest.raises(StateMismatchError, match=r"this one has \['weights'\]"):
        LengthTracker().load(tmp_path / "other.npz")


@pytest.mark.parametrize("ema", [0.0, -0.1, 1.1, math.nan])
def test_impossible_ema_is_named(ema: float) -> None:
    with pytest.raises(ConfigurationError, match="`ema`"):
        LengthTracker(ema)


def test_a_prompt_takes_300_bytes(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63, 10_000).tolist()
    tracemalloc.start()
    tracker = LengthTracker()
    for key in keys:
        tracker.update(key, [10, 20])
    in_memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tracker.save(tmp_path / "lengths.npz")
    assert in_memory <= 300 * len(tracker)
    assert (tmp_path / "lengths.npz").stat().st_size <= 30 * len(tracker)
    restored = LengthTracker()
    restored.load(tmp_path / "lengths.npz")
    assert restored.std(keys[-1]) == tracker.std(keys[-1])
