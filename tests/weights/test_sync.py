"""
Weight sync against real servers.

Invariant: after every sync, and not only after the first, the server computes what the trainer's model computes.
"""

from __future__ import annotations

import threading

import pytest
import torch

from tests.weights.probes import (
    MAX_ERROR,
    PROBE,
    greedy_error,
    load_model,
    max_error,
    model_logprobs,
    perturb,
    server_logprobs,
    sync,
)


pytestmark = pytest.mark.vllm
WAYS = ["gloo", "filesystem"]


@pytest.fixture(params=["untied", "tied"])
def server(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("weight_sync", WAYS)
def test_server_follows_the_trainer(server, client_of, weight_sync, rng):
    model = load_model(server.model_dir)
    client = client_of(weight_sync, server)
    for step in range(1, 5):
        perturb(model, rng)
        assert max_error(server, model) > 10 * MAX_ERROR  # the step is visible, so agreement means something
        sync(client, model)
        assert max_error(server, model) <= MAX_ERROR
        assert greedy_error(server, model) <= MAX_ERROR
        assert client.version == step
        assert server.request("/weight_info") == {"weight_version": f"v{step}"}
        assert server.request("/is_paused") == {"is_paused": False}


def test_stale_prefix_cache_is_not_used(untied, client_of, rng):
    """A prompt that was cached under the old weights is computed anew, without a reset by the caller."""
    model = load_model(untied.model_dir)
    client = client_of("gloo", untied)
    server_logprobs(untied, PROBE)
    greedy_error(untied, model)  # fills the cache, and hits it next time
    perturb(model, rng)
    client.update_model_params(model)
    assert greedy_error(untied, model) <= MAX_ERROR


@pytest.mark.parametrize("weight_sync", WAYS)
def test_running_requests_survive_a_sync(untied, client_of, weight_sync, rng):
    """They freeze, and go on under the new weights with all their keys and values computed anew."""
    model = load_model(untied.model_dir)
    client = client_of(weight_sync, untied)
    payload = {
        "model": untied.model,
        "prompt": PROBE,
        "max_tokens": 600,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    answers = []
    request = threading.Thread(target=lambda: answers.append(untied.request("/v1/completions", payload)))
    request.start()
    while untied.metric("vllm:num_requests_running") < 1:
        assert request.is_alive()
    perturb(model, rng)
    client.update_model_params(model)
    assert request.is_alive(), "the request was to be running during the sync"
    request.join()
    choice = answers[0]["choices"][0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 600)
    last = model_logprobs(model, PROBE + choice["token_ids"])[-5:]
    torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"][-5:]), last, atol=MAX_ERROR, rtol=0)


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0"])
@pytest.mark.parametrize("weight_sync", WAYS)
def test_names_of_this_machine(untied, weight_sync, host, rng):
    """TRL's default host is `0.0.0.0`."""
    from tests.servers import free_port
    from trl_darts.weights import make_client

    model = load_model(untied.model_dir)
    client = make_client([untied.base_url.replace("127.0.0.1", host)], weight_sync, group_port=free_port())
    client.init_communicator("cpu")
    perturb(model, rng)
    sync(client, model)
    client.close_communicator()
    assert max_error(untied, model) <= MAX_ERROR


def test_bfloat16_trainer(untied, client_of, rng):
    """The server keeps its own dtype; what is sent is the trainer's."""
    model = load_model(untied.model_dir)
    perturb(model, rng)
    model = model.to(torch.bfloat16)
    sync(client_of("gloo", untied), model)
    assert max_error(untied, model.float()) <= MAX_ERROR


def test_trl_single_parameter_updates(untied, client_of, rng):
    """TRL's `weight_update` context works on our clients too."""
    model = load_model(untied.model_dir)
    client = client_of("gloo", untied)
    perturb(model, rng)
    with client.weight_update():
        for name, param in model.named_parameters():
            client.update_named_param(name, param.data)
    client.reset_prefix_cache()
    assert max_error(untied, model) <= MAX_ERROR
