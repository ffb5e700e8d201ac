"""Servers for the tests of weight sync. Few, and shared: each takes 15 to 25 s to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.vllm_server import VLLMServer, start_vllm_server


def put_back(server: VLLMServer) -> None:
    """Give a server the weights it started with, for the tests after these."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(server.model_dir)}}
    server.request("/collective_rpc", body)
    server.request("/reset_prefix_cache", {})
    server.request("/update_weight_version", {"new_version": "default"})


@pytest.fixture(scope="module")
def untied(vllm_server) -> Iterator[VLLMServer]:
    """The session's server; its weights are put back after the module."""
    yield vllm_server
    put_back(vllm_server)


@pytest.fixture(scope="package")
def pair(tied_model_dir, log_of) -> Iterator[tuple[VLLMServer, VLLMServer]]:
    """Two servers of a model whose LM head is its embedding. Only the package's last test may kill the second."""
    with (
        start_vllm_server(tied_model_dir, log_path=log_of("tied"), wait=False) as first,
        start_vllm_server(tied_model_dir, log_path=log_of("tied-second"), wait=False) as second,
    ):
        for server in (first, second):
            server.wait_until_healthy(240)
        yield first, second


@pytest.fixture
def client_of() -> Iterator[Callable[..., object]]:
    """`client_of(server, …)`: a connected client whose weights are files, closed after the test."""
    from trl_darts.weights.fleet import make_client

    clients = []

    def connect(*servers: VLLMServer, **kwargs: object) -> object:
        client = make_client([server.base_url for server in servers], "filesystem", "cpu", **kwargs)
        client.init_communicator("cpu")
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.close_communicator()
