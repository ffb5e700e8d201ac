"""The command's output, streams and exit codes, with fake servers."""

import os
import re
import shlex
import signal
import subprocess
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from trl_darts.cli import app, serve
from trl_darts.serving import options

from .builders import CPU, CUDA, fake_command, free_ports


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(serve, "find_build", lambda: CPU)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where logs go
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.fixture
def started(monkeypatch) -> list:
    """Records the options with which servers would be started."""
    seen = []
    monkeypatch.setattr(serve, "start", seen.append)
    return seen


def run(*args: str):
    return CliRunner().invoke(app, ["serve", "--port", str(free_ports(1)[0]), *args])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--devices", "0, 1"], "Error: `devices` (0,1)"),
        (["other"], "Error: `other` is one argument too many"),
        (["--log-dir", __file__], "Error: [Errno 17] File exists"),
        (["--api-key", "k"], "Error: `--api-key` was removed. Set VLLM_API_KEY in the environment"),
        (["--num-generations", "4"], "Error: No such option: --num-generations"),  # which another command had
    ],
)
def test_bad_input(model, monkeypatch, args, message):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
    result = run(model, *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_options_arrive(model, monkeypatch, started):
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    run(model, "--num-servers", "2", "--devices", "0, 1", "--restart", "--timeout", "9", "--", "--seed", "1")
    (arrived,) = started
    assert (arrived.num_servers, arrived.devices, list(arrived.vllm_flags)) == (2, "0, 1", ["--seed", "1"])
    assert (arrived.timeout, arrived.log_dir, arrived.restart, arrived.api_key) == (9.0, None, True, "s3cret")
    assert "s3cret" not in run("--help").stdout


def test_defaults_are_those_of_the_options(started):
    run("M")
    (arrived,) = started
    assert arrived.timeout == 1800  # a large model from a shared file system
    own = {"model", "port", "vllm_flags", "first_seed", "api_key"}
    for option in fields(arrived):
        assert option.name in own or getattr(arrived, option.name) == option.default


def test_example_of_the_help_is_accepted(monkeypatch, started):
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    (example,) = re.findall(r"trl-darts serve (Qwen.*?-- --\S+ \S+)", text)
    run(*shlex.split(example))
    monkeypatch.setattr(options, "check_model", lambda name: None)  # of the Hub
    monkeypatch.setattr(options, "check_ports", lambda host, ports: None)  # which ports are free is this machine's
    options.check_options(started[0], CUDA)


def test_serves_prints_and_stops(model, monkeypatch):
    monkeypatch.setattr(serve, "make_commands", lambda options, build: [fake_command()])
    echo = serve.typer.echo

    def echo_and_stop(text):
        echo(text)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(serve.typer, "echo", echo_and_stop)
    result = run(model)
    assert result.exit_code == 0
    assert result.stdout.count("DARTSGRPOConfig(") == result.stdout.count("--use_vllm --vllm_mode server") == 1
    assert "is healthy after" in result.stderr
    assert "All servers have ended" in result.stderr


def test_lines_where_there_is_no_terminal(model, monkeypatch):
    monkeypatch.setattr(serve, "LINE_INTERVAL_S", 0.2)
    monkeypatch.setattr(serve, "make_commands", lambda options, build: [fake_command("--never-healthy")])
    result = run(model, "--timeout", "1")
    assert result.exit_code == 1
    assert result.stderr.count("starting for") >= 2
    assert "was not healthy within `timeout` (1 s)" in result.stderr
