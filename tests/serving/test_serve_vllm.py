"""`trl-darts serve` with real servers, from the command to the last process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from trl import TrlParser

from tests.servers import VLLMServer
from trl_darts import DARTSGRPOConfig
from trl_darts.serving.ports import check_ports

from .builders import all_ended, family, free_ports, wait_for


pytestmark = pytest.mark.vllm
KEY = "a-key-that-nobody-shall-see"


@pytest.fixture
def serve(markov_model_dir, tmp_path):
    """A running `trl-darts serve` with two servers, once it has printed the arguments."""
    ports = free_ports(2)
    argv = ["--num-servers", "2", "--port", str(ports[0]), "--max-model-len", "2048", "--api-key", KEY]
    argv += ["--log-dir", str(tmp_path / "logs"), "--restart", "--", "--max-num-seqs", "16"]
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


def parse(printed: str, tmp_path: Path) -> list[DARTSGRPOConfig]:
    """The printed arguments, in both forms, as a user would take them."""
    start = printed.index("DARTSGRPOConfig(")
    call = printed[start : printed.index("\n)", start) + 2]
    flags = next(line for line in printed.splitlines() if line.startswith("--use_vllm"))
    common = {"output_dir": str(tmp_path), "bf16": False, "use_cpu": True}
    words = [*flags.split(), "--output_dir", str(tmp_path), "--bf16", "False", "--use_cpu"]
    return [
        eval(call, {"DARTSGRPOConfig": lambda **kwargs: DARTSGRPOConfig(**common, **kwargs)}),
        *TrlParser((DARTSGRPOConfig,)).parse_args_and_config(words),
    ]


def check_server(url: str, model_dir: Path) -> None:
    """It is healthy, and what the trainer needs it to be."""
    server = VLLMServer(url, str(model_dir), model_dir, process=None, log_path=None)
    assert server.healthy()
    settings = server.request("/server_info?config_format=json")["vllm_config"]
    assert settings["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert settings["model_config"]["max_model_len"] == 2048
    assert settings["model_config"]["max_logprobs"] == -1
    assert settings["cache_config"]["enable_prefix_caching"] is True
    assert settings["scheduler_config"]["max_num_seqs"] == 16
    assert settings["weight_transfer_config"]["backend"] in ("gloo", "nccl")


def secret_readers(members: list[psutil.Process]) -> list[list[str]]:
    return [process.cmdline() for process in members if KEY in " ".join(process.cmdline())]


def test_two_servers_from_start_to_ctrl_c(serve, markov_model_dir, tmp_path):
    process, ports = serve
    printed = (tmp_path / "stdout").read_text()
    for args in parse(printed, tmp_path):
        assert (args.use_vllm, args.vllm_mode) == (True, "server")
        urls = args.vllm_server_base_url.split(",")
        assert urls == [f"http://127.0.0.1:{port}" for port in ports]
    for url in urls:
        check_server(url, markov_model_dir)

    members = family(process.pid)
    assert len(members) >= 5  # the command, and a guard and a server for each
    assert secret_readers(members) == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY in path.read_text(errors="replace")]
    assert "VLLM_API_KEY" in printed

    os.kill(members[0].pid, signal.SIGINT)
    assert process.wait(timeout=60) == 0
    assert all_ended(members, timeout_s=0)
    check_ports("127.0.0.1", ports)


def test_a_killed_server_comes_back_and_a_killed_command_leaves_nothing(serve, tmp_path):
    process, ports = serve
    servers = [member for member in family(process.pid) if "--port" in member.cmdline()]
    (api,) = [member for member in servers if str(ports[1]) in member.cmdline() and "-I" not in member.cmdline()][:1]
    api.kill()
    wait_for(lambda: (tmp_path / "stderr").read_text().count("is healthy after") == 3, timeout_s=120)
    assert "ended with exit code 137; it is started again in 1 s" in (tmp_path / "stderr").read_text()

    members = family(process.pid)
    process.kill()
    assert all_ended(members)
    check_ports("127.0.0.1", ports)
