"""
Weights over NCCL with a communicator whose broadcast blocks until its peer takes part, or it is destroyed. No test
needs a GPU: streams and events record their calls.
"""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from trl.generation.vllm_generation import VLLMGeneration

from tests.weights.probes import load_model
from tests.weights.stubs import BlockingCommunicator, RecordingCuda, answer_together
from trl_darts.engines.pool import State
from trl_darts.errors import ConfigurationError, WeightSyncError
from trl_darts.weights import nccl
from trl_darts.weights.nccl import GROUP_PORT, WeightGroup, listen, weight_chunks
from trl_darts.weights.parameters import as_served, num_bytes


peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
pytestmark = pytest.mark.vllm

UPDATE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
COMMIT = ["/reset_prefix_cache", "/resume", "/update_weight_version"]


@pytest.fixture
def cuda(monkeypatch):
    return RecordingCuda(monkeypatch)


@pytest.fixture
def generation(tiny_model_dir):
    """TRL's `VLLMGeneration` with a LoRA model whose adapter is not zero."""
    model = peft.get_peft_model(load_model(tiny_model_dir), peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.fill_(0.1)
    generation = object.__new__(VLLMGeneration)
    generation.model = model
    generation._dist = SimpleNamespace(gather_params=lambda params: nullcontext(), is_fsdp=False)
    return generation


@pytest.fixture
def formed(monkeypatch, servers, cuda):
    """Groups without a rendezvous, in the order of their creation: `(address, communicator)`."""
    formed = []

    async def form(server, device, first_port, timeout_s):
        (peer,) = [peer for peer in servers if peer.url == server.base_url]
        peer.communicator = BlockingCommunicator(cuda)
        formed.append((server.base_url, peer.communicator))
        return WeightGroup(peer.communicator, timeout_s)

    monkeypatch.setattr(WeightGroup, "form", form)
    monkeypatch.setattr(nccl, "CHUNK_BYTES", 30_000)
    return formed


@pytest.fixture
def fleet(servers, fleet_of, formed):
    fleet, _ = fleet_of([server.url for server in servers], timeout_s=5.0)
    fleet.init_communicator()
    return fleet


@pytest.fixture
def engine(fleet):
    return fleet._engine


def metadata_of(generation):
    return [
        (name, str(param.dtype).removeprefix("torch."), list(param.shape))
        for name, param in generation._iter_named_params()
    ]


def sync_weights(generation, fleet):
    fleet.update_named_params(metadata_of(generation), generation._iter_named_params())


def merged_bytes(generation, dtype=torch.float32):
    """Returns the bytes that a server must get, with matrices in a dtype."""
    params = [
        param.to(dtype if param.dim() > 1 else param.dtype, copy=True) for _, param in generation._iter_named_params()
    ]
    return torch.cat([param.reshape(-1).view(torch.uint8) for param in params])


def is_merged(generation):
    return any(getattr(module, "merged", False) for module in generation.model.modules())


def test_each_server_gets_all_of_the_merged_weights(generation, fleet, engine, servers):
    sync_weights(generation, fleet)
    for server in servers:
        assert len(server.received) > 3
        assert torch.equal(torch.cat(server.received), merged_bytes(generation))
        assert list(dict.fromkeys(server.paths)) == UPDATE + COMMIT
        assert server.weight_version == "v1"
    assert [member.version for member in engine.members.values()] == [1] * 3
    assert fleet.num_bytes == 3 * merged_bytes(generation).numel()
    assert not is_merged(generation)


def test_matrices_are_sent_as_the_servers_have_them(generation, servers, fleet_of, formed):
    fleet, _ = fleet_of([server.url for server in servers], timeout_s=5.0, dtype=torch.bfloat16)
    fleet.init_communicator()
    sync_weights(generation, fleet)
    for server in servers:
        assert torch.equal(torch.cat(server.received), merged_bytes(generation, torch.bfloat16))
    infos = [body["update_info"] for path, body in servers[0].posts if path == "/update_weights"]
    dtypes = {
        (dtype, len(shape)) for info in infos for dtype, shape in zip(info["dtype_names"], info["shapes"], strict=True)
    }
    assert dtypes == {("bfloat16", 2), ("float32", 1)}


def test_one_sync_is_a_round_trip_per_chunk_and_seven_more(generation, fleet, servers):
    """The number of servers does not matter: each answers only after all have a request."""
    servers[0].num_answers = 0
    answer_together(servers)
    sync_weights(generation, fleet)
    fleet.reset_prefix_cache()
    assert servers[0].num_answers == 7 + len(servers[0].received)


def test_a_stream_of_its_own_that_waits_until_the_chunk_is_there(generation, fleet, servers, cuda, formed):
    """Its memory is kept until it is sent."""
    sync_weights(generation, fleet)
    events = [event for stream, what, event in (e for e in cuda.log if len(e) == 3) if what == "record"]
    assert len(events) == len(set(events)) == len(servers[0].received)
    streams = {entry[0] for entry in cuda.log} - {"main"}
    assert len(streams) == len(servers)
    for stream in streams:
        told = [entry[1:] for entry in cuda.log if entry[0] == stream]
        assert told == [what for event in events for what in (("wait", event), ("broadcast",), ("synchronize",))]
    for event in events:
        assert cuda.log.index(("main", "record", event)) < min(
            cuda.log.index((stream, "wait", event)) for stream in streams
        )
    main = threading.main_thread()
    assert all(thread is not main for _, communicator in formed for thread in communicator.threads)


def test_the_next_chunk_is_gathered_while_one_is_sent(fleet, servers):
    """No further chunk is gathered: at most two are in memory."""
    gathered = []
    sent = threading.Event()

    async def wait():
        await asyncio.to_thread(sent.wait, 10)

    def params():
        for index in range(4):
            gathered.append(index)
            if index == 2:  # the first chunk is being sent until the third is asked for
                assert sent.is_set()
            elif index == 1:
                assert not servers[0].received
                sent.set()
            yield f"p{index}", torch.zeros(20_000, dtype=torch.uint8)

    servers[0].acts["/update_weights"] = wait
    fleet.update_named_params([(f"p{index}", "uint8", [20_000]) for index in range(4)], params())
    assert gathered == [0, 1, 2, 3]
    assert len(servers[0].received) == 4


def test_chunks_are_what_vllm_reads(cuda, monkeypatch):
    """In the order of the metadata, no longer than the buffer, and each tensor aligned for its dtype."""
    from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES, unpack_tensor

    assert nccl.CHUNK_BYTES == DEFAULT_PACKED_BUFFER_SIZE_BYTES
    monkeypatch.setattr(nccl, "CHUNK_BYTES", 64)
    params = [
        ("odd", torch.arange(3, dtype=torch.bfloat16)),
        ("float", torch.rand(4)),
        ("columns", torch.rand(6, 2)[:, 0]),
        ("large", torch.rand(5, 7).T),
    ]
    metadata = [(name, str(param.dtype).removeprefix("torch."), list(param.shape)) for name, param in params]
    found = {}
    parts = list(weight_chunks(metadata, iter(params), torch.device("cpu")))
    assert [[name for name, *_ in chunk.metadata] for chunk in parts] == [
        ["odd"],  # a float behind its 6 bytes could not be read
        ["float", "columns"],
        ["large"],
    ]
    for chunk in parts:
        names, dtypes, shapes = zip(*chunk.metadata, strict=True)
        sizes = [num_bytes([entry]) for entry in chunk.metadata]
        own = [getattr(torch, dtype) for dtype in dtypes]
        found |= dict(unpack_tensor(chunk.buffer, list(names), list(shapes), own, sizes))
    assert all(torch.equal(found[name], param) for name, param in params)


def test_only_matrices_are_cast_and_only_to_fewer_bytes():
    metadata = [("m", "float32", [2, 2]), ("v", "float32", [2]), ("h", "float16", [2, 2]), ("i", "int64", [2, 2])]
    as_bfloat16 = [entry[1] for entry in as_served(metadata, torch.bfloat16)]
    assert as_bfloat16 == ["bfloat16", "float32", "float16", "int64"]
    assert as_served(metadata, torch.float32) == as_served(metadata, None) == metadata


async def killed(server):
    """Closes the connection without an answer."""
    server.answers.clear()
    raise ConnectionResetError


async def silent(server):
    await asyncio.sleep(30)


def test_a_long_timeout_of_servers_is_not_that_of_nccl(servers, fleet_of, formed):
    """The trainer's other processes wait in a collective, whose watchdog is shorter."""
    fleet, _ = fleet_of([server.url for server in servers], timeout_s=1800.0)
    fleet.init_communicator()
    assert {group._timeout_s for group in fleet._groups.values()} == {120.0}


@pytest.mark.parametrize("fault", ["refuses", "never answers", "killed", "never takes part"])
def test_a_broadcast_that_fails_is_ended(generation, fleet, engine, servers, formed, fault, monkeypatch):
    """The other servers end with the new weights, none stays paused, and the trainer continues."""
    bad = servers[0]
    communicator = bad.communicator
    if fault == "refuses":
        bad.answers["/update_weights"] = (500, {"error": {"message": "no memory left"}})
    elif fault == "never takes part":
        bad.communicator = None  # it answers, but the broadcast has no peer
        monkeypatch.setattr(nccl, "GRACE_S", 0.2)
    else:
        bad.acts["/update_weights"] = partial({"killed": killed, "never answers": silent}[fault], bad)
    for url, group in fleet._groups.items():
        group._timeout_s = 0.3 if url == bad.url else 10.0
    sync_weights(generation, fleet)
    reason = {
        "refuses": "answered 500: no memory left",
        "never answers": "did not answer `/update_weights` within 0.3 s",
        "killed": "did not answer `/update_weights`|answered 500",
        "never takes part": "NCCL did not finish within 0.3 s",
    }[fault]
    assert re.search(reason, engine.members[bad.url].reason)
    assert communicator.disabled
    for thread in communicator.threads:
        thread.join(5)
        assert not thread.is_alive()
    assert [member.version for member in engine.members.values()] == [0, 1, 1]
    assert bad.paths[-1] == "/resume"
    for server in servers[1:]:
        assert server.paths[-2:] == COMMIT[1:]
        assert torch.equal(torch.cat(server.received), merged_bytes(generation))
    assert bad.weight_version == "v1-incomplete"
    assert "/finish_weight_update" in bad.paths
    assert not is_merged(generation)


def test_all_servers_fail(generation, fleet, engine, servers):
    """The iterator is still exhausted, because other processes gather with this one."""
    for server in servers:
        server.answers["/start_weight_update"] = (500, "stuck")
    sync_weights(generation, fleet)
    assert set(engine.states().values()) == {State.DOWN}
    assert not is_merged(generation)
    assert [server.paths[-1] for server in servers] == ["/resume"] * 3
    assert not servers[0].received


def test_a_gather_that_fails_leaves_no_server_paused(generation, fleet, servers):
    def broken():
        yield "a", torch.zeros(20_000, dtype=torch.uint8)
        yield "b", torch.zeros(20_000, dtype=torch.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fleet.update_named_params([(name, "uint8", [20_000]) for name in "abc"], broken())
    assert [server.paths[-1] for server in servers] == ["/resume"] * 3


def test_a_server_that_is_back_gets_a_group_of_its_own(generation, fleet, engine, servers, formed):
    """The old communicator is destroyed, as when a server is removed."""
    old = servers[1].communicator
    engine.lose(servers[1].url, "killed")
    sync_weights(generation, fleet)
    assert len(formed) == 3
    engine.members[servers[1].url].state = State.RETURNED
    sync_weights(generation, fleet)
    assert [url for url, _ in formed[3:]] == [servers[1].url]
    assert old.disabled
    assert torch.equal(torch.cat(servers[1].received), merged_bytes(generation))
    assert engine.states()[servers[1].url] is State.UP
    fleet.leave(servers[1].url)
    assert servers[1].communicator.disabled
    for url in fleet.base_urls:
        fleet.leave(url)
    assert all(communicator.disabled for _, communicator in formed)


def test_a_server_that_waits_is_given_the_weights_of_the_last_sync(generation, fleet, engine, servers):
    """The version does not change, because the rollout continues with it."""
    engine.lose(servers[1].url, "killed")
    sync_weights(generation, fleet)
    servers[0].posts.clear()
    member = engine.members[servers[1].url]
    member.state, member.waits = State.RETURNED, True
    fleet.catch_up(metadata_of(generation), generation._iter_named_params())
    assert (member.version, member.state, member.waits) == (1, State.UP, False)
    assert torch.equal(torch.cat(servers[1].received), merged_bytes(generation))
    assert not servers[0].posts
    assert not is_merged(generation)


def test_update_that_a_lost_trainer_left_open(generation, fleet, engine, servers):
    """A killed trainer has started an update, which `/start_weight_update` rejects once."""

    async def finish():
        servers[0].answers.pop("/start_weight_update", None)

    servers[0].acts["/finish_weight_update"] = finish
    servers[0].answers["/start_weight_update"] = (500, {"error": "A weight update is already active"})
    sync_weights(generation, fleet)
    assert engine.members[servers[0].url].version == 1


# The rendezvous: the store is vLLM's own, NCCL is not there


class Joined(BlockingCommunicator):
    """Replaces `PyNcclCommunicator`, with one of vLLM's groups."""

    def __init__(self, group, device):
        super().__init__()
        self.group, self.device = group, device


@pytest.fixture
def rendezvous(monkeypatch, cuda, servers, fleet_of):
    """A fleet whose servers connect back, each as its only worker."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.utils import StatelessProcessGroup

    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Joined)

    def join(server):
        (info,) = [body["init_info"] for path, body in server.posts if path == "/init_weight_transfer_engine"]
        StatelessProcessGroup.create(info["master_address"], info["master_port"], 1, info["world_size"])

    for server in servers:
        server.acts["/init_weight_transfer_engine"] = partial(asyncio.to_thread, join, server)
    return fleet_of([server.url for server in servers], timeout_s=5.0)[0]


def init_infos(servers):
    posts = [post for server in servers for post in server.posts]
    return [body["init_info"] for path, body in posts if path == "/init_weight_transfer_engine"]


def test_groups_are_formed_on_ports_of_their_own(rendezvous, servers):
    """From the given port on. Other runs on this machine may use the same range."""
    rendezvous.init_communicator()
    infos = init_infos(servers)
    ports = [info["master_port"] for info in infos]
    assert len(set(ports)) == 3
    assert min(ports) >= GROUP_PORT
    assert {(info["master_address"], info["rank_offset"], info["world_size"], info["packed"]) for info in infos} == {
        ("127.0.0.1", 1, 2, True)
    }


def test_a_server_that_can_not_reach_the_trainer_is_told_in_seconds(rendezvous, servers, monkeypatch):
    """The server would try for five minutes, while the trainer waits."""
    monkeypatch.setattr(nccl, "DIAL_BACK_S", 0.3)
    servers[1].acts["/init_weight_transfer_engine"] = partial(silent, servers[1])
    with pytest.raises(WeightSyncError, match=r"VLLM_HOST_IP.*NCCL_SOCKET_IFNAME.*firewall") as error:
        rendezvous.init_communicator()
    (info,) = init_infos(servers[1:2])
    assert f"{servers[1].url} did not reach the trainer at 127.0.0.1:{info['master_port']}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_server_that_refuses_to_join(rendezvous, servers):
    del servers[2].acts["/init_weight_transfer_engine"]
    servers[2].answers["/init_weight_transfer_engine"] = (500, {"error": "Weight transfer not configured"})
    with pytest.raises(WeightSyncError, match=rf"{servers[2].url} answered 500: Weight transfer not configured"):
        rendezvous.init_communicator()


def test_a_worker_that_never_joins(rendezvous, monkeypatch):
    """NCCL waits for it. After `vllm_server_timeout`, the group's communicator is aborted."""
    from vllm.distributed.device_communicators import pynccl

    missing = threading.Event()
    made = []

    class Stuck(Joined):
        def __init__(self, group, device):
            made.append(self)
            self.comm, self.left = "comm", threading.Event()
            missing.wait(30)

        def destroy(self):
            self.left.set()

    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Stuck)
    monkeypatch.setattr(nccl, "GRACE_S", 0.1)
    rendezvous._timeout_s = 1.0
    with pytest.raises(WeightSyncError, match=r"NCCL did not finish within 1 s\. Waiting for http.* to join"):
        rendezvous.init_communicator()
    assert all(communicator.left.wait(5) for communicator in made)
    missing.set()


def test_nccl_refuses_the_trainer_and_a_server_on_one_gpu(rendezvous, monkeypatch):
    from vllm.distributed.device_communicators import pynccl

    class Duplicate(Joined):
        def __init__(self, group, device):
            raise RuntimeError("NCCL error: invalid usage")

    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Duplicate)
    with pytest.raises(WeightSyncError, match=r"invalid usage\. .*share a GPU.*weight_sync='filesystem'"):
        rendezvous.init_communicator()


def test_a_trainer_without_nccl(rendezvous, monkeypatch):
    class Without(Joined):
        def __init__(self, group, device):
            super().__init__(group, device)
            self.disabled = True

    from vllm.distributed.device_communicators import pynccl

    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Without)
    with pytest.raises(ConfigurationError, match="no NCCL library"):
        rendezvous.init_communicator()


def test_an_address_that_is_not_this_machines(rendezvous, monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "192.0.2.1")
    with pytest.raises(ConfigurationError, match=r"can't listen at 192.0.2.1:51216 .*`VLLM_HOST_IP`"):
        rendezvous.init_communicator()


def test_no_port_is_free(monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    with pytest.raises(ConfigurationError, match=r"`vllm_group_port` \(65536\)"):
        listen(65536)
    first = listen(50_000)
    second = listen(50_000)
    assert first.getsockname()[1] < second.getsockname()[1]
    first.close()
    second.close()
