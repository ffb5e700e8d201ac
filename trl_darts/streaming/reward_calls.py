"""
Calls of reward functions on some rows of a batch, and where they run: async functions in one event loop, all at once;
the others in one thread beside it, one call after another, since they are often not thread-safe.

A call ends once, whichever comes first: with rewards or an error, late, or cancelled. Whoever waits for it waits no
longer, even where the function itself goes on.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any

from trl.trainer.utils import is_async_callable, start_event_loop_in_daemon

from ..rewards import check_rewards


RewardFunction = Callable[..., Any]
Rewards = list[float | None]
GRACE_S = 1.0


class RewardCall:
    """
    One call of a reward function on some rows, with TRL's arguments for them but for `log_extra` and `log_metric`. The
    future has the rewards, the function's error, or `None` for a call that is late.
    """

    def __init__(self, function: RewardFunction, name: str, rows: list[int], arguments: dict[str, Any]) -> None:
        self.function = function
        self.name = name
        self.rows = rows
        self.future: Future[Rewards | BaseException | None] = Future()
        self.started_at: float | None = None
        self.ended_at = 0.0
        self.columns: dict[tuple[str, int], list[Any]] = {}  # by name, and how often it was logged before
        self.metrics: list[tuple[str, float]] = []
        self._arguments = {**arguments, "log_extra": self._log_extra, "log_metric": self._log_metric}

    def run(self) -> None:
        self.started_at = time.monotonic()
        try:
            self._end(self._checked(self.function(**self._arguments)))
        except BaseException as error:
            self._end(error)

    async def run_async(self) -> None:
        self.started_at = time.monotonic()
        try:
            self._end(self._checked(await self.function(**self._arguments)))
        except BaseException as error:
            self._end(error)

    def expire(self) -> bool:
        """Ends the call without rewards, unless it has ended. Returns whether this did it."""
        return self._end(None)

    def _end(self, outcome: Rewards | BaseException | None) -> bool:
        self.ended_at = self.ended_at or time.monotonic()
        try:
            self.future.set_result(outcome)
        except InvalidStateError:
            return False
        return True

    def _checked(self, rewards: Iterable[float | None]) -> Rewards:
        rewards = check_rewards(self.name, rewards)
        if len(rewards) != len(self.rows):
            raise ValueError(
                f"The reward function '{self.name}' returned {len(rewards)} rewards, but {len(self.rows)} were "
                "expected in this call. With `stream_rewards` it is called for some rows of the batch at a time, and "
                "must return exactly one reward for each of their completions."
            )
        return rewards

    def _log_extra(self, column: str, values: Iterable[Any]) -> None:
        values = list(values)
        if len(values) != len(self.rows):
            raise ValueError(
                f"The reward function '{self.name}' logged {len(values)} values of `{column}` for {len(self.rows)} "
                "completions. With `stream_rewards`, `log_extra` takes one value for each completion of the call."
            )
        self.columns[column, sum(name == column for name, _ in self.columns)] = values

    def _log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, value))


class RewardLoop:
    """
    An event loop in a thread of its own, and a worker thread beside it. A deadline counts from the moment when a
    call's turn has come. A late call keeps its thread, and the next ones get another.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread, self._loop, _ = start_event_loop_in_daemon("trl_darts-reward-loop")
        self._turn = asyncio.Lock()  # of functions that are not async
        self._worker = _Worker()

    def submit(self, call: RewardCall) -> None:
        """Starts a call when its turn comes; returns at once."""
        asyncio.run_coroutine_threadsafe(self._run(call), self._loop)

    def close(self) -> None:
        """Ends the threads, at once or when what blocks them ends. Calls are to be cancelled first. Safe to repeat."""
        if self._loop.is_closed():
            return
        self._worker.calls.put(None)
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._thread.join(GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _run(self, call: RewardCall) -> None:
        if is_async_callable(call.function):
            if not call.future.done():
                task = asyncio.create_task(call.run_async())
                await self._within_deadline(call)
                task.cancel()  # and not awaited: a coroutine can refuse
            return
        async with self._turn:
            if call.future.done() or call.started_at is not None:  # cancelled; or in the loop that took this one over
                return
            self._worker.calls.put(call)
            if not await self._within_deadline(call):
                self._worker.calls.put(None)
                self._worker = _Worker()

    async def _within_deadline(self, call: RewardCall) -> bool:
        """Waits for the end of a call. Returns whether its function has ended too."""
        await asyncio.wait({asyncio.wrap_future(call.future)}, timeout=self._timeout_s)
        return not call.expire() and not call.future.cancelled()

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S / 2)
        self._loop.stop()


class _Worker:
    """A thread that makes calls until it is given `None`."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[RewardCall | None] = SimpleQueue()
        threading.Thread(target=self._work, name="trl_darts-rewards", daemon=True).start()

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            call.run()
