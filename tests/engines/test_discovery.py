"""Servers are added to a running rollout and removed from it by a list."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from transformers import Qwen2Config

from tests.engines.fake_server import HEALTHY, fake_server
from tests.engines.stub_servers import TOKENS, Stub, hangs, start, tokens_of
from tests.engines.test_preflight import needs, routes
from tests.waits import wait_for
from trl_darts.engines import VLLMServerEngine, connection, discovery, monitor, server_list
from trl_darts.engines.connection import ServerSettings, connect
from trl_darts.engines.discovery import Discovery
from trl_darts.engines.main_process import MainProcess
from trl_darts.engines.pool import State
from trl_darts.engines.preflight import ServerFacts, ServerUnreachableError
from trl_darts.engines.server_list import LOCK_SUFFIX, FileSource, ServerList, ServerListError, check_source
from trl_darts.engines.vllm_generation import SyncedGeneration
from trl_darts.engines.waiting import Deadlines
from trl_darts.errors import ConfigurationError
from trl_darts.weights.files import WeightDirectory


M = 4
CONFIG = Qwen2Config(vocab_size=128)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(discovery, "POLL_S", 0.02)
    monkeypatch.setattr(discovery, "RETRY_S", 0.05)
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr(connection, "LIST_POLL_S", 0.02)
    monkeypatch.setattr(connection, "JOIN_TIMEOUT_S", 0.5)


async def fits(server) -> None:
    await server.get("/health")


def write(path, *urls: str, num_servers: int = 0) -> None:
    ServerList(urls, num_servers).write(path)


def test_a_server_that_is_added_takes_over_from_one_that_is_removed_in_the_same_rollout(tmp_path):
    path, first, second = tmp_path / "servers.json", Stub(decode=hangs), Stub()
    with fake_server(first.routes) as old, fake_server(second.routes) as new:
        write(path, old)
        engine = VLLMServerEngine([old])
        engine.discover(Discovery(FileSource(str(path)), fits, [old]))
        rollout = start(engine, size=M)
        wait_for(lambda: len(first.requests) == M)
        write(path, new)
        assert tokens_of(engine.wait(rollout)) == [[TOKENS] * M]
        assert len(second.requests) == M
        assert engine.states() == {new: State.UP}
        engine.close()


def test_a_server_gets_no_candidates_before_it_has_the_weights(tmp_path):
    path, first, second = tmp_path / "servers.json", Stub(decode=hangs), Stub()
    refreshed = []

    async def refresh(pool, member):
        refreshed.append((member.server.base_url, pool.version, len(second.requests)))
        return True

    with fake_server(first.routes) as old, fake_server(second.routes) as new:
        engine = VLLMServerEngine([old], refresh=refresh)
        engine.follow(3, {old: True})
        write(path, old)
        engine.discover(Discovery(FileSource(str(path)), fits, [old]))
        rollout = start(engine, size=M)
        wait_for(lambda: len(first.requests) == M)
        write(path, new)
        engine.wait(rollout)
        assert refreshed == [(new, 3, 0)]
        engine.close()


def test_what_never_was_listed_stays_and_so_does_the_last_server(tmp_path):
    path, server = tmp_path / "servers.json", Stub()
    with fake_server(server.routes) as own, fake_server(server.routes) as other, fake_server(server.routes) as tail:
        write(path, own, other)
        engine = VLLMServerEngine([own, other, tail], tail_urls=[tail])
        engine.discover(Discovery(FileSource(str(path)), fits, [own, other]))
        write(path, own)
        wait_for(lambda: list(engine.states()) == [own, tail])
        path.unlink()  # the command has ended
        time.sleep(0.2)
        write(path)
        time.sleep(0.2)
        assert list(engine.states()) == [own, tail]
        engine.remove(tail)
        write(path, "http://127.0.0.1:1")  # does not answer
        time.sleep(0.3)
        assert own in engine.states()
        engine.close()


def test_a_server_that_does_not_fit_is_reported_once_and_joins_when_it_does(tmp_path, caplog):
    path, server, answers = tmp_path / "servers.json", Stub(), []

    async def check(server):
        answers.append(server.base_url)
        if len(answers) < 4:
            raise ConfigurationError("it has another model.")

    with fake_server(server.routes) as own, fake_server(server.routes) as other:
        write(path, own, other)
        engine = VLLMServerEngine([own])
        with caplog.at_level(logging.WARNING):
            engine.discover(Discovery(FileSource(str(path)), check, [own]))
            wait_for(lambda: other in engine.states())
        assert answers == [other] * 4
        assert caplog.text.count("is listed and can't join: it has another model.") == 1
        start(engine).result(10)
        engine.close()


def test_an_engine_with_a_list_can_be_freed(tmp_path):
    path = tmp_path / "servers.json"
    with fake_server(Stub().routes) as url:
        write(path, url)
        engine = VLLMServerEngine([url])
        engine.discover(Discovery(FileSource(str(path)), fits, [url]))
        lock = path.with_name(path.name + LOCK_SUFFIX)
        wait_for(lock.exists)
        thread = engine._thread
        del engine
        wait_for(lambda: not thread.is_alive())
        assert not lock.exists()


# The start of a run


def settings(path, **kwargs) -> ServerSettings:
    source = FileSource(str(path))
    directory = WeightDirectory()
    return ServerSettings([], directory, Deadlines(), None, needs(CONFIG, **kwargs), source=source)


def test_a_run_waits_for_its_servers_and_leaves_out_the_dead(tmp_path, caplog):
    path = tmp_path / "servers.json"
    with fake_server(routes(HEALTHY)) as url:
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import pathlib, sys, time; time.sleep(0.3); pathlib.Path(sys.argv[1]).write_text(sys.argv[2])",
                path,
                json.dumps({"servers": [url, "http://127.0.0.1:1"], "num_servers": 2}),
            ]
        )
        engine, facts = connect(settings(path))
        assert engine.base_urls == [url]
        assert facts.model == "served"
        assert "127.0.0.1:1 is listed and does not answer. It joins once it does." in caplog.text
        engine.close()


@pytest.mark.parametrize("listed", [None, (), ("http://127.0.0.1:1",)])
def test_a_run_without_servers(tmp_path, listed):
    path = tmp_path / "servers.json"
    if listed is not None:
        write(path, *listed, num_servers=2)
    with pytest.raises(ServerUnreachableError, match=r"`vllm_server_list` has no server|can't be reached"):
        connect(settings(path, timeout_s=0.5))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "other"}, r"has `model` \('served'\), and the others 'other'"),
        ({"max_model_len": 2048}, r"has `max_model_len` \(1024\), and the others 2048"),
        ({"dtype": "torch.bfloat16"}, r"has `dtype` \(None\), and the others 'torch.bfloat16'"),
    ],
)
def test_a_server_must_be_like_the_others(changed, words):
    facts = {"model": "served", "max_model_len": 1024}
    with pytest.raises(ConfigurationError, match=rf"http://a {words}"):
        ServerFacts(**facts).check_like("http://a", ServerFacts(**facts | changed))
    ServerFacts(**facts, dtype="torch.float16").check_like("http://a", ServerFacts("served", 512))


def test_a_server_that_is_added_by_hand_joins_as_a_listed_one():
    generation = object.__new__(SyncedGeneration)
    generation.main = MainProcess(SimpleNamespace(process_index=0, num_processes=1, is_main_process=True))
    with (
        fake_server(routes(HEALTHY)) as url,
        fake_server(routes(HEALTHY)) as other,
        fake_server(routes(HEALTHY, 512)) as short,
    ):
        engine = generation.engine = VLLMServerEngine([url])
        generation.facts = ServerFacts("served", 1024)
        generation.settings = ServerSettings([url], None, Deadlines(), None, needs(CONFIG))
        with pytest.raises(ConfigurationError, match=rf"{short} has `max_model_len` \(512\), and the others 1024"):
            generation.add_server(short)
        generation.add_server(f" {other}/")
        wait_for(lambda: engine.states() == {url: State.UP, other: State.UP})
        generation.remove_server(f"{url}/")
        assert engine.states() == {other: State.UP}
        engine.close()


# Lists


def test_a_directory_has_the_servers_of_all_its_files(tmp_path):
    write(tmp_path / "a.json", "http://a:1", num_servers=1)
    write(tmp_path / "b.json", "http://b:1", "http://a:1/", num_servers=2)
    assert ServerList.read(tmp_path) == ServerList(("http://a:1", "http://b:1"), 3)
    assert FileSource(str(tmp_path)).read().num_servers == 3


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"servers": ["a:1"], "num_servers": 1}', '{"servers": 1}'])
def test_a_file_that_is_no_list(tmp_path, text):
    path = tmp_path / "servers.json"
    path.write_text(text)
    with pytest.raises(ServerListError, match="must have JSON like"):
        ServerList.read(path)


def test_who_can_change_a_list(tmp_path, caplog, monkeypatch):
    """The servers that it names get the key, the prompts and the weights."""
    path, before = tmp_path / "servers.json", os.umask(0)
    try:
        ServerList(("http://a:1",), 1).write(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o664)  # of a group that shares it
    for source in (path, tmp_path):
        assert ServerList.read(source).urls == ("http://a:1",)
    assert not caplog.records
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 4)
    monkeypatch.setattr(server_list, "ROOT", -1)
    for _ in range(2):
        ServerList.read(path)
    (record,) = caplog.records
    assert "belongs to user" in record.message
    path.chmod(0o666)
    for source in (path, tmp_path):
        with pytest.raises(ConfigurationError, match="must not be writable by every user"):
            ServerList.read(source)


def test_a_list_belongs_to_one_trainer(tmp_path):
    path = tmp_path / "servers.json"
    write(path, "http://a:1")
    first, second = FileSource(str(path)), FileSource(str(path))
    first.read()
    first.read()
    with pytest.raises(ConfigurationError, match=r"is used by .*, process \d+. Stop that one"):
        second.read()
    first.close()
    second.read()
    second.close()
    assert [file.name for file in tmp_path.iterdir()] == ["servers.json"]


@pytest.mark.parametrize("value", ["", "ray:", "ray://head:10001", "http://127.0.0.1:8000"])
def test_a_value_that_is_no_list(value):
    with pytest.raises(ConfigurationError, match=r"`vllm_server_list` \('.*'\) must be a file or a directory"):
        check_source(value)


def test_what_is_known_of_addresses_that_left_the_list_is_forgotten():
    """On a cluster whose servers come and go, each has another address."""
    discovery = Discovery(SimpleNamespace(), hangs)
    monitor = SimpleNamespace(pool=SimpleNamespace(members={"http://b": None}))
    for number in range(5):
        discovery._retry_at[f"http://{number}"] = 0.0
        discovery._warned[f"http://{number}"] = "it can't join"
    asyncio.run(discovery._follow(monitor, ["http://b"]))
    assert (discovery._retry_at, discovery._warned) == ({}, {})
