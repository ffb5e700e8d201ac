"""
Calls of reward functions on some rows of a batch.

A call ends in one way only, and the first one wins: with its result, with the function's error, expired at its
deadline, or cancelled. Whoever waits for it never waits for longer, even where the function itself can't be stopped.

Worker processes import this module too: the standard library only.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


RewardFunction = Callable[..., Any]


@dataclass
class CallLog:
    """
    What a reward function logs in one call, until the calls of the batch's other rows are there too.

    Args:
        name (`str`):
            The function's name, for messages.
        num_rows (`int`):
            Rows of the call.
    """

    name: str
    num_rows: int
    columns: dict[str, list[list[Any]]] = field(default_factory=dict)  # as often as a column was logged
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Takes the place of TRL's, with its arguments."""
        values = list(values)
        if len(values) != self.num_rows:
            raise ValueError(
                f"The reward function '{self.name}' logged {len(values)} values of `{column}` for {self.num_rows} "
                "completions. With `stream_rewards`, `log_extra` takes one value for each completion of the call."
            )
        self.columns.setdefault(column, []).append(values)

    def log_metric(self, name: str, value: float) -> None:
        """Takes the place of TRL's, with its arguments."""
        self.metrics.append((name, value))


@dataclass(frozen=True)
class CallResult:
    """What a call gave. Times are those of `time.monotonic`, which all processes of a machine share."""

    rewards: list[float | None]
    log: CallLog
    started_at: float
    ended_at: float
    timed_out: bool = False


@dataclass(eq=False)
class RewardCall:
    """
    One call of a reward function on some rows.

    Args:
        function (`Callable`):
            The reward function.
        name (`str`):
            Its name, for messages.
        rows (`list[int]`):
            Rows of this process, ascending.
        arguments (`dict[str, Any]`):
            TRL's keyword arguments for these rows, but for `log_extra` and `log_metric`.
    """

    function: RewardFunction
    name: str
    rows: list[int]
    arguments: dict[str, Any]
    future: "Future[CallResult]" = field(default_factory=Future)

    def settle(self, result: CallResult | None = None, error: BaseException | None = None) -> bool:
        """Ends the call, unless it has ended. Returns whether this did it."""
        try:
            if result is not None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)
        except InvalidStateError:
            return False
        return True

    def expire(self, timeout_s: float) -> bool:
        """Ends the call without rewards, unless it has ended. Returns whether this did it."""
        now = time.monotonic()
        log = CallLog(self.name, len(self.rows))
        return self.settle(CallResult([None] * len(self.rows), log, now - timeout_s, now, timed_out=True))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the call has ended, for so long at most. Returns whether it has."""
        with suppress(FutureTimeoutError, CancelledError):
            self.future.exception(timeout_s)
        return self.future.done()

    @property
    def was_stopped(self) -> bool:
        """Whether the call ended while its function may still run."""
        future = self.future
        return future.cancelled() or (future.exception() is None and future.result().timed_out)


def score(function: RewardFunction, name: str, arguments: dict[str, Any]) -> CallResult:
    """
    Calls a function.

    Args:
        function (`Callable`):
            The reward function.
        name (`str`):
            Its name.
        arguments (`dict[str, Any]`):
            See [`RewardCall`].

    Returns:
        [`CallResult`]

    Raises:
        [`ValueError`]: If there is not one reward for each row.
    """
    started_at = time.monotonic()
    log = CallLog(name, len(arguments["completion_ids"]))
    rewards = function(**arguments, log_extra=log.log_extra, log_metric=log.log_metric)
    return _result(rewards, log, started_at)


async def score_async(call: RewardCall) -> CallResult:
    """Makes a call of a function that is a coroutine. See [`score`]."""
    started_at = time.monotonic()
    log = CallLog(call.name, len(call.rows))
    rewards = await call.function(**call.arguments, log_extra=log.log_extra, log_metric=log.log_metric)
    return _result(rewards, log, started_at)


def _result(rewards: Any, log: CallLog, started_at: float) -> CallResult:
    rewards = list(rewards)
    if len(rewards) != log.num_rows:
        raise ValueError(
            f"The reward function '{log.name}' returned {len(rewards)} rewards, but {log.num_rows} were expected in "
            "this call. With `stream_rewards` it is called for some rows of the batch at a time, and must return "
            "exactly one reward for each of their completions."
        )
    return CallResult(rewards, log, started_at, time.monotonic())


def pass_on(
    results: Sequence[CallResult],
    cells: Sequence[tuple[CallResult, int]],
    log_extra: Callable[[str, list[Any]], None],
    log_metric: Callable[[str, float], None],
) -> None:
    """
    Logs what calls have logged.

    Args:
        results (`Sequence[CallResult]`):
            Of the calls, in the order of their first rows.
        cells (`Sequence[tuple[CallResult, int]]` of shape `(B,)`):
            For each row of the process, the result that it is in, and its place there.
        log_extra (`Callable`):
            TRL's. Called once for all rows, with `None` for rows of which nothing was logged.
        log_metric (`Callable`):
            TRL's. Called as often as the function did.
    """
    times: dict[str, int] = {}  # by column, how often it was logged
    for result in results:
        for column, logged in result.log.columns.items():
            times[column] = max(times.get(column, 0), len(logged))
    for column, count in times.items():
        for nth in range(count):
            log_extra(column, [_value(result, column, nth, index) for result, index in cells])
    for result in results:
        for name, value in result.log.metrics:
            log_metric(name, value)


def _value(result: CallResult, column: str, nth: int, index: int) -> Any:
    logged = result.log.columns.get(column, [])
    return logged[nth][index] if nth < len(logged) else None


class ServingClock:
    """How much of the functions' time was spent before serving, and how long serving took."""

    def __init__(self) -> None:
        self.hidden_s = 0.0
        self.exposed_s = 0.0
        self._served_at = 0.0
        self._num_waiting = 0  # functions that are coroutines wait at the same time
        self._waiting_since = 0.0

    def begin(self) -> None:
        self._served_at = time.monotonic()

    def count(self, result: CallResult) -> None:
        """Adds a call's time before serving."""
        self.hidden_s += max(0.0, min(result.ended_at, self._served_at) - result.started_at)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what a function's place is served with."""
        if self._num_waiting == 0:
            self._waiting_since = time.monotonic()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self.exposed_s += time.monotonic() - self._waiting_since
