"""The server engine against a real vLLM server."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.policies import make_policies
from tests.waits import wait_for
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.engines.pool import State
from trl_darts.engines.sampling import RolloutSeed
from trl_darts.engines.vllm_api import CompletionRequest, ServerBrokenError, parse_choice
from trl_darts.errors import GenerationError
from trl_darts.scheduling import (
    CandidateState,
    GroupPlan,
    RolloutResult,
    Scheduler,
    ScheduleSettings,
    TailPolicy,
    TailServers,
)


pytestmark = pytest.mark.vllm


@pytest.fixture
def engine(vllm_server) -> Iterator[VLLMServerEngine]:
    engine = VLLMServerEngine([vllm_server.base_url])
    yield engine
    engine.close()


def body(vllm_server, **more) -> dict:
    fields = {"max_tokens": 400, "temperature": 1.0, "logprobs": 0}
    return {"model": vllm_server.model, **fields, **more}


def run(engine, body, counts, schedule="darts", prompts=None, overrides=None, on_progress=None, seed=None, **kwargs):
    policies = make_policies(schedule, 4, **kwargs)
    plans = [GroupPlan(i, count) for i, count in enumerate(counts)]
    prompts = prompts or [[60 + i, 61] for i in range(len(counts))]
    prompts = {place: [ServerPrompt(prompt)] for place, prompt in enumerate(prompts)}
    return engine.run(Scheduler(policies, 4), plans, prompts, body, overrides, on_progress, seed)


def fixed_lengths(lengths):
    """Returns request fields with which the server decodes exactly this many tokens, including the end-of-sequence."""
    return lambda command: {
        "min_tokens": lengths[command.group_id][command.index] - 1,
        "logit_bias": {"1": 100},
    }


def assert_sound(result: RolloutResult) -> None:
    for group in result.groups:
        assert len(group.rows) == 4
        for candidate in group.candidates:
            assert candidate.logprobs is None or len(candidate.logprobs) == len(candidate.tokens)
            assert all(row.finish_reason is not None for row in group.rows)


def test_grpo_keeps_all_and_logprobs_are_those_of_the_model(engine, vllm_server):
    result = run(engine, body(vllm_server), [4, 4, 4], schedule="grpo")
    assert_sound(result)
    model = AutoModelForCausalLM.from_pretrained(vllm_server.model_dir, dtype=torch.float32)
    for group in result.groups:
        prompt = [60 + group.plan.group_id, 61]
        for row in group.rows:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + row.tokens])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])[:, 0]
            assert (torch.tensor(row.logprobs) - expected).abs().max() < 1e-3


def test_tokens_come_without_the_prompt(vllm_server):
    """Also special ones: `pad` (0), which has no text, and the end (1). `return_token_ids` would add the prompt."""
    biased = body(vllm_server, max_tokens=40, logit_bias={"0": 30, "1": 28}, seed=0)

    async def ask(server):
        request = CompletionRequest.of("bare", ServerPrompt([60, 61]), [], biased)
        (choice,) = (await server.post(request.path, {**request.body, "return_token_ids": True}))["choices"]
        assert "return_token_ids" not in request.body
        assert choice["prompt_token_ids"] == [60, 61]
        (bare,) = (await server.post(request.path, request.body))["choices"]
        assert bare.get("prompt_token_ids") is None
        assert parse_choice({"choices": [bare]}).tokens == choice["token_ids"]
        chunks = [chunk async for chunk in await server.open(request, 4)]
        return choice["token_ids"], [token for chunk in chunks for token in chunk.tokens]

    engine = VLLMServerEngine([vllm_server.base_url])
    ((whole, streamed),) = engine.query(ask).values()
    engine.close()
    assert streamed == whole
    assert set(whole) == {0, 1}


def test_each_candidate_of_a_request_is_aborted_by_itself(vllm_server):
    """Of the last ones, which wait in the server's queue without a token, no chunk says it."""
    options = body(vllm_server, max_tokens=300, ignore_eos=True)

    async def ask(server):
        config = (await server.get("/server_info?config_format=json"))["vllm_config"]
        num = config["scheduler_config"]["max_num_seqs"] + 8
        prompts = [ServerPrompt([60 + index % 30, 61]) for index in range(num)]
        own = [CompletionRequest.of(str(i), prompt, [], options) for i, prompt in enumerate(prompts)]
        assert len({request.kind for request in own}) == 1
        together = CompletionRequest.together(own)
        stop = [*together.internal_ids[:4], *together.internal_ids[-8:]]
        counts, ends, error = [0] * num, {}, None
        try:
            async for chunk in await server.open(together, 4):
                counts[chunk.index] += len(chunk.tokens)
                ends[chunk.index] = chunk.finish_reason
                if stop and all(counts[:4]):
                    assert await server.abort(stop)
                    stop = []
        except ServerBrokenError as broken:
            error = str(broken)
        return num, counts, ends, error

    engine = VLLMServerEngine([vllm_server.base_url])
    ((num, counts, ends, error),) = engine.query(ask).values()
    engine.close()
    assert "without a `finish_reason`" in error
    assert ends == dict.fromkeys(range(4), "abort") | dict.fromkeys(range(4, num - 8), "length")
    assert max(counts[:4]) < 300
    assert set(counts[4 : num - 8]) == {300}
    assert not any(counts[num - 8 :])


def test_candidates_of_several_prompts_share_requests(engine, vllm_server):
    """And the server decodes none of them on when the rollout is over."""
    before = vllm_server.metric("http_requests_total", 'handler="/v1/completions"')
    result = run(engine, body(vllm_server), [6] * 8, num_longest=0)
    assert_sound(result)
    asked = vllm_server.metric("http_requests_total", 'handler="/v1/completions"') - before
    assert asked == 3
    assert sum(len(group.candidates) for group in result.groups) == 48
    wait_for(lambda: vllm_server.num_running() == 0, timeout_s=3.0)


def test_saturated_group_stops_early_and_partial_tokens_come_back(engine, vllm_server):
    # An abort takes a while on a busy machine: 48 sequences, of which each step takes several milliseconds. So does
    # the start of a request: the last one that is kept is long, so that all have begun when their group ends.
    lengths = {group: [5, 1880, 9, 1870, 12, 600, 1890, 1860] for group in range(6)}
    result = run(engine, body(vllm_server, max_tokens=1900), [8] * 6, overrides=fixed_lengths(lengths))
    assert len(result.groups) == 6
    for group in result.groups:
        assert group.selected == [0, 2, 4, 5]
        aborted = [c for c in group.candidates if c.state is CandidateState.ABORTED]
        assert [c.index for c in aborted] == [1, 3, 6, 7]
        numbers = [(c.length, len(c.logprobs)) for c in aborted]
        assert all(16 <= length < 1800 and logprobs == length for length, logprobs in numbers), numbers
    wait_for(lambda: vllm_server.num_running() == 0, timeout_s=3.0)


def test_bounded_wait_streams_and_aborts(engine, vllm_server):
    lengths = {0: [20, 25, 30, 40, 55, 1890]}
    result = run(
        engine, body(vllm_server, max_tokens=1900), [6], overrides=fixed_lengths(lengths), long_end_patience=2.0
    )
    (group,) = result.groups
    assert group.selected == [0, 1, 2, 4]
    assert 80 <= group.candidates[5].length < 1800
    assert_sound(result)


def test_candidates_differ_and_a_seed_repeats_them(engine, vllm_server):
    seeds = RolloutSeed(7, (0, 0, 1), always=True), RolloutSeed(7, (0, 0, 1), always=True), RolloutSeed(7, (0, 0, 2))
    first, second, third = (run(engine, body(vllm_server), [4, 4], schedule="grpo", seed=seed) for seed in seeds)
    tokens = [[row.tokens for row in group.rows] for group in first.groups]
    assert tokens == [[row.tokens for row in group.rows] for group in second.groups]
    assert len({tuple(row) for row in tokens[0]}) == 4
    assert tokens != [[row.tokens for row in group.rows] for group in third.groups]


def test_candidates_resume_after_their_tokens(engine, vllm_server):
    from trl_darts.scheduling import PartialCandidate

    scheduler = Scheduler(ScheduleSettings("grpo", 1).policies(), 1)
    full = run_one(engine, vllm_server, Scheduler(ScheduleSettings("grpo", 1).policies(), 1), ())
    partial = PartialCandidate(tuple(full.tokens[:10]), tuple(full.logprobs[:10]))
    resumed = run_one(engine, vllm_server, scheduler, (partial,))
    assert resumed.tokens == full.tokens
    assert torch.allclose(torch.tensor(resumed.logprobs), torch.tensor(full.logprobs), atol=1e-4)


def run_one(engine, vllm_server, scheduler, resumed):
    greedy = body(vllm_server, temperature=0.0, max_tokens=30, ignore_eos=True)
    result = engine.run(scheduler, [GroupPlan(0, 1, resumed=resumed)], {0: [ServerPrompt([60, 61])]}, greedy)
    return result.groups[0].rows[0]


def test_what_moves_to_a_tail_server_is_the_models_own(vllm_server):
    """Another name of the same address is used as a server of another layout."""
    tail_url = vllm_server.base_url.replace("127.0.0.1", "localhost")
    engine = VLLMServerEngine([vllm_server.base_url, tail_url], tail_urls=[tail_url])
    lengths = {0: [20, 300, 24, 280], 1: [30, 35, 320, 28]}
    result = run(
        engine,
        body(vllm_server),
        [4, 4],
        schedule="grpo",
        overrides=lambda command: {"min_tokens": lengths[command.group_id][command.index] - 1, "logit_bias": {"1": 3}},
        tail=TailPolicy(TailServers(), switch_at=3),
    )
    engine.close()
    assert result.num_resumed == 0
    moved = [(group, row) for group in result.groups for row in group.rows if row.engine_id == tail_url]
    # All three, unless one ended while a busy machine aborted it.
    assert 2 <= result.tail_switch.num_moved == len(moved) <= 3
    model = AutoModelForCausalLM.from_pretrained(vllm_server.model_dir, dtype=torch.float32)
    for group, row in moved:
        prompt, least = [60 + group.plan.group_id, 61], lengths[group.plan.group_id][row.index]
        assert row.segment == 1
        assert row.num_prior >= 16
        assert row.length >= least
        with torch.no_grad():
            logits = model(torch.tensor([prompt + row.tokens])).logits[0, len(prompt) - 1 : -1]
        logits[:, 1] += 3
        logits[: least - 1, 1] = -torch.inf
        expected = logits.log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])[:, 0]
        assert (torch.tensor(row.logprobs) - expected).abs().max() < 1e-4


def test_servers_words_surface(engine, vllm_server):
    with pytest.raises(GenerationError, match="Token id 99999 is out of vocabulary"):
        run(engine, body(vllm_server), [4, 4], prompts=[[60], [99999]])
    wait_for(lambda: vllm_server.num_running() == 0, timeout_s=3.0)
    with pytest.raises(GenerationError, match="maximum context length is 2048"):
        run(engine, body(vllm_server), [4], prompts=[[60] * 2000])


def test_interrupt_ends_the_requests(engine, vllm_server):
    def interrupt(ledger):
        if ledger.num_running:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(engine, body(vllm_server, ignore_eos=True, max_tokens=2000), [8] * 4, on_progress=interrupt)
    wait_for(lambda: vllm_server.num_running() == 0, timeout_s=3.0)
    assert engine.states() == {vllm_server.base_url: State.UP}


def test_an_engine_that_is_closed_ends_its_requests(vllm_server):
    engine = VLLMServerEngine([vllm_server.base_url])
    scheduler = Scheduler(ScheduleSettings("grpo", 32).policies(), 32)
    fields = body(vllm_server, ignore_eos=True, max_tokens=2000)
    future = engine.start(scheduler, [GroupPlan(0, 32)], {0: [ServerPrompt([60, 61])]}, fields)
    wait_for(lambda: scheduler.ledger.num_running > 0, timeout_s=10.0)
    future.cancel()
    engine.close()
    wait_for(lambda: vllm_server.num_running() == 0, timeout_s=3.0)


def test_killed_trainer_leaves_nothing_running(vllm_server):
    script = f"""
        from trl_darts.engines import ServerPrompt, VLLMServerEngine
        from trl_darts.scheduling import GroupPlan, Scheduler, ScheduleSettings
        body = dict(model={vllm_server.model!r}, max_tokens=2000, ignore_eos=True, logprobs=0)
        scheduler = Scheduler(ScheduleSettings("darts", 8, long_end_patience=None).policies(), 8)
        plans = [GroupPlan(i, 12) for i in range(8)]
        prompts = {{i: [ServerPrompt([60, i])] for i in range(8)}}
        VLLMServerEngine([{vllm_server.base_url!r}]).run(scheduler, plans, prompts, body)
    """
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    try:
        wait_for(lambda: vllm_server.num_running() > 0, timeout_s=60)
        os.kill(trainer.pid, signal.SIGKILL)
        seconds = wait_for(lambda: vllm_server.num_running() == 0, timeout_s=3.0)
        print(f"no request runs {seconds:.2f} s after the trainer was killed")
    finally:
        trainer.kill()
        trainer.wait()
