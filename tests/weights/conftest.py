"""Servers for the tests of weight sync. They are shared, because each takes 15 to 25 s to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from benchmarks.vllm_server import VLLMServer, start_vllm_server
from tests.weights.stubs import WeightServer


def put_back(server: VLLMServer) -> None:
    """Restores the initial weights of a server for the next tests."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(server.model_dir)}}
    server.request("/collective_rpc", body)
    server.request("/reset_prefix_cache", {})
    server.request("/update_weight_version", {"new_version": "default"})


@pytest.fixture(scope="module")
def untied(vllm_server) -> Iterator[VLLMServer]:
    """Yields the session's server, and restores its weights after the module."""
    yield vllm_server
    put_back(vllm_server)


@pytest.fixture(scope="package")
def pair(tied_model_dir, log_of) -> Iterator[tuple[VLLMServer, VLLMServer]]:
    """Two servers of a model with tied embeddings. Only the package's last test may kill the second."""
    with (
        start_vllm_server(tied_model_dir, log_path=log_of("tied"), wait=False) as first,
        start_vllm_server(tied_model_dir, log_path=log_of("tied-second"), wait=False) as second,
    ):
        for server in (first, second):
            server.wait_until_healthy(240)
        yield first, second


@pytest.fixture
def servers() -> Iterator[list[WeightServer]]:
    """Three servers without a model."""
    with ExitStack() as stack:
        servers = [WeightServer() for _ in range(3)]
        for server in servers:
            stack.enter_context(server.serve())
        yield servers


@pytest.fixture
def fleet_of() -> Iterator[Callable[..., Any]]:
    """
    `fleet_of(urls, directory, …)` returns a [`FleetVLLMClient`] and its engine, closed after the test. The engine
    updates reconnected servers from the directory.
    """
    from trl_darts.engines import VLLMServerEngine
    from trl_darts.weights.fleet import FleetVLLMClient
    from trl_darts.weights.update import refresh

    made = []

    def make(urls: list[str], directory: Any = None, takes_turns: bool = False, **kwargs: Any) -> Any:
        tail = [urls[-1]] if takes_turns else []
        engine = VLLMServerEngine(urls, None, None, tail, takes_turns, partial(refresh, files=directory))
        made.append((FleetVLLMClient(engine, directory, **kwargs), engine))
        return made[-1]

    yield make
    for fleet, engine in made:
        for url in fleet.base_urls:
            fleet.leave(url)
        engine.close()
