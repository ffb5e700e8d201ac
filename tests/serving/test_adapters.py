"""
Uploads of adapters: what is taken, where it is written, and what is refused. `tests/weights/test_adapter_sync.py` has
a real server.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from trl_darts.engines.vllm_api import UPLOADS
from trl_darts.serving import adapters
from trl_darts.serving.adapters import TakeAdapters
from trl_darts.weights import ADAPTER, ADAPTER_CONFIG


KEY = {"Authorization": "Bearer s3cret"}
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], "bias": "none"}
MATRIX = {"base_model.model.q_proj.lora_A.weight": torch.ones(1, 4)}


def adapter(tensors=MATRIX, **config):
    return save(tensors, {ADAPTER_CONFIG: json.dumps({**CONFIG, **config})})


@pytest.fixture
def client(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def answer(request):
        return PlainTextResponse("yours")

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST", "PUT"])])
    app.add_middleware(TakeAdapters)
    with TestClient(app) as client:
        yield client


def files(tmp_path):
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())


def test_taken(client, tmp_path):
    """An upload of the same name replaces the first."""
    for value in (1.0, 2.0):
        data = adapter({"a.lora_A.weight": torch.full((1, 4), value)})
        answer = client.put(f"{UPLOADS}run-v12", content=data, headers=KEY)
        assert answer.status_code == 200
        path = answer.json()["path"]
        with open(f"{path}/{ADAPTER}", "rb") as file:
            assert file.read() == data
        with open(f"{path}/{ADAPTER_CONFIG}") as file:
            assert json.load(file) == CONFIG
    assert len(files(tmp_path)) == 2


def test_other_paths_are_the_servers(client):
    assert client.get("/v1/models", headers=KEY).text == "yours"
    assert client.post(f"{UPLOADS}run-v12", headers=KEY).text == "yours"


def test_the_oldest_are_removed(client, tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 2)
    for version in range(4):
        client.put(f"{UPLOADS}v{version}", content=adapter(), headers=KEY)
    assert {name.split("/")[1] for name in files(tmp_path)} == {"v2", "v3"}


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_the_key_is_needed(client, tmp_path, headers):
    assert client.put(f"{UPLOADS}v1", content=adapter(), headers=headers).status_code == 401
    assert files(tmp_path) == []


@pytest.mark.parametrize("name", ["", ".hidden", "../v1", "a/b", "a%2Fb", "%2e%2e%2fv1", "v 1", "x" * 101])
def test_no_name_leaves_the_directory(client, tmp_path, name):
    answer = client.put(UPLOADS + name, content=adapter(), headers=KEY)
    assert answer.status_code == 400 or answer.text == "yours"
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must be a safetensors file"),
        (b"PK" * 100, "must be a safetensors file"),
        (save(MATRIX), "in its metadata"),
        (save(MATRIX, {ADAPTER_CONFIG: "[]"}), "must be an object"),
        (adapter(auto_mapping={}), "must be an object with some of peft_type"),
        (adapter(r="1"), "must have r of type int"),
        (adapter(r=True), "must have r of type int"),
        (adapter({}), "must have matrices"),
        (adapter({**MATRIX, "lm_head.weight": torch.ones(4)}), "and nothing else"),
    ],
)
def test_nothing_but_an_adapter(client, tmp_path, data, message):
    answer = client.put(f"{UPLOADS}v1", content=data, headers=KEY)
    assert answer.status_code == 400
    assert message in answer.json()["error"]
    assert files(tmp_path) == []


def test_size_is_bounded(client, tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "MAX_BYTES", 100)
    answer = client.put(f"{UPLOADS}v1", content=adapter(), headers=KEY)
    assert (answer.status_code, "may have 100 bytes" in answer.json()["error"]) == (413, True)
    assert files(tmp_path) == []


def test_without_a_key_the_server_does_not_start(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="`VLLM_API_KEY` must be set"):
        TakeAdapters(None)
