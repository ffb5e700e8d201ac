"""
Checks servers from the trainer's machine: the trainer's own check, and whether each can get weights from here and has
nothing else to decode.
"""

import asyncio
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigurationError, TRLDARTSError
from ..weights.plugin import PROBE
from ..weights.probe import PREFIX, digest_of
from .addresses import is_this_machine
from .failures import FAILURES, describe
from .preflight import AdapterNeeds, Preflight, Requirements, ServerFacts
from .server_metrics import server_load
from .vllm_api import VLLMServer, new_session


EQUAL = ("model", "dtype", "max_model_len", "vllm", "trl_darts")  # columns that must not differ between servers
NO_PLUGIN = "none"
PROBE_S = 30.0


@dataclass
class Checked:
    """What is known about a server, and what is wrong with it."""

    url: str
    model: str = ""
    dtype: str = ""
    max_model_len: str = ""
    slots: str = ""
    vllm: str = ""
    trl_darts: str = ""
    weights: str = ""  # how they get there
    problems: list[str] = field(default_factory=list)

    def note(self, facts: ServerFacts) -> None:
        self.model, self.dtype = facts.model, (facts.dtype or "").removeprefix("torch.")
        self.max_model_len, self.slots = str(facts.max_model_len), str(facts.max_num_seqs or "")


@dataclass(frozen=True)
class WayBack:
    """How weights reach the servers: a file that each must read, or an address to which each must connect."""

    secret: str  # in the file, or sent to who connects
    path: Path | None = None
    address: tuple[str, int] | None = None
    local_only: bool = False  # the file is on this machine
    over_http: bool = False  # servers on other machines get the file sent

    @property
    def question(self) -> dict[str, Any]:
        """The arguments of `probe`, on the servers."""
        if self.path is not None:
            return {"path": str(self.path), "digest": digest_of(self.secret.encode())}
        return {"address": self.address, "nonce": self.secret}

    def problem(self, url: str, answers: Sequence[dict[str, Any]]) -> str | None:
        """Returns what is wrong with the answers of a server's workers."""
        if self.local_only and not is_this_machine(urlsplit(url).hostname or ""):
            if self.over_http:
                return None
            return "it is on another machine: set `weight_sync_dir` to a directory that both can access"
        for answer in answers:
            if self.path is not None and not answer["reads"]:
                return f"it does not see {self.path.parent} as here"
            if self.address is not None and not answer["connects"]:
                host, port = self.address
                return (
                    f"it can't connect to {host}:{port}: set VLLM_HOST_IP here, NCCL_SOCKET_IFNAME on both sides, and "
                    "open the port"
                )
        return None


@contextmanager
def way_back(weight_sync: str, directory: Path | None, first_port: int) -> Iterator[WayBack]:
    """Writes a file for the servers, or listens for them, while the context runs."""
    secret = secrets.token_hex(16)
    if weight_sync == "nccl":
        from ..weights.nccl import listen  # loads vLLM

        with listen(first_port) as listener:
            threading.Thread(target=send_to_all, args=(listener, secret), daemon=True).start()
            try:
                yield WayBack(secret, address=listener.getsockname())
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which a closed socket does not
        return
    parent = Path(tempfile.gettempdir()) if directory is None else directory.absolute()
    try:
        with tempfile.NamedTemporaryFile("w", dir=parent, prefix=PREFIX) as file:
            file.write(secret)
            file.flush()
            is_local = directory is None
            yield WayBack(secret, Path(file.name), local_only=is_local, over_http=weight_sync == "adapter")
    except OSError as error:
        raise ConfigurationError(
            f"`weight_sync_dir` ({str(parent)!r}) must be a directory that this process can write: {error.strerror}. "
            "Choose another."
        ) from error


def send_to_all(listener: socket.socket, secret: str) -> None:
    """Sends a text to whoever connects, until the listener is closed."""
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(secret.encode())


def check_servers(
    urls: Sequence[str], way: WayBack, api_key: str | None, timeout_s: float, adapters: bool = False
) -> list[Checked]:
    """
    Checks all servers at once, for any model, and for LoRA adapters if weights are sent as such. Differences between
    servers are problems of those in the minority.
    """
    backend = None if way.address is None else "nccl"
    needs = Requirements(0, None, processed_logprobs=True, weight_transfer=backend, timeout_s=timeout_s)
    needs = replace(needs, adapters=AdapterNeeds()) if adapters else needs

    async def run() -> list[Checked]:
        async with new_session(api_key) as session:
            servers = [VLLMServer(url, session, timeout_s) for url in urls]
            return list(await asyncio.gather(*(_check(server, way, needs) for server in servers)))

    checked = asyncio.run(run())
    for name in EQUAL:
        values = [getattr(one, name) for one in checked if getattr(one, name)]
        usual = max(values, key=values.count, default="")
        for one in checked:
            if getattr(one, name) not in ("", usual):
                one.problems.append(f"its {name} is {getattr(one, name)}, that of others {usual}")
    return checked


async def _check(server: VLLMServer, way: WayBack, needs: Requirements) -> Checked:
    found = Checked(server.base_url)
    try:
        await server.get("/health", needs.timeout_s)
        found.vllm = ((await server.get("/version", needs.timeout_s)) or {}).get("version", "")
        check = await Preflight.of(server, needs)
        found.note(check.facts)
        found.problems += [problem async for problem in check.problems()]
        load = await server_load(server, needs.timeout_s)
        if load is not None and load.num_running + load.num_waiting:
            found.problems.append("it decodes: another trainer may be using it")
        await _probe(server, found, way)
    except FAILURES as error:
        found.problems.append(describe(error, f"a request within {needs.timeout_s:g} s"))
    except ConfigurationError as error:
        found.problems.append(str(error))
    return found


async def _probe(server: VLLMServer, found: Checked, way: WayBack) -> None:
    body = {"method": PROBE, "kwargs": way.question}
    try:
        answers = (await server.post("/collective_rpc", body, PROBE_S))["results"]
    except TRLDARTSError:
        found.trl_darts = NO_PLUGIN
        found.problems.append("trl_darts is not in its environment, so weights can't be checked")
        return
    found.trl_darts = answers[0]["trl_darts"]
    problem = way.problem(server.base_url, answers)
    found.weights = "no" if problem else "NCCL" if way.address else "files"
    if problem:
        found.problems.append(problem)
