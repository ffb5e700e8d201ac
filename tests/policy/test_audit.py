"""
Audits of what a bounded wait loses. Invariants, each under its name: nothing_is_lost_without_selection,
estimates_are_of_plain_sampling, evidence_is_fair.
"""

import json
import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.policy.audit import FALSE_ALARMS, AuditedGroup, Audits, BoundedWait


WAIT = BoundedWait(num_kept=2, num_longest=1, saturates_at=4)


def test_kept_are_those_that_end_before_the_batch_does():
    lengths, ended = [9, 3, 5, 30], [True] * 4
    assert WAIT.kept(lengths[:3], ended[:3], usual_length=6) == [1, 2]  # 9 would have been aborted
    assert WAIT.kept(lengths[:3], ended[:3], usual_length=9) == [0, 1]  # the shortest and the longest
    assert WAIT.kept([9, 30], [True, True], usual_length=6) == [0, 1]  # too few complete ones: they are waited for
    assert WAIT.kept(lengths, ended, usual_length=40) == [1, 2]  # saturated: the first two
    assert WAIT.kept([9, 3, 40], [True, True, False], usual_length=40) == [0, 1]  # cut off at the limit
    bounded = BoundedWait(2, 1, saturates_at=math.inf, patience=2.0)
    assert bounded.kept([9, 3, 5, 11], ended, usual_length=100) == [0, 1]  # up to twice the second shortest


def test_an_answer_that_is_aborted_is_lost():
    group = WAIT.audit([3, 5, 30], [True] * 3, [0.0, 0.0, 1.0], usual_length=6, num_candidates=3)
    assert group == AuditedGroup(1.0, pytest.approx(1 / 3), 4.0, pytest.approx(38 / 3), 0.0, pytest.approx(1 / 3), 0.0)
    group = WAIT.audit([3, 5, 30], [True] * 3, [0.0, 1.0, 1.0], usual_length=6, num_candidates=3)
    assert (group.lost, group.lost_at_random) == (0.0, 0.0)
    group = WAIT.audit([3, 5, 30], [True] * 3, [1.0, 1.0, 1.0], usual_length=6, num_candidates=3)
    assert (group.lost, group.lost_at_random) == (0.0, 0.0)


def groups_of(most):
    """Lengths, which candidates ended, and rewards of up to `most` candidates."""
    return st.integers(2, most).flatmap(
        lambda size: st.tuples(
            st.lists(st.integers(1, 99), min_size=size, max_size=size),
            st.lists(st.booleans(), min_size=size, max_size=size),
            st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=size, max_size=size),
        )
    )


groups = groups_of(12)


@given(groups, st.integers(1, 120))
def test_nothing_is_lost_without_selection(group, usual_length):
    lengths, ended, rewards = group
    everything = BoundedWait(len(lengths), 1, saturates_at=math.inf)
    found = everything.audit(lengths, ended, rewards, usual_length, len(lengths))
    assert (found.lost, found.lost_at_random) == (0.0, 0.0)
    assert found.kept_length == pytest.approx(found.plain_length)
    assert found.kept_reward == pytest.approx(found.plain_reward)


@given(groups, st.integers(1, 120), st.integers(2, 12))
def test_any_group_can_be_audited(group, usual_length, num_candidates):
    """A prompt may usually get more candidates than an audit samples."""
    found = WAIT.audit(*group, usual_length, num_candidates)
    assert 0 <= found.lost_at_random <= 1
    assert found.lost in (0.0, 1.0)
    assert found.kept_length <= max(group[0])


def observed(num_groups: int, seed: int, needs: int) -> Audits:
    """Audits of 16 candidates with log-normal lengths, right at 0.3, or if they are long."""
    rng, audits = np.random.default_rng(seed), Audits()
    wait = BoundedWait(8, 1, 16)
    for _ in range(num_groups):
        lengths = np.ceil(rng.lognormal(3, 1, 16))
        rewards = (lengths >= needs) if needs else rng.random(16) < 0.3
        audits.observe(wait.audit(lengths.tolist(), [True] * 16, rewards.astype(float).tolist(), 40, 11))
    return audits


def test_estimates_are_of_plain_sampling():
    """The true ratio is within the interval in about 95 of 100 trainings."""
    exact = np.mean([observed(900, seed, 0).metrics()["length_mean_ratio"] for seed in range(100, 120)])
    covered = 0
    for seed in range(60):
        metrics = observed(150, seed, 0).metrics()
        covered += abs(metrics["length_mean_ratio"] - exact) <= metrics["length_mean_ratio_interval"]
    assert covered >= 50


@given(groups_of(5), st.integers(1, 120))
def test_evidence_is_fair(group, usual_length):
    """If a group's rewards are as likely in any order, the likelihood ratio stays the same on average."""
    lengths, ended, rewards = group
    orders = [
        Audits([WAIT.audit(lengths, ended, order, usual_length, len(lengths))]) for order in permutations(rewards)
    ]
    assert np.mean([math.exp(audits.log_evidence()) for audits in orders]) == pytest.approx(1)


def is_warned(seed: int, needs: int) -> bool:
    """Whether a training of 150 audited groups warns, which looks at them after each."""
    audits = Audits()
    for group in observed(150, seed, needs).groups:
        audits.observe(group)
        if audits.pop_warning():
            return True
    return False


@pytest.mark.parametrize(("needs", "fewest", "most"), [(0, 0, 10 * FALSE_ALARMS), (90, 1, 1)])
def test_a_warning_tells_a_loss_from_chance(needs, fewest, most):
    assert fewest <= np.mean([is_warned(seed, needs) for seed in range(40)]) <= most


def test_a_loss_is_told_once():
    audits = observed(150, seed=0, needs=90)
    assert "defer_unsettled_groups=True" in audits.pop_warning()
    assert audits.pop_warning() is None


@pytest.mark.parametrize(("share", "warns"), [(0.01, False), (0.1, True)])
def test_many_truncated_answers_are_told(rng, share, warns):
    audits = Audits()
    for _ in range(100):
        ended = (rng.random(16) >= share).tolist()
        lengths = [10 if whole else 99 for whole in ended]
        audits.observe(BoundedWait(8, 1, 16).audit(lengths, ended, [1.0] * 16, 40, 11))
    assert audits.metrics()["truncated_share"] == pytest.approx(share, abs=0.02)
    warning = audits.pop_warning()
    assert (warning is not None) == warns
    if warning:
        assert "of the answers are truncated" in warning
    assert audits.pop_warning() is None


def test_unknown_rewards_are_left_out():
    audits = Audits()
    audits.observe(WAIT.audit([3, 5, 30], [True] * 3, [0.0, math.nan, 1.0], 6, 3))
    assert audits.groups == []
    assert audits.metrics() == {}


def test_restored_as_saved():
    audits, again = observed(70, 0, 90), Audits()
    audits.pop_warning()
    again.load_state_dict(json.loads(json.dumps(audits.state_dict())))
    assert again == audits
