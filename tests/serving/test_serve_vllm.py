"""`trl-darts serve` with real servers, from the command to the last process."""

import subprocess
import sys
from dataclasses import replace
from urllib.error import HTTPError

import pytest
from typer.testing import CliRunner

from benchmarks.vllm_server import VLLMServer
from tests.waits import wait_for
from trl_darts import __version__
from trl_darts.cli import app
from trl_darts.engines.addresses import key_of, key_path
from trl_darts.engines.server_list import ServerList
from trl_darts.serving.options import check_ports

from .builders import assert_ended, family, free_ports


pytestmark = pytest.mark.vllm


@pytest.fixture
def serve(markov_model_dir, tmp_path, monkeypatch):
    """Yields a running `trl-darts serve` with two servers, once it has printed the arguments."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    ports = free_ports(2)
    argv = ["--num-servers", "2", "--port", str(ports[0]), "--max-model-len", "2048"]
    argv += ["--log-dir", str(tmp_path / "logs"), "--restart", "--output", str(tmp_path / "servers.json")]
    argv += ["--", "--max-num-seqs", "16"]
    output = tmp_path / "stdout"
    with output.open("wb") as stdout, (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "trl_darts.cli", "serve", str(markov_model_dir), *argv],
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        wait_for(lambda: "--use_vllm" in output.read_text() or process.poll() is not None, timeout_s=240)
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        yield process, ports
    finally:
        process.kill()  # its guards end the rest


def test_two_servers_of_which_one_dies_and_then_the_command(serve, markov_model_dir, tmp_path):
    process, ports = serve
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    printed = (tmp_path / "stdout").read_text()
    assert f'vllm_server_list="{tmp_path / "servers.json"}"' in printed
    assert ServerList.read(tmp_path / "servers.json") == ServerList(tuple(urls), 2)
    key = key_of(urls[0])
    assert f"export VLLM_API_KEY=$(cat {key_path(urls[0])})" in printed
    seeds = []
    for url in urls:
        stranger = VLLMServer(url, str(markov_model_dir), markov_model_dir, process=None, log_path=None)
        assert stranger.healthy()
        with pytest.raises(HTTPError, match="401"):
            stranger.request("/server_info")
        server = replace(stranger, api_key=key)
        settings = server.request("/server_info?config_format=json")["vllm_config"]
        assert settings["model_config"]["logprobs_mode"] == "processed_logprobs"
        assert settings["model_config"]["max_model_len"] == 2048
        assert settings["model_config"]["max_logprobs"] == -1
        assert settings["cache_config"]["enable_prefix_caching"] is True
        assert settings["scheduler_config"]["max_num_seqs"] == 16
        assert settings["parallel_config"]["_api_process_count"] == 1  # the preflight reads it
        seeds.append(settings["model_config"]["seed"])
    assert seeds[1] == seeds[0] + 1

    checked = CliRunner().invoke(app, ["check", ",".join(urls)])
    assert checked.exit_code == 0, checked.output
    rows = [line.split() for line in checked.stdout.splitlines()]
    assert [(row[0], row[2], row[6], row[7]) for row in rows[1:]] == [
        (url, "float32", __version__, "files") for url in urls
    ]

    members = family(process.pid)
    assert len(members) >= 5  # the command, and a guard and a server for each
    assert not [member for member in members if "Worker" in " ".join(member.cmdline())]  # each engine is its own
    assert not [member for member in members if key in " ".join(member.cmdline())]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and key in path.read_text(errors="replace")]
    assert sorted(files) == sorted(key_path(url) for url in urls)

    servers = [member for member in members if "--port" in member.cmdline() and "-P" not in member.cmdline()]
    victim = next(member for member in servers if str(ports[1]) in member.cmdline())
    arguments = victim.cmdline()
    victim.kill()
    log = tmp_path / "logs" / f"server-{ports[1]}.log"
    words = f"{urls[1]} ended with exit code 137, by SIGKILL (log: {log}). It restarts in 1 s."
    wait_for(lambda: words in (tmp_path / "stderr").read_text())
    # test_on_ray.py waits until it is healthy again: the same supervisor restarts it there.
    wait_for(lambda: arguments in [member.cmdline() for member in family(process.pid)])

    members = family(process.pid)
    process.kill()
    assert_ended(members)
    check_ports("127.0.0.1", ports)
