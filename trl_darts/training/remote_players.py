"""
Conversations of other processes' rows: each process plays its own, and the main one decodes their turns.

```
main process: CandidateRun ──▶ RemotePlayers ──begin, end, decoded──▶ RemoteStage ──▶ Players   the others
                           ◀──               ◀──start, ended, failed──
```

All messages are sent and received in main threads, while the processes wait for the rollout.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from ..engines.mailbox import Mailbox
from ..engines.main_process import portable
from .conversations import Turn
from .players import Key, Played, Players, Stage
from .rows import Tokens


@dataclass(frozen=True)
class Message:
    """A method that another process calls."""

    exchange: int  # number of the rollout
    process: int  # that sends it
    method: str
    arguments: tuple[Any, ...]


class Link:
    """Sends and receives the messages of a rollout."""

    def __init__(self, mailbox: Mailbox, exchange: int) -> None:
        self._mailbox = mailbox
        self._exchange = exchange

    def send(self, process: int, method: str, *arguments: Any) -> None:
        self._mailbox.post(process, Message(self._exchange, self._mailbox.process_index, method, arguments))

    def receive(self) -> Iterator[Message]:
        """Yields new messages, without those that an earlier rollout has left behind."""
        for message in self._mailbox.receive():
            if isinstance(message, Message) and message.exchange == self._exchange:
                yield message


class RemotePlayers:
    """What plays on the other processes, as the main one sees it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._owners: dict[int, int] = {}  # by candidate
        self._turns: dict[int, Future[Turn]] = {}  # that decode, by candidate
        self._decoded: SimpleQueue[tuple[Key, int, Future[Turn]]] = SimpleQueue()

    def __contains__(self, candidate_id: int) -> bool:
        return candidate_id in self._owners

    def begin(self, process: int, candidate_id: int, segment: int, row: int, is_first: bool) -> None:
        """Has a process play a conversation, see [`Players`]."""
        self._owners[candidate_id] = process
        self._link.send(process, "begin", candidate_id, segment, row, is_first)

    def end(self, candidate_id: int) -> None:
        """Ends a conversation, and its turn. It may have ended before."""
        if (turn := self._turns.pop(candidate_id, None)) is not None:
            turn.cancel()
        self._link.send(self._owners[candidate_id], "end", candidate_id)

    def tend(self, stage: Stage) -> None:
        """Passes on what the others told, and the turns that they asked for. Raises the error of a process."""
        for message in self._link.receive():
            if message.method == "start":
                self._start(stage, *message.arguments)
            elif message.method == "broke":
                raise message.arguments[0]
            else:
                getattr(stage, message.method)(*message.arguments)
        while not self._decoded.empty():
            key, turn, decoding = self._decoded.get()
            if not decoding.cancelled():  # otherwise its conversation was ended
                self._send(key, turn, decoding.exception() or decoding.result())

    def _start(self, stage: Stage, key: Key, turn: int, tokens: Tokens, most: int) -> None:
        try:
            decoding = stage.start(key, turn, tokens, most)
        except Exception as error:  # of the conversation, which may have it dropped
            self._send(key, turn, error)
            return
        self._turns[key[0]] = decoding
        decoding.add_done_callback(lambda own: self._decoded.put((key, turn, own)))

    def _send(self, key: Key, turn: int, result: Turn | BaseException) -> None:
        result = portable(result) if isinstance(result, BaseException) else result
        self._link.send(self._owners[key[0]], "decoded", key, turn, result)


class RemoteStage:
    """The main process's rollout, as another one sees it. See [`Stage`]."""

    def __init__(self, link: Link, players: Players[Any]) -> None:
        self._link = link
        self._methods: dict[str, Callable[..., None]]
        self._methods = {"begin": players.begin, "end": players.end, "decoded": self._decoded}
        self._turns: dict[tuple[Key, int], Future[Turn]] = {}
        self._told: SimpleQueue[tuple[Any, ...]] = SimpleQueue()  # method and arguments

    def tend(self) -> None:
        """Does what the main process asks for, and tells it what happened. Called repeatedly during the rollout."""
        try:
            for message in self._link.receive():
                self._methods[message.method](*message.arguments)
            while not self._told.empty():
                self._link.send(0, *self._told.get())
        except Exception as error:  # otherwise the main process would wait for this one
            self._link.send(0, "broke", portable(error))
            raise

    def start(self, key: Key, turn: int, tokens: Tokens, most: int) -> Future[Turn]:
        decoding = self._turns[key, turn] = Future()
        self._told.put(("start", key, turn, tokens, most))
        return decoding

    def ended(self, key: Key, played: Played, is_cut: bool) -> None:
        self._told.put(("ended", key, played, is_cut))

    def failed(self, key: Key, error: BaseException) -> None:
        self._told.put(("failed", key, portable(error)))

    def _decoded(self, key: Key, turn: int, result: Turn | BaseException) -> None:
        decoding = self._turns.pop((key, turn))
        if not decoding.set_running_or_notify_cancel():
            return  # its conversation was ended
        if isinstance(result, BaseException):
            decoding.set_exception(result)
        else:
            decoding.set_result(result)
