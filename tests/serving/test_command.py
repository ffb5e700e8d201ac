"""Arguments and environment of each server, and the trainer's arguments."""

import importlib
import json
import socket
import sys
from dataclasses import replace

import pytest
from trl import TrlParser

from trl_darts import DARTSGRPOConfig
from trl_darts.engines.addresses import key_path
from trl_darts.serving.command import (
    ADAPTERS,
    MIDDLEWARE,
    ServerCommand,
    as_flags,
    as_python,
    make_commands,
    trainer_arguments,
    trainer_notes,
)
from trl_darts.serving.options import ServeOptions, with_own_key

from .builders import CPU, CUDA


def value(command: ServerCommand, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


def one(build, environ=(), **settings) -> ServerCommand:
    (command,) = make_commands(ServeOptions("MODEL", **settings), build, dict(environ))
    return command


def read_by_the_trainer(arguments, tmp_path) -> list[DARTSGRPOConfig]:
    """Parses the printed arguments in both forms, as a user would use them."""
    common = {"output_dir": str(tmp_path), "bf16": False, "use_cpu": True}
    words = [*as_flags(arguments).split(), "--output_dir", str(tmp_path), "--bf16", "False", "--use_cpu"]
    return [
        eval(as_python(arguments), {"DARTSGRPOConfig": lambda **given: DARTSGRPOConfig(**common, **given)}),
        *TrlParser((DARTSGRPOConfig,)).parse_args_and_config(words),
    ]


def test_cpu():
    command = one(CPU, max_model_len=512)
    assert command.argv[:5] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "MODEL")
    expected = {
        "--host": "127.0.0.1",
        "--port": "8000",
        "--max-model-len": "512",
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": "-1",
        "--api-server-count": "1",
        "--dtype": "float32",
        "--block-size": "32",
        "--distributed-executor-backend": "uni",
    }
    assert {flag: value(command, flag) for flag in expected} == expected
    assert {"--enable-prefix-caching", "--enforce-eager"} <= set(command.argv)
    assert "--weight-transfer-config" not in command.argv
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
    assert "--weight-transfer-config" not in one(CUDA, weight_sync="filesystem").argv


@pytest.mark.parametrize("build", [CPU, CUDA])
def test_the_drafter_is_ours(build):
    config = json.loads(value(one(build, speculative="suffix"), "--speculative-config"))
    assert (config["method"], config["num_speculative_tokens"]) == ("custom_class", 16)
    module, name = config["model"].rsplit(".", 1)
    assert hasattr(importlib.import_module(module), name)


def test_what_is_set_wins_over_cpu_defaults_and_never_over_development_endpoints():
    environ = {"OMP_NUM_THREADS": "8", "VLLM_CPU_KVCACHE_SPACE": "40", "VLLM_SERVER_DEV_MODE": "0"}
    command = one(CPU, environ, vllm_flags=["--dtype=bfloat16", "--no_enforce_eager", "--block-size", "16"])
    assert not {"--dtype", "--enforce-eager"} & set(command.argv)
    assert command.argv.count("--block-size") == 1
    assert command.argv[-6:-2] == ("--dtype=bfloat16", "--no_enforce_eager", "--block-size", "16")
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"} & set(command.env)
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1"


def seeds(commands) -> list[int]:
    """Returns the seed that counts, of each server."""
    return [int(command.argv[len(command.argv) - command.argv[::-1].index("--seed")]) for command in commands]


@pytest.mark.parametrize("settings", [{"num_servers": 4}, {"layout": "2x1+1x2"}])
def test_every_server_has_a_seed_of_its_own(settings):
    """Also main and tail servers, the servers of another command, and those of one command on a cluster."""
    options = ServeOptions("M", **settings)
    own = seeds(make_commands(options, CPU, {}))
    others = seeds(make_commands(ServeOptions("M", **settings), CPU, {}))
    assert len({*own, *others}) == len(own) + len(others)
    assert seeds(make_commands(options, CPU, {})) == own  # a restart, and what is printed
    one_each = replace(options, num_servers=1, layout=None)
    on_ray = [seeds(make_commands(one_each, CPU, {}, first=number))[0] for number in range(len(own))]
    assert on_ray == own


@pytest.mark.parametrize("flags", [["--seed", "7"], ["--seed=7"], ["--see", "7"]])
def test_a_users_seed_is_that_of_the_first(flags):
    options = ServeOptions("M", vllm_flags=flags, num_servers=3)
    assert seeds(make_commands(options, CPU, {})) == [7, 8, 9]
    last = ServeOptions("M", vllm_flags=["--seed", str(2**32 - 1)], num_servers=2)
    assert seeds(make_commands(last, CPU, {})) == [2**32 - 1, 0]


def test_cpu_with_several_processes():
    command = one(CPU, tensor_parallel_size=2)
    assert value(command, "--distributed-executor-backend") == "mp"
    assert value(command, "--tensor-parallel-size") == "2"
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in command.env


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tensor_parallel_size": 2, "devices": "3, 1,0,2"}, ["3,1", "0,2"]),
        ({"tensor_parallel_size": 2}, ["0,1", "2,3"]),
        ({}, ["2", "3"]),
        ({"vllm_flags": ["-dp", "2"]}, ["0,1", "2,3"]),
        ({"vllm_flags": ["--pipeline_parallel_size=2"]}, ["0,1", "2,3"]),
    ],
)
def test_devices_are_split(settings, expected):
    commands = make_commands(ServeOptions("M", num_servers=2, port=9000, **settings), CUDA)
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in commands] == expected
    assert [value(command, "--port") for command in commands] == ["9000", "9001"]


def test_key_is_in_the_environment_and_nowhere_else():
    settings = ServeOptions("M", api_key="s3cret", host="0.0.0.0")
    (command,) = make_commands(settings, CPU)
    notes = trainer_notes(settings, CPU)
    assert command.env["VLLM_API_KEY"] == "s3cret"
    assert command.env["VLLM_USE_RUST_FRONTEND"] == "0"  # it runs no middleware
    shown = [repr(settings), repr(command), str(command), as_python(trainer_arguments(settings, CPU, [command]))]
    assert not [text for text in [*shown, *notes, *command.argv] if "s3cret" in text]
    assert any("VLLM_API_KEY" in note for note in notes)


def test_who_asks_for_the_key_comes_last_and_so_is_asked_first():
    flags = ["--middleware", "mine.Own"]
    *_, first, mine, _, _, last, ours = one(CPU, api_key="k", vllm_flags=flags).argv
    assert (first, mine, last) == ("--middleware", "mine.Own", "--middleware")
    assert importlib.import_module(ours.rpartition(".")[0]).RequireKey.__name__ == ours.rpartition(".")[2]
    assert one(CPU, vllm_flags=flags).argv.count("--middleware") == 1


@pytest.mark.parametrize(
    ("host", "health_url", "base_url"),
    [
        ("::1", "http://[::1]:8000", "http://[::1]:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000", f"http://{socket.gethostname()}:8000"),
        ("10.0.0.7", "http://10.0.0.7:8000", "http://10.0.0.7:8000"),
    ],
)
def test_addresses(host, health_url, base_url):
    command = one(CPU, host=host, api_key="k")
    assert (command.health_url, command.base_url) == (health_url, base_url)


@pytest.mark.parametrize(
    ("build", "weight_sync", "expected"),
    [(CPU, "auto", "filesystem"), (CUDA, "auto", "nccl"), (CUDA, "filesystem", "filesystem")],
)
def test_trainer_arguments_are_what_the_trainer_reads(tmp_path, build, weight_sync, expected):
    settings = ServeOptions("M", num_servers=2, weight_sync=weight_sync)
    for args in read_by_the_trainer(trainer_arguments(settings, build, make_commands(settings, build)), tmp_path):
        assert (args.use_vllm, args.vllm_mode, args.weight_sync) == (True, "server", expected)
        assert args.vllm_server_base_url == "http://127.0.0.1:8000,http://127.0.0.1:8001"


def test_interfaces_matter_to_nccl_from_another_machine():
    def told(**settings) -> bool:
        return any("VLLM_HOST_IP" in note for note in trainer_notes(ServeOptions("M", **settings), CUDA))

    assert told(host="0.0.0.0", api_key="k")
    assert not told()
    assert not told(host="0.0.0.0", api_key="k", weight_sync="filesystem")


def test_where_the_key_is():
    settings = ServeOptions("M")
    keyed = with_own_key(settings)
    assert len(keyed.api_key) == 32
    assert with_own_key(settings).api_key != keyed.api_key
    (command,) = make_commands(keyed, CPU, {})
    assert command.env["VLLM_API_KEY"] == keyed.api_key
    assert value(command, "--middleware") == MIDDLEWARE
    (note,) = trainer_notes(keyed, CPU, command.base_url)
    assert f"export VLLM_API_KEY=$(cat {key_path('http://127.0.0.1:8000')})" in note
    for text in (note, str(command), repr(keyed), repr(command)):
        assert keyed.api_key not in text
    for other in ({"api_key": "k"}, {"no_api_key": True}, {"host": "0.0.0.0"}):
        assert with_own_key(ServeOptions("M", **other)).own_key is None


def test_servers_that_load_adapters(tmp_path):
    command = one(CUDA, lora_rank=20, api_key="k", vllm_flags=["--max-loras", "9"])
    assert "--enable-lora" in command.argv
    assert value(command, "--max-lora-rank") == "32"  # a size that vLLM takes
    assert [command.argv[i + 1] for i, flag in enumerate(command.argv) if flag == "--max-loras"] == ["5", "9"]
    assert value(command, "--middleware") == ADAPTERS
    module, _, name = ADAPTERS.rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    assert command.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--weight-transfer-config" in command.argv  # for adapters that must be merged
    options = ServeOptions("M", lora_rank=20)
    for config in read_by_the_trainer(trainer_arguments(options, CUDA, make_commands(options, CUDA, {})), tmp_path):
        assert config.weight_sync == "adapter"
    assert "--weight-transfer-config" not in one(CUDA, lora_rank=8, weight_sync="adapter").argv
    plain = one(CPU)
    assert not {"--enable-lora", "--max-loras"} & {*plain.argv}
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in plain.env


def test_gpus_that_are_left():
    assert "CUDA_VISIBLE_DEVICES=1,3" in trainer_notes(ServeOptions("M", devices="0,2", num_servers=2), CUDA)[0]
    assert "another machine" in trainer_notes(ServeOptions("M", tensor_parallel_size=4), CUDA)[0]


@pytest.mark.parametrize("build", [CPU, CUDA])
def test_two_layouts(build, tmp_path):
    options = ServeOptions("MODEL", layout="2x1+1x2")
    commands = make_commands(options, build, {})
    assert [(command.tail, value(command, "--port")) for command in commands] == [
        (False, "8000"),
        (False, "8001"),
        (True, "8002"),
    ]
    if build.cpu:
        assert [command.env["OMP_NUM_THREADS"] for command in commands] == ["1", "1", "2"]
    else:
        assert [command.env["CUDA_VISIBLE_DEVICES"] for command in commands] == ["2", "3", "2,3"]
        assert value(commands[2], "--tensor-parallel-size") == "2"
    assert all(("--enable-sleep-mode" in command.argv) == (not build.cpu) for command in commands)
    arguments = {**trainer_arguments(options, build, commands), "weight_sync": "filesystem"}
    for args in read_by_the_trainer(arguments, tmp_path):
        assert (args.tail_urls, args.tail_switch_at) == (["http://127.0.0.1:8002"], 8)
        assert args.num_engines == 2
        assert args.vllm_tail_shares_gpus == (not build.cpu)
    assert "`trl-darts profile`" in trainer_notes(options, build)[0]
