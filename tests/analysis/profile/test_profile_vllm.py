"""`trl-darts profile` with a real server, from the command to the trainer's configuration."""

import asyncio
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from trl_darts import DARTSGRPOConfig
from trl_darts.analysis.profile.probe import ServerProbe
from trl_darts.analysis.profile.profiled_server import describe_server
from trl_darts.cli import app
from trl_darts.engines.vllm_api import VLLMServer, new_session
from trl_darts.policy import LatencyCurve, LatencyProfile


pytestmark = pytest.mark.vllm
# The machine may be busy with other tests: what is predicted is compared with what is measured, to a factor.
FACTOR = 3.0


@pytest.fixture(scope="module")
def profiled(vllm_server, tmp_path_factory):
    """The file of a small profile, and what the command printed."""
    path = tmp_path_factory.mktemp("profile") / "latency.json"
    args = ["--output", str(path), "--batch-sizes", "1,4,16", "--context-lengths", "32,1024", "--repeats", "2"]
    preemptions = vllm_server.metric("vllm:num_preemptions_total")
    result = CliRunner().invoke(app, ["profile", vllm_server.base_url, *args])
    assert result.exit_code == 0, result.output
    assert vllm_server.metric("vllm:num_preemptions_total") == preemptions
    return path, result


def test_file_holds_what_was_measured(profiled, vllm_server):
    path, result = profiled
    profile = LatencyProfile.load(path)
    pairs = {(point.batch_size, point.context_length) for point in profile.points}
    assert pairs == {(size, length) for size in (1, 4, 16) for length in (32, 1024)}
    for point in profile.points:
        generated = point.context_tokens / point.batch_size - point.context_length
        assert 16 <= generated <= 1000  # the middle of the window
        assert 1e-4 < point.seconds < 1.0
    about = profile.metadata
    assert about["model"] == vllm_server.model
    assert about["vllm_version"].count(".") >= 2
    assert (about["tensor_parallel_size"], about["max_model_len"]) == (1, 2048)
    assert about["hardware"]
    assert about["kv_cache_tokens"] > 10_000
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "latency_curve" in result.stdout


def test_fit_predicts_how_long_real_requests_take(profiled, vllm_server):
    """End to end, without our measurement: one request of 200 tokens, prompt included."""
    profile = LatencyProfile.load(profiled[0])
    body = {"model": vllm_server.model, "prompt": [40] * 64, "max_tokens": 200, "ignore_eos": True, "temperature": 1}
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        vllm_server.request("/v1/completions", body)
        seconds.append(time.perf_counter() - start)
    predicted = profile.prefill(64) + 200 * profile.surface(1, 164)
    assert min(seconds) / FACTOR < predicted < min(seconds) * FACTOR


def test_prompts_that_are_timed_are_not_cached(profiled, vllm_server):
    """Not even in a second profile with the same seed, whose prompts are those of the first."""

    async def prefill() -> None:
        async with new_session() as session:
            server = VLLMServer(vllm_server.base_url, session)
            await ServerProbe(server, await describe_server(server), np.random.default_rng(2)).prefill(512)

    hits = []
    for _ in range(2):
        before = vllm_server.metric("vllm:prefix_cache_hits_total")
        asyncio.run(prefill())
        hits.append(vllm_server.metric("vllm:prefix_cache_hits_total") - before)
    assert hits == [0, 0]


def test_the_trainer_takes_the_file_and_the_server_is_idle_afterwards(profiled, vllm_server, tmp_path):
    path, _ = profiled
    config = DARTSGRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, latency_curve=str(path))
    curve = config.load_latency_curve()
    assert curve == LatencyCurve.load(path)
    assert (curve.knots[0], curve.knots[-1]) == (1, 16)
    deadline = time.monotonic() + 10
    while vllm_server.num_running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert vllm_server.num_running() == 0
