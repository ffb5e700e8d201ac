"""
Our manager between `generate_batch` and transformers' continuous batching: its decisions on a fake one, whole
rollouts on the real one, and what it leans on.
"""

import inspect
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig, GenerationMixin
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus

from tests.engines.settings import engine_settings
from trl_darts.distributed import DirectLink, Director, Report, Share, Slot
from trl_darts.engines import hf_continuous
from trl_darts.engines.hf_continuous import ScheduledManager, scheduled_batching
from trl_darts.errors import GenerationError
from trl_darts.scheduling import CandidateState, FinishReason, GroupPlan, Scheduler, make_policies


EOS = 1
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
LIMITS = engine_settings("continuous_batching")["transformers_continuous_batching_config"]


# A fake manager


class FakeManager:
    """Transformers' manager, with results that the test puts there."""

    def __init__(self, calls: list[tuple] | None = None) -> None:
        self.calls: list[tuple] = [] if calls is None else calls
        self.results: list[GenerationOutput] = []
        self.states: dict[str, RequestState] = {}
        self.scheduler = SimpleNamespace(active_requests={}, waiting_requests={})
        self.batch_processor: Any = SimpleNamespace(scheduler=self.scheduler)
        self.background_thread_status = SimpleNamespace(fatal_error=None)

    def add_requests(self, inputs: list[list[int]], **kwargs: Any) -> list[str]:
        self.calls.append(("add", inputs, kwargs))
        names = [f"req_{number}" for number in range(10, 10 + len(inputs))]  # a persistent manager counts on
        self.states = {
            name: RequestState(name, tokens, max_new_tokens=100) for name, tokens in zip(names, inputs, strict=True)
        }
        return names

    def get_result(self, timeout: float) -> GenerationOutput | None:
        self.calls.append(("wait", timeout))
        return self.results.pop(0) if self.results else None

    def cancel_request(self, request_id: str) -> None:
        self.calls.append(("cancel", request_id))

    def is_running(self) -> bool:
        return True

    # What its thread does

    def decode(self, name: str, *tokens: int) -> None:
        """A request is taken up, or goes on."""
        self.scheduler.waiting_requests.pop(name, None)
        self.scheduler.active_requests[name] = self.states[name]
        self.states[name].status = RequestStatus.DECODING
        self.states[name].generated_tokens += tokens

    def finish(self, name: str, *tokens: int, error: str | None = None) -> None:
        """A request ends; its result waits to be fetched."""
        self.decode(name, *tokens)
        del self.scheduler.active_requests[name]
        self.states[name].status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        self.states[name].error = error
        self.results.append(self.states[name].to_generation_output())

    def evict(self, name: str) -> None:
        """A request gives up its room: its tokens become part of its prompt, and it waits again."""
        state = self.states[name] = self.scheduler.active_requests.pop(name).create_equivalent_initial_request()
        self.scheduler.waiting_requests[name] = state


class Link:
    """Answers each exchange with what the test says, and notes the reports."""

    def __init__(self, calls: list[tuple] | None = None) -> None:
        self.calls = [] if calls is None else calls
        self.reports: list[Report] = []
        self.answer: list[int] = []
        self.error: BaseException | None = None

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        self.calls.append(("exchange",))
        self.reports += reports
        if self.error is not None:
            raise self.error
        answer, self.answer = self.answer, []
        return answer


class World:
    """A share of candidates 20, 21, 22, …, with requests req_10, req_11, req_12, …"""

    def __init__(self, num_candidates: int, needs_progress: bool = False, eos: Sequence[int] = (EOS,)) -> None:
        self.calls: list[tuple] = []
        self.manager, self.link = FakeManager(self.calls), Link(self.calls)
        slots = [Slot(20 + index, 0, index) for index in range(num_candidates)]
        self.share = Share(slots, self.link, needs_progress)
        self.scheduled = ScheduledManager(self.manager, self.share, set(eos))
        self.scheduled.add_requests([[5, 6]] * num_candidates, max_new_tokens=100)
        self.calls.clear()

    def result(self) -> GenerationOutput | None:
        return self.scheduled.get_result(timeout=1)

    @property
    def rows(self) -> dict[int, list[int]]:
        return {number: tokens for number, (tokens, _) in self.share.rows.items()}


def test_requests_are_the_candidates_in_their_order():
    world = World(3)
    world.manager.finish("req_12", 7, EOS)
    world.manager.finish("req_10", 8)
    assert [world.result().request_id, world.result().request_id] == ["req_12", "req_10"]
    assert world.rows == {22: [7, EOS], 20: [8]}
    assert world.share.running == {21}


def test_a_request_for_each_candidate_or_none_at_all():
    share = Share([Slot(0, 0, 0), Slot(1, 0, 1)], Link(), False)
    with pytest.raises(ValueError, match="shorter"):
        ScheduledManager(FakeManager(), share, {EOS}).add_requests([[5]])


def test_arguments_and_attributes_are_passed_on():
    manager = FakeManager()
    scheduled = ScheduledManager(manager, Share([Slot(0, 0, 0)], Link(), False), {EOS})
    assert scheduled.add_requests(inputs=[[5]], max_new_tokens=7, record_timestamps=True) == ["req_10"]
    assert manager.calls == [("add", [[5]], {"max_new_tokens": 7, "record_timestamps": True})]
    assert scheduled.is_running()
    assert scheduled.background_thread_status is manager.background_thread_status
    with pytest.raises(AttributeError):
        _ = scheduled.no_such_thing


@pytest.mark.parametrize(
    ("tokens", "reason"), [([7, EOS], STOP), ([7, 2], STOP), ([7, 8], LENGTH), ([EOS, 8], LENGTH), ([EOS], STOP)]
)
def test_the_last_token_tells_why_it_ended(tokens, reason):
    world = World(1, eos=(EOS, 2))
    world.manager.finish("req_10", *tokens)
    world.result()
    world.share.exchange()
    assert world.link.reports == [Report(20, len(tokens), reason)]
    assert world.share.rows == {20: (tokens, None)}


def test_decisions_come_before_the_wait_and_none_means_that_nothing_ended():
    world = World(1)
    assert world.result() is None
    assert world.calls == [("exchange",), ("wait", hf_continuous.POLL_S)]


def test_an_aborted_request_is_cancelled_and_returned_once():
    """`generate_batch` counts what it is given: each request must come, and none twice."""
    world = World(3)
    for name in ("req_10", "req_11", "req_12"):
        world.manager.decode(name, 7, 8)
    world.link.answer = [22, 20]
    outputs = [world.result(), world.result()]
    assert sorted(output.request_id for output in outputs) == ["req_10", "req_12"]
    assert all(output.is_finished() and output.error is None for output in outputs)
    assert all(output.generated_tokens == [7, 8] for output in outputs)
    assert world.calls == [("exchange",), ("cancel", "req_12"), ("cancel", "req_10")]
    assert world.rows == {22: [7, 8], 20: [7, 8]}
    assert world.result() is None
    world.share.exchange()
    assert world.link.reports == [Report(22, 2, ABORT), Report(20, 2, ABORT)]


def test_what_a_cancelled_request_has_does_not_grow():
    world = World(1)
    world.manager.decode("req_10", 7)
    world.link.answer = [20]
    output = world.result()
    world.manager.decode("req_10", 8)  # until its thread reads of it
    assert output.generated_tokens == world.rows[20] == [7]


def test_a_request_that_was_never_taken_up_has_nothing():
    world = World(3)
    world.manager.scheduler.waiting_requests["req_11"] = world.manager.states["req_11"]
    world.link.answer = [20, 21]
    assert [world.result().generated_tokens for _ in range(2)] == [[], []]
    world.manager.batch_processor = None  # its thread has not begun
    world.link.answer = [22]
    assert world.result().generated_tokens == []
    assert world.rows == {20: [], 21: [], 22: []}


def test_a_result_that_comes_after_the_abort_is_ignored():
    world = World(2)
    world.manager.decode("req_10", 7)
    world.link.answer = [20]
    world.result()
    world.manager.finish("req_10", 8, EOS)
    world.manager.finish("req_11", 9, EOS)
    assert world.result().request_id == "req_11"
    assert world.rows == {20: [7], 21: [9, EOS]}
    assert world.result() is None
    world.share.exchange()
    assert [report.candidate_id for report in world.link.reports] == [20, 21]


def test_a_request_that_ended_just_before_the_abort_keeps_its_tokens():
    """Its state has left transformers' books, and nobody has fetched its result."""
    world = World(2)
    world.manager.decode("req_10", 7, 8)
    assert world.result() is None
    world.manager.finish("req_10", 9)
    world.link.answer = [20]
    assert world.result().generated_tokens == [7, 8, 9]
    assert world.rows == {20: [7, 8, 9]}
    world.share.exchange()
    assert world.link.reports == [Report(20, 3, ABORT)]


def test_a_request_that_gave_up_its_room_keeps_its_tokens():
    """With a full cache, transformers puts a request back into its queue."""
    world = World(1, needs_progress=True)
    world.manager.decode("req_10", 7, 8)
    world.manager.evict("req_10")
    world.link.answer = [20]
    assert world.result().generated_tokens == [7, 8]
    assert world.rows == {20: [7, 8]}


def test_a_request_that_fails_has_transformers_words():
    world = World(2)
    world.manager.finish("req_11", error="No requests can be scheduled and no requests can be offloaded.")
    assert world.result().request_id == "req_11"  # it is counted
    world.share.exchange()
    words = "No requests can be scheduled and no requests can be offloaded."
    assert world.link.reports == [Report(21, 0, None, words)]
    assert world.share.running == {20}
    assert world.rows == {}


def test_results_that_are_not_final_are_passed_over():
    world = World(1)
    world.manager.decode("req_10", 7)
    world.manager.results.append(world.manager.states["req_10"].to_generation_output())
    assert world.result() is None
    world.manager.finish("req_10", EOS)
    assert world.result().generated_tokens == [7, EOS]


def test_progress_is_reported_now_and_then_to_schedules_that_need_it(monkeypatch, clock):
    monkeypatch.setattr(hf_continuous, "time", SimpleNamespace(monotonic=clock))
    world = World(3, needs_progress=True)
    world.manager.decode("req_10", 7, 8, 9)
    world.manager.decode("req_11", 7)
    for _ in range(4):
        clock.advance(0.02)  # 0.06 is the first that is more than 0.05
        world.result()
    world.share.exchange()
    # 22 is not taken up
    assert sorted((report.candidate_id, report.length) for report in world.link.reports) == [(20, 3), (21, 1)]
    world.manager.decode("req_11", 8)
    clock.advance(0.05)
    world.result()
    assert sorted((report.candidate_id, report.length) for report in world.link.reports[2:]) == [(20, 3), (21, 2)]


def test_no_progress_is_reported_to_schedules_that_do_not_need_it(monkeypatch, clock):
    monkeypatch.setattr(hf_continuous, "time", SimpleNamespace(monotonic=clock))
    world = World(1)
    world.manager.decode("req_10", 7)
    for _ in range(5):
        clock.advance(1.0)
        world.result()
    assert world.link.reports == []


# The context around `generate_batch`


class FakeModel:
    """A model whose `generate_batch` does what transformers' does with its manager."""

    def __init__(self, manager: FakeManager) -> None:
        self.manager = manager

    @contextmanager
    def continuous_batching_context_manager(self, **kwargs: Any) -> Iterator[FakeManager]:
        self.kwargs = kwargs
        yield self.manager
        self.manager.calls.append(("stop",))

    def generate_batch(self, inputs: list[list[int]]) -> dict[str, GenerationOutput]:
        results: dict[str, GenerationOutput] = {}
        with self.continuous_batching_context_manager(block=True, timeout=5) as manager:
            try:
                manager.add_requests(inputs=inputs, max_new_tokens=9)
                while len(results) < len(inputs):
                    if (result := manager.get_result(timeout=1)) is not None:
                        results[result.request_id] = result
                    elif not manager.is_running():
                        break
            except Exception:
                pass  # transformers logs it, and returns what it has
        return results


def test_generate_batch_talks_to_our_manager_inside_the_context():
    manager = FakeManager()
    model, share = FakeModel(manager), Share([Slot(0, 0, 0)], Link(), False)
    with scheduled_batching(model, share, [EOS]):
        with model.continuous_batching_context_manager(block=True) as scheduled:
            assert isinstance(scheduled, ScheduledManager)
        assert model.kwargs == {"block": True}
    with model.continuous_batching_context_manager() as own:
        assert own is manager
    assert "continuous_batching_context_manager" not in vars(model)


def test_the_model_inside_an_adapter_is_the_one_that_is_changed():
    """`PeftModel.generate_batch` is that of the model inside, which looks for its own context manager."""
    inner = FakeModel(FakeManager())
    with scheduled_batching(SimpleNamespace(get_base_model=lambda: inner), Share([], Link(), False), [EOS]):
        assert "continuous_batching_context_manager" in vars(inner)
    assert "continuous_batching_context_manager" not in vars(inner)


def failing_batch(error: BaseException) -> FakeManager:
    """Another process failed, or the user gave up, while three candidates run."""
    link = Link()
    model, share = FakeModel(FakeManager()), Share([Slot(number, 0, number) for number in range(3)], link, False)
    get_result = model.manager.get_result

    def fail_later(timeout: float) -> GenerationOutput | None:
        model.manager.finish("req_11", 7, EOS)
        link.error = error
        return get_result(timeout)

    model.manager.get_result = fail_later
    with pytest.raises(type(error), match=str(error)), scheduled_batching(model, share, [EOS]):
        model.generate_batch([[5]] * 3)
    assert "continuous_batching_context_manager" not in vars(model)
    return model.manager


def test_an_error_of_another_process_is_raised_although_generate_batch_swallows_it():
    failing_batch(GenerationError("Generation failed on process 1: boom"))


@pytest.mark.parametrize("error", [GenerationError("Generation failed on process 1: boom"), KeyboardInterrupt("ctrl")])
def test_what_runs_is_cancelled_after_a_failure(error):
    """Else transformers decodes on for five seconds, and its thread breaks on a model that has been put back."""
    calls = failing_batch(error).calls
    cancelled = {call[1] for call in calls if call[0] == "cancel"}
    assert cancelled == {"req_10", "req_12"}


def test_nothing_is_cancelled_after_a_rollout_that_went_well():
    model, share = FakeModel(FakeManager()), Share([Slot(0, 0, 0)], Link(), False)
    with scheduled_batching(model, share, [EOS]):
        add_requests = model.manager.add_requests
        model.manager.add_requests = lambda **kwargs: (add_requests(**kwargs), model.manager.finish("req_10", EOS))[0]
        assert list(model.generate_batch([[5]])) == ["req_10"]
    assert [call[0] for call in model.manager.calls] == ["add", "wait", "stop"]


def test_a_broken_thread_is_an_error():
    manager = FakeManager()
    manager.is_running = lambda: False
    manager.background_thread_status.fatal_error = RuntimeError("CUDA error: an illegal memory access")
    model, share = FakeModel(manager), Share([Slot(0, 0, 0)], Link(), False)
    with (
        pytest.raises(GenerationError, match="Continuous batching broke: CUDA error"),
        scheduled_batching(model, share, [EOS]),
    ):
        assert model.generate_batch([[5]]) == {}


# Transformers' own


@pytest.fixture(scope="module")
def model(markov_model_dir):
    return AutoModelForCausalLM.from_pretrained(markov_model_dir, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def few_threads():
    """Transformers' thread must be gone with the call that started it."""
    yield
    deadline = time.monotonic() + 10
    while generating() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not generating()


def generating() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if "_run_generation_loop" in t.name]


class RecordingLink(DirectLink):
    """Notes the reports; with an error, raises it after a few exchanges."""

    def __init__(self, director: Director, error: BaseException | None = None) -> None:
        super().__init__(director)
        self.reports: list[Report] = []
        self.error = error
        self.num_exchanges = 0

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        self.reports += reports
        self.num_exchanges += 1
        if self.error is not None and self.num_exchanges > 5:
            raise self.error
        return super().exchange(reports)


def rollout(
    model: Any,
    counts: Sequence[int],
    schedule: str = "darts",
    max_new_tokens: int = 200,
    eos: int = EOS,
    limits: dict[str, Any] | None = None,
    error: BaseException | None = None,
    **options: Any,
) -> tuple[Director, Share, dict[str, GenerationOutput], RecordingLink]:
    """What TRL's path of continuous batching does: one call for all rows. Prompts differ in their first token."""
    policies = make_policies(schedule, 4, 8, 1, **options)
    director = Director(Scheduler(policies, 4), [GroupPlan(index, count) for index, count in enumerate(counts)], 1)
    link = RecordingLink(director, error)
    share = Share(director.slots[0], link, director.scheduler.needs_progress)
    prompts = [[90 - group, 61] for group, count in enumerate(counts) for _ in range(count)]
    config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=True, top_k=0, eos_token_id=eos, pad_token_id=0)
    batching = ContinuousBatchingConfig(**{**LIMITS, **(limits or {})})
    with scheduled_batching(model, share, [eos]):
        outputs = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
        )
    share.exchange()
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.prompt_ids in (prompt, [])  # one that was never taken up has not even that
    return director, share, outputs, link


def test_grpo_returns_what_generate_batch_returns(model):
    director, share, outputs, _ = rollout(model, [4, 4, 4], schedule="grpo", max_new_tokens=40)
    assert [output.generated_tokens for output in outputs.values()] == [
        share.rows[slot.candidate_id][0] for slot in share.slots
    ]
    for group in director.result().groups:
        assert group.selected == [0, 1, 2, 3]
        for candidate in group.candidates:
            tokens, logprobs = share.rows[candidate.candidate_id]
            assert logprobs is None
            assert (tokens[-1] == EOS) == (candidate.finish_reason is STOP)
            assert (len(tokens) == 40) or candidate.finish_reason is STOP
            assert EOS not in tokens[:-1]


def test_saturated_groups_stop_and_every_candidate_ends_once(model):
    aborted = []
    for _ in range(3):  # five steps or so decide, and the thread that decodes does not wait for us
        director, share, outputs, link = rollout(model, [8, 6, 8])
        assert len(outputs) == 22  # `generate_batch` has counted all
        assert not share.running
        ends = [report.candidate_id for report in link.reports if report.finish_reason is not None]
        assert sorted(ends) == list(range(22))
        for group in director.result().groups:
            assert all(row.state is CandidateState.FINISHED for row in group.rows)
            for candidate in group.candidates:
                assert candidate.length == len(share.rows[candidate.candidate_id][0])
        aborted += [c for c in director.scheduler.ledger.candidates if c.state is CandidateState.ABORTED]
        if aborted:
            break
    assert aborted
    assert all(c.length > 0 for c in aborted)  # all of them were running


def test_bounded_wait_sees_requests_grow(model, monkeypatch):
    monkeypatch.setattr(hf_continuous, "PROGRESS_INTERVAL_S", 0.0)
    director, _, _, link = rollout(model, [7] * 4, max_new_tokens=2000, long_end_patience=1.0)
    assert any(report.finish_reason is None and report.length for report in link.reports)
    candidates = director.scheduler.ledger.candidates
    assert any(c.state is CandidateState.ABORTED for c in candidates)
    for group in director.result().groups:
        bound = sorted(c.length for c in group.candidates if c.complete)[3]
        assert all(c.length >= bound for c in group.candidates if c.state is CandidateState.ABORTED)


def test_progress_never_goes_back_when_the_cache_is_full(model, monkeypatch):
    """Six candidates of 60 tokens in a cache for four: some are put off, and go on later."""
    monkeypatch.setattr(hf_continuous, "PROGRESS_INTERVAL_S", 0.0)
    limits = {"num_blocks": 16, "block_size": 16, "max_batch_tokens": 64}
    director, _, _, link = rollout(
        model, [6], max_new_tokens=60, eos=-1, limits=limits, tail_pruning=False, long_end_patience=1000.0
    )
    assert [c.length for c in director.scheduler.ledger.candidates] == [60] * 6
    known: dict[int, int] = {}
    for report in link.reports:
        assert report.length >= known.get(report.candidate_id, 0)
        known[report.candidate_id] = report.length


@pytest.mark.parametrize("error", [GenerationError("Generation failed on process 1: boom"), KeyboardInterrupt("ctrl")])
def test_a_failure_elsewhere_ends_the_call_at_once(model, error):
    """Four candidates of 20,000 tokens run. Nothing of them is left a second later, and the model is as it was."""
    attention = model.config._attn_implementation
    start = time.monotonic()
    with pytest.raises(type(error), match=str(error)):
        rollout(model, [4], "grpo", max_new_tokens=20_000, eos=-1, limits={"num_blocks": 400}, error=error)
    assert not generating()
    assert time.monotonic() - start < 4
    assert model.config._attn_implementation == attention
    assert "continuous_batching_context_manager" not in vars(model)


def test_an_error_in_the_forward_pass_has_its_words(model, monkeypatch):
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("expected scalar type Half")

    monkeypatch.setattr(model.model.layers[0], "forward", broken)
    with pytest.raises((GenerationError, RuntimeError), match="expected scalar type Half"):
        rollout(model, [4], "grpo")


# What we lean on


def source(function: Any) -> str:
    return re.sub(r"\s+", " ", inspect.getsource(function))


def hook(name: str) -> str:
    return f"transformers' `{name}` is not what it was. It is used by trl_darts/engines/hf_continuous.py."


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
    """`batch_processor.scheduler.active_requests` has the states of what runs, and a cancelled one leaves it."""
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
