"""
Runs calls of reward functions on some rows of a batch. Async functions run concurrently in one event loop. The others
run one after another in one thread, because they are often not thread-safe.

A call ends with rewards, an error, a timeout or a cancellation, whichever comes first. Its future is then done, even
if the function itself still runs.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from ..training.reward_checks import check_rewards
from ..trl_compat import is_async_callable, start_event_loop_in_daemon


RewardFunction = Callable[..., Any]
Rewards = list[float | None]
GRACE_S = 1.0


class RewardCall:
    """
    One call of a reward function on some rows, with TRL's arguments except `log_extra` and `log_metric`. The future
    has the rewards, the function's exception, or `None` after a timeout.
    """

    def __init__(self, function: RewardFunction, name: str, rows: list[int], arguments: dict[str, Any]) -> None:
        self.function = function
        self.name = name
        self.rows = rows
        self.future: Future[Rewards | BaseException | None] = Future()
        self.started_at: float | None = None
        self.ended_at = 0.0
        self.columns: dict[tuple[str, int], list[Any]] = {}  # by name and number of earlier logs under this name
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
        """Ends the call without rewards, unless it has ended. Returns whether it was still running."""
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
                "expected in this call. With `stream_rewards`, each call gets some rows of the batch, and must return "
                "exactly one reward for each of their completions."
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
    An event loop in its own thread, and a worker thread for functions that are not async. The timeout of a call starts
    with its execution. After a timeout, the next calls run in a new worker thread.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread, self._loop, _ = start_event_loop_in_daemon("trl_darts-reward-loop")
        self._turn = asyncio.Lock()  # serialises functions that are not async
        self._worker = _Worker()

    def submit(self, call: RewardCall) -> None:
        """Schedules a call and returns at once."""
        asyncio.run_coroutine_threadsafe(self._run(call), self._loop)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Inside this context, no function runs here that is not async. Waits for the calls that were submitted."""
        asyncio.run_coroutine_threadsafe(self._turn.acquire(), self._loop).result()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._turn.release)

    def close(self) -> None:
        """Ends the threads once they are not blocked. Cancel all calls first. Can be called twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._thread.join(GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _run(self, call: RewardCall) -> None:
        if is_async_callable(call.function):
            if not call.future.done():
                task = asyncio.create_task(call.run_async())
                await self._within_deadline(call)
                task.cancel()  # not awaited, because a coroutine can ignore its cancellation
            return
        async with self._turn:
            if call.future.done() or call.started_at is not None:  # cancelled, or started by a newer loop
                return
            self._worker.calls.put(call)
            if not await self._within_deadline(call):
                self._worker.calls.put(None)
                self._worker = _Worker()

    async def _within_deadline(self, call: RewardCall) -> bool:
        """Waits until a call ends or times out. Returns whether its function has ended."""
        await asyncio.wait({asyncio.wrap_future(call.future)}, timeout=self._timeout_s)
        return not call.expire() and not call.future.cancelled()

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S / 2)
        self._worker.calls.put(None)  # here: a call that was cancelled just now has begun a new worker
        self._loop.stop()


class _Worker:
    """A thread that runs calls until it gets `None`."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[RewardCall | None] = SimpleQueue()
        threading.Thread(target=self._work, name="trl_darts-rewards", daemon=True).start()

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            call.run()
