"""
What runs calls of reward functions in this process: a thread for each function, and an event loop for all functions
that are coroutines.
"""

import asyncio
import ctypes
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from .reward_calls import RewardCall, score, score_async


GRACE_S = 1.0  # from the moment that a function is stopped until its thread, or its event loop, is given up


class RewardRunner(Protocol):
    """Runs calls of functions that are no coroutines, those of one function in the order in which they come."""

    def submit(self, call: RewardCall) -> None:
        """Takes a call, and returns at once."""

    def wait(self, call: RewardCall) -> None:
        """Returns when a call has ended."""

    def close(self) -> None:
        """Ends what runs calls. Those that have not ended are to be cancelled first."""


class CallStopped(BaseException):
    """Raised inside a reward function to stop it. Not an `Exception`: those are often caught around an answer."""


def _stop(thread: threading.Thread) -> None:
    """Raises [`CallStopped`] in a thread, when it next runs Python code."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(CallStopped))


class RewardThread:
    """
    Runs the calls of one function one after another, in a thread. A call that takes too long is stopped by an
    exception that is raised in the thread. A thread that was stopped gets no further calls, whether it has ended or
    not.

    Args:
        name (`str`):
            The function's name.
        timeout_s (`float`):
            Deadline of a call, from the moment that its turn has come.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._calls: SimpleQueue[RewardCall | None] = SimpleQueue()
        threading.Thread(target=self._supervise, name=f"trl_darts-deadlines-{name}", daemon=True).start()

    def submit(self, call: RewardCall) -> None:
        self._calls.put(call)

    def wait(self, call: RewardCall) -> None:
        call.wait()

    def close(self) -> None:
        self._calls.put(None)

    def _supervise(self) -> None:
        worker: _Worker | None = None
        while (call := self._calls.get()) is not None:
            if call.future.done():  # cancelled before its turn
                continue
            worker = worker or _Worker(f"trl_darts-reward-{self.name}")
            if not worker.run(call, self.timeout_s):
                worker = None
        if worker is not None:
            worker.calls.put(None)


class _Worker:
    """A thread that runs functions, until it is stopped."""

    def __init__(self, name: str) -> None:
        self.calls: SimpleQueue[RewardCall | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, call: RewardCall, timeout_s: float) -> bool:
        """Runs one call until its end. Returns whether the thread can take another."""
        self.calls.put(call)
        call.wait(timeout_s)
        call.expire(timeout_s)
        if not call.was_stopped:
            return True
        _stop(self._thread)
        self.calls.put(None)
        self._thread.join(GRACE_S)  # after that the next call must not wait for it any longer
        return False

    def _work(self) -> None:
        with suppress(CallStopped):  # comes late where the function had just returned
            while (call := self.calls.get()) is not None:
                try:
                    result = score(call.function, call.name, call.arguments)
                except BaseException as error:
                    call.settle(error=error)
                else:
                    call.settle(result)


class RewardLoop:
    """
    Runs the calls of all functions that are coroutines at the same time, in an event loop of its own.

    Args:
        timeout_s (`float`):
            Deadline of a call.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, call: RewardCall) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run_loop, args=(self._loop,), name="trl_darts-reward-loop", daemon=True
            )
            self._thread.start()
        asyncio.run_coroutine_threadsafe(self._run(call), self._loop)

    async def ended(self, calls: Sequence[RewardCall]) -> None:
        """
        Returns when all calls have ended. Awaited in another event loop.

        A function that blocks this loop keeps it from looking at deadlines. If nothing ends for as long as a call may
        take, the loop is given up with all that is in it.
        """
        pending = {asyncio.wrap_future(call.future) for call in calls}
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=self.timeout_s + GRACE_S, return_when=asyncio.FIRST_COMPLETED
            )
            for future in done:  # asyncio complains of errors that nobody looks at
                future.cancelled() or future.exception()
            if not done:
                for call in calls:
                    call.expire(self.timeout_s)
                self._abandon()
                return

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(GRACE_S)
        self._loop = self._thread = None

    async def _run(self, call: RewardCall) -> None:
        if call.future.done():  # cancelled, or given up by a loop that was blocked
            return
        task = asyncio.ensure_future(_score(call))
        loop = asyncio.get_running_loop()
        call.future.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(task.cancel))
        await asyncio.wait({task}, timeout=self.timeout_s)
        call.expire(self.timeout_s)  # not awaited further: a coroutine can refuse to be cancelled

    def _abandon(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            _stop(self._thread)
        self._loop = self._thread = None


async def _score(call: RewardCall) -> None:
    try:
        result = await score_async(call)
    except BaseException as error:
        call.settle(error=error)
    else:
        call.settle(result)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(CallStopped):
        loop.run_forever()
    with suppress(CallStopped):
        loop.run_until_complete(_cancel_tasks())
    loop.close()


async def _cancel_tasks() -> None:
    await asyncio.sleep(0)  # what was just submitted becomes tasks
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE_S / 2)
