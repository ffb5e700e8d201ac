"""Calls of reward functions in worker processes: what can't be stopped inside this process can be killed there."""

import math
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from ..errors import ConfigurationError
from .reward_calls import CallResult, RewardCall, RewardFunction, score


CHECK_INTERVAL_S = 1.0
# A worker whose trainer was killed in the middle of a call has nobody who stops it, so it stops itself, so much later.
ORPHAN_GRACE_S = 60


class RewardProcesses:
    """
    Runs calls in worker processes, as many at a time as there are processes. Calls of one function begin in the order
    in which they come, and can run beside each other: each process has its own copy of the function and its state.

    Processes are spawned, and import what the functions need before they take calls. A training script must therefore
    have `if __name__ == "__main__":` around what it does. A process that holds a call beyond its deadline is killed,
    and another one started.

    Args:
        functions (`Sequence[Callable]`):
            The reward functions.
        names (`Sequence[str]`):
            Their names.
        state_type (`type`):
            Of `trainer_state`. Imported in advance, as the functions are.
        timeout_s (`float`):
            Deadline of a call, from the moment that a process has taken it.
        num_processes (`int`):
            Worker processes.

    Raises:
        [`ConfigurationError`]: If a function can't be pickled, or `pebble` is not installed.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        names: Sequence[str],
        state_type: type,
        timeout_s: float,
        num_processes: int,
    ) -> None:
        self.timeout_s = timeout_s
        self.num_processes = num_processes
        self._functions = list(functions)  # held, so that an id stays that of one function
        self._index_of = {id(function): index for index, function in enumerate(self._functions)}
        for function, name in zip(functions, names, strict=True):
            self._check_picklable(function, name)
        self._payload = pickle.dumps((self._functions, state_type))
        self._pool = self._start()

    def submit(self, call: RewardCall) -> None:
        try:
            arguments = pickle.dumps((self._index_of[id(call.function)], call.name, call.arguments))
        except Exception as error:  # raised where the call's rewards are asked for, as every error of a call
            call.settle(error=error)
            return
        if not self._pool.active:
            self._pool = self._start()
        task = self._pool.schedule(run, args=(arguments, self.timeout_s), timeout=self.timeout_s)
        task.add_done_callback(partial(self._end, call))
        call.future.add_done_callback(lambda future: future.cancelled() and task.cancel())

    def wait(self, call: RewardCall) -> None:
        while not call.wait(CHECK_INTERVAL_S):
            if not self._pool.active:  # pebble forgets calls that it had not yet handed out
                call.settle(error=self._broken())

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _start(self) -> Any:
        try:
            from pebble import ProcessPool
        except ImportError as error:
            raise ConfigurationError(
                f"`stream_reward_processes` ({self.num_processes}) needs the package `pebble`. Install it with `pip "
                "install pebble`, or set it to 0 to run reward functions in threads."
            ) from error
        context = multiprocessing.get_context("spawn")  # forking a process with threads and CUDA in it is not safe
        pool = ProcessPool(self.num_processes, initializer=load, initargs=(self._payload,), context=context)
        assert pool.active  # asking starts it: processes import while the first completions are decoded
        return pool

    def _check_picklable(self, function: RewardFunction, name: str) -> None:
        try:
            pickle.dumps(function)
        except Exception as error:
            raise ConfigurationError(
                f"`stream_reward_processes` ({self.num_processes}) runs reward functions in other processes, so they "
                f"must be picklable, and '{name}' is not ({error}). Define it at the top level of a module, or set "
                "`stream_reward_processes=0` to run reward functions in threads."
            ) from error

    def _broken(self) -> Exception:
        return ConfigurationError(
            f"`stream_reward_processes` ({self.num_processes}): the worker processes ended before they took a call; "
            "their own words are above. They import the training script, so it must have `if __name__ == "
            '"__main__":` around what it does.'
        )

    def _end(self, call: RewardCall, task: Any) -> None:
        from pebble import ProcessExpired

        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, FutureTimeoutError):  # pebble's: what a function raises comes as a result
            call.expire(self.timeout_s)
        elif isinstance(error, ProcessExpired):
            message = f"The reward function '{call.name}' ended its worker process (exit code {error.exitcode})."
            call.settle(error=RuntimeError(message))
        elif isinstance(error, BrokenProcessPool):
            call.settle(error=self._broken())
        elif error is not None:
            call.settle(error=error)
        else:
            _settle(call, task.result())


def _settle(call: RewardCall, answer: bytes) -> None:
    try:
        result, text = pickle.loads(answer)
    except Exception as error:
        call.settle(error=error)
        return
    if isinstance(result, CallResult):
        call.settle(result)
    else:
        result.__cause__ = WorkerTraceback(text)
        call.settle(error=result)


class WorkerTraceback(Exception):
    """Where an error was raised in a worker process: its traceback, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


# In the worker process

_loaded: dict[str, Any] = {}


def load(payload: bytes) -> None:
    """Imports the functions, before any call, so that it counts for no deadline."""
    # pebble's own handler of this signal is Python code, which does not run while C code holds the interpreter.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _loaded["functions"], _ = pickle.loads(payload)
    except BaseException as error:  # said by the first call: here it would only end one process after another
        _loaded["error"] = error


def run(arguments: bytes, timeout_s: float) -> bytes:
    """
    Makes one call.

    Args:
        arguments (`bytes`):
            Pickled: which function, its name, its arguments.
        timeout_s (`float`):
            Deadline.

    Returns:
        `bytes`: Pickled, so that what can't be read again does no harm to the pool: a [`CallResult`] or an exception,
        and the exception's traceback.
    """
    signal.alarm(math.ceil(timeout_s) + ORPHAN_GRACE_S)
    try:
        index, name, own = pickle.loads(arguments)
        if "error" in _loaded:
            raise ConfigurationError(
                f"`stream_reward_processes`: a worker process could not import the reward function '{name}'. Define "
                "it in a module or a script that can be imported, or set `stream_reward_processes=0`."
            ) from _loaded["error"]
        answer = pickle.dumps((score(_loaded["functions"][index], name, own), ""))
    except BaseException as error:
        answer = pickle.dumps((_portable(error), traceback.format_exc()))
    finally:
        signal.alarm(0)
    return answer


def _portable(error: BaseException) -> BaseException:
    """The same exception, or its words where it can't be pickled and read again."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
