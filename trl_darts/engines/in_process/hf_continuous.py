"""
Decodes with transformers' continuous batching, in which a candidate that ends or is aborted makes room for others.

`generate_batch` runs unchanged with our manager, which reports finished requests and cancels others while it waits for
results.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ...errors import GenerationError
from ...scheduling import FinishReason
from ...trl_compat import replaced
from .share import Share


POLL_S = 0.01  # timeout of a result, after which the scheduler is asked again
PROGRESS_INTERVAL_S = 0.05


class ScheduledManager:
    """Wraps transformers' manager for `generate_batch`."""

    def __init__(self, manager: Any, share: Share, eos_token_ids: set[int]) -> None:
        self._manager = manager
        self._share = share
        self._eos_token_ids = eos_token_ids
        self._candidate_of: dict[str, int] = {}
        self._request_of: dict[int, str] = {}
        self._cancelled: list[GenerationOutput] = []
        self._fetched: deque[GenerationOutput] = deque()
        self.error: Exception | None = None
        self._last_progress = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def add_requests(self, *args: Any, **kwargs: Any) -> list[str]:
        """Adds requests and records their candidates."""
        request_ids = self._manager.add_requests(*args, **kwargs)
        for slot, request_id in zip(self._share.slots, request_ids, strict=True):
            self._candidate_of[request_id] = slot.candidate_id
            self._request_of[slot.candidate_id] = request_id
        return request_ids

    def get_result(self, *args: Any, **kwargs: Any) -> GenerationOutput | None:
        """Returns the next request that ended or was aborted, `None` after a while without one."""
        if not self._cancelled:
            try:
                self._decide()
            except Exception as error:  # `generate_batch` would log it and continue
                self.error = error
                raise
        if self._cancelled:
            return self._cancelled.pop()
        while (result := self._next()) is not None:
            if result.is_finished() or result.error is not None:
                candidate_id = self._candidate_of[result.request_id]
                if candidate_id in self._share.running:  # not aborted while its last token was decoded
                    self._end(candidate_id, result)
                    return result
        return None

    def cancel(self) -> None:
        for candidate_id in self._share.running & self._request_of.keys():
            self._manager.cancel_request(self._request_of[candidate_id])

    def _next(self) -> GenerationOutput | None:
        return self._fetched.popleft() if self._fetched else self._manager.get_result(timeout=POLL_S)

    def _end(self, candidate_id: int, result: GenerationOutput) -> None:
        if result.error is not None:
            self._share.fail(candidate_id, result.error)
            return
        tokens = list(result.generated_tokens)
        stopped = bool(tokens) and tokens[-1] in self._eos_token_ids
        self._share.end(candidate_id, tokens, None, FinishReason.STOP if stopped else FinishReason.LENGTH)

    def _decide(self) -> None:
        now = time.monotonic()
        if self._share.needs_progress and now - self._last_progress >= PROGRESS_INTERVAL_S:
            self._last_progress = now
            for candidate_id in self._share.running:
                if (output := self._so_far(candidate_id)) is not None:
                    self._share.progress(candidate_id, len(output.generated_tokens))
        for candidate_id in self._share.exchange():
            request_id = self._request_of[candidate_id]
            output = self._so_far(candidate_id) or self._result_of(request_id) or GenerationOutput(request_id)
            output.status = RequestStatus.FINISHED
            self._manager.cancel_request(request_id)
            self._share.end(candidate_id, list(output.generated_tokens), None, FinishReason.ABORT)
            self._cancelled.append(output)

    def _so_far(self, candidate_id: int) -> GenerationOutput | None:
        """
        Returns the output of a running or preempted request from the scheduler's state. Streaming it would copy all
        tokens for each new one.
        """
        processor = self._manager.batch_processor
        if processor is None:  # its thread has not started
            return None
        request_id = self._request_of[candidate_id]
        queues = (processor.scheduler.active_requests, processor.scheduler.waiting_requests)
        state = next((state for queue in queues if (state := queue.get(request_id)) is not None), None)
        return None if state is None else state.to_generation_output()

    def _result_of(self, request_id: str) -> GenerationOutput | None:
        """Returns the result of a request if it has just ended."""
        while (result := self._manager.get_result(timeout=0)) is not None:
            self._fetched.append(result)
        return next((result for result in self._fetched if result.request_id == request_id), None)


@contextmanager
def scheduled_batching(model: Any, share: Share, eos_token_ids: list[int]) -> Iterator[None]:
    """Inside this context, a model's `generate_batch` decodes a share."""
    target: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    make_manager = target.continuous_batching_context_manager
    error: list[Exception] = []

    @contextmanager
    def managed(*args: Any, **kwargs: Any) -> Iterator[ScheduledManager]:
        with make_manager(*args, **kwargs) as manager:
            scheduled = ScheduledManager(manager, share, set(eos_token_ids))
            try:
                yield scheduled
            finally:
                scheduled.cancel()  # after an error; transformers' thread would continue
            fatal = manager.background_thread_status.fatal_error
            if fatal is not None or scheduled.error is not None:
                error.append(scheduled.error or GenerationError(f"Continuous batching failed: {fatal}"))

    with replaced(target, "continuous_batching_context_manager", managed):
        yield
    if error:
        raise error[0]
