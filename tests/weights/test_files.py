"""`WeightDirectory`: a version exists completely or not at all, and nothing remains after the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from trl_darts.errors import WeightSyncError
from trl_darts.weights import files
from trl_darts.weights.files import WeightDirectory


PARAMS = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16)), ("c", torch.tensor(1.5))]


def read(path):
    return {name: tensor for file in sorted(path.iterdir()) for name, tensor in load_file(file).items()}


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """Replaces this machine's shared memory."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(files, "_free_bytes", lambda root: 1000)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "shm"


@pytest.mark.parametrize(("shard_bytes", "num_files"), [(1, 3), (25, 2), (1 << 20, 1)])
def test_round_trip(tmp_path, shard_bytes, num_files):
    directory = WeightDirectory(tmp_path, shard_bytes)
    path = directory.write(3, PARAMS, 36)
    assert path.name == "v3"
    assert len(list(path.iterdir())) == num_files
    found = read(path)
    assert set(found) == {"a", "b", "c"}
    for name, tensor in PARAMS:
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_views_of_one_memory_are_written_apart(tmp_path):
    """Tied parameters and views of a transposed one, which safetensors rejects."""
    weight = torch.arange(12.0).reshape(3, 4)
    directory = WeightDirectory(tmp_path)
    found = read(directory.write(1, [("x", weight), ("y", weight), ("z", weight.T)], 144))
    assert torch.equal(found["x"], weight)
    assert torch.equal(found["y"], weight)
    assert torch.equal(found["z"], weight.T)


def test_broken_write_leaves_nothing(tmp_path):
    def broken():
        yield PARAMS[0]
        raise KeyError("b")

    directory = WeightDirectory(tmp_path, shard_bytes=1)
    with pytest.raises(KeyError):
        directory.write(1, broken(), 36)
    assert directory.path(1) is None
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]


def test_directory_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WeightSyncError, match=r"file: .*`weight_sync_dir`"):
        WeightDirectory(tmp_path / "file").write(1, PARAMS, 36)


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    """safetensors raises its own error."""

    def full(*args):
        raise files.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(WeightSyncError, match="No space left on device"):
        WeightDirectory(tmp_path).write(1, PARAMS, 36)


@pytest.mark.parametrize("is_local", [True, False])
def test_what_was_written_goes_with_the_run(memory, tmp_path, is_local):
    first, second = (WeightDirectory(None if is_local else tmp_path / "given") for _ in range(2))
    kept = second.write(1, PARAMS, 36)
    old, new = (first.write(version, PARAMS, 36) for version in (1, 2))
    assert {path.parent.parent for path in (kept, old, new)} == {memory if is_local else tmp_path / "given"}
    first.keep_only([2])
    assert (old.exists(), new.exists()) == (False, True)
    assert (first.path(1), first.path(2)) == (None, new)
    first.close()
    first.close()
    assert not new.parent.exists()
    assert kept.exists()  # another run's
    del second
    assert not kept.exists()


def test_without_room_in_memory_it_is_the_temporary_directory(memory, tmp_path):
    directory = WeightDirectory()
    paths = [directory.write(version, PARAMS, num_bytes) for version, num_bytes in ((1, 500), (2, 501))]
    assert [path.parent.parent for path in paths] == [memory, tmp_path / "tmp"]
    directory.keep_only([2])
    assert (directory.path(1), directory.path(2)) == (None, paths[1])


@pytest.mark.parametrize("is_local", [True, False])
def test_a_killed_run_leaves_its_files_to_the_next(memory, is_local):
    """The next run removes them. Files of a live run, or of another machine, are not removed."""
    parent = None if is_local else str(memory)
    code = (
        "import sys, time, pathlib; from trl_darts.weights import files; "
        f"files.SHARED_MEMORY = pathlib.Path({str(memory)!r}); directory = files.WeightDirectory({parent!r}); "
        "directory.write(1, [], 0); print(directory.roots[0], flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        root = process.stdout.readline().strip()
        alive = WeightDirectory(parent)
        alive.write(1, [], 0)
        assert os.path.exists(root)
        process.send_signal(signal.SIGKILL)
    elsewhere = memory / f"{files.PREFIX}of-another-machine"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("another-machine")
    WeightDirectory(parent).write(1, [], 0)
    assert not os.path.exists(root)
    assert elsewhere.exists()
    assert alive.roots[0].exists()
