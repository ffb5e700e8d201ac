"""
Decoding step by step with vLLM in the trainer's process, over a scripted core without a real engine. The conformance
suite has the real one.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.scripted_vllm import NEVER, World, tokens, vllm
from trl_darts.engines.in_process.share import Report, Slot
from trl_darts.errors import GenerationError
from trl_darts.scheduling import FinishReason


pytestmark = pytest.mark.vllm
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


# Decisions


def test_order_of_calls():
    """All requests are added first. Then steps and decisions alternate until none is running."""
    world = World([1, 3, NEVER], answers={2: [2]})
    assert world.generate() == []
    assert world.calls == [
        *(("add", number) for number in range(3)),
        ("step",),
        ("exchange",),
        ("step",),
        ("exchange",),
        ("abort", {2}),
        ("step",),
        ("exchange",),
    ]
    assert world.link.reports == [[Report(0, 1, STOP)], [], [Report(2, 2, ABORT), Report(1, 3, STOP)]]
    assert not world.share.running
    world.assert_clean()


def test_candidates_are_told_by_their_id():
    """Their order is arbitrary, and vLLM's internal IDs are random."""
    slots = [Slot(7, 1, 2), Slot(3, 0, 0), Slot(12, 1, 0)]
    world = World([2, 1, 3], slots=slots)
    world.generate()
    assert {number: row[0] for number, row in world.share.rows.items()} == {7: tokens(2), 3: tokens(1), 12: tokens(3)}
    assert [request.external_req_id for request in world.core.requests] == ["7", "3", "12"]


def test_candidates_of_a_prompt_differ_under_a_seed():
    """Also those of its next visit."""
    sampling_params = vllm.SamplingParams(seed=40, max_tokens=5, temperature=0.5)
    seeds = []
    for rollout in ((0, 1), (0, 2), (1, 1), (0, 1)):  # step and number
        world = World([1] * 6)
        world.share.rollout = rollout
        vllm.SteppedLLM(world.llm, world.share).generate([{"prompt_token_ids": [3]}] * 6, sampling_params)
        sent = [request.sampling_params for request in world.core.requests]
        assert {(params.temperature, params.max_tokens) for params in sent} == {(0.5, 5)}
        seeds.append([params.seed for params in sent])
    assert len({seed for own in seeds[:3] for seed in own}) == 18
    assert seeds[0] == seeds[3]
    assert sampling_params.seed == 40  # it is the caller's


def test_only_final_outputs_are_asked_for():
    """Partial outputs would be built in each step for each request."""
    world = World([5, 5])
    sampling_params = vllm.SamplingParams(output_kind=vllm.RequestOutputKind.CUMULATIVE)
    vllm.SteppedLLM(world.llm, world.share).generate([{"prompt_token_ids": [3]}] * 2, sampling_params)
    assert {request.sampling_params.output_kind for request in world.core.requests} == {
        vllm.RequestOutputKind.FINAL_ONLY
    }
    assert sampling_params.output_kind is vllm.RequestOutputKind.CUMULATIVE


def test_finish_reasons():
    """An unknown reason is a failure, with vLLM's message."""
    world = World([1, 2, 3, 4, 5], reasons=dict(enumerate(["stop", "length", "repetition", "error", "abort"])))
    world.generate()
    assert [report for reports in world.link.reports for report in reports] == [
        Report(0, 1, STOP),
        Report(1, 2, LENGTH),
        Report(2, 3, LENGTH),
        Report(3, 0, None, "vLLM ended it with 'error'"),
        Report(4, 0, None, "vLLM ended it with 'abort'"),
    ]
    assert set(world.share.rows) == {0, 1, 2}
    world.assert_clean()


@pytest.mark.parametrize(("detokenize", "flat", "logprobs"), [(True, False, 0), (False, True, 2), (False, False, 2)])
def test_log_probs_are_those_of_the_sampled_tokens(tokenizer, detokenize, flat, logprobs):
    """For ended and aborted candidates. With more than one log-prob, other tokens may rank higher."""
    world = World([4, NEVER], answers={3: [1]}, tokenizer=tokenizer)
    world.generate(logprobs=logprobs, flat_logprobs=flat, detokenize=detokenize)
    for number, length in ((0, 4), (1, 3)):
        ids, values = world.share.rows[number]
        assert ids == tokens(length)
        assert values == pytest.approx([-t / 100 for t in range(1, length + 1)])
        assert all(type(token) is int for token in ids)


def test_without_log_probs_there_are_none():
    world = World([2, NEVER], answers={1: [1]})
    world.generate(logprobs=None)
    assert world.share.rows == {0: (tokens(2), None), 1: (tokens(1), None)}


def test_what_an_engine_says_of_an_aborted_candidate_is_ignored():
    """An engine that runs ahead may have decoded another token of it."""
    world = World([6, 4, NEVER], answers={2: [1, 2]}, reports_late=True)
    world.generate(logprobs=0)
    assert {number: len(row[0]) for number, row in world.share.rows.items()} == {0: 6, 1: 2, 2: 2}
    assert [report.candidate_id for reports in world.link.reports for report in reports] == [1, 2, 0]


def test_a_candidate_that_ended_in_the_same_step_is_not_aborted():
    world = World([2, 2, 3], answers={2: [0, 1, 2]})
    world.generate()
    assert ("abort", {2}) in world.calls
    assert [call for call in world.calls if call[0] == "abort"] == [("abort", {2})]
    assert [row[0] for row in world.share.rows.values()] == [tokens(2)] * 3
    assert world.link.reports[1] == [Report(0, 2, STOP), Report(1, 2, STOP)]


def test_a_candidate_that_waits_for_room_has_nothing():
    world = World([3, NEVER])
    add_request = world.core.add_request

    def no_room(request: Any) -> None:
        add_request(request)
        if request.external_req_id == "1":
            world.core.requests.remove(request)

    world.core.add_request = no_room
    world.link.answers = {2: [1]}
    world.generate(logprobs=0)
    assert world.share.rows[1] == ([], [])


def test_progress_is_reported_every_few_steps_to_schedules_that_need_it():
    world = World([20, 40, 40], needs_progress=True)
    world.generate()
    with_progress = {
        step: {report.candidate_id: report.length for report in reports if report.finish_reason is None}
        for step, reports in enumerate(world.link.reports, start=1)
    }
    assert {step: lengths for step, lengths in with_progress.items() if lengths} == {
        vllm.PROGRESS_INTERVAL: dict.fromkeys(range(3), vllm.PROGRESS_INTERVAL),
        2 * vllm.PROGRESS_INTERVAL: dict.fromkeys((1, 2), 2 * vllm.PROGRESS_INTERVAL),
    }
    quiet = World([20, 40, 40])
    quiet.generate()
    assert [report.finish_reason for reports in quiet.link.reports for report in reports] == [STOP] * 3


def test_the_loop_ends_with_the_engine():
    """If vLLM drops a request silently, the caller finds it running and does not wait forever."""
    world = World([2, NEVER])
    step = world.engine.step

    def lossy() -> Any:
        outputs = step()
        if world.core.steps == 3:
            (name,) = world.engine.output_processor.request_states
            world.engine.output_processor.abort_requests([name], internal=True)
        return outputs

    world.engine.step = lossy
    world.generate()
    assert world.share.running == {1}
    assert world.core.steps == 3


def test_everything_else_goes_to_the_llm():
    stepped = vllm.SteppedLLM(SimpleNamespace(sleep=lambda level: level), None)
    assert stepped.sleep(level=2) == 2
    with pytest.raises(AttributeError):
        _ = stepped.no_such_thing


# Failures


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), KeyboardInterrupt("ctrl")])
@pytest.mark.parametrize("where", ["step", "exchange"])
def test_everything_in_flight_is_aborted_after_a_failure(error, where):
    """Otherwise, the engine would continue these requests in the next rollout."""
    world = World([1, NEVER, NEVER, NEVER], answers={2: [3]} | ({4: error} if where == "exchange" else {}))
    if where == "step":
        world.core.error_at[4] = error
    with pytest.raises(type(error), match=str(error)):
        world.generate()
    assert world.calls[-1] == ("abort", {1, 2})
    world.assert_clean()


def test_a_prompt_that_is_refused_takes_the_others_with_it():
    world = World([NEVER] * 3)
    prompts = [{"prompt_token_ids": [3]}, {"prompt_token_ids": [3]}, {"prompt_token_ids": [3] * 101}]
    with pytest.raises(ValueError, match="longer than the maximum model length"):
        world.generate(prompts)
    assert world.calls == [("add", 0), ("add", 1), ("abort", {0, 1})]
    world.assert_clean()


def test_two_rollouts_on_one_engine():
    """Candidates of the second rollout have the same IDs as those of the first, which failed."""
    first = World([NEVER] * 2, answers={2: GenerationError("boom")})
    with pytest.raises(GenerationError):
        first.generate()
    second = World([2, 3])
    second.core.requests = []
    first.engine.engine_core = second.core
    second.llm.llm_engine = first.engine
    second.generate()
    assert {number: row[0] for number, row in second.share.rows.items()} == {0: tokens(2), 1: tokens(3)}
