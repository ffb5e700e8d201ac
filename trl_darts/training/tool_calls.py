"""Calls of tools in one conversation: how many run at once, how long they may take, and which of them ends it."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from ..errors import EnvironmentLost
from .environments import Instance


Tool = Callable[..., Any]


class ToolCalls:
    """
    Wraps the tools of one conversation, which begins now.

    Args:
        args (`DARTSGRPOConfig`):
            `tool_timeout_s`, `conversation_timeout_s` and `stop_tools`.
        room (`Semaphore`):
            Of all conversations: so many calls at once.
        instance (`Instance`, *optional*):
            The environment whose methods some of the tools are.
    """

    def __init__(self, args: Any, room: threading.Semaphore, instance: Instance | None) -> None:
        self._args = args
        self._tool_timeout_s: float = args.tool_timeout_s or math.inf
        self._end: float = time.perf_counter() + (args.conversation_timeout_s or math.inf)
        self._stop_tools = set(args.stop_tools or ())
        self._has_stopped = False
        self._room = room
        self._instance = instance

    @property
    def is_over(self) -> bool:
        """Whether a stop tool has answered, or the conversation's deadline is over."""
        return self._has_stopped or time.perf_counter() >= self._end

    def wrapped(self, tools: dict[str, Tool]) -> dict[str, Tool]:
        """Returns functions with their limits."""
        return {name: self._function(name, tool) for name, tool in tools.items()}

    def wrapped_coroutines(self, tools: dict[str, Tool]) -> dict[str, Tool]:
        """Returns coroutine functions with their limits."""
        return {name: self._coroutine(name, tool) for name, tool in tools.items()}

    def _function(self, name: str, tool: Tool) -> Tool:
        instance = self._of(tool)

        def call(**arguments: Any) -> Any:
            with self._room, self._noted(name, instance):
                seconds, limit = self._deadline()
                if seconds == math.inf:
                    return tool(**arguments)
                answer = _started(tool, arguments)
                wait([answer], seconds)
                if not answer.done():
                    if instance is not None:
                        instance.late = answer
                    raise self._too_late(limit)
                return answer.result()

        return call

    def _coroutine(self, name: str, tool: Tool) -> Tool:
        instance = self._of(tool)

        async def call(**arguments: Any) -> Any:
            seconds, limit = self._deadline()
            timeout = asyncio.timeout(None if seconds == math.inf else seconds)
            try:
                with self._noted(name, instance):
                    async with timeout:
                        return await tool(**arguments)
            except TimeoutError:
                if timeout.expired():
                    raise self._too_late(limit) from None
                raise

        return call

    def _of(self, tool: Tool) -> Instance | None:
        instance = self._instance
        return instance if instance is not None and instance.has(tool) else None

    @contextmanager
    def _noted(self, name: str, instance: Instance | None) -> Iterator[None]:
        """
        Notes an answer of a stop tool, and that an environment is lost. To TRL's loop, its error is an answer. Raises
        as long as another call acts on the environment.
        """
        if instance is not None and instance.is_busy:
            raise TimeoutError("the environment is still busy with a call that missed its deadline")
        try:
            yield
        except EnvironmentLost as error:
            if instance is not None:
                instance.lost = error
            raise
        self._has_stopped |= name in self._stop_tools

    def _deadline(self) -> tuple[float, str]:
        """Returns the seconds that a call has, and the name of their setting. Raises if none are left."""
        left = self._end - time.perf_counter()
        seconds, limit = min((self._tool_timeout_s, "tool_timeout_s"), (left, "conversation_timeout_s"))
        if seconds <= 0:
            raise self._too_late(limit)
        return seconds, limit

    def _too_late(self, limit: str) -> TimeoutError:
        return TimeoutError(f"no answer within `{limit}` ({getattr(self._args, limit)} s)")


def _started(tool: Tool, arguments: dict[str, Any]) -> Future[Any]:
    """Calls a tool in a thread that is left alone if it takes too long: threads can't be stopped."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(tool(**arguments))
        except BaseException as error:  # raised where the answer is waited for
            answer.set_exception(error)

    threading.Thread(target=run, name="trl_darts-tool", daemon=True).start()
    return answer
