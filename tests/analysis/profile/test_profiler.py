"""Rounds, noise, points that can't be measured, several servers, and the picture. The probes have a known latency."""

import asyncio
import re
from collections import Counter

import numpy as np
import pytest
from aiohttp import web

from tests.engines.fake_server import fake_server
from trl_darts.analysis.profile import ProfileOptions, ProfileResult, profile_servers, profiler
from trl_darts.analysis.profile.display import draw, summarize, warn
from trl_darts.analysis.profile.grid import Grid, GridPoint
from trl_darts.analysis.profile.profiled_server import check_alike, metadata_of
from trl_darts.errors import ConfigurationError, GenerationError
from trl_darts.policy import LatencySurface

from .builders import GRID, FakeProbe, FakeVLLM, facts, rng, seconds_of


ABOUT = {"model": "tiny", "servers": ["http://a", "http://b"], "hardware": None, "vllm_version": "0.31.0"}


def measure(probes: list[FakeProbe], grid: Grid = GRID, repeats: int = 3, report=lambda *_: None) -> ProfileResult:
    measured = asyncio.run(profiler.measure(probes, grid, repeats, rng(), report))
    return profiler.fit(measured, {**ABOUT, "servers": ABOUT["servers"][: len(probes)]})


def test_each_point_is_measured_in_each_round_in_random_order() -> None:
    log: list = []
    reports: list = []
    measure([FakeProbe(log), FakeProbe(log)], report=lambda *args: reports.append(args))
    assert [done for done, _, _ in reports] == list(range(len(log) + 1))
    assert {total for _, total, _ in reports} == {len(log)}
    num_warm_ups = 6 * 2
    assert [point.context_length for _, point in log[:num_warm_ups]] == [2048] * num_warm_ups
    rounds = np.array_split(np.arange(num_warm_ups, len(log)), 3)
    tasks = [[log[i][1] for i in part] for part in rounds]
    for part in tasks:
        assert Counter(part) == dict.fromkeys([*GRID.points, *GRID.prefill_lengths], 2)
        assert all(first == second for first, second in zip(part[::2], part[1::2], strict=True))  # side by side
    assert tasks[0] != tasks[1] != tasks[2]


def test_the_fit_predicts_in_spite_of_disturbances() -> None:
    noise = rng()

    def disturbed() -> float:  # by another process in a quarter of the time, and by up to 2 % always
        return (1 + 0.02 * noise.random()) * (1 + 2 * noise.random() * (noise.random() < 0.25))

    profile = measure([FakeProbe([], disturbed)], repeats=5).profile
    for point in GRID.points:
        tokens = point.batch_size * (point.context_length + 20)
        assert profile.surface(point.batch_size, tokens) == pytest.approx(seconds_of(point), rel=0.08)
    for size in (1, 5, 20, 32):
        expected = seconds_of(GridPoint(size, 2048, 0))
        assert profile.curve(size) == pytest.approx(expected, rel=0.1)
    assert profile.prefill(1000) == pytest.approx(0.053, rel=0.15)
    assert profile.held_out["surface"].median < 0.05


def test_points_that_cannot_be_measured_are_told_and_given_up() -> None:
    log: list = []
    result = measure([FakeProbe(log, impossible=lambda p: p.batch_size == 32 and p.context_length == 2048)])
    assert [(p.batch_size, p.context_length) for p in result.skipped] == [(32, 2048)]
    assert sum(point == result.skipped[0] for _, point in log) == 1 + 3  # the warm-up too
    assert len(result.profile.points) == len(GRID.points) - 1
    (warning,) = warn(result)
    assert "32 x 2048" in warning


def test_several_servers_are_pooled_and_compared() -> None:
    result = measure([FakeProbe([]), FakeProbe([], lambda: 1.3)])
    point = result.profile.points[0]
    assert point.server_seconds[1] == pytest.approx(1.3 * point.server_seconds[0], rel=1e-4)
    assert point.seconds == pytest.approx(np.mean(point.server_seconds), rel=1e-4)
    assert [line.split(" than")[0] for line in warn(result)] == ["http://a is 13% faster", "http://b is 13% slower"]
    assert warn(measure([FakeProbe([]), FakeProbe([], lambda: 1.05)])) == []


def test_a_busy_machine_is_told() -> None:
    noise = rng()
    (warning,) = warn(measure([FakeProbe([], lambda: 1 + noise.random())]))
    assert "the machine was busy" in warning


@pytest.mark.parametrize("name", ["model", "dtype", "tensor_parallel_size"])
def test_servers_that_differ_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"`{name}`.*http://b has .*Profile them separately"):
        check_alike([facts(), facts(url="http://b", **{name: "other"})])


def test_metadata_says_what_was_measured() -> None:
    servers = [facts(url="http://a", hardware="1 x X"), facts(url="http://b", hardware="1 x Y")]
    about = metadata_of(servers)
    assert about["hardware"] == "1 x X; 1 x Y"
    assert metadata_of(servers, "a box")["hardware"] == "a box"
    assert "url" not in about
    assert (about["servers"], about["max_num_seqs"]) == (["http://a", "http://b"], 64)


def test_the_picture_of_one_context_and_no_prompts(tmp_path) -> None:
    grid = Grid(tuple(point for point in GRID.points if point.context_length == 512), ())
    draw(measure([FakeProbe([])], grid).profile, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def profile_fake(server: FakeVLLM, **changes) -> ProfileResult:
    with fake_server(server.routes()) as url:
        options = {"batch_sizes": (1, 2, 4), "context_lengths": (16, 64), "repeats": 1, **changes}
        return profile_servers(ProfileOptions(urls=(url,), **options))


def test_tail_servers_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"of the model that `tail_of` has \('large'\), and .* has 'tiny'"):
        profile_fake(FakeVLLM(), model="large")


def test_over_http_from_the_address_to_the_fit() -> None:
    profile = profile_fake(FakeVLLM(step_s=0.002)).profile
    assert len(profile.points) == 6
    assert [point.seconds for point in profile.points] == pytest.approx([0.002] * 6)
    assert profile.curve(3) == pytest.approx(0.002)
    assert profile.metadata["model"] == "tiny"
    assert (profile.metadata["repeats"], profile.metadata["kv_cache_tokens"]) == (1, 50_000)


def test_the_same_seed_sends_the_same() -> None:
    servers = [FakeVLLM(step_s=0.001) for _ in range(3)]
    for server, seed in zip(servers, (7, 7, 8), strict=True):
        profile_fake(server, seed=seed, context_lengths=(16,), api_key="s3cret")
    first, same, other = ({str(body["prompt"]) for body in server.requests} for server in servers)
    assert first == same
    assert first != other
    assert servers[0].keys == {"Bearer s3cret"}
    salts = [{body["cache_salt"] for body in server.requests} for server in servers]
    assert [len(salt) for salt in salts] == [1, 1, 1]
    assert salts[0] != salts[1]  # and yet finds none of it in the server's prefix cache


def test_a_server_that_is_lost_meanwhile() -> None:
    class Dying(FakeVLLM):
        async def completions(self, request: web.Request) -> web.StreamResponse:
            if len(self.requests) > 8:
                request.transport.close()
            return await super().completions(request)

    with pytest.raises(GenerationError, match=r"A server was lost: .*See its log"):
        profile_fake(Dying(step_s=0.001))


def test_a_server_that_is_too_slow(monkeypatch) -> None:
    monkeypatch.setattr("trl_darts.analysis.profile.probe.REQUEST_TIMEOUT_S", 0.3)
    with pytest.raises(GenerationError, match=r"Is it stuck\?.*`--max-context-tokens`"):
        profile_fake(FakeVLLM(step_s=1.0))


def test_more_sequences_than_files_can_be_open(monkeypatch) -> None:
    monkeypatch.setattr("trl_darts.analysis.profile.profiler.max_open_files", lambda: 3)
    with pytest.raises(ConfigurationError, match=r"`max_batch_size` \(4\) must be at most 3.*ulimit -n"):
        profile_fake(FakeVLLM())


def test_numbers_are_rounded_and_a_single_point_has_no_error() -> None:
    noise = rng()
    grid = Grid(tuple(point for point in GRID.points if point.batch_size < 8), (128, 512, 2048))
    profile = measure([FakeProbe([], lambda: 1 + 0.01 * noise.random())], grid).profile
    numbers = [*profile.curve.values, *profile.points[3].server_seconds, profile.prefill.per_token_s]
    assert all(value == float(f"{value:.5g}") for value in numbers)
    assert profile.surface == LatencySurface.from_dict(profile.to_dict()["surface"])
    assert set(profile.held_out) == {"surface"}  # of three prompts, and of three batch sizes, one can be left out
    lines = summarize(profile)
    assert re.search(r": [\d.]{2,4} ms at 1, [\d.]{2,4} ms at [\d.]{1,4} sequences$", lines[1])
    assert re.search(r"^Prompt: [\d.]{2,4} ms and 1 s per [12]\d,000 tokens$", lines[2])
