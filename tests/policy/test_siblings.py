"""Answers to one prompt that are too alike are told from those that are equal because nothing else is likely."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from tests.builders import make_args, make_trainer
from trl_darts.checks import tells_chance, warn_of_twins
from trl_darts.policy.siblings import SiblingCheck, Twins
from trl_darts.scheduling import RolloutResult
from trl_darts.testing import stub_servers


def row(tokens, logprob=-1.0):
    return list(tokens), [logprob] * len(tokens)


def test_what_two_real_servers_with_one_seed_gave():
    """160 equal tokens with a log-prob of -62.85, and 48 with -16.7, which may differ after."""
    rows = [row([100 + i] * 50) for i in range(6)]
    twins = SiblingCheck().find([*rows, row(range(160), -62.85 / 160), row(range(160), -62.85 / 160)])
    assert (twins.num_tokens, round(twins.logprob, 2)) == (160, -62.85)
    twins = SiblingCheck().find([row([*range(48), 1, 2], -20 / 48), *rows, row([*range(48), 7], -20 / 48)])
    assert (twins.num_tokens, round(twins.logprob, 2)) == (48, -20.0)
    assert SiblingCheck().find(rows) is None


@pytest.mark.parametrize(
    "rows",
    [
        [row([7] * 2000, -1e-4)] * 8,  # at a temperature near 0
        [row([4, 5, 6], -9.0)] * 8,  # " 42" and the end
        [row([7] * 40, -0.2)] * 2,  # exp(-8): three in ten thousand
        [row([7] * 40), ([7] * 40, None)],
        [([7] * 40, [math.nan] * 40)] * 2,  # unknown log-probs
        [row([7] * 40), row([7] * 40, -0.1)],  # the second prompt makes the tokens likely
        [([], []), ([], [])],
    ],
)
def test_no_alarm(rows):
    assert SiblingCheck().find(rows) is None


def test_a_long_run_meets_rarer_pairs():
    """One in ten thousand million is nothing after as many pairs."""
    check, pair = SiblingCheck(), [row(range(25), -23.1 / 25)] * 2
    assert check.find(pair) is not None
    check.num_pairs = 10**5
    assert check.find(pair) is None


@pytest.mark.parametrize("kind", ["independent", "one stream"])
def test_independent_samples_never_alarm(rng, kind):
    """A peaked distribution, whose samples are often equal, and generators with the same seed."""
    for step in range(200):
        check = SiblingCheck()
        probs = rng.dirichlet(np.full(20, 0.02))
        streams = [rng] * 8 if kind == "independent" else [np.random.default_rng(step) for _ in range(2)]
        sampled = [stream.choice(20, size=60, p=probs) for stream in streams]
        twins = check.find([(tokens, np.log(probs[tokens])) for tokens in sampled])
        surprising = float(np.log(probs[sampled[0]]).sum()) < math.log(1e-6)
        assert (twins is not None) == (kind == "one stream" and surprising)


def test_where_logprobs_tell_what_is_likely(tmp_path):
    assert tells_chance(make_args(tmp_path))
    assert not tells_chance(make_args(tmp_path, temperature=1e-6))  # vLLM's log-probs are those before it
    assert not tells_chance(make_args(tmp_path, use_vllm=True, generation_kwargs={"temperature": 0.0}))
    assert not tells_chance(make_args(tmp_path, vllm_importance_sampling_correction=False))


def test_the_warning_names_the_remedy(caplog):
    rows = [SimpleNamespace(tokens=list(range(40)), logprobs=[-1.0] * 40)] * 2
    groups = [SimpleNamespace(rows=[]), SimpleNamespace(rows=rows)]
    check = SiblingCheck()
    assert not warn_of_twins(check, RolloutResult(groups[:1], [], None))
    assert warn_of_twins(check, RolloutResult(groups, [], None))
    assert check.find([(one.tokens, one.logprobs) for one in rows]) == Twins(40, -40.0)
    assert "share their first 40 tokens" in caplog.text
    assert "`trl-darts serve`" in caplog.text


@pytest.mark.parametrize("logprob", [-1.0, 0.0])
def test_a_run_warns_once(tiny_model_dir, tmp_path, caplog, logprob):
    """Candidates 0 and 1, 2 and 3, … are equal in each of its rollouts."""
    with stub_servers(lambda prompt, index: [50 + index // 2] * 30 + [1]):
        fields = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}
        trainer = make_trainer(tiny_model_dir, make_args(tmp_path, **fields))
    assert trainer._siblings is None
    trainer._siblings, run = SiblingCheck(), trainer._engine.run

    def unlikely(*args, **kwargs):
        result = run(*args, **kwargs)
        for row in (row for group in result.groups for row in group.rows):
            row.logprobs = [logprob] * len(row.tokens)
        return result

    trainer._engine.run = unlikely
    trainer.train()
    warnings = [record for record in caplog.records if "Two answers to one prompt" in record.message]
    assert len(warnings) == (logprob < 0)
