"""Sample-level streaming of rewards: reward functions score the groups that are complete while others still decode."""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational, prepare_multimodal_messages
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import get_callable_name, is_async_callable

from ..engines.hf_generate import replaced
from .reward_calls import RewardCall, RewardFunction, ServingClock, pass_on
from .reward_processes import RewardProcesses
from .reward_runners import RewardLoop, RewardRunner, RewardThread


logger = logging.getLogger(__name__)

OF_THE_BATCH = ("trainer_state", "log_extra", "log_metric")  # TRL's arguments that are not lists of rows


class RewardStream:
    """
    Runs reward functions on rows as they become final, and serves TRL's `_calculate_rewards` from the results.

    A function is called as TRL calls it, but with some rows at a time: one call for each [`submit`], and at the end
    one for all rows that were never submitted or have changed since. So its rewards must not depend on which other
    rows it sees. What it logs with `log_extra` is put together in the order of rows; `log_metric` is passed on call by
    call, so TRL's mean of it is one over calls.

    Functions run in threads, each in its own and one call after another, since they are often not thread-safe;
    coroutines run in an event loop, all at once. Neither TRL nor `signal.alarm` is there in a thread: a function that
    needs the main thread needs `stream_reward_processes`. Reward models are left to TRL.

    A call that takes longer than `timeout_s` gives its rows no reward. A coroutine is cancelled. In a thread an
    exception is raised, which is seen when the function next runs Python code; one that sleeps or waits is left behind
    in its thread, and goes on with the next call in another. Code in C that holds the interpreter's lock, such as a
    regular expression that backtracks for ever, can't be stopped that way and freezes the whole process, the deadline
    with it: `stream_reward_processes` runs functions in processes, which can be killed.

    Args:
        trainer ([`DARTSGRPOTrainer`]):
            Its reward functions, their names, its state and its tokenizer are read with each call.
        timeout_s (`float`):
            Deadline of a call (`stream_reward_timeout_s`).
        num_processes (`int`, *optional*, defaults to `0`):
            Worker processes for functions that are no coroutines (`stream_reward_processes`). `0` for threads. With
            several, calls of one function can run beside each other, each process with its own copy of it.

    Raises:
        [`ConfigurationError`]: If a function can't be run in another process.
    """

    def __init__(self, trainer: Any, timeout_s: float, num_processes: int = 0) -> None:
        self.trainer = trainer
        self.timeout_s = timeout_s
        self._inputs: Sequence[dict[str, Any]] = []
        self._prompts: list[Any] = []
        self._streamed: dict[int, dict[int, RewardCall]] = {}  # by place of the function, by row: the last call
        self._completion_ids: dict[int, list[int]] = {}  # by row, as submitted
        self._clock = ServingClock()
        self._num_timeouts = 0
        self._loop = RewardLoop(timeout_s)
        self._threads: dict[int, tuple[RewardFunction, RewardThread]] = {}  # by id of the function
        self._processes: RewardProcesses | None = None
        if num_processes > 0:
            named = [(f, name) for f, name in self._named_functions() if not is_async_callable(f)]
            if named:
                functions, names = zip(*named, strict=True)
                self._processes = RewardProcesses(functions, names, type(trainer.state), timeout_s, num_processes)

    def begin(self, inputs: Sequence[dict[str, Any]]) -> None:
        """
        Begins a batch. What is left of the one before is cancelled and forgotten.

        Args:
            inputs (`Sequence[dict[str, Any]]` of shape `(B,)`):
                Rows of this process, as TRL gets them in `_generate_and_score_completions`.
        """
        self._forget()
        self._inputs = inputs
        self._prompts = _prompts(inputs) if inputs else []
        self._clock = ServingClock()
        self._num_timeouts = 0

    def submit(self, rows: Sequence[int], completion_ids: Sequence[list[int]]) -> None:
        """
        Starts every function on rows whose completions are final. Decodes them, and does not wait for the functions.

        Args:
            rows (`Sequence[int]`):
                Rows of this process, in any order.
            completion_ids (`Sequence[list[int]]`):
                Their completions.
        """
        if not rows:
            return
        final = dict(sorted(zip(rows, completion_ids, strict=True)))
        self._completion_ids.update(final)
        rows = list(final)
        prompts = [self._prompts[row] for row in rows]
        completions = self._decode(prompts, list(final.values()))
        columns = [key for key in self._inputs[0] if key not in ("prompt", "completion", "completion_ids")]
        for place, (function, name) in enumerate(zip(self.trainer.reward_funcs, self._names, strict=True)):
            if isinstance(function, nn.Module):
                continue
            arguments = {
                "prompts": list(prompts),  # functions run beside each other, and may change their lists
                "completions": list(completions),
                "completion_ids": list(final.values()),
                **{key: [self._inputs[row][key] for row in rows] for key in columns},
                "trainer_state": self.trainer.state,
            }
            call = RewardCall(function, name, rows, arguments)
            self._streamed.setdefault(place, {}).update(dict.fromkeys(rows, call))
            self._start(call)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """
        Serves TRL's `_calculate_rewards`, which is to be called inside, from the calls that were started. Waits for
        them, and makes those that are still missing. An error of a function is raised there. Results are served once.
        """
        self._clock.begin()
        functions = [self._server(place, function) for place, function in enumerate(self.trainer.reward_funcs)]
        try:
            with replaced(self.trainer, "reward_funcs", functions):
                yield
        finally:
            self._forget()

    def metrics(self) -> dict[str, float]:
        """
        What streaming did for the last batch.

        Returns:
            `dict[str, float]`: Seconds that functions ran before serving, seconds that serving waited or computed, and
            calls that timed out, all of this process.
        """
        return {
            "darts/stream/reward_hidden_seconds": self._clock.hidden_s,
            "darts/stream/reward_exposed_seconds": self._clock.exposed_s,
            "darts/stream/reward_timeouts": float(self._num_timeouts),
        }

    def close(self) -> None:
        """Ends threads, processes and the event loop. Calls that still run are stopped."""
        self._forget()
        for _, thread in self._threads.values():
            thread.close()
        self._threads.clear()
        self._loop.close()
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    @property
    def _names(self) -> list[str]:
        names: list[str] = self.trainer.reward_func_names
        return names

    def _named_functions(self) -> list[tuple[RewardFunction, str]]:
        named = zip(self.trainer.reward_funcs, self._names, strict=True)
        return [(function, name) for function, name in named if not isinstance(function, nn.Module)]

    def _forget(self) -> None:
        for call in {call for calls in self._streamed.values() for call in calls.values()}:
            call.future.cancel()
        self._streamed, self._completion_ids = {}, {}

    def _start(self, call: RewardCall) -> None:
        if is_async_callable(call.function):
            self._loop.submit(call)
        else:
            self._runner(call.function, call.name).submit(call)

    def _runner(self, function: RewardFunction, name: str) -> RewardRunner:
        if self._processes is not None:
            return self._processes
        if id(function) not in self._threads:
            self._threads[id(function)] = function, RewardThread(name, self.timeout_s)
        return self._threads[id(function)][1]

    def _decode(self, prompts: list[Any], completion_ids: list[list[int]]) -> list[Any]:
        """As TRL does in `_generate`, which has no function for it."""
        processing_class: Any = self.trainer.processing_class
        if not is_conversational({"prompt": prompts[0]}):
            return list(processing_class.batch_decode(completion_ids, skip_special_tokens=True))
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        names = ("response_template", "response_schema")
        if hasattr(tokenizer, "parse_response") and any(getattr(tokenizer, name, None) is not None for name in names):
            prompt_ids, _, _ = GRPOTrainer._tokenize_prompts(self.trainer, copy.deepcopy(prompts))
            return [
                [parse_response(tokenizer, ids, prefix=prefix, tools=self.trainer.tools)]
                for ids, prefix in zip(completion_ids, prompt_ids, strict=True)
            ]
        contents = processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": content}] for content in contents]

    def _server(self, place: int, function: RewardFunction) -> RewardFunction:
        """What TRL calls instead of a function, with all rows."""
        if isinstance(function, nn.Module):
            return function

        def serve(**arguments: Any) -> list[float | None]:
            with self._clock.waiting():
                calls = self._calls(place, function, arguments)
                runner = self._runner(function, self._names[place])
                for call in dict.fromkeys(calls):
                    runner.wait(call)
                return self._merge(calls, arguments)

        async def serve_async(**arguments: Any) -> list[float | None]:
            with self._clock.waiting():
                calls = self._calls(place, function, arguments)
                await self._loop.ended(list(dict.fromkeys(calls)))
                return self._merge(calls, arguments)

        server = serve_async if is_async_callable(function) else serve
        server.__name__ = get_callable_name(function)
        return server

    def _calls(self, place: int, function: RewardFunction, arguments: Mapping[str, Any]) -> list[RewardCall]:
        """The call that each row's reward comes from. Starts one for the rows that have none."""
        completion_ids = arguments["completion_ids"]
        streamed = self._streamed.get(place, {})
        valid = {row: call for row, call in streamed.items() if self._is_final(row, completion_ids)}
        for call in set(streamed.values()) - set(valid.values()):
            call.future.cancel()
        missing = [row for row in range(len(completion_ids)) if row not in valid]
        if missing:
            own = {
                key: value if key in OF_THE_BATCH else [value[row] for row in missing]
                for key, value in arguments.items()
                if key not in ("log_extra", "log_metric")
            }
            call = RewardCall(function, self._names[place], missing, own)
            valid.update(dict.fromkeys(missing, call))
            self._start(call)
        self._streamed[place] = valid  # what is left of them when serving fails is cancelled
        return [valid[row] for row in range(len(completion_ids))]

    def _is_final(self, row: int, completion_ids: Sequence[list[int]]) -> bool:
        return row < len(completion_ids) and list(completion_ids[row]) == list(self._completion_ids[row])

    def _merge(self, calls: Sequence[RewardCall], arguments: Mapping[str, Any]) -> list[float | None]:
        """Rewards in the order of rows; passes on what was logged. Raises the first error."""
        results = {call: call.future.result() for call in dict.fromkeys(calls)}
        for call, result in results.items():
            self._clock.count(result)
            if result.timed_out:
                self._num_timeouts += 1
                logger.warning(
                    f"The reward function '{call.name}' did not score {len(call.rows)} rows within {self.timeout_s:g} "
                    "seconds (`stream_reward_timeout_s`). They have no reward of it."
                )
        cells = [(results[call], call.rows.index(row)) for row, call in enumerate(calls)]
        pass_on(list(results.values()), cells, arguments["log_extra"], arguments["log_metric"])
        return [result.rewards[index] for result, index in cells]


def _prompts(inputs: Sequence[dict[str, Any]]) -> list[Any]:
    """What TRL passes as prompts: with images, it has put them into the messages."""
    prompts = [example["prompt"] for example in inputs]
    if "images" in inputs[0]:
        images = [example.get("images") for example in inputs]
    elif "image" in inputs[0]:
        images = [None if example.get("image") is None else [example["image"]] for example in inputs]
    else:
        return prompts
    if all(of_row == [] for of_row in images):
        return prompts
    return [prepare_multimodal_messages(prompt, images=of_row) for prompt, of_row in zip(prompts, images, strict=True)]
