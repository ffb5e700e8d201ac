"""`PromptLengthPrior`: means per bucket of prompt length, drawn to the overall mean, and forgotten."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_darts.errors import ConfigurationError, StateMismatchError
from trl_darts.policy.prior import NUM_BUCKETS, PromptLengthPrior


observations = st.lists(st.tuples(st.integers(0, 1 << 24), st.floats(0, 1e6)), min_size=1, max_size=30)


def fed(pairs: list[tuple[int, float]], half_life: float = math.inf, shrinkage: float = 8.0) -> PromptLengthPrior:
    prior = PromptLengthPrior(half_life, shrinkage)
    for num_prompt_tokens, mean_length in pairs:
        prior.update(num_prompt_tokens, mean_length)
    return prior


@settings(deadline=None)
@given(st.integers(0, 1 << 24))
def test_nothing_is_known_before_the_first_update(num_prompt_tokens: int) -> None:
    assert math.isnan(PromptLengthPrior().expected(num_prompt_tokens))
    assert math.isnan(PromptLengthPrior(shrinkage=0).expected(num_prompt_tokens))


@settings(deadline=None)
@given(observations, st.integers(0, 1 << 24), st.floats(0.1, 1e4), st.floats(0, 100))
def test_between_the_smallest_and_the_largest_mean(
    pairs: list[tuple[int, float]], num_prompt_tokens: int, half_life: float, shrinkage: float
) -> None:
    expected = fed(pairs, half_life, shrinkage).expected(num_prompt_tokens)
    means = [mean for _, mean in pairs]
    assert min(means) * (1 - 1e-9) - 1e-200 <= expected <= max(means) * (1 + 1e-9) + 1e-200


def test_a_bucket_is_drawn_to_the_overall_mean() -> None:
    pairs = [(50, 100.0), (60, 100.0), (900, 700.0), (1000, 700.0)]  # two buckets, overall mean 400
    prior = fed(pairs, shrinkage=1)
    assert prior.expected(55) == pytest.approx((2 * 100 + 400) / 3)
    assert prior.expected(950) == pytest.approx((2 * 700 + 400) / 3)
    assert prior.expected(200) == pytest.approx(400)  # nothing in its bucket
    assert fed(pairs, shrinkage=0).expected(55) == pytest.approx(100)
    assert fed(pairs, shrinkage=0).expected(200) == pytest.approx(400)


@settings(deadline=None)
@given(st.integers(1, 30), st.floats(0.5, 50))
def test_the_more_a_bucket_has_seen_the_less_it_is_drawn(num: int, shrinkage: float) -> None:
    def distance(repeats: int) -> float:
        prior = fed([(50, 100.0), (900, 700.0)] * repeats, shrinkage=shrinkage)
        return prior.expected(50) - 100

    assert 0 < distance(num + 1) < distance(num) < 300


@settings(deadline=None)
@given(observations, st.integers(0, 1 << 24), st.floats(1, 1e6))
def test_a_mean_above_all_others_raises_the_expectation(
    pairs: list[tuple[int, float]], num_prompt_tokens: int, excess: float
) -> None:
    prior, mean_length = fed(pairs), 1e6 + excess
    before = prior.expected(num_prompt_tokens)
    prior.update(num_prompt_tokens, mean_length)
    assert before < prior.expected(num_prompt_tokens) < mean_length


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 100, 1 << 19])
def test_buckets_are_geometric(num_tokens: int) -> None:
    prior = fed([(num_tokens, 10.0), (2 * num_tokens, 90.0)], shrinkage=0)
    assert (prior.expected(num_tokens), prior.expected(2 * num_tokens)) == pytest.approx((10, 90))
    assert prior.expected(4 * num_tokens) == pytest.approx(90 if num_tokens == 1 << 19 else 50)


def test_an_observation_counts_half_after_its_half_life() -> None:
    prior = fed([(50, 0.0), (900, 0.0), (900, 0.0), (900, 0.0), (50, 300.0)], half_life=4, shrinkage=0)
    assert prior.expected(50) == pytest.approx(200)  # ages with the other bucket's updates too
    for _ in range(400):
        prior.update(50, 7.0)
    assert prior.expected(50) == pytest.approx(7)


def test_the_order_of_prompt_lengths_is_found(rng: np.random.Generator) -> None:
    prompts = np.exp(rng.uniform(math.log(20), math.log(4000), 2000))
    prior = fed([(int(n), float(10 * n**0.7 * rng.lognormal(0, 0.5))) for n in prompts], half_life=1024)
    expected = [prior.expected(n) for n in (32, 128, 512, 2048)]
    assert expected == sorted(expected)
    assert expected[-1] > 8 * expected[0]


@settings(deadline=None)
@given(observations, observations)
def test_a_restored_prior_goes_on_exactly(before: list[tuple[int, float]], after: list[tuple[int, float]]) -> None:
    prior, restored = fed(before, 7.0), PromptLengthPrior(7.0)
    state = json.loads(json.dumps(prior.state_dict()))
    restored.load_state_dict(state)
    for pair in after:
        prior.update(*pair)
        restored.update(*pair)
    assert restored.state_dict() == prior.state_dict()
    assert state == fed(before, 7.0).state_dict()  # neither shares memory with it
    assert [len(state[name]) for name in ("weights", "totals", "unit")] == [NUM_BUCKETS, NUM_BUCKETS, 1]


def test_rejects_a_state_of_something_else() -> None:
    prior = fed([(50, 100.0)])
    state = prior.state_dict()
    with pytest.raises(StateMismatchError, match=r"'totals'.*'weights'.*this one has \{'weights'"):
        prior.load_state_dict({"weights": state["weights"]})
    with pytest.raises(StateMismatchError, match="surplus"):
        prior.load_state_dict({**state, "surplus": [0.0]})
    with pytest.raises(StateMismatchError, match=r"\(3,\)"):
        prior.load_state_dict({**state, "totals": [0.0, 1.0, 2.0]})
    assert prior.state_dict() == state


@pytest.mark.parametrize("settings", [{"half_life": 0}, {"half_life": math.nan}, {"shrinkage": -1}])
def test_rejects_settings(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        PromptLengthPrior(**settings)
    with pytest.raises(ConfigurationError, match="shrinkage"):
        PromptLengthPrior(shrinkage=math.inf)


def test_rejects_values() -> None:
    prior = PromptLengthPrior()
    for pair, name in (((-1, 5.0), "num_prompt_tokens"), ((5, -1.0), "mean_length"), ((5, math.nan), "mean_length")):
        with pytest.raises(ValueError, match=name):
            prior.update(*pair)
    with pytest.raises(ValueError, match="num_prompt_tokens"):
        prior.expected(-1)
    assert math.isnan(prior.expected(5))  # nothing was added
