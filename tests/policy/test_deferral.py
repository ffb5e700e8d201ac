"""Tests which unsettled groups are deferred, and the effect of long rounds on this."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.policy.deferral import CUT_OFF, EXPLORED, GATE, LongRewards


def test_a_prompt_is_deferred_while_long_rounds_help():
    learned = LongRewards()
    assert learned.defers(7, 0)  # by the prior
    for _ in range(8):
        learned.observe_long(6, is_uniform=True, is_short_uniform=True)
        learned.observe_long(7, is_uniform=True, is_short_uniform=True)
        learned.observe_long(8, is_uniform=False, is_short_uniform=True)
        learned.observe_long(9, is_uniform=False, is_short_uniform=False)
    assert learned.probability(7) < GATE < learned.probability(8)
    assert learned.probability(9) == learned.probability(7)  # a short round would have different rewards too


def test_some_are_deferred_at_random():
    learned = LongRewards(num_groups=1000.0, num_hits=0.0)
    shares = sum(learned.defers(1, entry_id) for entry_id in range(4000)) / 4000
    assert shares == pytest.approx(EXPLORED, abs=0.02)
    assert [learned.defers(1, i) for i in range(50)] == [learned.defers(1, i) for i in range(50)]


def test_all_is_waited_for_until_few_answers_are_cut_off():
    learned = LongRewards()
    assert learned.waits_for_all  # nothing was observed
    learned.observe_ends(10, 100)
    assert learned.waits_for_all
    while learned.cut_off_share > CUT_OFF:
        learned.observe_ends(0, 100)
    assert not learned.waits_for_all
    learned.observe_ends(0, 0)  # a round of prompts that were all dropped
    assert not learned.waits_for_all


@given(st.lists(st.tuples(st.integers(0, 32), st.integers(1, 32)), max_size=20), st.integers(1, 64))
def test_between_one_and_two_prompts_are_started_for_each(rounds, num_groups):
    learned = LongRewards()
    for deferred, groups in rounds:
        learned.observe_short(100.0, min(deferred, groups), groups)
    assert num_groups <= learned.num_started(num_groups) <= 2 * num_groups


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=30))
def test_restored_as_saved(groups):
    learned, again = LongRewards(), LongRewards()
    for key, is_uniform, is_short_uniform in groups:
        learned.observe_long(key, is_uniform, is_short_uniform)
        learned.observe_ends(key, 10)
    again.load_state_dict(json.loads(json.dumps(learned.state_dict())))
    assert again == learned
