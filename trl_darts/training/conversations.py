"""
Conversations with tools, each by itself: while one waits for its tool, the others decode.

TRL's loop takes all rows through each turn together: it calls their tools one row after the other, and decodes once
all have answered. Here the same loop runs once for each row, in a thread of its own, on a copy of the trainer that has
this row alone. Nothing else changes: masks, limits, errors of tools and their order are TRL's.
"""

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from .environments import Instance, bound_to, retire
from .rows import Tokens
from .tool_calls import ToolCalls


POLL_S = 0.1

Turn = tuple[Tokens, list[float] | None]  # its tokens and their log-probs
Outcome = tuple[Any, ...]  # what TRL's `_tool_call_loop` returns


class Turns(Protocol):
    """What decodes turns, in any thread."""

    def decode(self, conversation: int, turn: int, prompt: Tokens) -> Turn:
        """Decodes a turn of a conversation whose tokens so far are `prompt`."""

    def start(self, conversation: int, turn: int, prompt: Tokens, most: int) -> Future[Turn]:
        """Starts to decode at most so many tokens of a turn."""

    def tend(self) -> None:
        """Called in the main thread while turns decode."""


class Over(BaseException):
    """Ends a conversation that nobody waits for. Not an `Exception`, which would be a tool's answer."""


class Serial:
    """
    Has an object's methods called by one thread at a time, as a tokenizer needs it. Raises [`Over`] in conversations
    that are over: the main thread, which uses the tokenizer without the lock, no longer waits for them.
    """

    def __init__(self, wrapped: Any, lock: Any, over: threading.Event) -> None:
        self._wrapped = wrapped
        self._lock = lock
        self._over = over

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._wrapped, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if self._over.is_set():
                    raise Over
                return value(*args, **kwargs)

        return call


class Views:
    """
    Copies of a trainer that have one row each, for TRL's loop.

    Args:
        trainer (`DARTSGRPOTrainer`):
            The trainer. Its tools are called in several threads, at most `max_concurrent_tools` at once.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._room = threading.Semaphore(trainer.args.max_concurrent_tools)
        self.lock = threading.RLock()  # of the tokenizer

    def of(self, row: int, decode: Callable[[Tokens], Turn], over: threading.Event, instance: Instance | None) -> Any:
        """
        Returns a copy whose only row is this one, with the turns that `decode` returns until it is `over`, and with
        this instance of the row's environment.
        """
        trainer = self._trainer
        view = copy.copy(trainer)
        tools, awaited = trainer._sync_tool_dicts[row], trainer._async_tool_dicts[row]
        if instance is not None:
            owner = trainer.environments[row]
            tools, awaited = (bound_to(own, owner, instance.environment) for own in (tools, awaited))
        calls = ToolCalls(trainer.args, self._room, instance)
        view._sync_tool_dicts, view._async_tool_dicts = [calls.wrapped(tools)], [calls.wrapped_coroutines(awaited)]
        if trainer.environment_factories is not None:
            view._batch_environments = [trainer._batch_environments[row]]
        view.processing_class = view._tokenizer = Serial(trainer.processing_class, self.lock, over)

        def turn(prompt_ids: list[Tokens], *args: Any, **kwargs: Any) -> tuple[list[Tokens], list[Any] | None]:
            if over.is_set():
                raise Over
            tokens, logprobs = decode(prompt_ids[0])
            return [tokens], None if logprobs is None else [logprobs]

        suffix_of = partial(type(view)._get_tool_suffix_ids, weakref.proxy(view))  # no cycle

        def suffix(messages: list[dict[str, Any]]) -> Any:
            """Has TRL's loop end as where the answers of tools do not fit: after the model's last turn."""
            if calls.is_over:
                return [0] * (trainer.max_completion_length + 1)
            return suffix_of(messages)

        view._generate_single_turn, view._get_tool_suffix_ids = turn, suffix
        return view


class OwnTurns:
    """
    The turns of one conversation, called in its thread. `decode` takes the number of a turn, the tokens so far, and
    how many there may still be of `most` after the prompt.
    """

    def __init__(self, decode: Callable[[int, Tokens, int], Turn], num_prompt_tokens: int, most: int) -> None:
        self._decode = decode
        self._end = num_prompt_tokens + most
        self._last_end = time.perf_counter()
        self.count = 0
        self.acting_s = 0.0  # seconds between turns

    def __call__(self, tokens: Tokens) -> Turn:
        """Returns the turn after these tokens. It is empty at the limit, beyond which TRL cuts."""
        self.acting_s += time.perf_counter() - self._last_end
        turn: Turn = [], []
        if len(tokens) < self._end:
            turn = self._decode(self.count, tokens, self._end - len(tokens))
            self.count += 1
        self._last_end = time.perf_counter()
        return turn


class Conversations:
    """
    Runs TRL's tool loop for each row of this process by itself, after the first turn of all.

    Args:
        trainer (`DARTSGRPOTrainer`):
            The trainer, see [`Views`].
        loop (`Callable`):
            TRL's `_tool_call_loop`, which takes the trainer first.
        turns (`Turns`):
            What decodes.
    """

    def __init__(self, trainer: Any, loop: Callable[..., Outcome], turns: Turns) -> None:
        self._trainer = trainer
        self._loop = loop
        self._turns = turns
        self._views = Views(trainer)
        self._over = threading.Event()
        self._instances: dict[int, Instance] = {}  # by row
        self.turns: list[OwnTurns] = []  # of each row that calls tools

    def run(
        self,
        prompts: Sequence[Any],
        prompt_ids: Sequence[Tokens],
        completion_ids: Sequence[Tokens],
        completions: Sequence[Any],
        logprobs: Sequence[list[float]] | None,
    ) -> Outcome:
        """Returns what TRL's loop returns for all rows. Arguments are TRL's, of which it changes the same."""
        rows: list[Any] = [
            (
                [prompts[i]],
                [prompt_ids[i]],
                [completion_ids[i]],
                [completions[i]],
                logprobs and [logprobs[i]],
                None,
                {},
            )
            for i in range(len(prompts))
        ]
        calling = [i for i in range(len(prompts)) if completions[i][0].get("tool_calls")]
        outcomes = {i: self._loop(self._trainer, *rows[i]) for i in range(len(prompts)) if i not in set(calling)}
        if calling:
            with self._threads(len(calling)) as pool:
                own = {i: pool.submit(self._loop, self._alone(i, len(prompt_ids[i])), *rows[i]) for i in calling}
                self._wait(list(own.values()))
            outcomes |= {i: future.result() for i, future in own.items()}
            self._retire()
        return joined([outcomes[i] for i in range(len(prompts))], logprobs is not None)

    @contextmanager
    def _threads(self, count: int) -> Iterator[ThreadPoolExecutor]:
        """Threads, of which those that go on after an error end with their next turn."""
        with ThreadPoolExecutor(count, thread_name_prefix="trl_darts-conversation") as pool:
            try:
                yield pool
            finally:
                self._over.set()

    def _wait(self, futures: list[Future[Outcome]]) -> None:
        pending: Any = futures
        while pending:
            done, pending = wait(pending, POLL_S, FIRST_EXCEPTION)
            for future in done:
                future.result()  # raises
            self._turns.tend()

    def _alone(self, row: int, num_prompt_tokens: int) -> Any:
        """Returns a copy of the trainer whose only row is this one."""

        def decode(turn: int, tokens: Tokens, most: int) -> Turn:
            return self._turns.decode(row, turn, tokens)

        turns = OwnTurns(decode, num_prompt_tokens, self._trainer.max_completion_length)
        self.turns.append(turns)
        if self._trainer.environments:
            self._instances[row] = Instance(self._trainer.environments[row])
        return self._views.of(row, turns, self._over, self._instances.get(row))

    def _retire(self) -> None:
        """Has later batches not use what is lost, or what calls still act on."""
        for row, instance in self._instances.items():
            if instance.is_spent:
                retire(self._trainer, row, instance.environment)


def joined(outcomes: Sequence[Outcome], has_logprobs: bool) -> Outcome:
    """Joins the outcomes of single rows."""
    masks, completions, ids, logprobs, calls, failures, images = zip(*outcomes, strict=True)
    return (
        [own[0] for own in masks],
        [own[0] for own in completions],
        [own[0] for own in ids],
        [own[0] for own in logprobs] if has_logprobs else None,
        sum(calls),
        sum(failures),
        [own[0] for own in images],
    )
