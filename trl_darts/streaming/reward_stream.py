"""Sample-level streaming of rewards: reward functions score complete groups while others still decode."""

import copy
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from trl import is_conversational  # type: ignore[attr-defined]  # exported lazily

from ..engines.mailbox import Mailbox
from ..scheduling import GroupResult, RolloutResult
from ..scheduling.ledger import Ledger
from ..trl_compat import get_callable_name, parse_completion, replaced
from .plan import Tokens
from .reward_calls import GRACE_S, RewardCall, RewardFunction, RewardLoop, Rewards


logger = logging.getLogger(__name__)

Decode = Callable[[list[Any], list[Tokens]], list[Any]]  # from prompts and tokens to completions
OF_THE_BATCH = ("trainer_state", "log_extra", "log_metric")  # TRL's arguments without one value per row


@dataclass(frozen=True, slots=True)
class FinalRows:
    """Rows of one process with final completions. `rows` are their numbers, see [`RewardStream`]."""

    rows: list[int]
    completion_ids: list[Tokens]


class RewardStream:
    """
    Scores rows with TRL's reward functions as they become final, and returns the cached rewards when TRL's
    `_calculate_rewards` calls the functions.

    A function gets the same arguments as from TRL, but for some rows at a time: one call per group, and at the end one
    call for all rows that were not submitted or have changed. Its rewards must therefore not depend on other rows.
    `log_extra` values are merged in the order of rows. `log_metric` values are passed on per call, so TRL averages
    them over calls. Reward models are left to TRL.

    A row's number is its position on this process, or a number unique within a rollout buffer. Results are kept until
    the next batch, or with `keeps_rows` until a batch asks for them.

    After a timeout, the rows of a call get no reward. An async function is cancelled; others keep running.
    """

    keeps_rows = False

    def __init__(self, trainer: Any, timeout_s: float, num_processes: int = 1, mailbox: Mailbox | None = None) -> None:
        self.trainer = trainer
        self._timeout_s = timeout_s
        self._num_processes = num_processes
        self._mailbox = mailbox
        self._loop = RewardLoop(timeout_s)
        self._num_groups = 0
        self._open_groups: set[int] = set()  # groups of the rollout whose rows are not selected yet
        self._from_buffer = False  # whether the groups' IDs are those of prompts in a buffer
        self.owners: dict[int, int] = {}  # process that scores an entry, by entry ID
        self._input_of: Callable[[int], dict[str, Any]] = dict[int, dict[str, Any]]().__getitem__
        self._functions: dict[int, tuple[RewardFunction, str]] = {}  # with their names, by index
        self._calls: list[RewardCall] = []
        self._call_of: dict[tuple[int, int], RewardCall] = {}  # latest call, by index of the function and row
        self._completion_ids: dict[int, Tokens] = {}  # submitted completions, by row
        self._served_at: float | None = None
        self._hidden_s = self._exposed_s = 0.0
        self._num_late = 0

    def begin(self, input_of: Callable[[int], dict[str, Any]]) -> None:
        """Starts a batch, and cancels calls of the previous one. `input_of` returns a row's data by its number."""
        if not self.keeps_rows:
            self._forget()
        self._input_of = input_of
        named = enumerate(zip(self.trainer.reward_funcs, self.trainer.reward_func_names, strict=True))
        self._functions = {index: pair for index, pair in named if not isinstance(pair[0], nn.Module)}
        self._hidden_s = self._exposed_s = 0.0
        self._num_late = 0

    # While candidates decode

    def watch(self, group_ids: Collection[int], from_buffer: bool = False) -> Callable[[Ledger], None]:
        """
        Starts a rollout on the main process. Returns a function to call repeatedly while the rollout runs. Groups of a
        buffer are assigned to the processes in turn.
        """
        self._num_groups, self._open_groups, self._from_buffer = len(group_ids), set(group_ids), from_buffer
        return self._step

    def _step(self, ledger: Ledger) -> None:
        # Groups are looked up one by one, because the engine's thread may be adding some.
        for group_id in sorted(self._open_groups):
            group = ledger.groups.get(group_id)
            if group is not None and group.selected is not None:
                self._send(GroupResult(group.plan, group.candidates, group.selected))

    def finish(self, result: RolloutResult) -> None:
        """Submits the remaining groups at the end of the rollout, on the main process."""
        for group in result.groups:
            if group.plan.group_id in self._open_groups:
                self._send(group)

    def _send(self, group: GroupResult) -> None:
        """Sends a group's rows to the processes that score them."""
        group_id, size = group.plan.group_id, len(group.selected)
        self._open_groups.remove(group_id)
        shares: dict[int, FinalRows] = {}
        for index, candidate in enumerate(group.rows):
            process, row = self._place(group_id, index, size)
            share = shares.setdefault(process, FinalRows([], []))
            share.rows.append(row)
            share.completion_ids.append(list(candidate.tokens))
        for process, share in shares.items():
            if process == 0:
                self.submit(share)
            else:
                assert self._mailbox is not None
                self._mailbox.post(process, share)

    def _place(self, group_id: int, index: int, size: int) -> tuple[int, int]:
        """Returns the process that scores a row, and the row's number."""
        number = group_id * size + index
        if self._from_buffer:
            return self.owners.setdefault(group_id, len(self.owners) % self._num_processes), number
        return divmod(number, self._num_groups * size // self._num_processes)

    def submit(self, own: FinalRows) -> None:
        """Decodes rows of this process and starts every function on them, without waiting for results."""
        final = dict(sorted(zip(own.rows, own.completion_ids, strict=True)))
        inputs = [self._input_of(row) for row in final]
        self._submit(final, inputs, partial(decode_completions, self.trainer))

    def _submit(self, final: Mapping[int, Tokens], inputs: Sequence[dict[str, Any]], decode: Decode) -> None:
        rows, completion_ids = list(final), list(final.values())
        prompts = [example["prompt"] for example in inputs]
        columns = [key for key in inputs[0] if key not in ("prompt", "completion", "completion_ids")]
        arguments = {
            "prompts": prompts,
            "completions": decode(prompts, completion_ids),
            "completion_ids": completion_ids,
            **{key: [example[key] for example in inputs] for key in columns},
            "trainer_state": self.trainer.state,
        }
        self._completion_ids.update(final)
        self._start(rows, arguments)

    def _start(self, rows: list[int], arguments: Mapping[str, Any]) -> None:
        for place, (function, name) in self._functions.items():
            call = RewardCall(function, name, rows, {key: _copied(key, value) for key, value in arguments.items()})
            self._calls.append(call)
            self._call_of |= {(place, row): call for row in rows}
            self._loop.submit(call)

    # When TRL requests rewards

    @contextmanager
    def serving(self, rows: Sequence[int] | None = None) -> Iterator[None]:
        """
        Inside this context, TRL's `_calculate_rewards` gets the results of the started calls for `rows` (0, 1, 2, … by
        default). It waits for them, and for one more call with the missing rows. A function's exception is raised
        there. Results can be used once.
        """
        functions = list(self.trainer.reward_funcs)
        for place, (function, _) in self._functions.items():
            functions[place] = self._server(place, get_callable_name(function), rows)
        self._served_at = None
        try:
            with replaced(self.trainer, "reward_funcs", functions):
                yield
        finally:
            self._forget(set(rows) if self.keeps_rows and rows is not None else None)

    def metrics(self) -> dict[str, float]:
        """
        Metrics of the last batch on this process: seconds that functions ran before TRL requested their rewards,
        seconds that TRL waited, and the number of timeouts.
        """
        return {
            "darts/stream/reward_hidden_seconds": self._hidden_s,
            "darts/stream/reward_exposed_seconds": self._exposed_s,
            "darts/stream/reward_timeouts": float(self._num_late),
        }

    def clear(self) -> None:
        """Cancels all calls, at the beginning or the end of a training."""
        self._forget()

    def close(self) -> None:
        """Ends the threads, without waiting for running calls."""
        self.clear()
        self._loop.close()

    def _forget(self, rows: Set[int] | None = None) -> None:
        """Cancels the calls of these rows, or all of them, and drops their results."""

        def is_kept(row: int) -> bool:
            return rows is not None and row not in rows

        gone = [call for call in self._calls if not is_kept(call.rows[0])]  # or all of its rows are kept
        for call in reversed(gone):  # in forward order, a cancellation would start the next call
            call.future.cancel()
        self._calls = [call for call in self._calls if is_kept(call.rows[0])]
        self._call_of = {key: call for key, call in self._call_of.items() if is_kept(key[1])}
        self._completion_ids = {row: ids for row, ids in self._completion_ids.items() if is_kept(row)}
        self.owners = {}

    def _server(self, place: int, name: str, numbers: Sequence[int] | None) -> RewardFunction:
        """Returns the replacement of a function that TRL calls with all rows. The first one waits for all calls."""

        def serve(**arguments: Any) -> Rewards:
            rows = range(len(arguments["completion_ids"])) if numbers is None else numbers
            if self._served_at is None:
                self._served_at = time.monotonic()
                self._start_missing(rows, arguments)
                self._wait(rows)
                self._exposed_s += time.monotonic() - self._served_at
            return self._merge(place, rows, arguments)

        serve.__name__ = name
        return serve

    def _start_missing(self, rows: Sequence[int], arguments: Mapping[str, Any]) -> None:
        """Calls each function with the rows that were not submitted, or have changed since."""
        known = [self._completion_ids.get(row) for row in rows]
        missing = [i for i, ids in enumerate(arguments["completion_ids"]) if known[i] != list(ids)]
        if missing:
            columns = {key: [value[i] for i in missing] for key, value in arguments.items() if key not in OF_THE_BATCH}
            self._start([rows[i] for i in missing], {**columns, "trainer_state": arguments["trainer_state"]})

    def _wait(self, rows: Sequence[int]) -> None:
        """Waits for the calls of these rows. If an async function blocks the event loop, a new loop is started."""
        pending = {self._call_of[place, row].future for place in self._functions for row in rows}
        while pending:
            done, pending = wait(pending, self._timeout_s + GRACE_S, FIRST_COMPLETED)
            if not done:
                self._renew_loop()

    def _renew_loop(self) -> None:
        self._loop.close()
        self._loop = RewardLoop(self._timeout_s)
        for call in self._calls:
            if call.started_at is not None:
                call.expire()
            else:
                self._loop.submit(call)

    def _merge(self, place: int, rows: Sequence[int], arguments: Mapping[str, Any]) -> Rewards:
        """Returns a function's rewards in the order of rows, and passes on its logs. Raises its first exception."""
        calls = [self._call_of[place, row] for row in rows]
        rewards = {call: self._rewards(call) for call in dict.fromkeys(calls)}
        cells = [(call, call.rows.index(row)) for row, call in zip(rows, calls, strict=True)]
        in_time = [call for call, values in rewards.items() if values is not None]
        for key in dict.fromkeys(key for call in in_time for key in call.columns):
            columns = {call: call.columns[key] for call in in_time if key in call.columns}
            arguments["log_extra"](key[0], [columns[call][i] if call in columns else None for call, i in cells])
        for call in in_time:
            for name, value in call.metrics:
                arguments["log_metric"](name, value)
        return [None if (values := rewards[call]) is None else values[i] for call, i in cells]

    def _rewards(self, call: RewardCall) -> Rewards | None:
        outcome = call.future.result()
        if isinstance(outcome, BaseException):
            raise outcome
        if call.started_at is not None and self._served_at is not None:
            self._hidden_s += max(0.0, min(call.ended_at, self._served_at) - call.started_at)
        if outcome is None:
            self._num_late += 1
            logger.warning(
                f"The reward function '{call.name}' did not score {len(call.rows)} rows within "
                f"`stream_reward_timeout_s` ({self._timeout_s:g} s), so they get no reward from it. A hanging call "
                "can't be stopped: make the function async, and run code that can hang in a subprocess."
            )
        return outcome


def _copied(key: str, value: Any) -> Any:
    """Copies an argument row by row: functions run concurrently, and may change what TRL or another one reads."""
    if not isinstance(value, list):
        return value
    return [list(row) if key == "completion_ids" else copy.deepcopy(row) for row in value]


def decode_completions(
    trainer: Any,
    prompts: list[Any],
    completion_ids: list[Tokens],
    tokenizer: Any = None,
    prompt_ids: Sequence[Tokens] | None = None,
) -> list[Any]:
    """
    Decodes completions as TRL does inside `_generate`. Outside the main thread, `tokenizer` is a copy of the
    trainer's, and `prompt_ids` are the prompts' tokens.
    """
    processing_class: Any = trainer.processing_class if tokenizer is None else tokenizer
    if not is_conversational({"prompt": prompts[0]}):
        return list(processing_class.batch_decode(completion_ids, skip_special_tokens=True))
    names = ("response_template", "response_schema")
    if any(getattr(processing_class, name, None) is not None for name in names):
        if prompt_ids is None:
            prompt_ids, _, _ = trainer._tokenize_prompts(copy.deepcopy(prompts))
        return [
            [parse_completion(processing_class, ids, prefix, trainer.tools)]
            for ids, prefix in zip(completion_ids, prompt_ids, strict=True)
        ]
    contents = processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    return [[{"role": "assistant", "content": content}] for content in contents]
