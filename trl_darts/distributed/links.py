"""
How a process's share reaches the director: by a call on one process, by messages on many.

```
Share ──reports──▶ DirectLink ──────────────────────────────▶ Director          one process
Share ──reports──▶ MainLink ────────────────────────────────▶ Director          main process of many
Share ──reports──▶ RemoteLink ──mailbox──▶ MainLink's thread ─▶ Director         the others
      ◀──aborts──                 ◀──
```

No collective is involved: a process that decodes long answers keeps none of the others waiting, and a model whose
forward pass is a collective is not disturbed.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..errors import GenerationError
from .director import Director, Report
from .mailbox import Mailbox


# How long a decision may take to reach another process. A decoding step of a large model takes longer.
POLL_S = 0.005
# Processes that decode one batch together must abort in the same step; telling each other costs about a millisecond.
FOLLOW_INTERVAL = 8


class Link(Protocol):
    """A share's way to the director."""

    def exchange(self, reports: Sequence[Report]) -> Sequence[int]:
        """Sends reports; returns the IDs of candidates to abort that are known by now."""
        ...


class DirectLink:
    """The only process: reports are handled at once."""

    def __init__(self, director: Director) -> None:
        self._director = director

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        """Aborts that the reports lead to."""
        return [candidate_id for _, candidate_id in self._director.handle(reports)]


class MainLink:
    """
    The main process of many. A thread handles what the others report, also while this process decodes.

    Args:
        director ([`Director`]):
            The decisions.
        mailbox ([`Mailbox`]):
            To the others.
        rollout (`int`):
            Number of this rollout; messages of others are ignored.
        leaders (`Sequence[int]`):
            The process that speaks for each engine.
    """

    def __init__(self, director: Director, mailbox: Mailbox, rollout: int, leaders: Sequence[int]) -> None:
        self._director = director
        self._mailbox = mailbox
        self._rollout = rollout
        self._leaders = leaders
        self._lock = threading.Lock()
        self._own: list[int] = []  # aborts for this process
        self._error: Exception | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="trl_darts-director", daemon=True)
        self._thread.start()

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        """Aborts for this process, also those that other processes' reports led to."""
        if reports:
            self._handle(reports)
        if self._error is not None:
            raise self._error
        with self._lock:
            aborts, self._own = self._own, []
        return aborts

    def wait(self) -> None:
        """Waits until every process has ended its candidates."""
        while not self._finished.wait(POLL_S):
            pass
        self._thread.join()
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Ends the rollout on all processes."""
        words = str(error) or type(error).__name__
        for process in self._leaders:
            if process != self._mailbox.process_index:
                self._mailbox.post(process, (self._rollout, words))
        self._finished.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()  # the mailbox has one reader at a time

    def _handle(self, reports: Sequence[Report]) -> None:
        with self._lock:
            aborts: dict[int, list[int]] = {}
            for engine, candidate_id in self._director.handle(reports):
                aborts.setdefault(self._leaders[engine], []).append(candidate_id)
            self._own += aborts.pop(self._mailbox.process_index, [])
            done = self._director.done
        for process, candidate_ids in aborts.items():
            self._mailbox.post(process, (self._rollout, candidate_ids))
        if done:
            self._finished.set()

    def _serve(self) -> None:
        try:
            while not self._finished.is_set():
                for reports in _read(self._mailbox, self._rollout):
                    self._handle(reports)
                self._finished.wait(POLL_S)
        except Exception as error:  # the main thread raises it with its next exchange
            self._error = error
            self.fail(error)


class RemoteLink:
    """
    Any other process.

    Args:
        mailbox ([`Mailbox`]):
            To the main process.
        rollout (`int`):
            Number of this rollout; messages of others are ignored.
    """

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
        return [candidate_id for aborts in _read(self._mailbox, self._rollout) for candidate_id in aborts]

    def fail(self, error: BaseException) -> None:
        """Tells the main process that this one can't go on."""
        words = str(error) or type(error).__name__
        words = f"Generation failed on process {self._mailbox.process_index}: {words}"
        self._mailbox.post(0, (self._rollout, words))


class FollowingLink:
    """
    A process of a group that decodes one batch together, step by step (tensor parallelism). One of them speaks for the
    group; all abort in the same step.

    Args:
        inner ([`Link`], *optional*):
            The link of the process that speaks; `None` on the others.
        leader (`int`):
            Its rank.
        group (`torch.distributed.ProcessGroup`):
            The group.
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
        Every eighth call, the aborts that have arrived since; the reports of followers are left out.

        Raises:
            [`GenerationError`]: If the rollout failed on another process. Raised on all of the group in the same step:
                none is left alone in the next one.
        """
        if self._inner is not None and self._error is None:
            try:
                self._aborts += self._inner.exchange(reports)
            except Exception as error:
                self._error = error
        self._steps += 1
        if self._steps % FOLLOW_INTERVAL:
            return []
        box: list[Any] = [self._aborts if self._error is None else str(self._error) or type(self._error).__name__]
        torch.distributed.broadcast_object_list(box, src=self._leader, group=self._group)
        self._aborts = []
        if self._error is not None:
            raise self._error
        if isinstance(box[0], str):
            raise GenerationError(box[0])
        return box[0]


def _read(mailbox: Mailbox, rollout: int) -> list[list[Any]]:
    """A rollout's new messages; an error among them is raised. Late messages of an earlier rollout are of no use."""
    messages = [message for number, message in mailbox.receive() if number == rollout]
    if words := next((message for message in messages if isinstance(message, str)), None):
        raise GenerationError(words)
    return messages
