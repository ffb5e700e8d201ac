"""What would run: arguments and environment of each server, and what the trainer is told."""

import json
import socket
import sys

import pytest
from trl import TrlParser

from trl_darts import DARTSGRPOConfig, config
from trl_darts.serving import ServeOptions, ServerCommand, TrainerArguments, make_commands, options
from trl_darts.weights import WEIGHT_SYNCS
from trl_darts.weights.plugin import BACKEND

from .builders import CPU, CUDA


def value(command: ServerCommand, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


def one(build, environ=(), **settings) -> ServerCommand:
    (command,) = make_commands(ServeOptions("MODEL", **settings), build, dict(environ))
    return command


def test_cpu():
    command = one(CPU, max_model_len=512)
    assert command.argv[:5] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "MODEL")
    expected = {
        "--host": "127.0.0.1",
        "--port": "8000",
        "--max-model-len": "512",
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": "-1",
        "--dtype": "float32",
        "--block-size": "32",
        "--distributed-executor-backend": "uni",
    }
    assert {flag: value(command, flag) for flag in expected} == expected
    assert json.loads(value(command, "--weight-transfer-config")) == {"backend": BACKEND}
    assert {"--enable-prefix-caching", "--enforce-eager"} <= set(command.argv)
    assert command.env == {
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def test_cuda():
    command = one(CUDA, speculative="ngram")
    assert command.argv[1:5] == ("-m", "vllm.entrypoints.cli.main", "serve", "MODEL")
    assert json.loads(value(command, "--weight-transfer-config")) == {"backend": "nccl"}
    assert json.loads(value(command, "--speculative-config"))["method"] == "ngram"
    assert not {"--dtype", "--enforce-eager", "--block-size"} & set(command.argv)
    assert command.env == {"VLLM_SERVER_DEV_MODE": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "3"}


def test_what_is_set_wins_over_cpu_defaults_and_never_over_development_endpoints():
    environ = {"OMP_NUM_THREADS": "8", "VLLM_CPU_KVCACHE_SPACE": "40", "VLLM_SERVER_DEV_MODE": "0"}
    command = one(CPU, environ, vllm_flags=("--dtype=bfloat16", "--no_enforce_eager", "--block-size", "16"))
    assert not {"--dtype", "--enforce-eager"} & set(command.argv)
    assert command.argv.count("--block-size") == 1
    assert command.argv[-4:] == ("--dtype=bfloat16", "--no_enforce_eager", "--block-size", "16")
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"} & set(command.env)
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1"


def test_cpu_with_several_processes():
    command = one(CPU, tensor_parallel_size=2)
    assert value(command, "--distributed-executor-backend") == "mp"
    assert value(command, "--tensor-parallel-size") == "2"
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in command.env


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"devices": ("0", "1", "2", "3")}, ["0,1", "2,3"]),
        ({"devices": ("3", "1", "0", "2")}, ["3,1", "0,2"]),
        ({}, ["0,1", "2,3"]),
        ({"tensor_parallel_size": 1}, ["2", "3"]),
        ({"tensor_parallel_size": 1, "vllm_flags": ("-dp", "2")}, ["0,1", "2,3"]),
        ({"tensor_parallel_size": 1, "vllm_flags": ("--pipeline_parallel_size=2",)}, ["0,1", "2,3"]),
    ],
)
def test_devices_are_split(settings, expected):
    commands = make_commands(
        ServeOptions("M", **{"num_servers": 2, "tensor_parallel_size": 2, "port": 9000, **settings}), CUDA
    )
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in commands] == expected
    assert [value(command, "--port") for command in commands] == ["9000", "9001"]


def test_filesystem_needs_no_transfer_engine():
    assert "--weight-transfer-config" not in one(CUDA, weight_sync="filesystem").argv


def test_key_is_in_the_environment_and_nowhere_else():
    settings = ServeOptions("M", api_key="s3cret", host="0.0.0.0")
    (command,) = make_commands(settings, CPU)
    arguments = TrainerArguments.of(settings, CPU, [command])
    assert command.env["VLLM_API_KEY"] == "s3cret"
    shown = [repr(settings), repr(command), str(command), arguments.as_python(), arguments.as_flags()]
    assert not [text for text in [*shown, *arguments.notes, *command.argv] if "s3cret" in text]
    assert any("VLLM_API_KEY" in note for note in arguments.notes)


@pytest.mark.parametrize(
    ("host", "health_url", "base_url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000", "http://[::1]:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000", f"http://{socket.gethostname()}:8000"),
        ("10.0.0.7", "http://10.0.0.7:8000", "http://10.0.0.7:8000"),
    ],
)
def test_addresses(host, health_url, base_url):
    command = one(CPU, host=host, api_key="k")
    assert (command.health_url, command.base_url) == (health_url, base_url)


@pytest.mark.parametrize("build", [CPU, CUDA])
@pytest.mark.parametrize("weight_sync", ["auto", "gloo", "filesystem"])
def test_trainer_arguments_are_what_the_trainer_reads(tmp_path, build, weight_sync):
    settings = ServeOptions("M", num_servers=2, weight_sync=weight_sync)
    arguments = TrainerArguments.of(settings, build, make_commands(settings, build))
    backend = {"auto": "gloo" if build.cpu else "nccl"}.get(weight_sync, weight_sync)
    common = {"output_dir": str(tmp_path), "bf16": False, "use_cpu": True}
    from_python = eval(
        arguments.as_python(), {"DARTSGRPOConfig": lambda **kwargs: DARTSGRPOConfig(**common, **kwargs)}
    )
    words = [*arguments.as_flags().split(), "--output_dir", str(tmp_path), "--bf16", "False", "--use_cpu"]
    (from_flags,) = TrlParser((DARTSGRPOConfig,)).parse_args_and_config(words)
    for args in (from_python, from_flags):
        assert (args.use_vllm, args.vllm_mode, args.weight_sync) == (True, "server", backend)
        assert args.vllm_server_base_url == "http://127.0.0.1:8000,http://127.0.0.1:8001"


def test_gpus_that_are_left():
    settings = ServeOptions("M", devices=("0", "2"), num_servers=2)
    assert "CUDA_VISIBLE_DEVICES=1,3" in TrainerArguments.of(settings, CUDA, make_commands(settings, CUDA)).notes[0]
    settings = ServeOptions("M", tensor_parallel_size=4)
    assert "another machine" in TrainerArguments.of(settings, CUDA, make_commands(settings, CUDA)).notes[0]


def test_the_same_ways_as_the_trainer():
    assert set(options.WEIGHT_SYNCS) == set(WEIGHT_SYNCS)
    assert options.API_KEY_VARIABLE == config.API_KEY_VARIABLE
