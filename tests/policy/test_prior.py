"""`PromptLengthPrior`: means per bucket of prompt length, drawn to the overall mean, and forgotten."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_darts.errors import StateMismatchError
from trl_darts.policy import PromptLengthPrior
from trl_darts.policy.lengths import HALF_LIFE, SHRINKAGE


observations = st.lists(st.tuples(st.integers(0, 1 << 24), st.floats(0, 1e6)), min_size=1, max_size=30)


def fed(pairs: list[tuple[int, float]]) -> PromptLengthPrior:
    prior = PromptLengthPrior()
    for num_prompt_tokens, mean_length in pairs:
        prior.update(num_prompt_tokens, mean_length)
    return prior


@pytest.mark.parametrize("num_prompt_tokens", [0, 1, 1000, 1 << 24])
def test_nothing_is_known_before_the_first_update(num_prompt_tokens: int) -> None:
    assert math.isnan(PromptLengthPrior().expected(num_prompt_tokens))


@settings(deadline=None)
@given(observations, st.integers(0, 1 << 24))
def test_between_the_smallest_and_the_largest_mean(pairs: list[tuple[int, float]], num_prompt_tokens: int) -> None:
    means = [mean for _, mean in pairs]
    assert min(means) * (1 - 1e-9) <= fed(pairs).expected(num_prompt_tokens) <= max(means) * (1 + 1e-9)


def test_a_bucket_is_drawn_to_the_overall_mean_the_less_the_more_it_has_seen() -> None:
    pairs = [(50, 100.0), (900, 700.0)]
    for repeats in (1, 2, 20):
        prior, shrinkage = fed(pairs * repeats), SHRINKAGE
        expected = (repeats * 100 + shrinkage * 400) / (repeats + shrinkage)
        assert prior.expected(55) == pytest.approx(expected, rel=0.02)  # the same bucket as 50
        assert prior.expected(200) == pytest.approx(400, rel=0.02)  # nothing in its bucket


def test_an_observation_counts_half_after_its_half_life() -> None:
    long_ago, since = [(50, 900.0)] * 5000, [(900, 0.0)] * HALF_LIFE
    prior = fed([*long_ago, *since])  # ages with the other bucket's updates too
    weight = sum(0.5 ** (n / HALF_LIFE) for n in range(5000))
    assert sorted(prior._weights)[-2] == pytest.approx(weight / 2, rel=0.01)


def test_the_order_of_prompt_lengths_is_found(rng: np.random.Generator) -> None:
    prompts = np.exp(rng.uniform(math.log(20), math.log(4000), 2000))
    prior = fed([(int(n), float(10 * n**0.7 * rng.lognormal(0, 0.5))) for n in prompts])
    expected = [prior.expected(n) for n in (32, 128, 512, 2048)]
    assert expected == sorted(expected)
    assert expected[-1] > 6 * expected[0]


@settings(deadline=None)
@given(observations, observations)
def test_a_restored_prior_goes_on_exactly(before: list[tuple[int, float]], after: list[tuple[int, float]]) -> None:
    prior, restored = fed(before), PromptLengthPrior()
    state = json.loads(json.dumps(prior.state_dict()))
    restored.load_state_dict(state)
    for pair in after:
        prior.update(*pair)
        restored.update(*pair)
    assert restored.state_dict() == prior.state_dict()
    assert state == fed(before).state_dict()  # neither shares memory with it


def test_rejects_a_state_of_something_else() -> None:
    prior = fed([(50, 100.0)])
    state = prior.state_dict()
    with pytest.raises(StateMismatchError, match=r"'totals'.*'weights'.*this one has \{'weights'"):
        prior.load_state_dict({"weights": state["weights"]})
    with pytest.raises(StateMismatchError, match=r"\(3,\)"):
        prior.load_state_dict({**state, "totals": [0.0, 1.0, 2.0]})
    assert prior.state_dict() == state
