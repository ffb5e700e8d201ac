"""
The comparison of the servers' weights with the trainer's.

Invariants: rounding never ends a run, whatever the dtypes; other weights do, and only after two completions; a server
that does not answer, or says nothing of itself, never does.
"""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.fake_server import completion, fake_server
from trl_darts.engines import VLLMServerEngine
from trl_darts.engines.pool import State
from trl_darts.errors import WeightSyncError
from trl_darts.weights import canary as module
from trl_darts.weights.canary import (
    QUANTIZED,
    TOLERANCES,
    Canary,
    Difference,
    Sample,
    coarsest,
    compare,
    evaluating,
    own_logprobs,
    precision,
    prompt_of,
    tolerance,
)


URL = "http://one:8000"
CONFIG = {"model_config": {"dtype": "torch.bfloat16", "quantization": None, "logprobs_mode": "processed_logprobs"}}


def sample(logprobs, rank=None):
    return Sample(URL, rank, [5] * len(logprobs), logprobs)


# The rule


def test_difference_is_the_mean_over_the_tokens():
    found = compare(sample([-1.0, -2.0, -3.0]), [-1.5, -2.0, -2.0], 2.0)
    assert (found.mean, found.deviation) == (0.5, 2.0)
    for limit, is_wrong in ((0.26, False), (0.24, True)):
        assert Difference(URL, None, found.mean, 2.0, tolerance=limit).is_wrong == is_wrong


@given(st.sampled_from(sorted(TOLERANCES)), st.floats(0.05, 5), st.integers(0, 2**32 - 1))
def test_rounding_is_no_difference_and_other_weights_are(dtype, deviation, seed):
    """Both scale with the logits. The measured share of rounding is 0.02 of them at worst with bfloat16."""
    rng = torch.Generator().manual_seed(seed)
    own = (torch.randn(32, generator=rng) * deviation).tolist()
    for share, is_wrong in ((0.02 * TOLERANCES[dtype] / TOLERANCES["bfloat16"], False), (0.3, True)):
        noise = torch.randn(32, generator=rng) * share * deviation
        found = compare(sample([a + b for a, b in zip(own, noise.tolist(), strict=True)]), own, deviation)
        limit = TOLERANCES[dtype]
        assert Difference(URL, None, found.mean, found.deviation, limit).is_wrong == is_wrong


def test_weights_that_are_not_finite():
    """A server's are wrong, the trainer's own can't be compared."""
    assert compare(sample([-1.0, math.nan]), [-1.0, -1.0], 1.0).mean == math.inf
    assert Difference(URL, None, math.inf, 1.0, QUANTIZED).is_wrong
    assert compare(sample([-1.0, -1.0]), [-1.0, math.nan], 1.0) is None
    assert compare(sample([-1.0]), [-1.0], math.nan) is None


def test_a_model_without_preferences_has_room_for_rounding():
    assert not Difference(URL, None, 1e-6, 0.0, TOLERANCES["float32"]).is_wrong


def with_model(**fields):
    return {"model_config": {**CONFIG["model_config"], **fields}}


@pytest.mark.parametrize(
    ("dtype", "config", "limit"),
    [
        ("float32", with_model(dtype="torch.float32"), TOLERANCES["float32"]),
        ("float32", CONFIG, TOLERANCES["bfloat16"]),
        ("bfloat16", with_model(dtype="torch.float32"), TOLERANCES["bfloat16"]),
        ("float16", with_model(dtype="torch.float16"), TOLERANCES["float16"]),
        ("float32", with_model(quantization="fp8"), QUANTIZED),
        ("float32", {**CONFIG, "cache_config": {"cache_dtype": "fp8_e5m2"}}, QUANTIZED),
        ("float32", {**CONFIG, "cache_config": {"cache_dtype": "auto"}}, TOLERANCES["bfloat16"]),
        ("float32", with_model(logprobs_mode="raw_logprobs"), TOLERANCES["bfloat16"]),
        ("float32", with_model(logprobs_mode="processed_logits"), math.inf),
        ("float32", {}, TOLERANCES["float32"]),
    ],
)
def test_tolerance_is_that_of_the_coarser_side(dtype, config, limit):
    assert tolerance(dtype, False, config)[0] == limit


def test_raw_log_probs_are_those_of_temperature_1():
    raw = with_model(logprobs_mode="raw_logprobs")
    assert tolerance("float32", False, raw, 1.0)[0] == TOLERANCES["bfloat16"]
    assert tolerance("float32", False, raw, 0.7)[0] == math.inf
    assert tolerance("float32", False, CONFIG, 0.7)[0] == TOLERANCES["bfloat16"]


def test_quantized_trainer():
    assert tolerance("float32", True, CONFIG) == (QUANTIZED, "quantization")


def test_unknown_dtypes_are_the_coarsest():
    assert coarsest([None, "int8"]) == "bfloat16"
    assert coarsest([torch.float32, "torch.float16"]) == "float16"


# The trainer's side


class Model(torch.nn.Module):
    """Logits that depend on the token before, and on dropout."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(128, 128)
        self.dropout = torch.nn.Dropout(0.5)
        self.frozen = torch.nn.Dropout(0.5).eval()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=128))

    def forward(self, ids):
        return self.frozen(self.dropout(self.table(ids)))


def per_token_logps(model, ids, mask, num_logits, batch_size, compute_entropy):
    assert not torch.is_grad_enabled()
    logps = model(ids)[:, -num_logits - 1 : -1].log_softmax(-1)
    return logps.gather(-1, ids[:, -num_logits:, None])[..., 0], -(logps.exp() * logps).sum(-1), None


def make_trainer(tokenizer, mixed="no", facts_dtype="torch.float32"):
    facts = SimpleNamespace(dtype=facts_dtype, model="m", max_model_len=512)
    return SimpleNamespace(
        model=Model(),
        accelerator=SimpleNamespace(device="cpu", mixed_precision=mixed),
        vllm_generation=SimpleNamespace(facts=facts),
        processing_class=tokenizer,
        temperature=1.0,
        _get_per_token_logps_and_entropies=per_token_logps,
    )


def test_own_log_probs(tokenizer):
    """Without dropout, random numbers or a change of the model's modes."""
    trainer = make_trainer(tokenizer)
    prompt, rows = prompt_of(tokenizer), [[5, 6, 7], [8, 9, 10], [1, 2, 3], [4, 4, 4], [9, 9, 8]]
    assert len(prompt) == 48
    state = torch.get_rng_state()
    own, deviation = own_logprobs(trainer, prompt, rows)
    assert torch.equal(torch.get_rng_state(), state)
    assert (trainer.model.training, trainer.model.dropout.training, trainer.model.frozen.training) == (1, 1, 0)
    logps = trainer.model.table.weight.detach().log_softmax(-1)
    expected = [[logps[before, token] for before, token in zip([prompt[-1], *row], row)] for row in rows]  # noqa: B905
    torch.testing.assert_close(own, torch.tensor(expected))
    spread = logps[[prompt[-1], 8, 9]].std(-1).mean()
    assert deviation[1] == pytest.approx(spread.item(), rel=0.2)  # of normally distributed logits


def test_deviation_is_never_imaginary(tokenizer):
    trainer = make_trainer(tokenizer)
    trainer.model.table.weight.data.zero_()
    assert own_logprobs(trainer, [5], [[6, 7]])[1].item() == pytest.approx(0, abs=2e-3)


def test_modes_return_after_an_error():
    model = Model()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert any(part.training for part in model.modules()) / 0
    assert (model.training, model.dropout.training, model.frozen.training) == (True, True, False)


@pytest.mark.parametrize(
    ("mixed", "convert", "dtype"),
    [
        ("no", "float", "float32"),
        ("no", "bfloat16", "bfloat16"),
        ("bf16", "float", "bfloat16"),
        ("fp16", "float", "float16"),
    ],
)
def test_precision_is_that_of_the_forward_pass(tokenizer, mixed, convert, dtype):
    trainer = make_trainer(tokenizer, mixed)
    getattr(trainer.model, convert)()
    assert precision(trainer) == (dtype, False)
    trainer.model.config.quantization_config = {"bits": 4}
    assert precision(trainer) == (dtype, True)


def test_text_of_a_processor_needs_no_image(tokenizer):
    assert prompt_of(SimpleNamespace(tokenizer=tokenizer)) == prompt_of(tokenizer)


# When, and what follows


class Servers:
    """An engine whose servers answer with a given error of their log-probs, one per completion."""

    def __init__(self, monkeypatch, errors, config=CONFIG):
        self.members = {url: SimpleNamespace(state=State.UP, num_losses=0, decodes=True) for url in errors}
        self.errors = {url: iter(own) for url, own in errors.items()}
        self.takes_turns, self.asked = False, []
        monkeypatch.setattr(module, "_complete", self.complete)

        async def read(member):
            return config

        monkeypatch.setattr(module, "_vllm_config", read)
        for url, member in self.members.items():
            member.url = url

    def call(self, coroutine):
        return asyncio.run(coroutine)

    async def pool(self):
        return self

    async def complete(self, member, prompt, trainer):
        self.asked.append(member.url)
        error = next(self.errors[member.url], None)
        if error is None:
            return []
        tokens = [7] * 32
        own, _ = own_logprobs(self.trainer, prompt, [tokens])
        return [Sample(member.url, None, tokens, (own[0] + error).tolist())]


class Main:
    def broadcast(self, compute):
        return compute()


def canary_of(monkeypatch, tokenizer, errors, **options):
    servers = Servers(monkeypatch, errors, **options)
    servers.trainer = make_trainer(tokenizer, facts_dtype=None)
    return Canary(servers, Main()), servers


def test_servers_are_compared_after_the_first_sync_every_50th_and_after_they_have_joined(monkeypatch, tokenizer):
    canary, servers = canary_of(monkeypatch, tokenizer, {"a": [0.0] * 99, "b": [0.0] * 99})
    servers.members["b"].state = State.DOWN
    asked = []
    for number in range(102):
        if number == 3:
            servers.members["b"].state = State.UP
        if number == 60:
            servers.members["a"].num_losses += 1
        metrics = canary.check(servers.trainer)
        assert metrics == ({"darts/sync/logp_difference": 0.0} if servers.asked else {})
        asked += [(number, url) for url in servers.asked]
        servers.asked.clear()
    assert asked == [(0, "a"), (3, "b"), (50, "a"), (50, "b"), (60, "a"), (100, "a"), (100, "b")]


def test_other_weights_end_the_run_in_the_second_completion(monkeypatch, tokenizer):
    canary, servers = canary_of(monkeypatch, tokenizer, {"http://sound:1": [0.0], URL: [0.4, 0.5]})
    with pytest.raises(WeightSyncError) as error:
        canary.check(servers.trainer)
    for part in (URL, "by 0.5 on average", "bfloat16 explains at most 0."):
        assert part in str(error.value)
    assert servers.asked == ["http://sound:1", URL, URL]


@pytest.mark.parametrize("second", [0.0, None])
def test_one_completion_is_not_enough(monkeypatch, tokenizer, second):
    """Nor is a server that is lost after it."""
    canary, servers = canary_of(monkeypatch, tokenizer, {URL: [0.4, second]})
    assert canary.check(servers.trainer)["darts/sync/logp_difference"] == pytest.approx(0.4)


def test_quantized_servers_and_servers_that_say_nothing_are_not_alarming(monkeypatch, tokenizer):
    for config in (with_model(quantization="fp8"), with_model(logprobs_mode="raw_logits"), None):
        canary, servers = canary_of(monkeypatch, tokenizer, {URL: [0.3, 0.3]}, config=config)
        assert canary.check(servers.trainer)["darts/sync/logp_difference"] == pytest.approx(0.3)


def test_a_server_that_does_not_answer_is_not_judged(monkeypatch, tokenizer):
    canary, servers = canary_of(monkeypatch, tokenizer, {URL: [None]})
    assert canary.check(servers.trainer) == {}


def test_servers_that_share_gpus_are_woken_up_in_turns(monkeypatch, tokenizer):
    """The main ones last, because the next rollout begins with them."""
    canary, servers = canary_of(monkeypatch, tokenizer, {"main": [0.0], "tail": [0.0]})
    turns, servers.takes_turns = [], True

    async def take_turns(tail):
        turns.append(tail)
        for url, member in servers.members.items():
            member.decodes = tail == (url == "tail")

    servers.take_turns = take_turns
    canary.check(servers.trainer)
    assert (turns, servers.asked) == ([True, False], ["tail", "main"])


# Requests


def asked(answers, num_engines):
    """Has a server whose engines answer with the given statuses complete the prompt; returns requests and samples."""
    requests = []

    async def complete(request):
        rank = request.headers.get("X-data-parallel-rank")
        requests.append((rank, await request.json()))
        tokens = list(range(answers[int(rank or 0)]))
        return web.json_response(
            completion(tokens) if tokens else {"error": {"message": "no"}}, status=200 if tokens else 503
        )

    async def metrics(request):
        lines = [f'vllm:num_requests_running{{engine="{rank}"}} 1.0' for rank in range(num_engines)]
        return web.Response(text="\n".join(lines))

    generation = SimpleNamespace(facts=SimpleNamespace(model="m", max_model_len=512))
    trainer = SimpleNamespace(vllm_generation=generation, temperature=0.7)
    with fake_server({"POST /v1/completions": complete, "GET /metrics": metrics}) as url:
        engine = VLLMServerEngine([url])
        samples = engine.call(module._complete(engine.members[url], [5, 6], trainer))
        engine.close()
    return requests, samples


def test_each_data_parallel_rank_is_asked():
    requests, samples = asked([32, 32], num_engines=2)
    assert {rank for rank, _ in requests} == {"0", "1"}
    assert [(sample.rank, len(sample.tokens)) for sample in samples] == [(0, 32), (1, 32)]
    body = requests[0][1]
    options = {"max_tokens": 32, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "logprobs": 0, "ignore_eos": True}
    assert options.items() <= body.items()
    assert not {"seed", "n"} & body.keys()


def test_a_single_engine_is_asked_without_a_rank():
    requests, samples = asked([32], num_engines=1)
    assert [rank for rank, _ in requests] == [None]
    assert samples[0].rank is None


def test_refused_and_cut_answers_are_not_compared():
    """A server that can't answer is not wrong, and another client may abort its requests."""
    assert asked([0, 31], num_engines=2)[1] == []
    engine = VLLMServerEngine(["http://127.0.0.1:9"])
    generation = SimpleNamespace(facts=SimpleNamespace(model="m", max_model_len=512))
    trainer = SimpleNamespace(vllm_generation=generation, temperature=0.7)
    assert engine.call(module._complete(next(iter(engine.members.values())), [5], trainer)) == []
    engine.close()
