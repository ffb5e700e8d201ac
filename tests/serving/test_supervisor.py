"""
One or several servers behind their guards. The servers are fake, the processes are real. No process of a server
remains, whoever ends it and however.
"""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.waits import wait_for
from trl_darts.serving import supervisor
from trl_darts.serving.supervisor import ProcessState, Server, ServerFailedError, Supervisor, counted_signals

from .builders import assert_ended, fake_command, fake_server, family, make_exit


STUBBORN = ("--ignore-sigterm", "--engine", "own")
OWNER = """
import sys, time
from pathlib import Path
from trl_darts.serving.command import ServerCommand
from trl_darts.serving.supervisor import Server
Server(ServerCommand("", "", tuple(sys.argv[2:])), Path(sys.argv[1]), grace_s=0.2).start(0)
time.sleep(600)
"""


def members_of(*servers: Server) -> list:
    return [member for server in servers for member in family(server.process.pid)]


@pytest.mark.parametrize(
    ("end", "options", "grace_s", "code"),
    [
        (lambda server, *_: server.ask_to_stop(), (), 600, 128 + signal.SIGTERM),
        (lambda server, *_: server.ask_to_stop(), STUBBORN, 0.2, 128 + signal.SIGKILL),
        (lambda server, *_: server.kill(), STUBBORN, 600, 128 + signal.SIGKILL),
        (lambda server, *_: make_exit(server, 7), ("--engine", "own"), 600, 7),
        (lambda _, guard, api, engine: api.kill(), STUBBORN, 600, 128 + signal.SIGKILL),
        (lambda _, guard, api, engine: api.kill(), ("--engine", "same"), 600, 128 + signal.SIGKILL),
        (lambda _, guard, api, engine: guard.kill(), ("--engine", "same"), 600, 128 + signal.SIGKILL),
        (lambda _, guard, api, engine: guard.terminate(), STUBBORN, 0.2, 128 + signal.SIGKILL),
    ],
)
def test_nothing_of_a_server_remains(tmp_path, end, options, grace_s, code):
    server = fake_server(tmp_path, *options, grace_s=grace_s)
    server.start(0.0)
    try:
        wait_for(server.is_healthy)
        assert os.getsid(server.process.pid) == server.process.pid != os.getsid(0)
        members = members_of(server)
        end(server, *members)
        wait_for(lambda: server.poll() is not None)
        assert server.poll() == code
        assert_ended(members)
    finally:
        server.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_its_owner(tmp_path, number):
    command = fake_command(*STUBBORN)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "log"), *command.argv])
    wait_for(Server(command, Path("unused")).is_healthy)
    members = family(owner.pid)
    assert len(members) == 4  # with a guard, the server, and its engine
    owner.send_signal(number)
    owner.wait()
    assert_ended(members)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(supervisor, "POLL_S", 0.02)
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.05)


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def supervise(
    servers, *when_ready, restart: bool = False, timeout_s: float = 20.0, told: list | None = None, **more
) -> list:
    """
    Runs until a signal or a failure. Each time all are healthy, calls the next of `when_ready`. Returns the reports.
    """
    messages, calls = [] if told is None else told, list(when_ready)
    watcher = Supervisor(servers, timeout_s, restart, **more)

    def report(found: list[str]) -> None:
        messages.extend(found)
        if found and watcher.is_ready and calls:
            calls.pop(0)()

    with counted_signals() as stop:
        watcher.run(stop, report)
    return messages


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_all(tmp_path, number):
    servers = [fake_server(tmp_path, "--engine", "own", grace_s=1.0) for _ in range(2)]
    members = []
    before = signal.getsignal(number)
    supervise(servers, lambda: (members.extend(members_of(*servers)), interrupt(number)))
    assert len(members) == 6
    assert_ended(members, timeout_s=1)
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("quick")
def test_servers_on_the_same_gpus_start_in_turns(tmp_path):
    main, tail = fake_server(tmp_path), fake_server(tmp_path)
    tail.command = replace(tail.command, tail=True)
    for server in (main, tail):
        server.command = replace(server.command, env={"VLLM_API_KEY": "secret"})
    supervise([main, tail], interrupt, takes_turns=True)
    sleep, wake = "POST /sleep?level=1", "POST /wake_up"
    told = {own: [line for line in own.log_path.read_text().splitlines() if "POST" in line] for own in (main, tail)}
    assert told == {main: [sleep, wake], tail: [sleep]}


@pytest.mark.usefixtures("quick")
def test_a_server_that_does_not_sleep_ends_all(tmp_path):
    main, tail = fake_server(tmp_path), fake_server(tmp_path)
    main.command = replace(main.command, argv=("env", "VLLM_API_KEY=another", *main.command.argv))
    tail.command = replace(tail.command, tail=True)
    with pytest.raises(ServerFailedError, match=r"did not go to sleep \(log: .*\): .* answered 401"):
        supervise([main, tail], takes_turns=True)


@pytest.mark.usefixtures("quick")
def test_second_signal_kills(tmp_path):
    server = fake_server(tmp_path, "--ignore-sigterm", grace_s=600)
    members = []
    supervise([server], lambda: (members.extend(members_of(server)), interrupt(), interrupt()))
    assert_ended(members, timeout_s=1)


@pytest.mark.usefixtures("quick")
def test_others_go_on_until_none_is_left(tmp_path):
    servers = [fake_server(tmp_path, "--engine", "own") for _ in range(2)]
    urls = [server.command.base_url for server in servers]
    members, messages = [], []

    def next_dies():
        messages.append([server.is_healthy() for server in servers])
        make_exit(servers[0], 8)

    def one_dies():
        members.extend(members_of(*servers))
        make_exit(servers[1], 9)

    with pytest.raises(ServerFailedError) as caught:
        supervise(servers, one_dies, next_dies, told=messages)
    words = "The vLLM server at {} ended with exit code {} (log: {}): OSError: as you wish."
    last, remedy = f"Still running: {urls[0]}.", "Use `--restart` to restart servers that die."
    assert messages[-2] == f"{words.format(urls[1], 9, servers[1].log_path)} {last} {remedy}"
    assert messages[-1] == [True, False]
    assert str(caught.value) == words.format(urls[0], 8, servers[0].log_path)
    assert caught.value.exit_code == 8
    assert_ended(members, timeout_s=1)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("code", "exit_code"), [(5, 5), (0, 1)])
def test_death_at_start_is_final_also_with_restart(tmp_path, code, exit_code):
    servers = [fake_server(tmp_path), fake_server(tmp_path, "--exit-at-start", str(code))]
    with pytest.raises(ServerFailedError, match=f"exit code {code}") as caught:
        supervise(servers, restart=True)
    assert caught.value.exit_code == exit_code
    assert all(server.poll() is not None for server in servers)


@pytest.mark.usefixtures("quick")
def test_restart_and_its_log_goes_on(tmp_path):
    servers = [fake_server(tmp_path, "--engine", "own") for _ in range(2)]
    strike = lambda: make_exit(servers[0], 3)  # noqa: E731
    messages = supervise(servers, strike, strike, interrupt, restart=True)
    ends = [message.partition("OSError: as you wish. ")[2] for message in messages if "exit code 3" in message]
    assert ends == [f"It restarts in {seconds} s." for seconds in ("0.05", "0.1")]
    assert servers[0].log_path.read_text().count("fake server") == 3


@pytest.mark.usefixtures("quick")
def test_crash_loop_ends(tmp_path):
    server = fake_server(tmp_path)
    with pytest.raises(ServerFailedError, match="6 times in a row") as caught:
        supervise([server], *[lambda: make_exit(server, 3)] * 100, restart=True)
    assert caught.value.exit_code == 3


def test_backoff_doubles_and_a_stable_server_starts_anew(tmp_path, clock, monkeypatch):
    server = fake_server(tmp_path)
    monkeypatch.setattr(server, "poll", lambda: 1)
    monkeypatch.setattr(server, "start", lambda now: server.enter(ProcessState.STARTING, now))
    watcher = Supervisor([server], timeout_s=1e9, restart=True, clock=clock)
    watcher.was_ready = True
    waits = []
    for healthy_s in [0.0, 0.0, 0.0, supervisor.STABLE_S, 0.0]:
        server.enter(ProcessState.HEALTHY, clock())
        clock.advance(healthy_s)
        watcher.look()
        waits.append(server.restart_at - clock())
        clock.advance(waits[-1])
        watcher.look()
    assert waits == [1, 2, 4, 1, 2]
