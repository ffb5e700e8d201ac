"""
vLLM in this process without a model: its `LLMEngine` and output processor are real, the core decodes by a script.
"""

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from trl_darts.engines.in_process.share import Report, Share, Slot


NEVER = 10**9


class LazyNames:
    """Imports vLLM's names on first use: this takes seconds, and vLLM may be missing."""

    modules: ClassVar[dict[str, str]] = {
        "EngineCoreOutput": "vllm.v1.engine",
        "EngineCoreOutputs": "vllm.v1.engine",
        "EngineCoreRequest": "vllm.v1.engine",
        "FinishReason": "vllm.v1.engine",
        "InputProcessor": "vllm.v1.engine.input_processor",
        "LLMEngine": "vllm.v1.engine.llm_engine",
        "LogprobsLists": "vllm.v1.outputs",
        "OutputProcessor": "vllm.v1.engine.output_processor",
        "PROGRESS_INTERVAL": "trl_darts.engines.in_process.vllm_colocated",
        "RequestOutputKind": "vllm.sampling_params",
        "SamplingParams": "vllm",
        "SteppedLLM": "trl_darts.engines.in_process.vllm_colocated",
    }

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.modules[name]), name)


vllm = LazyNames()


class Core:
    """
    Replaces the part of vLLM that runs the model. Token t of a request is 10 + t, its log-prob −t / 100. `lengths[r]`
    and `reasons[r]` are the length and finish reason of the r-th request.
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
    """Replaces the part of vLLM that converts a prompt to a request."""

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
    """Returns the n-th entry at the n-th exchange, and records the reports with their step."""

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
        engine.renderer = SimpleNamespace(mm_processor_cache=None)  # asked in each step since vLLM 0.32
        return engine

    def generate(self, prompts: Sequence[Any] | None = None, **params: Any) -> list[Any]:
        prompts = prompts or [{"prompt_token_ids": [3, number]} for number in range(len(self.slots))]
        sampling_params = vllm.SamplingParams(max_tokens=1000, **params)
        return vllm.SteppedLLM(self.llm, self.share).generate(prompts, sampling_params=sampling_params, use_tqdm=False)

    def assert_clean(self) -> None:
        """Asserts that the next rollout starts with an empty engine."""
        assert not self.engine.has_unfinished_requests()
        assert not self.engine.output_processor.request_states
        assert not self.core.running


def tokens(length: int) -> list[int]:
    return list(range(10, 10 + length))
