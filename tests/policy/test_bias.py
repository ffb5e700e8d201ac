"""Tests `length_bias` and `reward_bias` without selection, and against synthetic truths."""

import math
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.policy import select_dual_end, select_shortest
from trl_darts.policy.bias import LengthBias, RewardBias, length_bias, reward_bias


class Rollout(NamedTuple):
    """Arguments of both functions."""

    lengths: list[list[int]]
    finished: list[list[bool]]
    selected: list[list[int]]
    rewards: list[list[float]]
    num_generations: int

    def length_bias(self) -> LengthBias:
        return length_bias(self.lengths, self.finished, self.selected, self.num_generations)

    def reward_bias(self) -> RewardBias:
        return reward_bias(*self)


@st.composite
def rollouts(draw: st.DrawFn, over_provisioned: bool = True, aborts: bool = True) -> Rollout:
    """Draws dual-end selections from up to 10 groups of up to 10 candidates."""
    num, num_groups = draw(st.integers(1, 5)), draw(st.integers(1, 10))
    lengths, finished, selected, rewards = [], [], [], []
    for _ in range(num_groups):
        size = num + (draw(st.integers(0, 5)) if over_provisioned else 0)
        lengths.append(draw(st.lists(st.integers(0, 40), min_size=size, max_size=size)))
        ends = st.booleans() if aborts else st.just(True)
        finished.append(draw(st.lists(ends, min_size=size, max_size=size)))
        num_longest = draw(st.integers(0, num))
        selected.append(select_dual_end(lengths[-1], finished[-1], num - num_longest, num_longest))
        rewards.append(draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=num, max_size=num)))
    return Rollout(lengths, finished, selected, rewards, num)


@given(rollouts(over_provisioned=False, aborts=False), st.data())
def test_without_over_provisioning_there_is_no_bias(rollout: Rollout, data: st.DataObject) -> None:
    assert rollout.length_bias() == (1, 1, 0, 0)
    for own in rollout.rewards:
        own[data.draw(st.integers(0, len(own) - 1))] = math.nan
    gap, unseen_share = rollout.reward_bias()
    assert unseen_share == pytest.approx(1) if math.isnan(gap) else gap == pytest.approx(0, abs=1e-9)


@given(rollouts(aborts=False))
def test_the_first_candidates_are_unbiased_whatever_else_was_started(rollout: Rollout) -> None:
    first = rollout._replace(selected=[list(range(rollout.num_generations))] * len(rollout.lengths))
    assert first.length_bias() == pytest.approx((1, 1, 0, 0), abs=1e-9)
    assert first.reward_bias().reward_gap == pytest.approx(0, abs=1e-9)


@given(rollouts(), st.randoms(), st.integers(2, 5), st.floats(-2, 2), st.floats(-3, 3))
def test_order_and_units_do_not_matter(
    rollout: Rollout, random: Random, factor: int, scale: float, offset: float
) -> None:
    """Also if only some prompts have a reward."""
    order = list(range(len(rollout.lengths)))
    random.shuffle(order)
    other = Rollout(
        [[factor * length for length in rollout.lengths[i]] for i in order],
        [rollout.finished[i] for i in order],
        [rollout.selected[i] for i in order],
        [[scale * reward + i * offset for reward in rollout.rewards[i]] for i in order],
        rollout.num_generations,
    )
    assert other.length_bias() == pytest.approx(rollout.length_bias(), abs=1e-9)
    gap, unseen_share = rollout.reward_bias()
    assert other.reward_bias() == pytest.approx((scale * gap, unseen_share), abs=1e-6)


@given(rollouts(), st.data())
def test_an_aborted_candidate_counts_for_more_than_its_bound(rollout: Rollout, data: st.DataObject) -> None:
    """If bounds counted as lengths, the unbiased sample would be shorter and the ratio of the means larger."""
    naive = rollout._replace(finished=[[True] * len(own) for own in rollout.lengths])
    assert rollout.length_bias().length_mean_ratio <= naive.length_bias().length_mean_ratio + 1e-9


def test_kaplan_meier_by_hand() -> None:
    # In its own group: 20 becomes 30 or 40, half each. Unbiased: 10 (1/2), 30 (1/4), 40 (1/4). Kept: 10, 30.
    own = length_bias([[10, 20, 30, 40]], [[True, False, True, True]], [[0, 2]], 2)
    assert own == pytest.approx((20 / 22.5, 30 / 40, 0.25, 0.5))
    # Beyond its group's last end: 20 becomes 30 or 50, half each, as in the other group. Unbiased mean: 130 / 4.
    lengths, finished = [[10, 20], [30, 50]], [[True, False], [True, True]]
    passed_on = length_bias(lengths, finished, [[0, 0], [0, 1]], 2)
    assert passed_on == pytest.approx((25 / 32.5, 1, 0.25, 0.25))
    # Both: 20 becomes 30 with 1/2, and the rest becomes 35 (1/4), 50 or 60 (3/8 each), but not 25. Mean: 40.
    lengths, finished = [[10, 20, 30, 40], [25, 35, 50, 60]], [[True, False, True, False], [True] * 4]
    assert length_bias(lengths, finished, [[0, 0], [0, 1]], 2).length_mean_ratio == pytest.approx(20 / 27.5)
    # Beyond the longest of all, lengths count as the longest: 20 becomes 60.
    last = length_bias([[10, 20], [15, 60]], [[True, False], [True, False]], [[0, 0], [0, 0]], 2)
    assert last == pytest.approx((12.5 / 36.25, 15 / 60, 0.5, 0.5))
    # At a tie, the end comes first, so that the aborted one is longer.
    tie = length_bias([[10, 10, 10, 70]], [[False, True, True, True]], [[1, 2]], 2)
    assert tie.length_mean_ratio == pytest.approx(10 / 40)
    assert length_bias([[10, 20, 30, 40]], [[True] * 4], [[2, 3]], 2).length_ks == pytest.approx(1)


def sample(
    rng: np.random.Generator, num_groups: int, saturated: float, spread: float, slope: float, prompts: float = 0.0
) -> tuple[Rollout, np.ndarray, float]:
    """
    Simulates groups of which 8 rows are kept: of 16 candidates if the group is `saturated` and stops at 8 complete
    ones, otherwise of 8 to 15. Scales of length differ by `spread` between prompts, on a log scale. The expected
    reward falls by `slope` per doubling of the length, and by `prompts` per unit of the prompt's scale. Also returns
    the final lengths of 8 candidates per group, and the true gap in expected reward.
    """
    num = 8
    parts, whole, true_gap = [], [], []
    for _ in range(num_groups):
        level = rng.normal()
        size = 16 if rng.random() < saturated else int(rng.integers(num, 16))
        logs = np.log(400) + spread * level + 0.7 * rng.normal(size=size)
        full = np.exp(logs).round().astype(int)
        expected = -slope * np.log2(full) - prompts * level
        bound = np.sort(full)[num - 1] if size == 16 else full.max()
        done = full <= bound
        lengths, finished = np.minimum(full, bound).tolist(), done.tolist()
        rows = select_shortest(lengths, finished, num) if size == 16 else select_dual_end(lengths, finished, 6, 2)
        parts.append((lengths, finished, rows, (expected[rows] + 0.3 * rng.normal(size=num)).tolist()))
        whole.append(np.resize(full, 8 * 15) if size == num else rng.choice(full, 8 * 15))
        true_gap.append(expected[rows].mean() - expected.mean())
    return Rollout(*map(list, zip(*parts, strict=True)), num), np.concatenate(whole), float(np.mean(true_gap))


def test_lengths_that_were_aborted_are_estimated(rng: np.random.Generator) -> None:
    """A third of the groups stops early. If bounds counted as lengths, a tenth of the bias would be hidden."""
    errors, naive_errors = [], []
    for _ in range(40):
        rollout, whole, _ = sample(rng, 64, saturated=0.33, spread=0.2, slope=0)
        kept = [own[i] for own, rows in zip(rollout.lengths, rollout.selected, strict=True) for i in rows]
        truth = np.array([np.mean(kept) / whole.mean(), np.quantile(kept, 0.9) / np.quantile(whole, 0.9)])
        naive = rollout._replace(finished=[[True] * len(own) for own in rollout.lengths])
        errors.append(np.array(rollout.length_bias()[:2]) - truth)
        naive_errors.append(np.array(naive.length_bias()[:2]) - truth)
    assert np.abs(np.mean(errors, axis=0)) == pytest.approx([0, 0], abs=0.04)
    assert (np.mean(naive_errors, axis=0) > 0.08).all()


@pytest.mark.parametrize(("slope", "prompts"), [(0.2, 0.0), (0.2, 1.0), (0.0, 1.0), (-0.1, 2.0)])
def test_the_gap_is_near_the_true_one(rng: np.random.Generator, slope: float, prompts: float) -> None:
    """Rewards depend on length, prompt or both. Without levels per prompt, their differences would count as a gap."""
    errors, gaps = [], []
    for _ in range(60):
        rollout, _, true_gap = sample(rng, 64, saturated=0.2, spread=0.5, slope=slope, prompts=prompts)
        gap, unseen_share = rollout.reward_bias()
        assert unseen_share < 0.05
        errors.append(gap - true_gap)
        gaps.append(true_gap)
    statistical = 4 * np.std(errors) / math.sqrt(len(errors))
    assert abs(np.mean(errors)) < statistical + 0.1 * abs(np.mean(gaps))  # tolerance for the width of strata
    assert statistical < 0.02
    assert slope == 0 or abs(np.mean(gaps)) > 0.1 * abs(slope)


def repeated(num_groups: int, of: Callable[[int], tuple[list[int], list[int], list[float]]]) -> Rollout:
    lengths, selected, rewards = map(list, zip(*map(of, range(num_groups)), strict=True))
    return Rollout(lengths, [[True] * len(own) for own in lengths], selected, rewards, 4)


def test_strata_that_share_no_prompt_are_not_compared() -> None:
    """If half of the prompts keep short rows and the others long ones, the rewards may depend on the prompts alone."""
    pool = [1, 1, 9, 9, 1, 1, 9, 9]
    short_only = repeated(8, lambda i: ([1, 1, 9, 9, 1, 1], [0, 1, 4, 5], [0.0, 1.0, 0.0, 1.0]))
    assert short_only.reward_bias() == pytest.approx((0, 0.5))  # also a stratum without a kept row
    apart = repeated(8, lambda i: (pool, [0, 1, 4, 5] if i % 2 else [2, 3, 6, 7], [float(i % 2)] * 4))
    assert apart.reward_bias() == pytest.approx((0, 0.5))
    # One prompt kept both, with short rows 0.5 better than long ones, which applies to all 17 short and 15 long rows.
    linked = apart._replace(
        selected=[*apart.selected[:-1], [0, 1, 4, 2]], rewards=[*apart.rewards[:-1], [0.5, 0.5, 0.5, 0.0]]
    )
    num_short = sum(i in (0, 1, 4, 5) for rows in linked.selected for i in rows)
    assert linked.reward_bias() == pytest.approx((0.5 * (num_short / 32 - 0.5), 0))


def test_prompts_link_strata_in_a_chain() -> None:
    """Two prompts keep only the shortest stratum; the other seven strata are connected by neighbours."""
    pool = [*range(1, 9)] * 8  # eight strata of one length each

    selected = [[8 * j for j in range(8)] for _ in range(2)]
    for i in range(18):
        selected.append([8 * j + i % 6 + step for j in range(4) for step in (1, 2)])  # lengths 2 + i % 6 and the next
    lengths = [[pool[j] for j in own] for own in selected]
    rewards = [[100.0 * i - length**2 for length in own] for i, own in enumerate(lengths)]
    gap, unseen_share = reward_bias([pool] * 20, [[True] * 64] * 20, selected, rewards, 8)
    seen = np.concatenate(lengths[2:])
    assert unseen_share == pytest.approx(1 / 8)
    assert gap == pytest.approx(np.mean(np.arange(2, 9) ** 2) - np.mean(seen**2))


def test_rows_without_a_reward_are_ignored() -> None:
    pool = [1, 1, 9, 9, 1, 9]
    full = repeated(8, lambda i: (pool, [0, 1, 2, 4], [0.5, 0.5, 0.0, 0.5]))
    assert full.reward_bias() == pytest.approx((0.5 * 0.25, 0))
    partial = full._replace(rewards=[[0.5, math.nan, 0.0, 0.5], *full.rewards[1:-1], [math.nan] * 4])
    assert partial.reward_bias() == pytest.approx(full.reward_bias())
    gap, unseen_share = full._replace(rewards=[[math.nan] * 4] * 8).reward_bias()
    assert math.isnan(gap)
    assert unseen_share == pytest.approx(1)


def test_a_deferred_group_is_part_of_the_unbiased_sample() -> None:
    short, long = [2, 4], [20, 40]
    lengths, finished = [short, long], [[True, True], [True, True]]
    report = length_bias(lengths, finished, [[0, 1], []], 2)
    assert report.length_mean_ratio == pytest.approx(3 / 16.5)
    assert report.length_ks == pytest.approx(0.5)
    assert reward_bias(lengths, finished, [[0, 1], []], [[0.0, 1.0], []], 2).unseen_share >= 0


def test_no_groups_and_no_tokens() -> None:
    assert all(map(math.isnan, [*length_bias([], [], [], 2), *reward_bias([], [], [], [], 2)]))
    assert length_bias([[0, 0]], [[True, True]], [[0, 1]], 2) == (1, 1, 0, 0)
    assert length_bias([[0, 0, 5]], [[True] * 3], [[0, 2]], 2)[:2] == (math.inf, math.inf)
