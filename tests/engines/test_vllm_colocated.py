"""
Decoding step by step with vLLM in the trainer's process.

Everything of vLLM is real but the model: its `LLMEngine` and output processor run over a core that decodes by a
script, so no engine is started here. The conformance suite runs the whole.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from trl_darts.distributed import DirectLink, Director, Report, Share, Slot
from trl_darts.errors import GenerationError
from trl_darts.scheduling import CandidateState, FinishReason, GroupPlan, Scheduler, make_policies


pytestmark = pytest.mark.vllm
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
NEVER = 10**9


class LazyNames:
    """vLLM's names, imported when one is used: that takes seconds, and vLLM may be missing."""

    modules: ClassVar[dict[str, str]] = {
        "EngineCoreOutput": "vllm.v1.engine",
        "EngineCoreOutputs": "vllm.v1.engine",
        "EngineCoreRequest": "vllm.v1.engine",
        "FinishReason": "vllm.v1.engine",
        "InputProcessor": "vllm.v1.engine.input_processor",
        "LLMEngine": "vllm.v1.engine.llm_engine",
        "LogprobsLists": "vllm.v1.outputs",
        "OutputProcessor": "vllm.v1.engine.output_processor",
        "PROGRESS_INTERVAL": "trl_darts.engines.vllm_colocated",
        "RequestOutputKind": "vllm.sampling_params",
        "SamplingParams": "vllm",
        "SteppedLLM": "trl_darts.engines.vllm_colocated",
    }

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.modules[name]), name)


vllm = LazyNames()


class Core:
    """
    The part of vLLM that runs the model. Token t of a request is 10 + t, its log-prob −t / 100.

    `lengths[r]` and `reasons[r]` tell when and why the r-th request ends.
    """

    def __init__(self, calls: list[Any], lengths: Sequence[int], reasons: dict[int, str], reports_late: bool) -> None:
        self.calls = calls
        self.lengths = lengths
        self.reasons = reasons
        self.reports_late = reports_late
        self.requests: list[Any] = []
        self.running: dict[str, int] = {}
        self.error_at: dict[int, BaseException] = {}
        self.steps = 0

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def dp_engines_running(self) -> bool:
        return False

    def add_request(self, request: Any) -> None:
        self.calls.append(("add", int(request.external_req_id)))
        self.running[request.request_id] = 0
        self.requests.append(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.calls.append(("abort", {int(name.split("-")[0]) for name in request_ids}))
        for name in request_ids:
            if not self.reports_late:
                self.running.pop(name)

    def get_output(self) -> Any:
        self.calls.append(("step",))
        self.steps += 1
        if self.steps in self.error_at:
            raise self.error_at[self.steps]
        outputs = []
        for number, request in enumerate(self.requests):
            name = request.request_id
            if name in self.running:
                self.running[name] += 1
                outputs.append(self._output(number, request, self.running[name]))
        return vllm.EngineCoreOutputs(outputs=outputs)

    def _output(self, number: int, request: Any, length: int) -> Any:
        reason = None
        if length >= self.lengths[number]:
            del self.running[request.request_id]
            reason = vllm.FinishReason[self.reasons.get(number, "stop").upper()]
        logprobs = None
        if request.sampling_params.logprobs is not None:
            others = range(90, 90 + request.sampling_params.logprobs)
            logprobs = vllm.LogprobsLists(
                np.array([[9 + length, *others]]),
                np.array([[-length / 100, *(0.0 for _ in others)]], dtype=np.float32),
                np.array([1 + len(others)]),
            )
        return vllm.EngineCoreOutput(request.request_id, [9 + length], new_logprobs=logprobs, finish_reason=reason)


class Inputs:
    """The part of vLLM that turns a prompt into a request."""

    def __init__(self, longest: int = 100) -> None:
        self.longest = longest
        self.prompts: list[Any] = []

    def process_inputs(self, request_id: str, prompt: Any, params: Any, **_: Any) -> Any:
        if len(prompt["prompt_token_ids"]) > self.longest:
            raise ValueError("The decoder prompt is longer than the maximum model length")
        self.prompts.append(prompt)
        return vllm.EngineCoreRequest(
            request_id, prompt["prompt_token_ids"], None, params.clone(), None, 0.0, None, None, None
        )

    def assign_request_id(self, request: Any) -> None:
        vllm.InputProcessor.assign_request_id(request)


class Link:
    """Answers the n-th exchange with the n-th entry, and notes the reports with the step that they came in."""

    def __init__(self, calls: list[Any], answers: dict[int, Any]) -> None:
        self.calls = calls
        self.answers = answers
        self.num_exchanges = 0
        self.reports: list[list[Report]] = []

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        self.calls.append(("exchange",))
        self.num_exchanges += 1
        self.reports.append(list(reports))
        answer = self.answers.get(self.num_exchanges, [])
        if isinstance(answer, BaseException):
            raise answer
        return answer


class World:
    """A share of candidates 0, 1, 2, … of two groups, over vLLM's engine and a scripted core."""

    def __init__(
        self,
        lengths: Sequence[int],
        answers: dict[int, Any] | None = None,
        reasons: dict[int, str] | None = None,
        needs_progress: bool = False,
        reports_late: bool = False,
        tokenizer: Any = None,
        link: Any = None,
        slots: Sequence[Slot] | None = None,
    ) -> None:
        self.calls: list[Any] = []
        self.link = link or Link(self.calls, answers or {})
        self.core = Core(self.calls, lengths, reasons or {}, reports_late)
        self.slots = slots or [Slot(number, number % 2, number // 2) for number in range(len(lengths))]
        self.share = Share(self.slots, self.link, needs_progress)
        self.engine = self._engine(tokenizer)
        self.llm = SimpleNamespace(llm_engine=self.engine)

    def _engine(self, tokenizer: Any) -> Any:
        engine = object.__new__(vllm.LLMEngine)  # its `__init__` would load a model
        engine.log_stats, engine.logger_manager, engine.dp_group = False, None, None
        engine.should_execute_dummy_batch = False
        engine.model_config = SimpleNamespace(is_encoder_decoder=False)
        engine.output_processor = vllm.OutputProcessor(tokenizer, log_stats=False)
        engine.input_processor = Inputs()
        engine.engine_core = self.core
        return engine

    def generate(self, prompts: Sequence[Any] | None = None, **params: Any) -> list[Any]:
        prompts = prompts or [{"prompt_token_ids": [3, number]} for number in range(len(self.slots))]
        sampling_params = vllm.SamplingParams(max_tokens=1000, **params)
        return vllm.SteppedLLM(self.llm, self.share).generate(prompts, sampling_params=sampling_params, use_tqdm=False)

    def assert_clean(self) -> None:
        """The next rollout starts with an empty engine."""
        assert not self.engine.has_unfinished_requests()
        assert not self.engine.output_processor.request_states
        assert not self.core.running


def tokens(length: int) -> list[int]:
    return list(range(10, 10 + length))


# Decisions


def test_order_of_calls():
    """All requests first; then a step, then decisions, until nothing runs."""
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
    """They come in an order of their own, and vLLM's internal names are random."""
    slots = [Slot(7, 1, 2), Slot(3, 0, 0), Slot(12, 1, 0)]
    world = World([2, 1, 3], slots=slots)
    world.generate()
    assert {number: row[0] for number, row in world.share.rows.items()} == {7: tokens(2), 3: tokens(1), 12: tokens(3)}
    assert [request.external_req_id for request in world.core.requests] == ["7", "3", "12"]


def test_prompts_are_passed_on_as_they_are():
    prompts = [{"prompt_token_ids": [5]}, {"prompt_token_ids": [6], "multi_modal_data": {"image": object()}}]
    world = World([1, 1])
    world.generate(prompts)
    assert all(seen is given for seen, given in zip(world.engine.input_processor.prompts, prompts, strict=True))


def test_candidates_of_a_prompt_differ_under_a_seed():
    world = World([1] * 6)
    sampling_params = vllm.SamplingParams(seed=40, max_tokens=5, temperature=0.5)
    vllm.SteppedLLM(world.llm, world.share).generate([{"prompt_token_ids": [3]}] * 6, sampling_params)
    sent = [request.sampling_params for request in world.core.requests]
    assert [params.seed for params in sent] == [40, 40, 41, 41, 42, 42]  # by index, in each of the two groups
    assert {(params.temperature, params.max_tokens) for params in sent} == {(0.5, 5)}
    assert sampling_params.seed == 40  # it is the caller's


def test_without_a_seed_there_is_none():
    world = World([1, 1])
    world.generate()
    assert [request.sampling_params.seed for request in world.core.requests] == [None, None]


def test_only_final_outputs_are_asked_for():
    """Others would be built in each step for each request."""
    world = World([5, 5])
    sampling_params = vllm.SamplingParams(output_kind=vllm.RequestOutputKind.CUMULATIVE)
    vllm.SteppedLLM(world.llm, world.share).generate([{"prompt_token_ids": [3]}] * 2, sampling_params)
    assert {request.sampling_params.output_kind for request in world.core.requests} == {
        vllm.RequestOutputKind.FINAL_ONLY
    }
    assert sampling_params.output_kind is vllm.RequestOutputKind.CUMULATIVE


def test_finish_reasons():
    world = World([1, 2, 3], reasons={0: "stop", 1: "length", 2: "repetition"})
    world.generate()
    assert [report for reports in world.link.reports for report in reports] == [
        Report(0, 1, STOP),
        Report(1, 2, LENGTH),
        Report(2, 3, LENGTH),
    ]


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_an_end_that_nobody_asked_for_is_a_failure_in_vllms_words(reason):
    world = World([3, 5], reasons={0: reason})
    world.generate()
    assert world.link.reports[2] == [Report(0, 0, None, f"vLLM ended it with {reason!r}")]
    assert world.link.reports[4] == [Report(1, 5, STOP)]
    assert set(world.share.rows) == {1}
    world.assert_clean()


@pytest.mark.parametrize("detokenize", [True, False])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("logprobs", [0, 2])
def test_log_probs_are_those_of_the_sampled_tokens(tokenizer, detokenize, flat, logprobs):
    """The same for a candidate that ended and for one that was aborted; with more of them, others rank higher."""
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
    """One that runs ahead may have decoded another token of it."""
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
    """Should vLLM drop a request without a word, the caller finds it running; it must not wait forever."""
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
    woken: list[Any] = []
    llm = SimpleNamespace(wake_up=lambda tags: woken.append(tags) or "awake", sleep=lambda level: level, llm_engine=5)
    stepped = vllm.SteppedLLM(llm, None)
    assert stepped.wake_up(tags=["kv_cache"]) == "awake"
    assert stepped.sleep(level=2) == 2
    assert stepped.llm_engine == 5
    assert woken == [["kv_cache"]]
    with pytest.raises(AttributeError):
        _ = stepped.no_such_thing


# Failures


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), KeyboardInterrupt("ctrl")])
@pytest.mark.parametrize("where", ["step", "exchange"])
def test_everything_in_flight_is_aborted_after_a_failure(error, where):
    """Else the engine would go on with it in the next rollout."""
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


def test_a_prompt_for_each_candidate_or_none_at_all():
    world = World([NEVER] * 3)
    with pytest.raises(ValueError, match="shorter"):
        world.generate([{"prompt_token_ids": [3]}] * 2)
    world.assert_clean()


def test_two_rollouts_on_one_engine():
    """Candidates of the second have the same numbers as those of the first, which broke."""
    first = World([NEVER] * 2, answers={2: GenerationError("boom")})
    with pytest.raises(GenerationError):
        first.generate()
    second = World([2, 3])
    second.core.requests = []
    first.engine.engine_core = second.core
    second.llm.llm_engine = first.engine
    second.generate()
    assert {number: row[0] for number, row in second.share.rows.items()} == {0: tokens(2), 1: tokens(3)}


# A whole rollout


def test_rollout():
    """Three of the saturated group's six end; the others are told so in the same step."""
    lengths = [[4, 90, 7, 30, 12, 500], [3, 40, 5]]
    policies = make_policies("darts", 3, 6, 1)
    plans = [GroupPlan(index, len(group)) for index, group in enumerate(lengths)]
    director = Director(Scheduler(policies, 3), plans, num_engines=1)
    flat = [length for group in lengths for length in group]
    world = World(flat, link=DirectLink(director), slots=director.slots[0])
    world.generate(logprobs=0)
    saturated, other = director.result().groups
    assert saturated.selected == [0, 2, 4]
    assert [c.length for c in saturated.candidates] == [4, 12, 7, 12, 12, 12]
    assert [c.state for c in saturated.candidates].count(CandidateState.ABORTED) == 3
    assert other.selected == [0, 1, 2]
    assert world.core.steps == 40
    for candidate in director.scheduler.ledger.candidates:
        ids, logprobs = world.share.rows[candidate.candidate_id]
        assert (ids, len(logprobs)) == (tokens(candidate.length), candidate.length)
    world.assert_clean()


# What we lean on


def source(function: Callable[..., Any]) -> str:
    return re.sub(r"\s+", " ", inspect.getsource(function))


def hook(name: str, used_by: str = "engines/vllm_colocated.py") -> str:
    return f"`{name}` is not what it was. It is used by trl_darts/{used_by}."


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_trl_calls_generate_of_its_llm():
    from trl.generation.vllm_generation import VLLMGeneration, extract_logprobs

    text = source(VLLMGeneration.generate)
    call = "self.llm.generate(vllm_prompts, sampling_params=sampling_params, use_tqdm=False)"
    assert call in text, hook("VLLMGeneration.generate")
    assert '"n": 1' in text, hook("VLLMGeneration.generate (one completion per request)")
    assert extract_logprobs([]) == ([], []), hook("extract_logprobs (of no outputs)")
    from vllm import LLM

    assert {"prompts", "sampling_params", "use_tqdm"} <= set(parameters(LLM.generate)), hook("vllm.LLM.generate")
    assert parameters(vllm.SteppedLLM.generate) == ["self", "prompts", "sampling_params", "use_tqdm"]


def test_engine_methods():
    assert parameters(vllm.LLMEngine.add_request)[:4] == ["self", "request_id", "prompt", "params"], hook(
        "add_request"
    )
    assert source(vllm.LLMEngine.add_request).count("return req_id") == 2, hook("LLMEngine.add_request (internal ID)")
    assert parameters(vllm.LLMEngine.abort_request) == ["self", "request_ids", "internal"], hook(
        "LLMEngine.abort_request"
    )
    assert parameters(vllm.LLMEngine.step) == ["self"], hook("LLMEngine.step")
    assert parameters(vllm.LLMEngine.has_unfinished_requests) == ["self"], hook("LLMEngine.has_unfinished_requests")


def test_output_processor_keeps_what_a_request_has(tokenizer):
    """`request_states[internal ID]`, with the tokens in `detokenizer` and the log-probs in `logprobs_processor`."""
    world = World([NEVER], tokenizer=tokenizer)
    params = vllm.SamplingParams(logprobs=0, output_kind=vllm.RequestOutputKind.FINAL_ONLY)
    name = world.engine.add_request("17", {"prompt_token_ids": [3, 4]}, params)
    assert name != "17", hook("LLMEngine.add_request (internal ID)")
    assert world.engine.step() == world.engine.step() == [], hook("RequestOutputKind.FINAL_ONLY")
    state = world.engine.output_processor.request_states[name]
    assert list(state.detokenizer.output_token_ids) == [10, 11], hook("RequestState.detokenizer.output_token_ids")
    entries = list(state.logprobs_processor.logprobs)
    assert [list(entry) for entry in entries] == [[10], [11]], hook("RequestState.logprobs_processor.logprobs")
    assert entries[1][11].logprob == pytest.approx(-0.02), hook("Logprob.logprob")
    world.engine.abort_request([name], internal=True)
    assert world.core.calls[-1] == ("abort", {17}), hook("LLMEngine.abort_request(internal=True)")
    assert not world.engine.has_unfinished_requests(), hook("LLMEngine.has_unfinished_requests")


def test_a_finished_output_has_the_name_that_we_gave_and_one_completion():
    world = World([2])
    world.engine.add_request(
        "17", {"prompt_token_ids": [3]}, vllm.SamplingParams(output_kind=vllm.RequestOutputKind.FINAL_ONLY)
    )
    world.engine.step()
    (output,) = world.engine.step()
    name = hook("RequestOutput")
    assert (output.request_id, output.finished, len(output.outputs)) == ("17", True, 1), name
    completion = output.outputs[0]
    assert (list(completion.token_ids), completion.finish_reason, completion.logprobs) == ([10, 11], "stop", None), (
        name
    )


def test_prompts_with_images_go_through_the_method_that_is_replaced():
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm.multimodal.processing import BaseMultiModalProcessor
    from vllm.renderers import BaseRenderer

    assert "self.mm_processor" in source(BaseRenderer.__init__), hook("BaseRenderer.mm_processor")
    name = hook("BaseMultiModalProcessor._apply_prompt_updates")
    assert parameters(BaseMultiModalProcessor._apply_prompt_updates)[1:] == ["token_ids", "mm_prompt_updates"], name
    assert "self._apply_prompt_updates(" in source(BaseMultiModalProcessor._maybe_apply_prompt_updates), name
    assert parameters(BaseMultiModalProcessor._find_mm_placeholders)[1:] == ["new_token_ids", "mm_prompt_updates"], (
        hook("BaseMultiModalProcessor._find_mm_placeholders")
    )
    assert parameters(vllm.LLMEngine.reset_encoder_cache) == ["self"], hook("reset_encoder_cache", "generation.py")
    # Once TRL does it, ours can go.
    assert "reset_encoder_cache" not in source(VLLMGeneration), hook("VLLMGeneration.sync_weights", "generation.py")


def test_finish_reasons_of_vllm():
    from vllm.v1.engine import FINISH_REASON_STRINGS

    assert set(FINISH_REASON_STRINGS) == {"stop", "length", "abort", "error", "repetition"}, hook(
        "FINISH_REASON_STRINGS (a new one would fail the rollout)"
    )


def test_sampling_params():
    params = vllm.SamplingParams(seed=3, logprobs=0)
    clone = params.clone()
    clone.seed += 1
    clone.output_kind = vllm.RequestOutputKind.FINAL_ONLY
    name = hook("SamplingParams.clone")
    assert (params.seed, clone.seed, clone.logprobs) == (3, 4, 0), name
    assert params.output_kind is not vllm.RequestOutputKind.FINAL_ONLY, name
    assert vllm.SamplingParams().seed is None, hook("SamplingParams.seed")


def test_reload_of_a_colocated_model():
    """`LLM.llm_engine.model_executor.driver_worker.model_runner` has the model that weights are loaded into."""
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm.model_executor.model_loader import reload
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    path = "self.llm.llm_engine.model_executor.driver_worker.model_runner.model"
    assert path in source(VLLMGeneration.sync_weights) + source(VLLMGeneration), hook(path, "generation.py")
    text = source(vllm.LLMEngine.__init__)
    assert "self.model_executor = self.engine_core.engine_core.model_executor" in text, hook(
        "LLMEngine.model_executor", "generation.py"
    )
    assert "self.driver_worker = " in source(UniProcExecutor._init_executor), hook("driver_worker", "generation.py")
    assert "getattr(self.worker, attr)" in source(WorkerWrapperBase.__getattr__), hook(
        "driver_worker", "generation.py"
    )
    assert "self.model_config = " in source(GPUModelRunner.__init__), hook("model_runner", "generation.py")
    name = hook("vllm.model_executor.model_loader.reload", "weights/reload.py")
    assert parameters(reload.initialize_layerwise_reload) == ["model"], name
    assert callable(reload.finalize_layerwise_reload), name


def test_weight_transfer_of_vllm():
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    assert callable(WeightTransferEngineFactory.register_engine), hook(
        "WeightTransferEngineFactory", "weights/plugin.py"
    )
    assert callable(get_layerwise_info), hook("get_layerwise_info", "weights/reload.py")
