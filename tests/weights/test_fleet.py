"""Several servers behind one client. The last test kills one of them."""

from __future__ import annotations

import pytest
import requests

from tests.servers import free_port, start_vllm_server
from tests.weights.probes import MAX_ERROR, load_model, max_error, perturb, sync
from trl_darts.errors import WeightSyncError
from trl_darts.weights import FleetVLLMClient


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
