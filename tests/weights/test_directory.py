"""`WeightDirectory`: a version is there completely, or not at all."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from trl_darts.weights.directory import WeightDirectory


PARAMS = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16)), ("c", torch.tensor(1.5))]


def read(path):
    return {name: tensor for file in sorted(path.iterdir()) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shard_bytes", [1, 25, 1 << 20])
def test_round_trip(tmp_path, shard_bytes):
    path = WeightDirectory(tmp_path, shard_bytes).write(3, iter(PARAMS))
    assert path.name == "v3"
    assert {"1": 3, "25": 2}.get(str(shard_bytes), 1) == len(list(path.iterdir()))
    found = read(path)
    assert set(found) == {"a", "b", "c"}
    for name, tensor in PARAMS:
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_views_of_one_memory_are_written_apart(tmp_path):
    """Tied parameters, and the columns of a transposed one: safetensors refuses both as they are."""
    weight = torch.arange(12.0).reshape(3, 4)
    found = read(WeightDirectory(tmp_path).write(1, iter([("x", weight), ("y", weight), ("z", weight.T)])))
    assert torch.equal(found["x"], weight)
    assert torch.equal(found["y"], weight)
    assert torch.equal(found["z"], weight.T)


def test_broken_write_shows_no_version(tmp_path):
    def broken():
        yield PARAMS[0]
        raise KeyError("b")

    directory = WeightDirectory(tmp_path)
    with pytest.raises(KeyError):
        directory.write(1, broken())
    assert not list(tmp_path.glob("*/v*"))
    assert directory.write(1, iter(PARAMS)).exists()


def test_two_trainings_share_a_directory(tmp_path):
    first, second = WeightDirectory(tmp_path), WeightDirectory(tmp_path)
    paths = [directory.write(1, iter(PARAMS)) for directory in (first, second)]
    assert paths[0] != paths[1]
    first.close()
    assert paths[1].exists()


def test_cleaning_up():
    directory = WeightDirectory()
    assert directory.is_temporary
    old, new = (directory.write(version, iter(PARAMS)) for version in (1, 2))
    directory.forget_before(2)
    assert (old.exists(), new.exists()) == (False, True)
    directory.close()
    directory.close()
    assert not directory.root.parent.exists()
