"""Whole rollouts on transformers' continuous batching, and contracts of what we use of it."""

import inspect
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig, GenerationMixin
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus

from tests.engines.settings import engine_settings
from tests.policies import make_policies
from tests.waits import wait_for
from trl_darts.engines.in_process import hf_continuous
from trl_darts.engines.in_process.hf_continuous import scheduled_batching
from trl_darts.engines.in_process.share import MainLink, Report, Share
from trl_darts.errors import GenerationError
from trl_darts.scheduling import CandidateState, FinishReason, GroupPlan, Scheduler


EOS = 1
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
LIMITS = engine_settings("continuous_batching")["transformers_continuous_batching_config"]


@pytest.fixture(scope="module")
def model(markov_model_dir):
    return AutoModelForCausalLM.from_pretrained(markov_model_dir, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def few_threads():
    """Transformers' thread must end with the call that started it."""
    yield
    wait_for(lambda: not generating())


def generating() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if "_run_generation_loop" in t.name]


class RecordingLink:
    """Records the reports, and raises `error` after a few exchanges."""

    def __init__(self, main: MainLink, error: BaseException | None = None) -> None:
        self.main = main
        self.reports: list[Report] = []
        self.error = error
        self.num_exchanges = 0

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        self.reports += reports
        self.num_exchanges += 1
        if self.error is not None and self.num_exchanges > 5:
            self.error.raised_at = time.monotonic()
            raise self.error
        return self.main.exchange(reports)


def rollout(
    model: Any,
    counts: Sequence[int],
    schedule: str = "darts",
    max_new_tokens: int = 200,
    eos: int = EOS,
    limits: dict[str, Any] | None = None,
    error: BaseException | None = None,
    **options: Any,
) -> tuple[MainLink, Share, dict[str, GenerationOutput], RecordingLink]:
    """Calls `generate_batch` once for all rows, as TRL does. Prompts differ in their first token."""
    policies = make_policies(schedule, 4, **options)
    main = MainLink(Scheduler(policies, 4), [GroupPlan(index, count) for index, count in enumerate(counts)])
    link = RecordingLink(main, error)
    share = Share(main.slots[0], link, main.scheduler.needs_progress)
    prompts = [[90 - group, 61] for group, count in enumerate(counts) for _ in range(count)]
    config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=True, top_k=0, eos_token_id=eos, pad_token_id=0)
    batching = ContinuousBatchingConfig(**{**LIMITS, **(limits or {})})
    with scheduled_batching(model, share, [eos]):
        outputs = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
        )
    share.exchange()
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.prompt_ids in (prompt, [])  # empty if it never started
    return main, share, outputs, link


def test_saturated_groups_stop_and_every_candidate_ends_once(model):
    aborted = []
    for _ in range(3):  # about five steps decide, and the decoding thread does not wait
        main, share, outputs, link = rollout(model, [8, 6, 8])
        assert len(outputs) == 22  # `generate_batch` has counted all
        assert not share.running
        ends = [report.candidate_id for report in link.reports if report.finish_reason is not None]
        assert sorted(ends) == list(range(22))
        for group in main.result().groups:
            assert all(row.state is CandidateState.FINISHED for row in group.rows)
            for candidate in group.candidates:
                assert candidate.length == len(share.rows[candidate.candidate_id][0])
        aborted += [c for c in main.scheduler.ledger.candidates if c.state is CandidateState.ABORTED]
        if aborted:
            break
    assert aborted
    assert all(c.length > 0 for c in aborted)  # all of them were running


def test_progress_never_goes_back_when_the_cache_is_full(model, monkeypatch):
    """Six candidates of 60 tokens in a cache for four: some are preempted and continue later."""
    monkeypatch.setattr(hf_continuous, "PROGRESS_INTERVAL_S", 0.0)
    limits = {"num_blocks": 16, "block_size": 16, "max_batch_tokens": 64}
    main, _, _, link = rollout(
        model, [6], max_new_tokens=60, eos=-1, limits=limits, tail_pruning=False, long_end_patience=1000.0
    )
    assert [c.length for c in main.scheduler.ledger.candidates] == [60] * 6
    known: dict[int, int] = {}
    for report in link.reports:
        assert report.length >= known.get(report.candidate_id, 0)
        known[report.candidate_id] = report.length


@pytest.mark.parametrize("error", [GenerationError("Generation failed on process 1: boom"), KeyboardInterrupt("ctrl")])
def test_a_failure_elsewhere_ends_the_call_at_once(model, error):
    """Four candidates of 20,000 tokens run. A second later, none is running, and the model is unchanged."""
    attention = model.config._attn_implementation
    with pytest.raises(type(error), match=str(error)):
        rollout(model, [4], "grpo", max_new_tokens=20_000, eos=-1, limits={"num_blocks": 400}, error=error)
    assert not generating()
    assert time.monotonic() - error.raised_at < 4
    assert model.config._attn_implementation == attention
    assert "continuous_batching_context_manager" not in vars(model)


def test_an_error_in_the_forward_pass_has_its_words(model, monkeypatch):
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("expected scalar type Half")

    monkeypatch.setattr(model.model.layers[0], "forward", broken)
    with pytest.raises((GenerationError, RuntimeError), match="expected scalar type Half"):
        rollout(model, [4], "grpo")


# Contracts


def source(function: Any) -> str:
    return re.sub(r"\s+", " ", inspect.getsource(function))


def hook(name: str) -> str:
    return f"transformers' `{name}` is not what it was. It is used by trl_darts/engines/in_process/hf_continuous.py."


def test_generate_batch_takes_its_manager_from_the_model():
    text = source(GenerationMixin.generate_batch)
    for call in (
        "self.continuous_batching_context_manager(",
        "manager.add_requests(",
        "manager.get_result(timeout=1)",
        "if result.is_finished(): results[req_id] = result finished_count += 1",
        "while finished_count < num_requests",
        "elif not manager.is_running()",
        "except Exception as e:",  # that is why we keep the error
        "for req_id in request_ids:",  # results are in the order of the requests, not of their ends
    ):
        assert call in text, hook(f"GenerationMixin.generate_batch ({call})")
    assert "yield manager" in source(GenerationMixin.continuous_batching_context_manager), hook(
        "continuous_batching_context_manager"
    )


def test_manager_methods():
    name = hook("ContinuousBatchingManager")
    assert list(inspect.signature(ContinuousBatchingManager.add_requests).parameters)[:2] == ["self", "inputs"], name
    assert "timeout" in inspect.signature(ContinuousBatchingManager.get_result).parameters, name
    assert list(inspect.signature(ContinuousBatchingManager.cancel_request).parameters) == ["self", "request_id"], name
    text = source(ContinuousBatchingManager.__init__)
    for attribute in ("batch_processor", "background_thread_status"):
        assert f"self.{attribute}" in text, hook(f"ContinuousBatchingManager.{attribute}")


def test_requests_keep_their_tokens_when_they_are_put_off():
    state = RequestState("req_0", [5, 6], max_new_tokens=10)
    state.status = RequestStatus.DECODING
    state.generated_tokens += [7, 8]
    name = hook("RequestState")
    output = state.to_generation_output()
    assert (output.request_id, output.prompt_ids, output.generated_tokens) == ("req_0", [5, 6], [7, 8]), name
    assert (output.status, output.error) == (RequestStatus.DECODING, None), name
    state.generated_tokens.append(9)
    assert output.generated_tokens == [7, 8], name
    again = state.create_equivalent_initial_request()
    again.generated_tokens.append(10)
    assert again.to_generation_output().generated_tokens == [7, 8, 9, 10], name
    assert again.to_generation_output().prompt_ids == [5, 6], name


def test_generation_output_can_be_made_without_a_request():
    output = GenerationOutput("req_0")
    name = hook("GenerationOutput")
    assert (output.generated_tokens, output.error, output.is_finished()) == ([], None, False), name
    output.status = RequestStatus.FINISHED
    assert output.is_finished(), name
    assert GenerationOutput("req_0", status=RequestStatus.FAILED, error="words").is_finished(), name


def test_books_of_the_real_manager(model):
    """`batch_processor.scheduler.active_requests` has the states of running requests, without cancelled ones."""
    config = GenerationConfig(max_new_tokens=3000, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    name = hook("batch_processor.scheduler.active_requests")
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=ContinuousBatchingConfig(**LIMITS)
    ) as manager:
        requests = manager.add_requests(inputs=[[60, 61], [70, 61]], max_new_tokens=3000)
        assert len(requests) == len(set(requests)) == 2, name
        active = manager.batch_processor.scheduler.active_requests
        deadline = time.monotonic() + 5
        while len(active) < 2 or min(len(state.generated_tokens) for state in list(active.values())) < 3:
            assert time.monotonic() < deadline, name
            time.sleep(0.01)
        assert set(active) == set(requests), name
        assert all(isinstance(state, RequestState) for state in active.values()), name
        assert active[requests[0]].to_generation_output().prompt_ids == [60, 61], name
        manager.cancel_request(requests[0])
        while requests[0] in active:
            assert time.monotonic() < deadline, hook("ContinuousBatchingManager.cancel_request")
            time.sleep(0.01)
        assert requests[1] in active
        assert manager.get_result(timeout=0.01) is None, hook("ContinuousBatchingManager.get_result")
        manager.cancel_request(requests[1])
    assert manager.background_thread_status.fatal_error is None, hook("background_thread_status.fatal_error")
