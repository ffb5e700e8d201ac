"""Tests which unsettled groups are deferred, and the effect of long rounds on this."""

import json
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.policy.deferral import CUT_OFF, EXPLORED, GATE, WAITING_ROUNDS, LongRewards, gain_of_length


LENGTHS = [10, 10, 10, 10, 90, 90]  # of which four are usual


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=5, max_size=5), st.integers(0, 5))
def test_no_gain_where_rewards_do_not_depend_on_lengths(rewards, num_short):
    lengths = [10] * num_short + [90] * (5 - num_short)
    gains = [gain_of_length(order, lengths, 50.0) for order in permutations(rewards)]
    assert np.mean(gains) == pytest.approx(0.0, abs=1e-12)


def test_gain_of_length():
    assert gain_of_length([0, 0, 0, 0, 0, 0], LENGTHS, 50.0) == 0.0
    # Four of six rows at random are without the one right row in a third of the cases.
    assert gain_of_length([0, 0, 0, 0, 0, 1], LENGTHS, 50.0) == pytest.approx(1 - 1 / 3)
    assert gain_of_length([1, 0, 0, 0, 0, 0], LENGTHS, 50.0) == pytest.approx(-1 / 3)
    assert gain_of_length([0, 1, 0, 1, 0, 1], LENGTHS, 50.0) == 0.0  # four rows always have both


NAN = float("nan")


@given(st.lists(st.sampled_from([0.0, 0.5, NAN]), min_size=5, max_size=5), st.integers(0, 5))
def test_no_gain_where_unknown_rewards_do_not_depend_on_lengths(rewards, num_short):
    lengths = [10] * num_short + [90] * (5 - num_short)
    gains = [gain_of_length(order, lengths, 50.0) for order in permutations(rewards)]
    assert np.mean(gains) == pytest.approx(0.0, abs=1e-12)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([10, 90])), max_size=6),
    st.lists(st.sampled_from([10, 90]), max_size=4),
)
def test_rows_without_a_reward_do_not_count(known, unknown):
    """All, some, one or no row without a reward: the gain is that of the other rows."""
    rewards, lengths = [reward for reward, _ in known], [length for _, length in known]
    gain = gain_of_length(rewards + [NAN] * len(unknown), lengths + unknown, 50.0)
    assert gain == gain_of_length(rewards, lengths, 50.0)
    assert len(set(rewards)) > 1 or gain == 0.0


def test_a_verifier_that_times_out_on_long_answers_does_not_make_all_rounds_long():
    learned = LongRewards(usual_length=50.0)
    for _ in range(40):
        learned.observe_long(7, [1, 1, 1, 1, NAN, NAN], LENGTHS)
        learned.observe_long(8, [NAN] * 6, LENGTHS)
    assert learned.expected_gain(7) < GATE
    assert learned.expected_gain(8) < GATE
    assert learned.expected_gain(9) < GATE  # of a prompt without a long round


def test_a_prompt_is_deferred_while_long_rounds_help():
    learned = LongRewards(usual_length=50.0)
    assert learned.defers(7, 0)  # by the prior
    for _ in range(16):
        learned.observe_long(6, [0] * 6, LENGTHS)
        learned.observe_long(7, [0, 1, 0, 1, 0, 1], LENGTHS)  # a short round would have different rewards too
        learned.observe_long(8, [0, 0, 0, 0, 0, 1], LENGTHS)
        learned.observe_long(9, [1, 0, 0, 0, 0, 0], LENGTHS)
    assert learned.expected_gain(9) < learned.expected_gain(7) < GATE < learned.expected_gain(8)
    assert learned.expected_gain(6) == learned.expected_gain(7)


def test_one_group_alone_does_not_decide():
    """Where a tenth of the groups gain, most prompts' first group does not."""
    learned = LongRewards(num_groups=100.0, total_gain=10.0, usual_length=50.0)
    learned.observe_long(7, [0] * 6, LENGTHS)
    assert learned.expected_gain(7) > GATE
    for _ in range(9):
        learned.observe_long(7, [0] * 6, LENGTHS)
    assert learned.expected_gain(7) < GATE


def test_some_are_deferred_at_random():
    learned = LongRewards(num_groups=1000.0, total_gain=0.0)
    shares = sum(learned.defers(1, entry_id) for entry_id in range(4000)) / 4000
    assert shares == pytest.approx(EXPLORED, abs=0.02)
    assert [learned.defers(1, i) for i in range(50)] == [learned.defers(1, i) for i in range(50)]


def test_all_is_waited_for_until_few_answers_are_cut_off():
    learned = LongRewards()
    assert learned.waits_for_all  # nothing was observed
    learned.observe_ends(10, 100, 0, 12)
    assert learned.waits_for_all
    while learned.cut_off_share > CUT_OFF:
        learned.observe_ends(0, 100, 0, 12)
    assert not learned.waits_for_all
    learned.observe_ends(0, 0, 0, 0)  # a round of prompts that were all dropped
    assert not learned.waits_for_all


def test_rounds_that_are_never_bounded_get_one_warning():
    """Not while the first rounds are decoded to their end, as always, and not for a share that falls in time."""
    learned = LongRewards()
    for _ in range(WAITING_ROUNDS - 1):
        learned.observe_ends(10, 100, 0, 12)
        assert learned.pop_warning() is None
    learned.observe_ends(10, 100, 0, 12)
    assert "10.0% of the answers reach `max_completion_length`, more than 3% in 5 rollouts" in learned.pop_warning()
    learned.observe_ends(10, 100, 0, 12)
    assert learned.pop_warning() is None
    calm = LongRewards()
    for num_cut in (4, 3, 2, 1, 0, 0, 0, 0):
        calm.observe_ends(num_cut, 100, 0, 12)
        assert calm.pop_warning() is None


@given(st.lists(st.tuples(st.integers(0, 32), st.integers(1, 32)), max_size=20), st.integers(1, 64))
def test_between_one_and_two_prompts_are_started_for_each(rounds, num_groups):
    learned = LongRewards()
    for deferred, groups in rounds:
        learned.observe_short(100.0, min(deferred, groups), groups)
    assert num_groups <= learned.num_started(num_groups) <= 2 * num_groups


def test_the_first_short_round_expects_what_long_rounds_have_shown():
    """Only those before it: later ones are of the deferred prompts."""
    learned = LongRewards()
    assert learned.num_started(32) == 32  # nothing was observed
    learned.observe_ends(0, 256, 8, 32)
    assert learned.num_started(32) == 43
    learned.observe_ends(0, 256, 32, 32)
    assert learned.num_started(32) == 64
    learned.observe_short(100.0, 0, 32)
    learned.observe_ends(0, 256, 0, 32)
    assert learned.num_started(32) == 64


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.booleans(), min_size=6, max_size=6)), max_size=30))
def test_restored_as_saved(groups):
    learned, again = LongRewards(), LongRewards()
    learned.observe_short(50.0, 1, 4)
    for key, rewards in groups:
        learned.observe_long(key, rewards, LENGTHS)
        learned.observe_ends(key, 10, 1, 2)
    again.load_state_dict(json.loads(json.dumps(learned.state_dict())))
    assert again == learned
