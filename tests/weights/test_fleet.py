"""Several servers behind one client. The last test kills one of them."""

from __future__ import annotations

import signal
import time

import pytest
import requests

from tests.servers import free_port, start_vllm_server
from tests.weights.probes import MAX_ERROR, load_model, max_error, named_params, perturb, sync
from trl_darts.errors import GenerationError, WeightSyncError
from trl_darts.weights import FleetVLLMClient, gloo_client


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def second(untied, tmp_path_factory):
    """Another server of the session's model."""
    log_path = tmp_path_factory.mktemp("second") / "server.log"
    with start_vllm_server(untied.model_dir, log_path=log_path) as server:
        yield server


@pytest.mark.parametrize("weight_sync", ["gloo", "filesystem"])
def test_all_servers_follow_the_trainer(untied, second, client_of, weight_sync, rng):
    model = load_model(untied.model_dir)
    fleet = client_of(weight_sync, untied, second)
    assert isinstance(fleet, FleetVLLMClient)
    assert (fleet.base_url, fleet.model) == (untied.base_url, untied.model)
    fleet.chunk_bytes = 40_000  # several chunks, some of one tensor
    for step in range(1, 4):
        perturb(model, rng)
        sync(fleet, model)
        assert fleet.version == step
        for server in (untied, second):
            assert max_error(server, model) <= MAX_ERROR
            assert server.request("/weight_info") == {"weight_version": f"v{step}"}


def test_generation_keeps_the_order(untied, second, client_of):
    fleet = client_of("filesystem", untied, second)
    prompts = [[index, index + 1] for index in range(3, 8)]
    output = fleet.generate(prompts, n=2, max_tokens=3)
    assert output["prompt_ids"] == prompts
    assert len(output["completion_ids"]) == len(output["logprobs"]) == 10


def freeze(server, what):
    for process in server.session():
        process.send_signal(what)


def test_server_that_freezes_in_the_middle_is_not_waited_for(untied, second, client_of, rng, monkeypatch):
    """The other gets its weights; the frozen one is good for the next sync once it goes on."""
    monkeypatch.setattr(gloo_client, "SEND_TIMEOUT_S", 2.0)
    model = load_model(untied.model_dir)
    client = client_of("gloo", untied, second)
    sync(client, model)
    perturb(model, rng)
    metadata, params = named_params(model)

    def freezing():
        for index, param in enumerate(params):
            if index == 5:
                freeze(second, signal.SIGSTOP)
            yield param

    start = time.perf_counter()
    client.chunk_bytes = 1  # tensor by tensor
    with pytest.raises(WeightSyncError, match=f"{second.base_url}.*Timed out waiting 20") as error:
        client.update_named_params(metadata, freezing())
    assert untied.base_url not in str(error.value)
    assert time.perf_counter() - start < 45  # 2 s, 5 s for its last words, 15 s for leaving it in order
    assert max_error(untied, model) <= MAX_ERROR
    assert client.behind == [second.base_url]
    freeze(second, signal.SIGCONT)
    perturb(model, rng)
    sync(client, model)
    assert max_error(untied, model) <= MAX_ERROR
    assert max_error(second, model) <= MAX_ERROR


def test_weights_are_written_also_when_no_server_is_there_to_take_them(untied, client_of, rng):
    """It gets them when it is back, as long as the trainer has not gone on."""
    model = load_model(untied.model_dir)
    fleet = FleetVLLMClient([client_of("filesystem", untied)])
    fleet.excluded = {untied.base_url}
    perturb(model, rng)
    sync(fleet, model)
    assert fleet.behind == [untied.base_url]
    assert fleet.refresh(untied.base_url, [], None)
    assert fleet.behind == []
    assert max_error(untied, model) <= MAX_ERROR


def test_server_that_is_back_takes_part_in_the_next_sync(untied, second, client_of, rng):
    model = load_model(untied.model_dir)
    fleet = client_of("gloo", untied, second)
    fleet.excluded = {second.base_url}
    perturb(model, rng)
    sync(fleet, model)
    assert fleet.behind == [second.base_url]
    assert fleet.rejoin(second.base_url)
    fleet.excluded = set()
    perturb(model, rng)
    sync(fleet, model)
    assert fleet.behind == []
    assert max_error(second, model) <= MAX_ERROR


def test_images_are_processed_by_the_first_server_that_answers():
    class Client:
        def __init__(self, base_url, error=None):
            self.base_url, self.error, self.group_port = base_url, error, 0

        def image_features(self, images):
            if self.error is not None:
                raise self.error
            return [self.base_url for _ in images]

    lost = requests.ConnectionError("refused")
    fleet = FleetVLLMClient([Client("a", lost), Client("b"), Client("c")])
    assert fleet.image_features([None]) == ["b"]
    fleet.excluded = {"b"}
    assert fleet.image_features([None]) == ["c"]
    fleet.excluded = {"b", "c"}
    with pytest.raises(GenerationError, match="a: ConnectionError: refused"):
        fleet.image_features([None])


def test_lost_server_does_not_keep_the_others_from_new_weights(untied, second, client_of, rng):
    model = load_model(untied.model_dir)
    fleet = client_of("gloo", second, untied)
    second.kill()
    perturb(model, rng)
    with pytest.raises(WeightSyncError, match=second.base_url):
        sync(fleet, model)
    assert max_error(untied, model) <= MAX_ERROR
    assert fleet.clients[1].version == fleet.version == 1
    assert fleet.clients[0].version == 0


def test_dead_server(client_of, second):
    """Runs after the server was killed: TRL's own error says that it can't be reached."""
    with pytest.raises(requests.ConnectionError, match="can't be reached"):
        client_of("gloo", second, group_port=free_port())
