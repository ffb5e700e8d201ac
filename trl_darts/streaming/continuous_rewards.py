"""Rewards of a rollout without an end: groups are scored once they are complete, while the trainer trains."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..scheduling import GroupResult
from .plan import Tokens
from .reward_stream import RewardStream, decode_completions


class ContinuousRewards(RewardStream):
    """
    A [`RewardStream`] for `rollout_ahead="continuous"`. One thread decodes complete groups, and reward functions run
    in the threads of [`RewardLoop`]. The trainer's thread finds the rewards when it takes the groups.

    A row's number is its group's ID times the number of rows of a group, plus its place among them.
    """

    keeps_rows = True

    def __init__(self, trainer: Any, timeout_s: float) -> None:
        super().__init__(trainer, timeout_s)
        self._tokenizer = copy.deepcopy(trainer.processing_class)  # a fast one fails if two threads use it at once
        self._decoder = ThreadPoolExecutor(1, "trl_darts-reward-decoder")
        self._lock = threading.RLock()  # for the calls, which are added in the decoder's thread
        self._rollout = 0

    def follow(self, data_of: Callable[[int], tuple[dict[str, Any], Tokens]]) -> Callable[[GroupResult], None]:
        """
        Returns a function to call, in any thread, with each group of the rollout that begins now. `data_of` returns
        the data and the prompt's tokens of a group by its ID, until the group is taken.
        """
        rollout = self._rollout

        def note(group: GroupResult) -> None:
            if rollout == self._rollout:
                self._decoder.submit(self._score, rollout, group, *data_of(group.plan.group_id))

        return note

    def _score(self, rollout: int, group: GroupResult, data: dict[str, Any], prompt_ids: Tokens) -> None:
        """Runs in the decoder's thread. After an error, the rows are scored with their batch, where it is raised."""
        size = len(group.selected)
        first = group.plan.group_id * size
        final = {first + place: list(candidate.tokens) for place, candidate in enumerate(group.rows)}
        decode = partial(decode_completions, self.trainer, tokenizer=self._tokenizer, prompt_ids=[prompt_ids] * size)
        with self._lock:
            if rollout == self._rollout:  # else the rollout was cancelled
                self._submit(final, [data] * size, decode)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside this context, no function runs here that is not async, as an evaluation calls them itself."""
        with self._loop.turn():
            yield

    def clear(self) -> None:
        with self._lock:
            self._rollout += 1
            super().clear()

    def close(self) -> None:
        super().close()
        self._decoder.shutdown(wait=False)

    def _start_missing(self, rows: Sequence[int], arguments: Mapping[str, Any]) -> None:
        self._decoder.submit(int).result()  # waits for the groups that were taken
        super()._start_missing(rows, arguments)

    def _start(self, rows: list[int], arguments: Mapping[str, Any]) -> None:
        with self._lock:
            super()._start(rows, arguments)

    def _forget(self, rows: Set[int] | None = None) -> None:
        with self._lock:
            super()._forget(rows)

    def _renew_loop(self) -> None:
        with self._lock:
            super()._renew_loop()
