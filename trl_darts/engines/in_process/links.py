"""How a share's reports reach the [`Director`] from the other processes, and from those that decode in step."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import GenerationError
from ..mailbox import Mailbox
from .director import message_of, read_messages
from .share import Link, Report


# How long a decision may take to reach another process. A decoding step of a large model takes longer.
POLL_S = 0.005
# Processes that decode one batch together must abort in the same step; telling each other costs about a millisecond.
FOLLOW_INTERVAL = 8


class RemoteLink:
    """A process other than the main one: reports and aborts are messages."""

    def __init__(self, mailbox: Mailbox, rollout: int) -> None:
        self._mailbox = mailbox
        self._rollout = rollout
        self._last_poll = 0.0

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        """Aborts that have arrived. Asks for them at most every 5 ms."""
        if reports:
            self._mailbox.post(0, (self._rollout, list(reports)))
        now = time.monotonic()
        if now - self._last_poll < POLL_S:
            return []
        self._last_poll = now
        return [candidate_id for aborts in read_messages(self._mailbox, self._rollout) for candidate_id in aborts]

    def fail(self, error: BaseException) -> None:
        """Tells the main process that this one can't go on."""
        message = f"Generation failed on process {self._mailbox.process_index}: {message_of(error)}"
        self._mailbox.post(0, (self._rollout, message))


class FollowingLink:
    """
    A process of a group that decodes one batch together, step by step (tensor parallelism). One of them speaks for the
    group; all abort in the same step.
    """

    def __init__(self, inner: Link | None, leader: int, group: Any) -> None:
        self._inner = inner
        self._leader = leader
        self._group = group
        self._steps = 0
        self._aborts: list[int] = []
        self._error: Exception | None = None

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        """
        Every eighth call, the aborts that have arrived since; the reports of followers are left out. If the rollout
        failed on another process, all of the group raise a [`GenerationError`] in the same step: none is left alone in
        the next one.
        """
        if self._inner is not None and self._error is None:
            try:
                self._aborts += self._inner.exchange(reports)
            except Exception as error:
                self._error = error
        self._steps += 1
        if self._steps % FOLLOW_INTERVAL:
            return []
        box: list[Any] = [self._aborts if self._error is None else message_of(self._error)]
        torch.distributed.broadcast_object_list(box, src=self._leader, group=self._group)
        self._aborts = []
        if self._error is not None:
            raise self._error
        if isinstance(box[0], str):
            raise GenerationError(box[0])
        return box[0]
