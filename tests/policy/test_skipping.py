"""Prompts that taught nothing are skipped more and more often, but never for ever."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.policy.skipping import LEAST_SAMPLED, UniformPrompts


OBSERVATIONS = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60)


def observed(observations):
    prompts = UniformPrompts()
    for key, is_uniform in observations:
        prompts.observe(key, is_uniform)
    return prompts


@given(OBSERVATIONS, st.integers(0, 5))
def test_never_certain_and_none_without_a_uniform_group(observations, key):
    prompts = observed(observations)
    own = [is_uniform for other, is_uniform in observations if other == key]
    streak = next((i for i, is_uniform in enumerate(reversed(own)) if not is_uniform), len(own))
    assert prompts.probability(key) == pytest.approx(1 - max(0.5**streak, LEAST_SAMPLED))
    assert (key in prompts._streaks) == (streak > 0)


@given(OBSERVATIONS)
def test_a_uniform_group_never_makes_it_likelier_to_be_sampled(observations):
    prompts = observed(observations)
    before = prompts.probability(0)
    prompts.observe(0, True)
    assert prompts.probability(0) >= before
    prompts.observe(0, False)
    assert prompts.probability(0) == 0


@given(OBSERVATIONS, st.integers(0, 50))
def test_restored_as_saved(observations, num_draws):
    prompts = observed(observations)
    for key in range(num_draws):
        prompts.skips(key % 6)
    restored = UniformPrompts()
    restored.load_state_dict(json.loads(json.dumps(prompts.state_dict())))
    assert [restored.skips(key % 6) for key in range(60)] == [prompts.skips(key % 6) for key in range(60)]


@pytest.mark.parametrize("streak", [0, 1, 2, 10])
def test_draws_have_their_probability(streak):
    prompts = observed([(7, True)] * streak)
    share = sum(prompts.skips(7) for _ in range(4000)) / 4000
    assert share == pytest.approx(prompts.probability(7), abs=0.03)
