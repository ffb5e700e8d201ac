"""Real servers: siblings, and visits of a prompt, do not repeat each other's random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from transformers import AutoConfig

from benchmarks.vllm_server import VLLMServer, start_vllm_server
from tests.builders import letters_dataset, make_trainer
from tests.engines.test_preflight import check, needs
from tests.test_trainer_server import server_args
from trl_darts.errors import ConfigurationError


pytestmark = pytest.mark.vllm
SEED = {"generation_kwargs": {"seed": 3}}
CONTINUOUS = {**SEED, "rollout_ahead": "continuous", "schedule": "darts"}
LONG = 24  # tokens


def shared(one: list[int], other: list[int]) -> int:
    """Returns the number of first tokens that two answers share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def train(model_dir, servers, output_dir, **fields) -> list[list[list[list[int]]]]:
    """Trains on three prompts × 8 at temperature 2. Returns the tokens of all candidates, by rollout and group."""
    fields = {
        "num_generations": 8,
        "per_device_train_batch_size": 24,
        "temperature": 2.0,
        "schedule": "grpo",
        **fields,
    }
    urls = ",".join(server.base_url for server in servers)
    args = server_args(output_dir, servers[0], vllm_server_base_url=urls, learning_rate=1e-5, **fields)
    trainer = make_trainer(model_dir, args, train_dataset=letters_dataset(3))
    found, run = [], trainer._engine.run

    def recorded(*args, **kwargs):
        result = run(*args, **kwargs)
        found.append([[candidate.tokens for candidate in group.candidates] for group in result.groups])
        return result

    trainer._engine.run = recorded
    trainer.train()
    assert all(server.healthy() for server in servers)
    return found


def twins(rollouts) -> list[int]:
    """Returns the number of first tokens that siblings share, of those that share many."""
    pairs = (pair for groups in rollouts for group in groups for pair in itertools.combinations(group, 2))
    return [length for pair in pairs if (length := shared(*pair)) >= LONG]


def repeats(rollouts) -> int:
    """Returns the number of long answers that the run has had before."""
    answers = [tuple(tokens) for groups in rollouts for group in groups for tokens in group if len(tokens) >= LONG]
    assert len(answers) > 20
    return len(answers) - len(set(answers))


@pytest.mark.parametrize("fields", [SEED, CONTINUOUS])
def test_a_users_seed_gives_each_visit_other_answers(server, second_server, model_dir, tmp_path, monkeypatch, fields):
    monkeypatch.setenv("VLLM_API_KEY", "secret")  # of the second server
    fields = {**fields, "max_steps": 5, "max_completion_length": 48}
    fields["generation_kwargs"] = {**fields["generation_kwargs"], "ignore_eos": True}  # long answers
    rollouts = train(model_dir, [server, second_server], tmp_path, **fields)
    assert twins(rollouts) == []
    assert repeats(rollouts) == 0


def ask_all(server: VLLMServer, num_prompts: int = 64) -> list[list[int]]:
    """Returns the answers to prompts that do not fit one step, so that some are prefilled in parts."""

    def ask(number: int) -> list[int]:
        prompt = [3 + number] * 200
        body = {"model": server.model, "prompt": prompt, "max_tokens": 8, "seed": number, "return_token_ids": True}
        return server.request("/v1/completions", {**body, "ignore_eos": True})["choices"][0]["token_ids"]

    with ThreadPoolExecutor(num_prompts) as executor:
        return list(executor.map(ask, range(num_prompts)))


def test_seeded_requests_are_prefilled_in_parts_and_repeat(server):
    """Their answers are those of a server that has room for all at once."""
    answers = ask_all(server)
    assert {len(tokens) for tokens in answers} == {8}
    assert server.healthy()
    assert ask_all(server) == answers
    assert ask_all(server, 1) == answers[:1]


@pytest.mark.slow
def test_without_our_plugin_they_end_the_server(tiny_model_dir):
    """So a user's seed is refused before."""
    config = AutoConfig.from_pretrained(tiny_model_dir)
    with start_vllm_server(tiny_model_dir, max_model_len=512, env={"VLLM_PLUGINS": "none"}) as server:
        asked = {"weight_transfer": None, "max_completion_length": 32}
        check(server.base_url, needs(config, **asked))
        with pytest.raises(ConfigurationError, match=r"`generation_kwargs\['seed'\]` \(3\) would end the vLLM server"):
            check(server.base_url, needs(config, sampling={"seed": 3}, **asked))
        with pytest.raises(OSError, match=r"500|reset|refused|closed"):
            ask_all(server)
        assert "CPU Generator does not use offset" in server.log_path.read_text()
        assert not server.healthy()


@pytest.fixture(scope="module")
def alike(tiny_model_dir) -> Iterator[list[VLLMServer]]:
    """Two servers with vLLM's own seed, 0."""
    with ExitStack() as stack:
        options = {"max_model_len": 512, "wait": False}
        servers = [stack.enter_context(start_vllm_server(tiny_model_dir, **options)) for _ in range(2)]
        for server in servers:
            server.wait_until_healthy(240)
        yield servers


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, SEED, CONTINUOUS])
def test_siblings_on_two_servers_with_one_seed(alike, tiny_model_dir, tmp_path, caplog, fields):
    fields = {**fields, "max_steps": 20, "max_completion_length": 160}
    rollouts = train(tiny_model_dir, alike, tmp_path, **fields)
    assert len(rollouts) >= 20
    assert twins(rollouts) == []
    assert repeats(rollouts) == 0
    assert "Two answers to one prompt" not in caplog.text
