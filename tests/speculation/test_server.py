"""Drafts on a real server: tokens and their frequencies follow the model's distribution."""

import pytest

from benchmarks.vllm_server import free_port, start_vllm_server
from tests.builders import ON_POLICY, make_args, make_trainer
from tests.weights.conftest import put_back
from trl_darts.serving.options import SPECULATIVE
from trl_darts.speculation.drafter import ALWAYS_VARIABLE

from .chains import largest_error, make_chain, p_value, sample, transitions


MAX_MODEL_LEN = 256
SAMPLING = {
    "warm": {"temperature": 1.0},
    "cool": {"temperature": 0.7},
    "top-k and top-p": {"temperature": 1.0, "top_k": 3, "top_p": 0.9},
}
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def chain_dir(tmp_path_factory, tokenizer):
    return make_chain(tmp_path_factory.mktemp("chain") / "model", tokenizer)


def start(chain_dir, tmp_path_factory, method, **options):
    log_path = tmp_path_factory.mktemp("chain") / "server.log"
    options = {"max_model_len": MAX_MODEL_LEN, "speculative_config": SPECULATIVE[method], **options}
    return start_vllm_server(chain_dir, log_path=log_path, **options)


@pytest.fixture(scope="module")
def drafting(chain_dir, tmp_path_factory):
    with start(chain_dir, tmp_path_factory, "suffix", env={ALWAYS_VARIABLE: "1"}) as server:
        yield server


@pytest.fixture
def trained(drafting):
    """The same server, whose weights a test may change: the frequencies of others' tokens are those of the first."""
    yield drafting
    put_back(drafting)


def counts(server):
    return [server.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")]


def check(server, chain_dir, num_answers, num_per_request):
    for sampling in SAMPLING.values():
        before = counts(server)
        answers = sample(server, num_answers, num_per_request=num_per_request, **sampling)
        expected = transitions(chain_dir, **sampling)
        drafted, accepted = (after - old for after, old in zip(counts(server), before, strict=True))
        assert largest_error(answers, expected) < 1e-4
        assert p_value(answers, expected) > 1e-4
        assert drafted > num_answers
        assert 0.1 < accepted / drafted < 1


def test_answers_are_the_models_own(drafting, chain_dir):
    check(drafting, chain_dir, 160, 8)


def test_a_sequence_may_reach_the_limit_of_the_model(drafting, chain_dir):
    """vLLM's own check would draft token 0 for every sequence, which ends a server on a CPU."""
    answers = sample(drafting, 24, max_tokens=MAX_MODEL_LEN - 2, ignore_eos=True)
    assert {len(tokens) for tokens, _ in answers} == {MAX_MODEL_LEN - 1}
    assert drafting.healthy()


def test_a_training_s_log_says_what_was_drafted(trained, chain_dir, tmp_path):
    fields = {"vllm_server_base_url": trained.base_url, "vllm_group_port": free_port(), "max_completion_length": 96}
    args = make_args(tmp_path, use_vllm=True, vllm_mode="server", learning_rate=3e-3, **fields, **ON_POLICY)
    trainer = make_trainer(chain_dir, args)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "darts/rollout/seconds" in entry]
    assert len(logs) == 3
    for entry in logs:
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3  # also with new weights
        assert 0 <= entry["darts/drafts/accepted"] <= entry["darts/drafts/tokens"]
        assert 0 <= entry["darts/drafts/step_share"] <= 1
    assert logs[0]["darts/drafts/tokens"] > logs[0]["darts/drafts/accepted"] > 0
    assert logs[0]["darts/drafts/accepted_per_step"] > 0.1
    assert "Drafting failed" not in trained.log_path.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_answers(drafting, chain_dir):
    check(drafting, chain_dir, 10_000, 16)


@pytest.mark.slow
def test_without_the_cure_they_are_not(chain_dir, tmp_path_factory):
    """If this fails, vLLM has fixed its kernel, and `fix_expand` can be removed."""
    with start(chain_dir, tmp_path_factory, "ngram", env={"VLLM_PLUGINS": ""}) as server:
        # Of its log-probs some are no numbers, for which it answers 400.
        answers = sample(server, 240, logprobs=None, **SAMPLING["cool"])
        assert counts(server)[0] > 0
    assert p_value(answers, transitions(chain_dir, **SAMPLING["cool"])) < 1e-6
