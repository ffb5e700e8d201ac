"""One server behind its guard: nothing of it remains, whoever ends it and however."""

import os
import signal
import subprocess
import sys
import time

import pytest

from trl_darts.serving import ServerProcess

from .builders import all_ended, fake_command, fake_process, family, make_exit, wait_for


STUBBORN = ("--ignore-sigterm", "--engine", "own")
OWNER = """
import sys, time
from pathlib import Path
from trl_darts.serving import ServerCommand, ServerProcess
url = f"http://127.0.0.1:{sys.argv[1]}"
process = ServerProcess(ServerCommand(int(sys.argv[1]), url, url, tuple(sys.argv[3:])), Path(sys.argv[2]), grace_s=0.2)
process.start()
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def start_process(*options: str, grace_s: float = 10.0) -> ServerProcess:
        process = fake_process(tmp_path, *options, grace_s=grace_s)
        started.append(process)
        process.start()
        wait_for(process.is_healthy)
        return process

    yield start_process
    for process in started:
        process.kill()


def test_runs_in_its_own_session_and_logs(start):
    process = start()
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    assert process.poll() is None
    assert process.log_tail() == f"fake server on {process.command.port}"


def test_stops_politely(start):
    process = start(grace_s=60)
    members = family(process.pid)
    process.ask_to_stop()
    process.ask_to_stop()
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == 128 + signal.SIGTERM
    assert all_ended(members)


def test_stops_what_ignores_sigterm(start):
    process = start(*STUBBORN, grace_s=0.2)
    members = family(process.pid)
    assert len(members) == 3  # guard, server, engine
    process.ask_to_stop()
    assert all_ended(members)
    assert process.poll() == 128 + signal.SIGKILL


def test_kill_does_not_wait_for_grace(start):
    process = start(*STUBBORN, grace_s=600)
    members = family(process.pid)
    start_s = time.monotonic()
    process.kill()
    assert all_ended(members, timeout_s=0)
    assert time.monotonic() - start_s < 10


def test_a_dead_server_leaves_no_engine_and_its_exit_code(start):
    process = start("--engine", "own")
    members = family(process.pid)
    make_exit(process, 7)
    assert all_ended(members)
    assert process.poll() == 7


@pytest.mark.parametrize(("target", "engine"), [("server", "own"), ("server", "same"), ("guard", "same")])
def test_sigkill_of_one_process_ends_the_others(start, target, engine):
    process = start("--ignore-sigterm", "--engine", engine)
    members = family(process.pid)
    members[["guard", "server"].index(target)].kill()
    wait_for(lambda: process.poll() is not None)
    assert process.poll() == 128 + signal.SIGKILL
    assert all_ended(members)


def test_sigterm_to_the_guard_ends_the_server(start):
    process = start("--engine", "own")
    members = family(process.pid)
    os.kill(process.pid, signal.SIGTERM)
    assert all_ended(members)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_its_owner(tmp_path, number):
    command = fake_command(*STUBBORN)
    argv = [sys.executable, "-c", OWNER, str(command.port), str(tmp_path / "log"), *command.argv]
    owner = subprocess.Popen(argv)
    probe = ServerProcess(command, tmp_path / "unused")
    wait_for(probe.is_healthy)
    members = family(owner.pid)
    assert len(members) == 4
    owner.send_signal(number)
    owner.wait()
    assert all_ended(members)


def test_starts_again_and_its_log_goes_on(start):
    process = start()
    make_exit(process, 1)
    wait_for(lambda: process.poll() is not None)
    process.start()
    wait_for(process.is_healthy)
    first_line = f"fake server on {process.command.port}"
    assert process.log_tail().splitlines() == [first_line, "as you wish", first_line]


def test_before_the_first_start(tmp_path):
    process = fake_process(tmp_path)
    process.ask_to_stop()
    process.kill()
    assert process.poll() is None
    assert process.log_tail().startswith("(no log")
