"""`--config hf://org/name[@revision]`: what it stands for, and which commit that is."""

import pytest
import yaml

from tests.hub.test_transfer import PUBLIC, REPO
from trl_darts.errors import ConfigurationError
from trl_darts.hub import push_config, resolve_config_arguments


@pytest.mark.parametrize(("world_size", "rank"), [("1", "0"), ("2", "0"), ("2", "1")])
def test_a_run_says_its_commit(hub, monkeypatch, caplog, world_size, rank):
    commit = push_config(PUBLIC, REPO).commit
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("RANK", rank)
    resolve_config_arguments(["--config", f"hf://{REPO}"])
    assert f"`--config hf://{REPO}` is hf://{REPO}@{commit}." in caplog.text
    assert ("Each process asks for itself" in caplog.text) == (world_size == "2")
    caplog.clear()
    resolve_config_arguments(["--config", f"hf://{REPO}@{commit}"])
    assert "Each process" not in caplog.text
    assert (f"is hf://{REPO}@{commit}." in caplog.text) == (rank == "0")


def test_resolve_config_arguments(hub):
    commit = push_config(PUBLIC, REPO).commit
    for words in (["--config", f"hf://{REPO}"], [f"--config=hf://{REPO}@main"], ["--config", f"hf://{REPO}@{commit}"]):
        resolved = resolve_config_arguments(["--seed", "3", *words, "--use_cpu"])
        assert resolved[:3] == ["--seed", "3", "--config"]
        assert resolved[4:] == ["--use_cpu"]
        with open(resolved[3]) as file:
            assert yaml.safe_load(file) == PUBLIC


@pytest.mark.parametrize("words", [["--config", "local.yaml"], ["--run_name", "hf://me/recipe"], ["--config"], []])
def test_other_arguments_stay(words):
    assert resolve_config_arguments(words) == words


@pytest.mark.parametrize("name", ["hf://", "hf://me/recipe@"])
def test_malformed_address(name):
    with pytest.raises(ConfigurationError, match=r"must be of the form org/name or org/name@revision"):
        resolve_config_arguments(["--config", name])
