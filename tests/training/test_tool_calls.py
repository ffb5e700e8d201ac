"""Limits of the calls in a conversation: deadlines, tools that end it, environments that are lost or still busy."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from trl_darts.errors import EnvironmentLost
from trl_darts.training.environments import Instance
from trl_darts.training.tool_calls import ToolCalls


class Shell:
    """An environment."""

    def __init__(self):
        self.over, self.num_calls = threading.Event(), 0

    def run(self, command="", hangs=False):
        self.num_calls += 1
        if hangs:
            self.over.wait(60)
        if command == "exit":
            raise EnvironmentLost("the shell is gone")
        return f"ran {command}"

    async def run_later(self, **arguments):
        await asyncio.sleep(0)
        return self.run(**arguments)


def calls(instance=None, room=8, **limits):
    args = SimpleNamespace(**{"tool_timeout_s": None, "conversation_timeout_s": None, "stop_tools": None, **limits})
    return ToolCalls(args, threading.Semaphore(room), instance)


def both(own, shell):
    """Its method as a function and as a coroutine function, both called alike."""
    later = own.wrapped_coroutines({"run": shell.run_later})["run"]
    return own.wrapped({"run": shell.run})["run"], lambda **arguments: asyncio.run(later(**arguments))


@pytest.mark.parametrize("kind", [0, 1])
def test_a_lost_environment_is_noted(kind):
    shell = Shell()
    instance = Instance(shell)
    run = both(calls(instance), shell)[kind]
    assert run(command="ls") == "ran ls"
    assert instance.lost is None
    with pytest.raises(EnvironmentLost):
        run(command="exit")
    assert str(instance.lost) == "the shell is gone"


def test_of_another_than_the_environment_it_is_an_answer():
    shell, instance = Shell(), Instance(Shell())
    with pytest.raises(EnvironmentLost):
        calls(instance).wrapped({"run": shell.run})["run"](command="exit")
    assert instance.lost is None


@pytest.mark.parametrize("kind", [0, 1])
def test_nothing_else_acts_on_an_environment_while_a_late_call_does(kind):
    shell = Shell()
    instance = Instance(shell)
    hang, _ = runs = both(calls(instance, tool_timeout_s=0.1), shell)
    run = runs[kind]
    assert run(command="ls") == "ran ls"
    with pytest.raises(TimeoutError, match=r"no answer within `tool_timeout_s` \(0.1 s\)"):
        hang(hangs=True)
    assert instance.is_busy
    with pytest.raises(TimeoutError, match="still busy"):
        run(command="ls")
    assert shell.num_calls == 2
    shell.over.set()
    while instance.is_busy:
        time.sleep(0.01)
    assert run(command="ls") == "ran ls"


@pytest.mark.parametrize("kind", [0, 1])
def test_a_stop_tool_ends_the_conversation_unless_it_fails(kind):
    shell = Shell()
    own = calls(stop_tools=["run"])
    other, run = own.wrapped({"look": shell.run})["look"], both(own, shell)[kind]
    other(command="ls")
    with pytest.raises(EnvironmentLost):
        run(command="exit")
    assert not own.is_over
    run(command="ls")
    assert own.is_over


@pytest.mark.parametrize("kind", [0, 1])
def test_the_deadline_of_a_conversation_bounds_its_calls(kind):
    shell = Shell()
    own = calls(conversation_timeout_s=0.2, tool_timeout_s=60.0)
    run = both(own, shell)[kind]
    assert run(command="ls") == "ran ls"
    assert not own.is_over
    begin = time.monotonic()
    if kind == 0:
        with pytest.raises(TimeoutError, match=r"`conversation_timeout_s` \(0.2 s\)"):
            run(hangs=True)
    else:
        time.sleep(0.2)
    assert time.monotonic() - begin < 5
    assert own.is_over
    num_calls = shell.num_calls
    with pytest.raises(TimeoutError, match="`conversation_timeout_s`"):
        run(command="ls")
    assert shell.num_calls == num_calls  # not even begun
    shell.over.set()
