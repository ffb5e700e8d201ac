"""Servers on a Ray cluster, from the command to the last process. Two real servers on a Ray of this machine."""

import os
import re
import signal
import subprocess
import sys
import time
from urllib.parse import urlsplit

import psutil
import pytest

from tests.builders import ON_POLICY, make_args, make_trainer, rollout_logs
from tests.waits import wait_for
from trl_darts.engines.ray_list import RaySource
from trl_darts.engines.ray_reader import ANSWER_S, POLL_S
from trl_darts.engines.server_list import ServerList, ServerListError
from trl_darts.errors import ConfigurationError
from trl_darts.serving.on_ray import connect

from .builders import assert_ended, family, free_ports


pytestmark = [pytest.mark.ray, pytest.mark.vllm]


@pytest.fixture(scope="module")
def command(model_dir, tmp_path_factory):
    """`trl-darts serve --on ray` with two servers, once it has printed the arguments."""
    tmp_path, ports = tmp_path_factory.mktemp("ray"), free_ports(2)
    argv = ["serve", str(model_dir), "--on", "ray", "--num-servers", "2", "--port", str(ports[0])]
    argv += ["--name", "test", "--max-model-len", "512", "--log-dir", str(tmp_path), "--ray-address", "local"]
    output, errors = tmp_path / "stdout", tmp_path / "stderr"
    with output.open("wb") as stdout, errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "trl_darts.cli", *argv, "--output", str(tmp_path / "servers.json")],
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            # A second connection of one process would not find the token of the first.
            env={**os.environ, "RAY_memory_monitor_refresh_ms": "0", "RAY_AUTH_MODE": "disabled"},
        )
    try:
        wait_for(lambda: "--use_vllm" in output.read_text() or process.poll() is not None, timeout_s=300)
        assert process.poll() is None, errors.read_text()
        yield process, tmp_path
    finally:
        process.kill()


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def servers_of(process) -> list[psutil.Process]:
    members = {member: member.cmdline() for member in family(process.pid)}
    return [m for m, words in members.items() if "vllm.entrypoints.openai.api_server" in words and "-P" not in words]


def test_a_training_finds_its_servers_and_one_dies(command, model_dir, tmp_path):
    process, directory = command
    assert 'vllm_server_list="ray:test"' in (directory / "stdout").read_text()
    fields = {"use_vllm": True, "vllm_mode": "server", "vllm_server_list": "ray:test", "max_completion_length": 96}
    args = make_args(tmp_path, max_steps=4, learning_rate=3e-3, **fields, **ON_POLICY)
    trainer = make_trainer(model_dir, args)
    urls = set(trainer.vllm_generation.engine.base_urls)
    assert urls == set(ServerList.read(directory / "servers.json").urls)
    with pytest.raises(ConfigurationError, match="must be used by one trainer at a time"):
        RaySource("test").read()
    victim = servers_of(process)[0]
    sync, syncs = trainer.vllm_generation.sync_weights, []

    def killing():
        syncs.append(time.monotonic())
        if len(syncs) == 2:
            victim.kill()
        sync()

    trainer.vllm_generation.sync_weights = killing
    trainer.train()
    assert len(rollout_logs(trainer)) == 4
    for entry in rollout_logs(trainer):
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
    wait_for(lambda: "It restarts in 1 s." in (directory / "stderr").read_text())
    wait_for(lambda: set(trainer.vllm_generation.engine.base_urls) == urls, timeout_s=120)


def test_bad_input(command, model_dir):
    """In processes of their own: Ray replaces the handler of SIGTERM, and ends a process whose cluster has ended."""
    (address,) = re.findall(r"Ray cluster at (\S+)", (command[1] / "stderr").read_text())
    serve = [sys.executable, "-m", "trl_darts.cli", "serve", str(model_dir), "--on", "ray", "--ray-address", address]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    for flags, words in (
        (["--num-servers", "1000"], r"`num_servers` \(1000\) must fit the Ray cluster, .*: \d+ CPUs are missing"),
        (["--name", "test"], r"`name` \('test'\) must be new on the Ray cluster, and is taken"),
        (["--name", "other", "--join"], r"`name` \('other'\) must be that of running servers with `--join`"),
    ):
        done = subprocess.run([*serve, *flags], env=environment, capture_output=True, text=True)
        assert done.returncode == 2
        assert re.search(words, done.stderr), done.stderr
    with pytest.raises(ConfigurationError, match=r"`ray_address` \('127.0.0.1:1'\) must be the address of a Ray"):
        connect("127.0.0.1:1")  # before it connects
    source = RaySource("nobody")
    with pytest.raises(ServerListError, match="no servers run under this name"):
        source.read()
    source.close()


def test_nothing_remains(command):
    process, directory = command
    source = RaySource("nobody")
    with pytest.raises(ServerListError):
        source.read()
    members = servers_of(process)
    members += [psutil.Process(member.ppid()) for member in members]  # their guards
    assert len(members) == 4
    assert all(urlsplit(url).hostname == "127.0.0.1" for url in ServerList.read(directory / "servers.json").urls)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert_ended(members)
    assert not (directory / "servers.json").exists()
    assert "All servers have ended." in (directory / "stderr").read_text()
    time.sleep(2 * POLL_S)  # now the reader waits for the cluster
    source.close()
    wait_for(lambda: source._process.poll() is not None, timeout_s=2 * ANSWER_S)
