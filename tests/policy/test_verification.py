"""Old answers that are kept as far as the new policy goes follow the new policy exactly."""

import numpy as np
import pytest
from scipy.stats import chisquare

from trl_darts.policy.verification import draw_residual, num_accepted


def random_policies(seed, num_tokens, difference):
    """Returns the distributions `q` and `p` at two positions."""
    rng = np.random.default_rng(seed)
    q = rng.dirichlet(np.ones(num_tokens), size=2)
    p = (1 - difference) * q + difference * rng.dirichlet(np.ones(num_tokens), size=2)
    return q, p


def top(probs, count):
    """The likeliest tokens of a distribution."""
    return {int(i): float(np.log(probs[i])) for i in np.argsort(-probs)[:count]}


def reused(q, p, rng, count, residual=True):
    """Two tokens of `q` as `p` would have written them, by the rule of the rollouts."""
    old = [int(rng.choice(len(row), p=row)) for row in q]
    kept = num_accepted(np.log(q[[0, 1], old]), np.log(p[[0, 1], old]), rng)
    tokens = old[:kept]
    if kept < 2 and residual:
        before = {**top(q[kept], count), old[kept]: np.log(q[kept][old[kept]])}
        token, _ = draw_residual(before, top(p[kept], count), rng)
        tokens += [] if token is None else [token]
    return tokens + [int(rng.choice(len(row), p=row)) for row in p[len(tokens) :]]


def counts_of(q, p, count, residual=True, size=20_000):
    rng = np.random.default_rng(1)
    found = np.zeros((len(q[0]), len(q[0])))
    for _ in range(size):
        found[tuple(reused(q, p, rng, count, residual))] += 1
    return found


@pytest.mark.parametrize("difference", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_new_policys_distribution(seed, difference):
    q, p = random_policies(seed, 5, difference)
    found = counts_of(q, p, count=5)
    assert chisquare(found.ravel(), found.sum() * np.outer(p[0], p[1]).ravel()).pvalue > 1e-3


def test_the_comparison_can_fail():
    """The published rule draws from the new policy where a token was rejected."""
    q, p = random_policies(0, 5, 1.0)
    found = counts_of(q, p, count=5, residual=False)
    assert chisquare(found.ravel(), found.sum() * np.outer(p[0], p[1]).ravel()).pvalue < 1e-6


@pytest.mark.parametrize("difference", [0.1, 1.0])
def test_what_is_unknown_bounds_what_it_is_off(difference):
    """With half of the tokens known, the distribution is off by no more than said, and by chance."""
    q, p = random_policies(2, 10, difference)
    rng = np.random.default_rng(0)
    unknown = [draw_residual(top(own, 5), top(new, 5), rng)[1] for own, new in zip(q, p, strict=True)]
    assert all(0 <= bound <= 1 for bound in unknown)
    found = counts_of(q, p, count=5)
    first = found.sum(axis=1) / found.sum()
    rejected = np.maximum(p[0] - q[0], 0).sum()
    missing = sum(q[0][i] for i in range(10) if i in top(p[0], 5) and i not in top(q[0], 5))
    assert np.abs(first - p[0]).sum() / 2 < rejected * max(unknown) + missing + 0.02


def test_equal_policies_keep_all():
    rng = np.random.default_rng(0)
    logprobs = np.log(rng.random(1000))
    assert num_accepted(logprobs, logprobs, rng) == 1000
    assert num_accepted([], [], rng) == 0
    assert num_accepted([-1.0, np.nan, -1.0], [-1.0, -1.0, -1.0], rng) == 1  # an unknown probability


def test_nothing_is_known_of_the_old_policy():
    assert draw_residual({}, {3: -0.1}, np.random.default_rng(0)) == (None, 1.0)
