"""
Places servers on a Ray cluster, one actor each, and shows what happens to them.

Actors and their placement group belong to this process's Ray job: when it ends, even by SIGKILL, Ray ends them, and
their guards end the servers.
"""

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..engines.addresses import API_KEY_VARIABLE, is_this_machine
from ..engines.ray_reader import NAMESPACE
from ..errors import ConfigurationError
from ..import_utils import is_ray_available
from .options import ServeOptions, is_loopback, with_own_key
from .ray_server import Prepared, RayServer, worker_environment
from .registry import Entry, Registry
from .supervisor import GRACE_S, KILL_MARGIN_S, POLL_S, ProcessState, ServerFailedError


REACH_S = 5.0  # to open a connection to the head node; Ray itself would try for minutes
PLACE_S = 30.0  # until the placement group has its resources, which other jobs may hold
PREPARE_S = 120.0  # for all nodes to import vLLM's environment and check the options
CALL_S = 30.0  # of the registry

Resources = dict[str, float]


def connect(address: str | None) -> str:
    """
    Connects to the cluster at an address, or to the one of this machine, or starts one on this machine. Returns its
    address.
    """
    if not is_ray_available():
        raise ConfigurationError("`on` ('ray') needs Ray. Install it with `pip install 'trl-darts[ray]'`.")
    import ray

    wanted = address or os.environ.get("RAY_ADDRESS") or ("local" if _is_stale() else "auto")
    if wanted not in ("auto", "local"):
        _check_reachable(wanted)
    start = partial(ray.init, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    try:
        start(wanted)
    except ConnectionError as error:
        if address is not None or wanted != "auto":
            raise _unreachable(wanted, str(error)) from error
        start("local")
    except (RuntimeError, ValueError) as error:
        raise _unreachable(wanted, str(error)) from error
    return str(ray.get_runtime_context().gcs_address)


def _is_stale() -> bool:
    """Whether `ray start` left the address of a cluster that has ended. Ray would try to reach it for minutes."""
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        _check_reachable(file.read_text().strip())
    except (OSError, ConfigurationError) as error:
        return isinstance(error, ConfigurationError)
    return False


def _check_reachable(address: str) -> None:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        socket.create_connection((parts.hostname or "", parts.port or 10001), REACH_S).close()
    except (OSError, ValueError) as error:
        raise _unreachable(address, getattr(error, "strerror", None) or str(error)) from error


def _unreachable(address: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"`ray_address` ({address!r}) must be the address of a Ray cluster: {' '.join(reason.split())[:200]}. Start "
        "one with `ray start --head`, or leave it out for one on this machine."
    )


def needs(options: ServeOptions) -> Resources:
    """
    Returns the resources of one server. vLLM's own Ray executor makes a placement group for its GPUs, for which ones
    that are reserved here would be missing.
    """
    import ray

    gpus = 0 if options.spans_nodes or not ray.cluster_resources().get("GPU") else options.gpus_per_server
    return {"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {})}


def check_room(options: ServeOptions, each: Resources) -> set[str]:
    """Returns the addresses of nodes with room. Raises [`ConfigurationError`] if there is too little."""
    import ray

    alive = {node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    nodes = list(alive.values())
    rooms = [min(math.floor(node.get(name, 0) / amount) for name, amount in each.items()) for node in nodes]
    room = sum(rooms)
    total = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    wanted = {"GPU": options.gpus_per_server} if options.spans_nodes else each
    missing = {name: options.num_servers * amount - total[name] for name, amount in wanted.items()}
    short = [f"{amount:g} {name}s are missing" for name, amount in missing.items() if amount > 0]
    if room < options.num_servers or short:
        per_server = " and ".join(f"{amount:g} {name}" for name, amount in wanted.items())
        detail = ", ".join(short) or "they are spread over too many nodes"
        raise ConfigurationError(
            f"`num_servers` ({options.num_servers}) must fit the Ray cluster, with {per_server} each, and there is "
            f"room for {room} ({len(nodes)} nodes, {total['GPU']:g} GPUs, {total['CPU']:g} CPUs): {detail}. Add "
            "nodes, or start fewer servers."
        )
    return {address for address, count in zip(alive, rooms, strict=True) if count}


class RayServers:
    """The servers of one command. Like `Supervisor`, but their processes are on other nodes."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.prepared: list[Prepared] = []
        self.was_ready = False
        self._num_seen = 0
        self._entries: dict[int, tuple[Entry, float]] = {}
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._started_at: float | None = None
        self._registry: Any = None
        self._numbers: list[int] = []

    def prepare(self) -> None:
        """Reserves resources, starts the actors, and has each check the options on its node."""
        import ray

        each = needs(self.options)
        addresses = check_room(self.options, each)
        alone = next(iter(addresses)) if len(addresses) == 1 else None
        this_machine = alone if alone is not None and is_this_machine(alone) else None
        if this_machine is None:
            self._check_key(addresses)
        else:
            self.options = with_own_key(self.options)
        self._registry = self._find_registry() if self.options.join else self._new_registry()
        self._numbers = ray.get(self._registry.reserve.remote(self.options.num_servers), timeout=CALL_S)
        self._reserve(each)
        for bundle, number in enumerate(self._numbers):
            self._actors[number] = self._actor(bundle, each).remote(self.options, number, this_machine)
        try:
            answers = ray.get([actor.prepare.remote() for actor in self._actors.values()], timeout=PREPARE_S)
        except ray.exceptions.GetTimeoutError as error:
            raise ServerFailedError(
                f"Not all nodes answered within {PREPARE_S:g} s: {'; '.join(self.describe())}. A node may be dead.", 1
            ) from error
        except ray.exceptions.RayError as error:
            raise ServerFailedError(f"A node can't start a server: {_cause(error)}", 1) from error
        for answer in answers:
            if isinstance(answer, str):
                raise ConfigurationError(answer)
        self.prepared = answers

    def _check_key(self, addresses: set[str]) -> None:
        public = sorted(address for address in addresses if not is_loopback(address))
        if self.options.api_key is None and public:
            raise ConfigurationError(
                f"`api_key` must be set, because servers listen in a network (such as at {public[0]}), and anyone "
                f"could reach their development endpoints, which replace weights. Set {API_KEY_VARIABLE}."
            )

    def _find_registry(self) -> Any:
        import ray

        try:
            return ray.get_actor(self.options.name)
        except ValueError as error:
            raise ConfigurationError(
                f"`name` ({self.options.name!r}) must be that of running servers with `--join`, and there are none. "
                "Correct it, or leave `--join` out."
            ) from error

    def _new_registry(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # Not on a node of a server, with which it would be lost.
        make = ray.remote(Registry).options(
            name=self.options.name, num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here
        )
        try:
            return make.remote()
        except ValueError as error:
            raise ConfigurationError(
                f"`name` ({self.options.name!r}) must be new on the Ray cluster, and is taken. Choose another, stop "
                "the command that has it, or add servers to it with `--join`."
            ) from error

    def _reserve(self, each: Resources) -> None:
        import ray
        from ray.util.placement_group import placement_group

        self._group = placement_group([each] * self.options.num_servers, strategy=self.options.placement.upper())
        if not self._group.wait(PLACE_S):
            free = ray.available_resources()
            has = ", ".join(f"{free.get(name, 0):g} {name}s" for name in each)
            wanted = ", ".join(f"{self.options.num_servers * amount:g} {name}s" for name, amount in each.items())
            raise ConfigurationError(
                f"`num_servers` ({self.options.num_servers}) needs {wanted}, and only {has} of the Ray cluster are "
                "free: other jobs have the rest. Wait for them, or start fewer servers."
            )

    def _actor(self, bundle: int, each: Resources) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        environment = worker_environment()
        if self.options.spans_nodes:  # vLLM finds the GPUs of all nodes, although this actor has none
            environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        return ray.remote(RayServer).options(
            num_cpus=each["CPU"],
            num_gpus=each.get("GPU", 0),
            max_restarts=-1,
            max_concurrency=4,  # `stop` while another call waits
            runtime_env={"env_vars": environment},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
            ),
        )

    # As `Supervisor`

    @property
    def is_ready(self) -> bool:
        """Whether all servers are healthy, except those gone."""
        states = [entry.state for entry, _ in self._entries.values()]
        return bool(states) and all(state in (ProcessState.HEALTHY, ProcessState.GONE) for state in states)

    @property
    def urls(self) -> list[str]:
        """Addresses of the healthy servers."""
        return [entry.url for entry, _ in self._entries.values() if entry.url is not None]

    def describe(self) -> list[str]:
        """Returns each server's state and its duration."""
        return [
            f"server {number} on {entry.node} {entry.state.value} for {seconds:.0f} s"
            for number, (entry, seconds) in self._entries.items()
        ]

    def run(self, stop: Sequence[int], report: Callable[[list[str]], None]) -> None:
        """Starts all servers, reports changes until `stop` has a signal, and finally stops all servers."""
        for actor in self._actors.values():
            actor.start.remote()
        self._started_at = time.monotonic()
        while not stop:
            report(self.look())
            time.sleep(POLL_S)
        report(["Stopping. Repeat to kill." if len(stop) == 1 else "Killing."])

    def look(self) -> list[str]:
        """Returns news. Raises [`ServerFailedError`] if a server fails before all were healthy, or the last one."""
        import ray

        try:
            answer = ray.get(self._registry.look.remote(self._numbers, self._num_seen), timeout=CALL_S)
        except ray.exceptions.RayError as error:
            raise ServerFailedError(f"The Ray cluster is lost: {_cause(error)}", 1) from error
        self._entries, messages, self._num_seen = answer
        gone = [entry for entry, _ in self._entries.values() if entry.state is ProcessState.GONE]
        if gone and (not self.was_ready or len(gone) == len(self._entries)):
            raise ServerFailedError(messages[-1] if messages else "All servers are gone.", gone[0].exit_code)
        late_s = time.monotonic() - (self._started_at or 0.0) - self.options.timeout
        if not self.was_ready and late_s > KILL_MARGIN_S:
            raise ServerFailedError(f"Not all servers are healthy within `timeout`: {'; '.join(self.describe())}.", 1)
        self.was_ready = self.was_ready or self.is_ready
        return messages

    def end(self, stop: Sequence[int]) -> None:
        """Stops all servers, kills them after the grace period or on a second signal, and frees the resources."""
        import ray

        stopping = [actor.stop.remote() for actor in self._actors.values() if self._started_at is not None]
        deadline = time.monotonic() + GRACE_S + KILL_MARGIN_S
        while stopping and len(stop) < 2 and time.monotonic() < deadline:
            _, stopping = ray.wait(stopping, num_returns=len(stopping), timeout=POLL_S)
        with suppress(Exception):  # the cluster may be lost
            if self._registry is not None:
                ray.get(self._registry.forget.remote(self._numbers), timeout=CALL_S)
        for actor in self._actors.values():
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()


def _cause(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
