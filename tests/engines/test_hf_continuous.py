"""Our manager between `generate_batch` and transformers' continuous batching, on a fake manager."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus

from trl_darts.engines.in_process import hf_continuous
from trl_darts.engines.in_process.hf_continuous import ScheduledManager, scheduled_batching
from trl_darts.engines.in_process.share import Report, Share, Slot
from trl_darts.errors import GenerationError
from trl_darts.scheduling import FinishReason


EOS = 1
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


class FakeManager:
    """Transformers' manager, with results set by the test."""

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
        """Starts or continues a request."""
        self.scheduler.waiting_requests.pop(name, None)
        self.scheduler.active_requests[name] = self.states[name]
        self.states[name].status = RequestStatus.DECODING
        self.states[name].generated_tokens += tokens

    def finish(self, name: str, *tokens: int, error: str | None = None) -> None:
        """Ends a request. Its result can then be fetched."""
        self.decode(name, *tokens)
        del self.scheduler.active_requests[name]
        self.states[name].status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        self.states[name].error = error
        self.results.append(self.states[name].to_generation_output())

    def evict(self, name: str) -> None:
        """Preempts a request: its tokens become part of its prompt, and it waits again."""
        state = self.states[name] = self.scheduler.active_requests.pop(name).create_equivalent_initial_request()
        self.scheduler.waiting_requests[name] = state


class Link:
    """Returns the aborts that the test sets, and records the reports."""

    def __init__(self, calls: list[tuple] | None = None) -> None:
        self.calls = [] if calls is None else calls
        self.reports: list[Report] = []
        self.answer: list[int] = []

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        self.calls.append(("exchange",))
        self.reports += reports
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


@pytest.mark.parametrize(("tokens", "reason"), [([7, 2], STOP), ([EOS, 8], LENGTH), ([EOS], STOP)])
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
    """`generate_batch` counts results, so each request must be returned exactly once."""
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
    output = world.result()
    world.manager.finish("req_10", 8, EOS)  # until its thread reads of it
    assert output.generated_tokens == [7]
    world.manager.finish("req_11", 9, EOS)
    assert world.result().request_id == "req_11"
    assert world.rows == {20: [7], 21: [9, EOS]}
    assert world.result() is None
    world.share.exchange()
    assert [report.candidate_id for report in world.link.reports] == [20, 21]


def test_a_request_that_ended_just_before_the_abort_keeps_its_tokens():
    """Transformers no longer has its state, and its result was not fetched yet."""
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
    """With a full cache, transformers preempts a request and queues it again."""
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


# The context around `generate_batch`


class FakeModel:
    """A model whose `generate_batch` uses its manager as transformers' does."""

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


def test_the_model_inside_an_adapter_is_the_one_that_is_changed():
    """`PeftModel.generate_batch` calls the base model's, which uses the base model's context manager."""
    inner = FakeModel(FakeManager())
    with scheduled_batching(SimpleNamespace(get_base_model=lambda: inner), Share([], Link(), False), [EOS]):
        assert "continuous_batching_context_manager" in vars(inner)
    assert "continuous_batching_context_manager" not in vars(inner)


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
        pytest.raises(GenerationError, match="Continuous batching failed: CUDA error"),
        scheduled_batching(model, share, [EOS]),
    ):
        assert model.generate_batch([[5]]) == {}
