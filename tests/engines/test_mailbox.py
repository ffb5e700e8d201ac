"""
Messages, announcements and functions of the main process over a real store, between threads with separate connections.
`tests/launches/test_two_processes.py` has two processes.
"""

import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.threads import TIMEOUT_S, at_once, in_threads, open_mailboxes, store
from trl_darts.engines import mailbox, main_process
from trl_darts.engines.mailbox import Mailbox
from trl_darts.engines.main_process import MainProcess
from trl_darts.errors import GenerationError


def receive_all(inbox: Mailbox, count: int) -> list[Any]:
    """Receives until there are `count` messages."""
    messages: list[Any] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(messages) < count and time.monotonic() < deadline:
        messages += inbox.receive()
    return messages


# Messages


def test_messages_arrive_once_in_order_at_their_receiver():
    first, second, third = open_mailboxes(3)
    first.post(1, "a")
    first.post(2, {"b": [1, 2]})
    third.post(1, ("c", None))
    first.post(1, "d")
    assert second.receive() == ["a", ("c", None), "d"]
    assert second.receive() == []
    assert third.receive() == [{"b": [1, 2]}]
    first.post(1, "e")
    assert second.receive() == ["e"]
    assert first.receive() == []


def test_nothing_is_lost_or_doubled_under_concurrent_posting():
    num_messages = 150
    inbox, *boxes = open_mailboxes(4)

    def post(box: Mailbox, thread: int) -> None:
        for number in range(num_messages):
            box.post(0, (box.process_index, thread, number))

    senders = [(box, thread) for box in boxes for thread in range(2)]  # two threads of a process share a mailbox
    jobs = [lambda sender=sender: post(*sender) for sender in senders]
    *_, messages = at_once(*jobs, lambda: receive_all(inbox, num_messages * len(senders)))
    assert inbox.receive() == []
    assert len(messages) == len(set(messages)) == num_messages * len(senders)
    for box, thread in senders:
        numbers = [number for process, sender, number in messages if (process, sender) == (box.process_index, thread)]
        assert numbers == list(range(num_messages))


class Paused:
    """A store whose `set` waits: the sender has its number, but the message is not stored yet."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def set(self, key: str, value: bytes) -> None:
        self.reached.set()
        assert self.go_on.wait(TIMEOUT_S)
        self._inner.set(key, value)


def test_a_message_on_its_way_is_waited_for():
    inbox, slow, fast = open_mailboxes(3)
    slow._store = paused = Paused(slow._store)

    def overtake() -> None:
        assert paused.reached.wait(TIMEOUT_S)
        fast.post(0, "second")
        threading.Timer(0.05, paused.go_on.set).start()

    def read() -> list[Any]:
        assert paused.reached.wait(TIMEOUT_S)
        return receive_all(inbox, 2)

    assert at_once(lambda: slow.post(0, "first"), overtake, read)[2] == ["first", "second"]


# Announcements


def test_an_announcement_that_comes_late_is_waited_for(monkeypatch):
    monkeypatch.setattr(mailbox, "WAIT_S", 0.05)
    main, other, another = open_mailboxes(3)
    timer = threading.Timer(0.3, main.announce, [b"at last"])
    timer.start()
    assert at_once(other.await_announcement, another.await_announcement) == [b"at last"] * 2
    timer.join()


def test_waiting_ends_when_the_store_is_gone():
    class Gone:
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            raise torch.distributed.DistStoreError("Connection reset by peer")

    with pytest.raises(torch.distributed.DistStoreError, match="reset by peer"):
        Mailbox(Gone(), 1, 2, b"key").await_announcement()


# Strangers


class Opened(Exception):
    """Raised by code in a pickle when it is unpickled."""


def spring() -> None:
    raise Opened


class Trap:
    def __reduce__(self) -> Any:
        return spring, ()


def forge(box: Mailbox, name: str, message: bytes) -> None:
    """Writes a message to the store without the key, as a stranger could."""
    Mailbox(box._store, 0, 2, key=b"a stranger's")._set(name, message)


@pytest.mark.parametrize("message", [pickle.dumps(Trap()), b"", b"DONE"])
@pytest.mark.parametrize("signed", [True, False])
def test_what_a_stranger_writes_is_never_unpickled(message, signed):
    main, other = open_mailboxes(2)
    write = forge if signed else lambda box, name, message: box._store.set(name, message)
    write(main, f"inbox/1/{main._store.add('inbox/1', 1)}", message)
    with pytest.raises(GenerationError, match=r"'inbox/1/1' has no valid signature"):
        other.receive()
    write(main, "announcement/1", message)
    with pytest.raises(GenerationError, match=r"'announcement/1' has no valid signature"):
        other.await_announcement()


def test_a_copied_message_is_a_strangers():
    main, other = open_mailboxes(2)
    main.post(1, "a")
    main._store.set(f"inbox/1/{main._store.add('inbox/1', 1)}", main._store.get("inbox/1/1"))
    with pytest.raises(GenerationError, match=r"'inbox/1/2'"):
        other.receive()


@given(message=st.binary(max_size=80), position=st.integers(0), flip=st.integers(1, 255))
def test_a_changed_message_is_a_strangers(message, position, flip):
    stored: dict[str, bytes] = {}
    box = Mailbox(SimpleNamespace(set=stored.__setitem__, get=stored.__getitem__), 0, 2, b"key")
    box._set("name", message)
    assert box._get("name") == message
    changed = bytearray(stored["name"])
    changed[position % len(changed)] ^= flip
    stored["name"] = bytes(changed)
    with pytest.raises(GenerationError, match="no valid signature"):
        box._get("name")


# The store


def test_keys_are_cleaned_up():
    main, other = open_mailboxes(2)

    def rounds(count: int) -> int:
        for number in range(count):
            for _ in range(3):
                main.post(1, number)
                other.post(0, number)
            assert main.receive() == other.receive() == [number] * 3
            main.announce(b"done")
            assert other.await_announcement() == b"done"
        return store().num_keys()

    assert rounds(3) == rounds(100)


# The main process


class Processes:
    """The main process as several processes see it, with a broadcast that waits like a collective."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.rank = threading.local()
        self.barrier = threading.Barrier(count, timeout=TIMEOUT_S)
        self.num_broadcasts = 0
        self.payload = b""
        monkeypatch.setattr(main_process, "broadcast_object_list", self.broadcast)
        self.mains = []
        for process, box in enumerate(open_mailboxes(count)):
            accelerator = SimpleNamespace(process_index=process, num_processes=count, is_main_process=process == 0)
            self.mains.append(MainProcess(accelerator))
            self.mains[-1]._mailbox = box

    def broadcast(self, box: list[Any], from_process: int) -> None:
        if self.rank.value == from_process:
            self.payload = pickle.dumps(box)
            self.num_broadcasts += 1
        self.barrier.wait()
        box[:] = pickle.loads(self.payload)
        self.barrier.wait()

    def run(self, act: Callable[[MainProcess], Any]) -> tuple[list[Any], dict[int, BaseException]]:
        def process(rank: int) -> Any:
            self.rank.value = rank
            return act(self.mains[rank])

        return in_threads(*(lambda rank=rank: process(rank) for rank in range(len(self.mains))))


def test_one_process_has_the_value_at_once():
    main = MainProcess(SimpleNamespace(num_processes=1))
    assert main.run(lambda: "value") == main.broadcast(lambda: "value") == "value"
    with pytest.raises(KeyError, match="words"):
        main.broadcast(lambda: {}["words"])


def test_a_late_process_finds_every_announcement(monkeypatch):
    """
    The main process does not wait for the others, not even in NCCL's broadcasts, so it may be several steps ahead.
    """
    processes = Processes(monkeypatch, 3)

    def act(main: MainProcess) -> list[Any]:
        if main.index == 2:
            time.sleep(0.3)
        return [main.run(lambda number=number: number) for number in range(4)]

    assert processes.run(act) == ([list(range(4)), [None] * 4, [None] * 4], {})
    assert processes.num_broadcasts == 0  # the value stays where it is


class Locked(Exception):
    """An error that can't be pickled."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [(GenerationError("boom"), GenerationError, "boom"), (Locked("boom"), GenerationError, "Locked: boom")],
)
def test_an_error_of_the_main_process_is_raised_on_all(monkeypatch, error, expected, words):
    """The next call works as before."""
    processes = Processes(monkeypatch, 3)

    def fail() -> None:
        raise error

    def act(main: MainProcess) -> Any:
        try:
            main.run(fail)
        except Exception as problem:
            return problem, main.broadcast(lambda: "next")

    start = time.monotonic()
    results, errors = processes.run(act)
    assert not errors
    assert results[0][0] is error
    assert [(type(problem), str(problem)) for problem, _ in results[1:]] == [(expected, words)] * 2
    assert [value for _, value in results] == ["next"] * 3
    assert time.monotonic() - start < main_process.RECEIVED_TIMEOUT_S  # as soon as all have heard of it
    assert processes.mains[0].mailbox.receive() == []


def test_the_main_process_waits_until_the_others_have_heard_of_its_error(monkeypatch):
    """The store ends with the main process. A late process still finds the error in it."""
    processes = Processes(monkeypatch, 2)
    gone = threading.Event()

    def act(main: MainProcess) -> None:
        if processes.rank.value == 0:
            try:
                main.run(lambda: {}["words"])
            finally:
                gone.set()
        else:
            time.sleep(0.2)
            assert not gone.is_set()
            main.run(lambda: None)

    errors = processes.run(act)[1]
    assert {rank: repr(error) for rank, error in errors.items()} == dict.fromkeys(range(2), "KeyError('words')")


def test_the_main_process_does_not_wait_forever_for_one_that_is_gone(monkeypatch):
    monkeypatch.setattr(main_process, "RECEIVED_TIMEOUT_S", 0.2)
    processes = Processes(monkeypatch, 2)
    processes.mains.pop()
    start = time.monotonic()
    errors = processes.run(lambda main: main.run(lambda: {}["words"]))[1]
    assert isinstance(errors[0], KeyError)
    assert 0.2 <= time.monotonic() - start < 5
