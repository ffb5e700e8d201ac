"""The command itself: what it prints, where, and with which exit code. Its servers are fake."""

import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.test_imports import loaded
from trl_darts import cli
from trl_darts.cli import app, display, hide_api_key, serve, without_api_key
from trl_darts.serving import checks

from .builders import CPU, CUDA, fake_command


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(serve, "find_build", lambda: CPU)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where logs go
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def run(*args: str):
    return CliRunner().invoke(app, ["serve", *args])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--host", "0.0.0.0"], "Error: `host` ('0.0.0.0')"),
        (["--devices", "0, 1"], "Error: `devices` (0,1)"),
        (["--timeout", "0"], "Error: `timeout` (0)"),
        (["--", "--port", "1"], "Error: `--port` after `--`"),
        (["other"], "Error: `other` is one argument too many"),
    ],
)
def test_bad_input(model, monkeypatch, args, message):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
    result = run(model, *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stdout == ""


def test_a_wrong_argument_does_not_wait_for_torch():
    assert loaded("import trl_darts.cli") == set()


def test_log_dir_that_is_a_file(model, tmp_path):
    (tmp_path / "file").touch()
    result = run(model, "--log-dir", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "`log_dir`" in result.stderr


def test_options_arrive(model, monkeypatch):
    seen = []
    monkeypatch.setattr(serve, "_serve", lambda *args: seen.append(args))
    run(model, "--num-servers", "2", "--devices", "0, 1", "--restart", "--timeout", "9", "--", "--seed", "1")
    ((options, timeout_s, log_dir, restart),) = seen
    assert (options.num_servers, options.devices, options.vllm_flags) == (2, ("0", "1"), ("--seed", "1"))
    assert (timeout_s, log_dir, restart) == (9.0, None, True)


def test_example_of_the_help_is_accepted(model, monkeypatch):
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    (example,) = re.findall(r"trl-darts serve (Qwen.*?-- --\S+ \S+)", text)
    started = []
    monkeypatch.setattr(serve, "find_build", lambda: CUDA)
    monkeypatch.setattr(checks, "check_model", lambda name: None)  # of the Hub
    monkeypatch.setattr(checks, "check_ports", lambda host, ports: None)  # which ports are free is this machine's
    monkeypatch.setattr(serve, "Supervisor", lambda servers, *args: started.append(servers) or Idle())
    result = run(*shlex.split(example))
    assert result.exit_code == 0, result.stderr
    ((first, second),) = started
    assert [server.command.env["CUDA_VISIBLE_DEVICES"] for server in (first, second)] == ["2", "3"]


class Idle:
    """A supervisor whose servers are never started."""

    def run(self, display, stop) -> None:
        pass


def test_key_from_the_environment(model, monkeypatch):
    seen = []
    monkeypatch.setattr(serve, "_serve", lambda *args: seen.append(args))
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    run(model)
    assert seen[0][0].api_key == "s3cret"
    assert "s3cret" not in run("--help").stdout


def test_serves_prints_and_stops(model, monkeypatch):
    monkeypatch.setattr(serve, "make_commands", lambda options, build: [fake_command()])
    echo = serve._print_arguments

    def echo_and_stop(arguments):
        echo(arguments)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(serve, "_print_arguments", echo_and_stop)
    result = run(model)
    assert result.exit_code == 0
    assert "DARTSGRPOConfig(" in result.stdout
    assert "--use_vllm --vllm_mode server" in result.stdout
    assert "is healthy after" in result.stderr
    assert "All servers have ended" in result.stderr


def test_death_at_start(model, monkeypatch):
    monkeypatch.setattr(serve, "make_commands", lambda options, build: [fake_command("--exit-at-start", "4")])
    result = run(model)
    assert result.exit_code == 4
    assert "exit code 4" in result.stderr
    assert "fake server on" in result.stderr
    assert result.stdout == ""


def test_lines_where_there_is_no_terminal(model, monkeypatch):
    monkeypatch.setattr(display, "LINE_INTERVAL_S", 0.2)
    monkeypatch.setattr(serve, "make_commands", lambda options, build: [fake_command("--never-healthy")])
    result = run(model, "--timeout", "1")
    assert result.exit_code == 1
    assert result.stderr.count("starting for") >= 2
    assert "was not healthy within `timeout` (1 s)" in result.stderr


@pytest.mark.parametrize(
    ("args", "kept", "key"),
    [
        (["serve", "M", "--api-key", "k", "--port", "1"], ["serve", "M", "--port", "1"], "k"),
        (["serve", "--api-key=a=b", "M"], ["serve", "M"], "a=b"),
        (["serve", "M", "--api-key"], ["serve", "M", "--api-key"], None),
        (["serve", "M", "--port=1", "--", "--api-key", "k"], ["serve", "M", "--port=1", "--", "--api-key", "k"], None),
    ],
)
def test_without_api_key(args, kept, key):
    assert without_api_key(args) == (kept, key)


def test_key_leaves_the_command_line(monkeypatch):
    seen = []
    monkeypatch.setattr(cli.os, "execve", lambda *args: seen.append(args))
    monkeypatch.setattr(sys, "argv", ["trl-darts", "serve", "M", "--api-key", "k"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "/bin/trl-darts", "serve", "M", "--api-key", "k"])
    hide_api_key()
    ((program, argv, environ),) = seen
    assert (program, argv) == (sys.executable, ["python", "-X", "dev", "/bin/trl-darts", "serve", "M"])
    assert environ["VLLM_API_KEY"] == "k"
