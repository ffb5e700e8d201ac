"""One server in an actor of a Ray cluster. Ray restarts the actor on another node if its node is lost."""

import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..engines.addresses import publish, withdraw
from ..errors import ConfigurationError
from .build import VLLMBuild, find_build
from .command import make_commands
from .options import ServeOptions, check_options, is_free, is_loopback, log_directory
from .supervisor import ProcessState, Server, ServerFailedError, Supervisor


HEARTBEAT_S = 2.0  # between two reports without news
ANSWER_S = 30.0  # of the registry


@dataclass(frozen=True)
class Prepared:
    """What a node says before any server starts."""

    build: VLLMBuild
    command: str
    log_path: str
    url: str


class RayServer:
    """
    Runs the command that `trl-darts serve` would run on this node, under its guard, and restarts it if it dies.

    The actor's first process starts nothing by itself: the driver first asks all of them to `prepare`.
    """

    def __init__(self, options: ServeOptions, number: int, this_machine: str | None) -> None:
        import ray

        self._registry: Any = ray.get_actor(options.name)  # by name: a handle as an argument could be lost with a node
        self._number = number
        address = ray.util.get_node_ip_address()
        self._host = "127.0.0.1" if address == this_machine else address
        port = free_port(self._host, options.port + number, options.num_servers)
        self._options = replace(options, num_servers=1, host=self._host, port=port)
        self._stop: list[int] = []
        self._thread: threading.Thread | None = None
        self._server: Server | None = None
        self._is_replacement = ray.get_runtime_context().was_current_actor_reconstructed
        self._node = f"{socket.gethostname()} ({address})"
        self._started = time.time()
        self._report(ProcessState.WAITING)
        if self._is_replacement:
            answer = self.prepare()
            if isinstance(answer, str):
                self._report(ProcessState.GONE, None, [answer], 1)
            else:
                self.start()

    def prepare(self) -> Prepared | str:
        """Checks the options on this node. Returns a message if they can't work here."""
        try:
            build = find_build()
            check_options(self._options, build)
            (command,) = make_commands(self._options, build, first=self._number)
            log = log_directory(self._options.log_dir) / f"server-{self._number}.log"
            if self._options.own_key is not None:
                publish(command.base_url, self._options.own_key)
        except ConfigurationError as error:
            return str(error)
        if not is_loopback(self._host):  # between the processes of one server, as the trainer
            command = replace(command, env={**command.env, "VLLM_HOST_IP": self._host})
        self._server = Server(command, log)
        return Prepared(build, str(command), str(log), command.base_url)

    def start(self) -> None:
        """Starts the prepared server."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._supervise, name="trl_darts-server", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stops the server, and waits for its end."""
        self._stop.append(1)
        if self._thread is not None:
            self._thread.join()
        if self._server is not None and self._options.own_key is not None:
            withdraw(self._server.command.base_url)

    def _supervise(self) -> None:
        assert self._server is not None
        server, reported = self._server, (ProcessState.WAITING, -HEARTBEAT_S)
        # A replacement is restarted if it fails, because the trainer uses the other servers already.
        supervisor = Supervisor([server], self._options.timeout, restart=True, was_ready=self._is_replacement)

        def report(messages: list[str]) -> None:
            nonlocal reported
            now = time.monotonic()
            if messages or reported[0] is not server.state or now - reported[1] > HEARTBEAT_S:
                reported = server.state, now
                if not self._report(server.state, server.command.base_url, messages):
                    self._stop.append(1)  # the command has ended, or another node has taken over

        try:
            supervisor.run(self._stop, report)
        except ServerFailedError as error:
            self._report(ProcessState.GONE, None, [str(error)], error.exit_code)

    def _report(self, state: ProcessState, *news: Any) -> bool:
        """Reports to the registry. Returns whether the server should go on."""
        import ray

        answer = self._registry.report.remote(self._number, self._started, self._node, state, *news)
        try:
            return bool(ray.get(answer, timeout=ANSWER_S))
        except ray.exceptions.ActorDiedError:
            return False
        except ray.exceptions.RayError:  # it does not answer now
            return True


def free_port(host: str, first: int, step: int) -> int:
    """Returns a free port. Servers of one command step over each other's, which vLLM would share without an error."""
    port = next((port for port in range(first, 65536, max(1, step)) if is_free(host, port)), None)
    if port is None:
        raise ConfigurationError(f"`port` ({first}) must have a free port at or above it on {host}. Lower it.")
    return port


def worker_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables of this process that servers on other nodes get too: those of vLLM, NCCL and the Hub."""
    kept = {
        name: value
        for name, value in environ.items()
        if name.startswith(("VLLM_", "NCCL_", "HF_", "OMP_")) and not name.endswith(("_KEY", "_TOKEN", "_HOST_IP"))
    }
    # Otherwise Ray kills the guard before it has stopped its server.
    return {**kept, "RAY_kill_child_processes_on_worker_exit": "false"}
