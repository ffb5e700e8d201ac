"""`trl-darts check`: what is wrong with servers is found from the trainer's machine."""

from __future__ import annotations

import copy
import re
import socket
from contextlib import ExitStack
from dataclasses import replace

import pytest
from aiohttp import web
from typer.testing import CliRunner

from tests.engines.fake_server import HEALTHY, answer, fake_server
from tests.engines.test_preflight import routes
from trl_darts.cli import app
from trl_darts.engines.check import check_servers, way_back
from trl_darts.engines.server_list import FileSource, ServerList
from trl_darts.weights import nccl
from trl_darts.weights.probe import PREFIX, digest_of, probe


async def rpc(request: web.Request) -> web.Response:
    body = await request.json()
    assert body["method"] == "trl_darts_probe"
    return await answer({"results": [probe(**body["kwargs"])]})


async def blind(request: web.Request) -> web.Response:
    return await answer({"results": [probe() | {"reads": False}]})


def served(config=HEALTHY, rpc=rpc, **kwargs) -> dict:
    return routes(config, **kwargs) | {"POST /collective_rpc": rpc}


def check(*servers: dict, args=(), join=",".join):
    with ExitStack() as stack:
        urls = [stack.enter_context(fake_server(one)) for one in servers]
        return urls, CliRunner().invoke(app, ["check", join(urls), *args], env={"COLUMNS": "200"})


def test_servers_that_are_alike_and_see_the_directory(tmp_path):
    urls, result = check(served(), served(), args=["--weight-sync-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["server", "model", "dtype", "max_model_len", "slots", "vllm", "trl_darts", "weights"]
    assert [row[0] for row in rows[1:]] == urls
    assert [(row[1], row[5], row[7]) for row in rows[1:]] == [("served", "0.31.0", "files")] * 2
    assert not list(tmp_path.iterdir())


def test_a_list_is_read_and_not_kept(tmp_path):
    path = tmp_path / "servers.json"

    def join(urls):
        ServerList(tuple(urls)).write(path)
        return str(path)

    assert check(served(), join=join)[1].exit_code == 0
    source = FileSource(str(path))
    assert source.read().urls
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 2
    assert "must be used by one trainer at a time" in result.stderr
    source.close()


def other(**changes) -> dict:
    config = copy.deepcopy(HEALTHY)
    config["model_config"] |= changes
    return config


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (served(max_model_len=512), r"its max_model_len is 512, that of others 1024"),
        (served(other(dtype="torch.bfloat16")), r"its dtype is bfloat16, that of others float32"),
        (served(other(logprobs_mode="raw_logprobs")), r"runs with `--logprobs-mode raw_logprobs`"),
        (served(rpc=blind), r"it does not see .* as here$"),
        (routes(HEALTHY), r"trl_darts is not in its environment"),
        (routes(HEALTHY, without=["GET /server_info"]), r"does not expose its development endpoints"),
        ({"GET /health": lambda _: answer({"error": "the key"}, 401)}, r"answered 401: the key"),
        ({}, r"is not one: it has no `/version`"),
    ],
)
def test_what_is_wrong_is_named(server, words):
    usual = served(other(dtype="torch.float32"))
    urls, result = check(usual, usual, server)
    assert result.exit_code == 1
    assert re.search(rf"^{urls[2]}: .*{words}", result.stderr, re.MULTILINE), result.stderr
    assert urls[0] not in result.stderr


def test_a_dead_server_and_bad_arguments(tmp_path):
    result = CliRunner().invoke(app, ["check", "http://127.0.0.1:1"])
    assert (result.exit_code, result.stderr) == (1, "http://127.0.0.1:1: nothing listens there\n")
    for args, words in (
        (["no-list.json"], "can't be read: No such file"),
        (["127.0.0.1:8000"], "can't be read"),
        (["http://a:1", "--weight-sync", "gloo"], "`weight_sync` ('gloo')"),
        (["http://a:1", "--weight-sync", "nccl"], "needs a CUDA device"),
        (["http://a:1", "--weight-sync-dir", str(tmp_path / "no")], "`weight_sync_dir`"),
        (["http://a:1", "--timeout", "0"], "`timeout` (0) must be positive"),
    ):
        result = CliRunner().invoke(app, ["check", *args])
        assert result.exit_code == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


def test_the_way_back_over_a_socket(monkeypatch):
    monkeypatch.setattr(nccl, "listen", lambda port: socket.create_server(("127.0.0.1", 0)))
    with fake_server(served()) as url:
        with way_back("nccl", None, 1) as way:
            (found,) = check_servers([url], way, None, 5.0)
            assert (found.weights, found.problems) == ("NCCL", [])
            (found,) = check_servers([url], replace(way, secret="another listener's"), None, 5.0)
            assert found.weights == "no"
        (found,) = check_servers([url], way, None, 5.0)
        assert found.weights == "no"
        assert re.search(r"can't connect to 127.0.0.1:\d+: set VLLM_HOST_IP", found.problems[0])


def test_a_server_tells_nothing_of_other_files(tmp_path, monkeypatch):
    """Whoever can reach a server could read all that its user can."""
    secret, ours = tmp_path / "id_rsa", tmp_path / f"{PREFIX}x"
    for path in (secret, ours):
        path.write_text("a key")
    monkeypatch.setattr("trl_darts.weights.probe.CONNECT_S", 0.1)
    answers = [probe(str(path), digest) for path in (secret, ours) for digest in (digest_of(b"a key"), digest_of(b""))]
    assert [found["reads"] for found in answers] == [False, False, True, False]
    assert probe(str(tmp_path / "missing"))["reads"] is False
    with socket.create_server(("127.0.0.1", 0)) as listener:  # of another program
        assert probe(address=listener.getsockname())["connects"] is False
    for found in answers:
        assert found.keys() == {"trl_darts", "reads", "connects"}
        assert "a key" not in str(found)
