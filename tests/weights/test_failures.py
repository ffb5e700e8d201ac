"""
What happens when a sync fails, on real servers.

Invariants: the caller gets a `WeightSyncError` or its own iterator's error, never a hang; the iterator is run to its
end; the server is not paused, still answers, and the next sync brings it to the trainer's weights.
"""

from __future__ import annotations

import socket

import pytest
import requests

from tests.servers import free_port, start_vllm_server
from tests.weights.probes import MAX_ERROR, PROBE, load_model, max_error, named_params, perturb, server_logprobs, sync
from trl_darts.errors import ConfigurationError, WeightSyncError
from trl_darts.weights import make_client


pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


class Walked:
    """An iterator that can break, and knows how far it was walked."""

    def __init__(self, params, break_at=None):
        self.params, self.break_at, self.num_taken = params, break_at, 0

    def __iter__(self):
        for index, param in enumerate(self.params):
            if index == self.break_at:
                raise KeyError("the trainer's own error")
            self.num_taken += 1
            yield param


def assert_recovers(server, client, model):
    """Alive, resumed, and good for the next sync."""
    assert server.request("/is_paused") == {"is_paused": False}
    server_logprobs(server, PROBE)  # a generate after a failed update kills an engine that was not restored
    assert server.request("/weight_info")["weight_version"].endswith("-incomplete")
    sync(client, model)
    assert max_error(server, model) <= MAX_ERROR


@pytest.mark.parametrize("model_kind", ["untied", "tied"])
def test_trainer_breaks_in_the_middle(request, client_of, model_kind, rng):
    server = request.getfixturevalue(model_kind)
    model = load_model(server.model_dir)
    client = client_of("gloo", server)
    perturb(model, rng)
    metadata, params = named_params(model)
    with pytest.raises(WeightSyncError, match="the trainer's own error"):
        client.update_named_params(metadata, iter(Walked(params, break_at=5)))  # in the middle of a fused layer
    assert_recovers(server, client, model)


def test_filesystem_trainer_breaks_in_the_middle(untied, client_of, rng):
    model = load_model(untied.model_dir)
    client = client_of("filesystem", untied)
    perturb(model, rng)
    metadata, params = named_params(model)
    with pytest.raises(KeyError, match="the trainer's own error"):
        client.update_named_params(metadata, iter(Walked(params, break_at=5)))  # before the server is touched
    sync(client, model)
    assert max_error(untied, model) <= MAX_ERROR


def test_server_refuses_a_tensor(untied, client_of, rng):
    """Its own words arrive, and the rest of the iterator is walked, for the processes that gather with us."""
    model = load_model(untied.model_dir)
    client = client_of("gloo", untied)
    perturb(model, rng)
    _, params = named_params(model)
    wrong = [(name, param[:-1] if "k_proj.weight" in name else param) for name, param in params]
    announced = [(name, "float32", list(param.shape)) for name, param in wrong]
    walked = Walked(wrong)
    with pytest.raises(WeightSyncError, match=r"/update_weights.*failed \(500\)"):
        client.update_named_params(announced, iter(walked))
    assert walked.num_taken == len(params)
    assert_recovers(untied, client, model)


def test_tensor_that_was_not_announced(untied, client_of, rng):
    model = load_model(untied.model_dir)
    client = client_of("gloo", untied)
    metadata, params = named_params(model)
    with pytest.raises(WeightSyncError, match="not the one that was announced"):
        client.update_named_params(metadata, iter(params[::-1]))
    with pytest.raises(WeightSyncError, match="shorter"):
        client.update_named_params(metadata, iter(params[:-1]))
    with pytest.raises(WeightSyncError, match="1 tensors were not announced"):
        client.update_named_params(metadata[:-1], iter(params))
    sync(client, model)
    assert max_error(untied, model) <= MAX_ERROR


def test_update_that_a_lost_trainer_left_open(untied, client_of, rng):
    """It started an update and paused the server, then it was killed."""
    model = load_model(untied.model_dir)
    lost = client_of("gloo", untied)
    untied.request("/pause?mode=keep", {})
    untied.request("/start_weight_update", {})
    perturb(model, rng)
    client = client_of("gloo", untied)
    sync(client, model)
    lost.close_communicator()
    assert untied.request("/is_paused") == {"is_paused": False}
    assert max_error(untied, model) <= MAX_ERROR


def test_server_cannot_read_the_directory(untied, client_of, rng, monkeypatch):
    """The reload fails in the server; its layers are restored, and what was buffered does not count later."""
    from trl_darts.weights.directory import WeightDirectory

    model = load_model(untied.model_dir)
    client = client_of("filesystem", untied)
    write = WeightDirectory.write

    def spoiled(self, version, params):
        path = write(self, version, iter(list(params)[:5]))
        (path / "model-99999.safetensors").write_bytes(b"no checkpoint")
        return path

    monkeypatch.setattr(WeightDirectory, "write", spoiled)
    perturb(model, rng)
    with pytest.raises(WeightSyncError, match="under the same path"):
        sync(client, model)
    monkeypatch.undo()
    assert_recovers(untied, client, model)


def test_directory_that_can_not_be_written(untied, client_of, tmp_path):
    model = load_model(untied.model_dir)
    (tmp_path / "file").write_text("in the way")
    client = client_of("filesystem", untied, sync_dir=tmp_path / "file")
    with pytest.raises(WeightSyncError, match=r"`weight_sync_dir` \(.*file\)"):
        sync(client, model)


def test_directory_is_tidy(untied, client_of, tmp_path):
    model = load_model(untied.model_dir)
    client = client_of("filesystem", untied, sync_dir=tmp_path)
    for version in (1, 2):
        sync(client, model)
        assert [path.name for path in tmp_path.glob("*/*")] == [f"v{version}"]
    client.close_communicator()
    assert not list(tmp_path.iterdir())


def test_taken_port(untied, client_of):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(WeightSyncError, match=rf"`vllm_group_port` \({port}\)"):
            client_of("gloo", untied, group_port=port)


def test_next_trainer_of_the_process_takes_the_port_over(untied, client_of, rng):
    """A notebook's cell that is run again: the first trainer is still there, and not in use."""
    model = load_model(untied.model_dir)
    first = client_of("gloo", untied)
    second = client_of("gloo", untied, group_port=first.group_port)
    for client in (second, first):  # and the first can take it back
        perturb(model, rng)
        sync(client, model)
        assert max_error(untied, model) <= MAX_ERROR


def test_group_can_be_formed_again_on_its_port(untied, client_of, rng):
    model = load_model(untied.model_dir)
    client = client_of("gloo", untied)
    for _ in range(3):
        client.close_communicator()
        client.init_communicator("cpu")
    perturb(model, rng)
    sync(client, model)
    assert max_error(untied, model) <= MAX_ERROR


@pytest.fixture(scope="module")
def bare(tied_model_dir, tmp_path_factory):
    """A server without our plugin and without a weight-transfer engine."""
    log_path = tmp_path_factory.mktemp("bare") / "server.log"
    options = {"env": {"VLLM_PLUGINS": "none"}, "weight_transfer": None}
    with start_vllm_server(tied_model_dir, log_path=log_path, **options) as server:
        yield server


def test_server_without_plugin(bare, client_of, rng):
    """Gloo is refused with the remedy, and so is the directory, which would leave the LM head stale without a word."""
    with pytest.raises(ConfigurationError, match="pip install trl-darts"):
        client_of("gloo", bare)
    model = load_model(bare.model_dir)
    client = client_of("filesystem", bare)
    perturb(model, rng)
    with pytest.raises(WeightSyncError, match="pip install trl-darts"):
        sync(client, model)
    assert max_error(bare, model) > 10 * MAX_ERROR, (
        "vLLM repacks tied LM heads by itself now: `repack_tied_lm_heads` in trl_darts/weights/reload.py can go."
    )


def test_settings(untied, tmp_path):
    with pytest.raises(ConfigurationError, match=r"`weight_sync` \('mpi'\) must be one of"):
        make_client([untied.base_url], "mpi")
    with pytest.raises(ConfigurationError, match="needs a CUDA device"):
        make_client([untied.base_url], "nccl", "cpu")
    with pytest.raises(ConfigurationError, match="weight_sync_dir"):
        make_client([untied.base_url], "gloo", "cpu", sync_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="different addresses"):
        make_client([untied.base_url, untied.base_url])
    with pytest.raises(requests.ConnectionError, match="can't be reached"):
        make_client([f"http://127.0.0.1:{free_port()}"])
