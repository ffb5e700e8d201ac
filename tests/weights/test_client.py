"""Clients of servers on this machine, in an environment with a proxy that takes no connections, and no `no_proxy`."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from aiohttp import web

from tests.engines.fake_server import answer, completion, fake_server
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.engines.check import WayBack, check_servers
from trl_darts.errors import GenerationError
from trl_darts.scheduling import GroupPlan, Scheduler, ScheduleSettings
from trl_darts.weights.client import BlockingVLLMClient, image_features


PROXY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for each in (name, name.upper()):
            monkeypatch.setenv(each, PROXY)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def routes(keys: list, status: int = 200) -> dict:
    async def handle(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        if request.method == "POST":
            return await answer(completion([4]))
        if request.path == "/server_info":
            config = {"model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"}}
            return web.json_response({"vllm_config": config})
        return web.json_response({"data": [{"id": "served", "max_model_len": 64}]}, status=status)

    paths = ("GET /health", "GET /v1/models", "GET /server_info", "GET /version", "POST /v1/completions")
    return dict.fromkeys(paths, handle)


def test_the_engine():
    with fake_server(routes([])) as url:
        engine = VLLMServerEngine([url])
        scheduler = Scheduler(ScheduleSettings("grpo", 1).policies(), 1)
        body = {"model": "m", "max_tokens": 4, "logprobs": 0}
        (group,) = engine.run(scheduler, [GroupPlan(0, 1)], {0: [ServerPrompt([5])]}, body).groups
        engine.close()
    assert group.rows[0].tokens == [4]


def test_the_client_of_trl(tmp_path, monkeypatch):
    """For a `rollout_func`, for images, and for TRL's question after the log-probs. `.netrc` would replace the key."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login someone password else\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    keys: list = []
    with fake_server(routes(keys)) as url:
        engine = VLLMServerEngine([url], api_key="secret")
        client = BlockingVLLMClient(engine, url)
        assert client.model == "served"
        assert client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
        engine.close()
    assert set(keys) == {"Bearer secret"}


def test_the_check_command():
    with fake_server(routes([])) as url:
        (found,) = check_servers([url], WayBack("secret"), None, 5.0)
    assert found.model == "served"


def test_a_server_that_is_broken_is_passed_over_for_the_next_one():
    """TRL's own check waits for ever if a server answers 503."""
    with fake_server(routes([], status=503)) as url:
        engine = VLLMServerEngine([url])
        with pytest.raises(GenerationError, match=f"{url} answered 503"):
            image_features(engine, [url], [])
        engine.close()


def test_that_the_environment_has_a_proxy():
    with fake_server(routes([])) as url, pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(f"{url}/health", timeout=5)
