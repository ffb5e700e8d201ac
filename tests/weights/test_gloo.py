"""The broadcast group, both sides in one process."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from trl_darts.weights.gloo import BroadcastGroup, is_local, joined_key, listen, local_address


@pytest.fixture
def pair():
    store = listen("127.0.0.1", 0)
    joined = []
    worker = threading.Thread(target=lambda: joined.append(BroadcastGroup.join("127.0.0.1", store.port, 1, 2, 30.0)))
    worker.start()
    trainer = BroadcastGroup(store, 0, 2, "127.0.0.1", 30.0)
    worker.join()
    assert store.check([joined_key(1)])
    yield trainer, joined[0]
    trainer.close()
    joined[0].close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(3, 5).to(torch.bfloat16),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.arange(7),
        torch.tensor(True),
        torch.empty(0, 3),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_every_dtype_and_shape_arrives(pair, tensor):
    trainer, worker = pair
    received = torch.zeros_like(tensor)
    thread = threading.Thread(target=worker.broadcast, args=(received,))
    thread.start()
    trainer.broadcast(tensor)
    thread.join()
    assert torch.equal(received.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("leaver", [0, 1])
def test_who_stays_alone_gets_an_error(pair, leaver):
    """Not a wait for the timeout of 30 s."""
    pair[leaver].close()
    with pytest.raises(RuntimeError):
        pair[1 - leaver].broadcast(torch.zeros(1 << 20))
    with pytest.raises(RuntimeError, match="closed"):
        pair[leaver].broadcast(torch.zeros(1))


def test_taken_port():
    store = listen("127.0.0.1", 0)
    with pytest.raises(RuntimeError):
        listen("127.0.0.1", store.port)


def test_addresses():
    assert local_address("127.0.0.1") == local_address("localhost") == local_address("0.0.0.0") == "127.0.0.1"
    assert all(map(is_local, ["127.0.0.1", "localhost", "0.0.0.0"]))
    assert not is_local("192.0.2.1")  # reserved for documentation
    socket.inet_aton(local_address("192.0.2.1"))
