"""What a server says of itself, and what is said where it can't be measured."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from tests.engines.fake_server import fake_server
from trl_darts.engines.vllm_api import VLLMServer, new_session
from trl_darts.errors import ConfigurationError
from trl_darts.profiling import ServerFacts
from trl_darts.profiling import facts as module
from trl_darts.profiling.facts import hardware_of, kv_cache_tokens, learn, with_server_info, without_credentials

from .builders import FakeVLLM, facts, metrics


INFO = {
    "vllm_config": {
        "parallel_config": {"tensor_parallel_size": 2, "data_parallel_size": 2},
        "scheduler_config": {"max_num_seqs": 128},
        "model_config": {"dtype": "torch.bfloat16"},
    },
    "system_env": {"nvidia_gpu_models": "GPU 0: NVIDIA H100\nGPU 1: NVIDIA H100\n"},
}


async def ask(url: str) -> ServerFacts:
    async with new_session() as session:
        return await learn(VLLMServer(url, session))


def test_a_server_without_development_endpoints(monkeypatch) -> None:
    monkeypatch.setattr(module, "_local_gpus", lambda: "1 x NVIDIA H100")
    with fake_server(FakeVLLM().routes()) as url:
        learned = asyncio.run(ask(url))
    assert learned == ServerFacts(
        url, "tiny", 4096, 200, kv_cache_tokens=50_000, vllm_version="0.31.0", hardware="1 x NVIDIA H100"
    )


def test_server_info_is_added() -> None:
    learned = with_server_info(facts(), INFO)
    assert (learned.max_num_seqs, learned.tensor_parallel_size, learned.data_parallel_size) == (256, 2, 2)
    assert (learned.dtype, learned.hardware) == ("bfloat16", "2 x NVIDIA H100")
    nothing = with_server_info(facts(), {})
    assert (nothing.max_num_seqs, nothing.dtype, nothing.hardware) == (None, None, None)


@pytest.mark.parametrize(
    ("system_env", "hardware"),
    [
        ({"nvidia_gpu_models": "GPU 0: NVIDIA A100\nGPU 1: NVIDIA L4"}, "1 x NVIDIA A100, 1 x NVIDIA L4"),
        ({"nvidia_gpu_models": "GPU 0: NVIDIA A100 (UUID: GPU-1-2)"}, "1 x NVIDIA A100"),
        ({"nvidia_gpu_models": None, "cpu_info": "CPU(s):  8\nModel name:   A CPU \n"}, "8 CPUs, A CPU"),
        ({"nvidia_gpu_models": "Could not collect", "cpu_info": ""}, None),
        ({}, None),
    ],
)
def test_hardware(system_env: dict[str, Any], hardware: str | None) -> None:
    assert hardware_of(system_env) == hardware


@pytest.mark.parametrize(
    ("tokens", "expected"), [("4096", 4096), ("None", 1600), ("many", None)], ids=["told", "from blocks", "odd"]
)
def test_kv_cache(tokens: str, expected: int | None) -> None:
    assert kv_cache_tokens(metrics(tokens=tokens)) == expected
    assert kv_cache_tokens("") is None


def test_caches_of_data_parallel_engines_add_up() -> None:
    two = 'vllm:cache_config_info{engine="%d",kv_cache_size_tokens="100"} 1.0\n'
    assert kv_cache_tokens(two % 0 + two % 1) == 200


def test_no_credentials_in_files() -> None:
    assert without_credentials("http://me:secret@host:8000/x") == "http://host:8000/x"
    assert without_credentials("http://host:8000") == "http://host:8000"


async def unauthorized(request: web.Request) -> web.Response:
    return web.json_response({"error": "Unauthorized"}, status=401)


async def page(request: web.Request) -> web.Response:
    return web.Response(text="<html>welcome</html>")


async def empty(request: web.Request) -> web.Response:
    return web.json_response({"data": []})


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({"GET /v1/models": unauthorized}, "answered 401: .*Set VLLM_API_KEY"),
        ({"GET /v1/models": page}, r"what answers is none \(JSONDecodeError.*Correct the address"),
        ({"GET /v1/models": empty}, r"what answers is none \(IndexError"),
        ({}, r"it has no `/v1/models`, and an address ends before `/v1`"),
    ],
)
def test_what_is_no_server_is_told(routes: dict, message: str) -> None:
    with fake_server(routes) as url, pytest.raises(ConfigurationError, match=message) as caught:
        asyncio.run(ask(url))
    assert str(caught.value).startswith(f"`url` ('{url}') must be the address of a running vLLM server")


def test_unreachable() -> None:
    with pytest.raises(ConfigurationError, match=r"'http://127.0.0.1:9'.*trl-darts serve MODEL"):
        asyncio.run(ask("http://127.0.0.1:9"))


def test_a_busy_server_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(module, "IDLE_TIMEOUT_S", 0.0)
    server = FakeVLLM()
    server.others = 3
    with (
        fake_server(server.routes()) as url,
        pytest.raises(ConfigurationError, match=r"idle server.* 3 requests running"),
    ):
        asyncio.run(ask(url))


def test_a_server_without_statistics_is_refused() -> None:
    server = FakeVLLM()

    async def nothing(request: web.Request) -> web.Response:
        return web.Response(text="# HELP python_info Python platform information\n")

    with (
        fake_server({**server.routes(), "GET /metrics": nothing}) as url,
        pytest.raises(ConfigurationError, match=r"`url`.* server with statistics.*without `--disable-log-stats`"),
    ):
        asyncio.run(ask(url))
