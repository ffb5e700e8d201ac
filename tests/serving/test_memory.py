"""The memory of servers that share GPUs, from the sizes of weights and GPUs."""

import json

import pytest

from trl_darts.errors import ConfigurationError
from trl_darts.serving import memory
from trl_darts.serving.command import make_commands, trainer_notes
from trl_darts.serving.memory import DEFAULT, GIB, KEPT, shared_utilization, weight_bytes
from trl_darts.serving.options import ServeOptions

from .builders import CPU, CUDA


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Writes a checkpoint whose files have a given size, for GPUs of 80 GiB."""
    monkeypatch.setattr(memory, "gpu_bytes", lambda: 80 * GIB)

    def make(gib: float, dtype: str = "bfloat16") -> str:
        index = {"metadata": {"total_size": int(gib * GIB)}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        (tmp_path / "config.json").write_text(json.dumps({"dtype": dtype}))
        return str(tmp_path)

    return make


def options(model: str, *flags: str, layout: str = "4x1+1x4") -> ServeOptions:
    return ServeOptions(model, flags, layout=layout)


@pytest.mark.parametrize("gib", [1, 15, 30, 50, 60])
@pytest.mark.parametrize("layout", ["4x1+1x4", "2x2+1x4", "1x4+4x1"])
def test_both_fit_in_a_weight_sync(checkpoint, gib, layout):
    asked = options(checkpoint(gib), layout=layout)
    main, tail = (gib * GIB / own.tensor_parallel_size for own in asked.sets)
    try:
        utilization = shared_utilization(asked)
    except ConfigurationError:
        assert max(main, tail) + tail + KEPT >= 79 * GIB  # nothing is left that could be a KV cache
        return
    awake = utilization * 80 * GIB
    assert awake + tail + KEPT <= 80 * GIB
    assert max(main, tail) < awake
    assert utilization <= DEFAULT
    assert utilization > DEFAULT - 0.01 or awake + tail + KEPT > 79 * GIB  # and not less than could be


def test_every_server_gets_it(checkpoint):
    for command in make_commands(options(checkpoint(40)), CUDA, {}):
        assert command.argv[command.argv.index("--gpu-memory-utilization") + 1] == "0.82"  # 1 - (40 / 4 + 4) / 80
    (command, *_) = make_commands(options(checkpoint(40), "--gpu-memory-utilization", "0.7"), CUDA, {})
    assert command.argv[-4:-2] == ("--gpu-memory-utilization", "0.7")
    assert command.argv.count("--gpu-memory-utilization") == 1
    assert "--gpu-memory-utilization" not in make_commands(options(checkpoint(40)), CPU, {})[0].argv
    assert "--gpu-memory-utilization" not in make_commands(ServeOptions(checkpoint(40)), CUDA, {})[0].argv


@pytest.mark.parametrize(
    ("gib", "flags", "message"),
    [
        (
            65,
            [],
            r"`layout` \('4x1\+1x4'\) must leave room .* have 65.0 and 16.2 GiB of weights on each GPU of 80 GiB",
        ),
        (40, ["--gpu_memory_utilization=0.9"], r"`--gpu-memory-utilization` \(0.9\) must be at most 0.82 with"),
    ],
)
def test_refused(checkpoint, gib, flags, message):
    with pytest.raises(ConfigurationError, match=message):
        make_commands(options(checkpoint(gib), *flags), CUDA, {})


@pytest.mark.parametrize(
    ("dtype", "flags", "gib"),
    [
        ("bfloat16", [], 8),
        ("float32", [], 4),
        ("float32", ["--dtype", "float32"], 8),
        ("float16", ["--dtype=float"], 16),
        ("bfloat16", ["--quantization", "fp8"], None),
    ],
)
def test_weights_on_the_gpu(checkpoint, dtype, flags, gib):
    assert weight_bytes(options(checkpoint(8, dtype), *flags)) == (None if gib is None else gib * GIB)


def test_pipeline_stages_have_their_part_of_the_weights(checkpoint):
    assert options("M", "-pp", "2").sets[1].gpus_per_copy == 8
    assert shared_utilization(options(checkpoint(80), "-pp", "2")) == 0.82


@pytest.mark.parametrize("model", ["nobody/no-such-model", "s3://bucket/a"])
def test_weights_that_are_not_here_are_the_users_to_fit(model):
    assert shared_utilization(options(model)) is None
    assert any("`--gpu-memory-utilization`" in note for note in trainer_notes(options(model), CUDA))
    chosen = options(model, "--gpu-memory-utilization", "0.8")
    assert not any("utilization" in note for note in trainer_notes(chosen, CUDA))


def test_one_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    assert weight_bytes(options(str(tmp_path))) == 100
