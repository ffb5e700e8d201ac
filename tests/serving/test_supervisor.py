"""Several servers: health, restarts, limits, signals. The servers are fake, the processes are not."""

import os
import signal

import pytest

from trl_darts.serving import ServerFailedError, StopRequest, Supervisor, supervisor
from trl_darts.serving.supervisor import State

from .builders import Recorder, all_ended, fake_process, family, make_exit


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(supervisor, "POLL_S", 0.02)
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.05)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Killer(Recorder):
    """Ends the first server each time it is healthy, and asks to stop after so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.process = None

    def event(self, text: str) -> None:
        super().event(text)
        if self.num_ready and "is healthy" in text and self.process.command.base_url in text:
            self.strike()

    def ready(self) -> None:
        super().ready()
        self.strike()  # not before: a server that dies while others start is not started again

    def strike(self) -> None:
        if self.times == 0:
            interrupt()
        else:
            make_exit(self.process, 3)
        self.times -= 1


@pytest.mark.parametrize("number", StopRequest.SIGNALS)
def test_signal_stops_all(tmp_path, number):
    processes = [fake_process(tmp_path, "--engine", "own", grace_s=1.0) for _ in range(2)]
    members = []

    def stop_now() -> None:
        members.extend(member for process in processes for member in family(process.pid))
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    recorder = Recorder(stop_now)
    with StopRequest() as stop:
        Supervisor(processes, timeout_s=20).run(recorder, stop)
    assert recorder.num_ready == 1
    assert len(members) == 6
    assert all_ended(members, timeout_s=0)
    assert signal.getsignal(number) == before


def test_second_signal_kills(tmp_path):
    process = fake_process(tmp_path, "--ignore-sigterm", grace_s=600)
    members = []

    def stop_twice() -> None:
        members.extend(family(process.pid))
        interrupt()
        interrupt()

    with StopRequest() as stop:
        Supervisor([process], timeout_s=20).run(Recorder(stop_twice), stop)
    assert all_ended(members, timeout_s=0)


def test_death_ends_all_with_its_log_and_exit_code(tmp_path):
    processes = [fake_process(tmp_path) for _ in range(2)]
    members = []

    def end_one() -> None:
        members.extend(member for process in processes for member in family(process.pid))
        make_exit(processes[1], 9)

    with StopRequest() as stop, pytest.raises(ServerFailedError, match="as you wish") as caught:
        Supervisor(processes, timeout_s=20).run(Recorder(end_one), stop)
    assert caught.value.exit_code == 9
    assert processes[1].command.base_url in str(caught.value)
    assert all_ended(members, timeout_s=0)


@pytest.mark.parametrize(("code", "exit_code"), [(5, 5), (0, 1)])
def test_death_at_start_is_final_also_with_restart(tmp_path, code, exit_code):
    processes = [fake_process(tmp_path), fake_process(tmp_path, "--exit-at-start", str(code))]
    with StopRequest() as stop, pytest.raises(ServerFailedError, match=f"exit code {code}") as caught:
        Supervisor(processes, timeout_s=20, restart=True).run(Recorder(), stop)
    assert caught.value.exit_code == exit_code
    assert all(process.poll() is not None for process in processes)


def test_timeout(tmp_path):
    process = fake_process(tmp_path, "--never-healthy")
    with StopRequest() as stop, pytest.raises(ServerFailedError, match=r"not healthy within `timeout` \(0.5 s\)"):
        Supervisor([process], timeout_s=0.5).run(Recorder(), stop)
    assert process.poll() is not None


def test_restart(tmp_path):
    killer = Killer(times=2)
    processes = [fake_process(tmp_path, "--engine", "own") for _ in range(2)]
    killer.process = processes[0]
    with StopRequest() as stop:
        Supervisor(processes, timeout_s=20, restart=True).run(killer, stop)
    assert sum("ended with exit code 3; it is started again" in event for event in killer.events) == 2
    assert killer.num_ready == 1
    assert processes[0].log_path.read_text().count("fake server") == 3


def test_crash_loop_ends(tmp_path):
    killer = Killer(times=100)
    process = killer.process = fake_process(tmp_path)
    with StopRequest() as stop, pytest.raises(ServerFailedError, match="6 times in a row") as caught:
        Supervisor([process], timeout_s=20, restart=True).run(killer, stop)
    assert caught.value.exit_code == 3


def test_backoff_doubles_and_a_stable_server_starts_anew(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 1.0)

    class Dead:
        command = fake_process(tmp_path).command
        log_path = tmp_path / "log"

        def poll(self):
            return 1

        def start(self):
            pass

        def log_tail(self):
            return ""

    watcher = Supervisor([Dead()], timeout_s=1e9, restart=True, clock=clock)
    watcher.was_ready = True
    (watched,) = watcher.servers
    waits = []
    for healthy_s in [0.0, 0.0, 0.0, supervisor.STABLE_S, 0.0]:
        watched.enter(State.HEALTHY, clock())
        clock.advance(healthy_s)
        watcher.look(Recorder())
        waits.append(watched.restart_at - clock())
        clock.advance(waits[-1])
        watcher.look(Recorder())
    assert waits == [1, 2, 4, 1, 2]
