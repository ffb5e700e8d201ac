"""Every path except `/health` requires the key. `tests/test_trainer_server.py` has a real server."""

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from trl_darts.serving.middleware import RequireKey


METHODS = ["GET", "POST", "OPTIONS"]


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")

    async def answer(request):
        return PlainTextResponse("yours")

    routes = [Route("/{path:path}", answer, methods=METHODS)]
    app = Starlette(routes=[Mount("/metrics", routes=routes), *routes])
    app.add_middleware(RequireKey)
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize("path", ["/server_info", "/metrics", "/metrics/", "/v1/models", "/", "//health", "/health/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "given", [None, "", "s3cret", "Basic s3cret", "Bearer", "Bearer ", "Bearer wröng", "Bearer s3"]
)
def test_refused(client, path, method, given):
    headers = {} if given is None else {"Authorization": given.encode()}
    answer = client.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert "VLLM_API_KEY" in answer.json()["error"]
    assert "s3cret" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/health", {}),
        ("OPTIONS", "/pause", {}),
        ("POST", "/pause", {"Authorization": "Bearer s3cret"}),
        ("GET", "/metrics/", {"authorization": "bearer s3cret"}),
    ],
)
def test_let_in(client, method, path, headers):
    assert client.request(method, path, headers=headers).text == "yours"


@pytest.mark.parametrize("key", [None, ""])
def test_without_a_key_the_server_does_not_start(monkeypatch, key):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ValueError, match="`VLLM_API_KEY` must be set"):
        RequireKey(None)
