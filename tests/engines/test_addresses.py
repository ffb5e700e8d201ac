"""Keys of servers on loopback addresses, in files of their user."""

import asyncio
import stat

import pytest
from aiohttp import web

from tests.engines.fake_server import answer, fake_server
from trl_darts.engines.addresses import key_of, key_path, publish, published, withdraw
from trl_darts.engines.vllm_api import ServerRefusedError, VLLMServer, new_session
from trl_darts.errors import ConfigurationError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_only_this_user_can_read_them(cache):
    url = "http://127.0.0.1:8000"
    publish(url, "old")
    publish(url, "secret")
    path = key_path(url)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert key_of("http://localhost:8000/") == key_of("http://[::1]:8000") == key_of(url) == "secret"
    assert key_of("http://127.0.0.1:8001") is None
    assert key_of("http://10.0.0.7:8000") is key_of("http://server:8000") is None  # plain HTTP in a network
    path.chmod(0o640)  # others may have written it
    assert key_of(url) is None
    withdraw(url)
    assert not path.exists()
    withdraw(url)


def test_they_are_there_while_servers_run(cache, monkeypatch):
    urls = [f"http://127.0.0.1:{port}" for port in (8000, 8001)]
    with published("k", urls):
        assert [key_of(url) for url in urls] == ["k", "k"]
    assert [key_of(url) for url in urls] == [None, None]
    with published(None, ["http://10.0.0.7:8000"]):
        assert not list(cache.rglob("*-8000"))
    (cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    with pytest.raises(ConfigurationError, match="XDG_CACHE_HOME"):
        publish(urls[0], "k")


def test_a_client_finds_the_key_also_that_of_the_next_start():
    right = "first"

    async def info(request: web.Request) -> web.Response:
        given = request.headers.get("Authorization")
        return await answer({"given": given}, 200 if given == f"Bearer {right}" else 401)

    async def ask(url, api_key=None):
        nonlocal right
        right, found = "first", []
        async with new_session(api_key) as session:
            server = VLLMServer(url, session)
            for key in ("first", "first", "second"):
                publish(url, key)
                try:
                    found.append((await (server.get if len(found) % 2 else server.post)("/info"))["given"])
                except ServerRefusedError as error:
                    found.append(error.status)
                if len(found) == 2:
                    right = "second"
            found.append((await server.get("/info"))["given"])
        return found

    with fake_server({"GET /info": info, "POST /info": info}) as url:
        assert asyncio.run(ask(url)) == ["Bearer first", "Bearer first", 401, "Bearer second"]
        withdraw(url)
    right = "given"

    async def given(url):
        async with new_session("given") as session:
            return await VLLMServer(url, session).get("/info")

    with fake_server({"GET /info": info}) as url:
        publish(url, "of a server that was killed")
        assert asyncio.run(given(url)) == {"given": "Bearer given"}  # what the user sets wins
