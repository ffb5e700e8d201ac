"""Reading what a server reports about itself, and the errors of servers that can't be measured."""

import asyncio
import math
from typing import Any

import pytest
from aiohttp import web

from tests.engines.fake_server import fake_server
from trl_darts.analysis.profile import profiled_server
from trl_darts.analysis.profile.profiled_server import (
    ProfiledServer,
    describe_server,
    hardware_of,
    kv_cache_tokens,
    read_clock,
    with_server_info,
)
from trl_darts.engines.vllm_api import VLLMServer, new_session
from trl_darts.errors import ConfigurationError

from .builders import FakeVLLM, facts, metrics


INFO = {
    "vllm_config": {
        "parallel_config": {"tensor_parallel_size": 2, "data_parallel_size": 2},
        "scheduler_config": {"max_num_seqs": 128},
        "model_config": {"dtype": "torch.bfloat16"},
    },
    "system_env": {"nvidia_gpu_models": "GPU 0: NVIDIA H100\nGPU 1: NVIDIA H100\n"},
}


def ask(url: str, question=describe_server) -> Any:
    async def run() -> Any:
        async with new_session() as session:
            return await question(VLLMServer(url, session))

    return asyncio.run(run())


def answers(text: str, status: int = 200):
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    return handler


def test_a_server_without_development_endpoints() -> None:
    with fake_server(FakeVLLM().routes()) as url:
        learned = ask(url.replace("http://", "http://me:secret@"))
    assert learned == ProfiledServer(url, "tiny", 4096, 200, kv_cache_tokens=50_000, vllm_version="0.31.0")


def test_server_info_is_added() -> None:
    learned = with_server_info(facts(), INFO)
    assert (learned.max_num_seqs, learned.tensor_parallel_size, learned.data_parallel_size) == (256, 2, 2)
    assert (learned.dtype, learned.hardware) == ("bfloat16", "2 x NVIDIA H100")


@pytest.mark.parametrize(
    ("system_env", "hardware"),
    [
        (
            {"nvidia_gpu_models": "GPU 0: NVIDIA A100 (UUID: GPU-1-2)\nGPU 1: NVIDIA L4"},
            "1 x NVIDIA A100, 1 x NVIDIA L4",
        ),
        ({"nvidia_gpu_models": None, "cpu_info": "CPU(s):  8\nModel name:   A CPU \n"}, "8 CPUs, A CPU"),
        ({"nvidia_gpu_models": "Could not collect", "cpu_info": ""}, None),
    ],
)
def test_hardware(system_env: dict[str, Any], hardware: str | None) -> None:
    assert hardware_of(system_env) == hardware


@pytest.mark.parametrize(("tokens", "expected"), [("4096", 4096), ("None", 1600), ("many", None)])
def test_kv_cache_is_told_or_computed_from_blocks(tokens: str, expected: int | None) -> None:
    assert kv_cache_tokens(metrics(tokens=tokens)) == expected
    assert kv_cache_tokens("") is None


def test_engines_of_one_server_add_up() -> None:
    text = metrics(seconds=10.0, generated=100, running=2, tokens="100")
    both = text + text.replace('engine="0"', 'engine="1"')
    with fake_server({"GET /metrics": answers(both)}) as url:
        early = ask(url, read_clock)
    assert (early.num_running, early.seconds, early.tokens) == (4, 20.0, 200.0)
    assert kv_cache_tokens(both) == 200
    with fake_server({"GET /metrics": answers(metrics(seconds=22.0, generated=600))}) as url:
        assert ask(url, read_clock).seconds_per_token_since(early) == pytest.approx(0.005)
    assert math.isnan(early.seconds_per_token_since(early))


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({"GET /v1/models": answers("Unauthorized", 401)}, r"answered 401: .*Set VLLM_API_KEY"),
        ({"POST /v1/completions": answers("Unauthorized", 401)}, r"answered 401: .*Set VLLM_API_KEY"),
        (
            {"GET /v1/models": answers("<html>401</html>")},
            r"what answers is none \(.* invalid JSON.*Correct the address",
        ),
        ({"GET /v1/models": answers("at most 401 tokens", 400)}, r"what answers is none .*Correct the address"),
    ],
)
def test_what_is_no_server_is_told(routes: dict, message: str) -> None:
    with (
        fake_server({**FakeVLLM().routes(), **routes}) as url,
        pytest.raises(ConfigurationError, match=message) as error,
    ):
        ask(url)
    assert str(error.value).startswith(f"`url` ('{url}') must be the address of a running vLLM server")
    assert ("VLLM_API_KEY" in str(error.value)) == ("answered 401" in str(error.value))


def test_a_port_that_contains_401_is_no_missing_key() -> None:
    with pytest.raises(ConfigurationError, match=r"'http://127.0.0.1:401'.*trl-darts serve MODEL"):
        ask("http://127.0.0.1:401")


def test_a_refusal_that_contains_401_is_no_missing_key() -> None:
    routes = {**FakeVLLM().routes(), "POST /v1/completions": answers("no logit_bias beyond 401", 400)}
    with fake_server(routes) as url:
        assert ask(url).vocab_size == profiled_server.FALLBACK_VOCABULARY


def test_a_busy_server_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(profiled_server, "IDLE_TIMEOUT_S", 0.0)
    server = FakeVLLM()
    server.others = 3
    with fake_server(server.routes()) as url, pytest.raises(ConfigurationError, match=r"idle.* 3 requests running"):
        ask(url)


def test_metrics_from_before_an_abort_do_not_make_a_server_busy() -> None:
    server = FakeVLLM()
    server.stale = 32
    with fake_server(server.routes()) as url:
        assert ask(url).model == "tiny"


@pytest.mark.parametrize("name", ["inter_token_latency_seconds_sum", "generation_tokens_total"])
def test_a_server_without_statistics_is_refused(name: str) -> None:
    text = "\n".join(line for line in metrics().splitlines() if name not in line)
    routes = {**FakeVLLM().routes(), "GET /metrics": answers(text)}
    message = rf"`url`.* server with statistics.*`vllm:{name}`.*without `--disable-log-stats`"
    with fake_server(routes) as url, pytest.raises(ConfigurationError, match=message):
        ask(url)
