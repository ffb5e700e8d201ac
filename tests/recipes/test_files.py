"""Tests that errors in config files are found before torch, TRL or transformers are loaded."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_imports import loaded
from trl_darts.errors import ConfigurationError
from trl_darts.recipes.files import SHIPPED, check_config_option, check_hub, shipped_file, split_command_line


ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "configs" / "tiny_reasoner.yaml")


def run_script(*words):
    command = [sys.executable, str(ROOT / "examples" / "train_grpo.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_nothing_heavy_is_loaded():
    assert loaded(f"from trl_darts.recipes.files import *; check_config_option(['--config', {RECIPE!r}])") == set()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "nothing.yaml"], r"`file` \('nothing.yaml'\) must be a file that can be read: No such file"),
        (["--config", "list.yaml"], r"`file` \('list.yaml'\) must be a YAML mapping of names to values"),
        (["--config=broken.yaml"], r"`file` \('broken.yaml'\) must be plain YAML: .* in line 1"),
        (["--config", "twice.yaml"], r"`file` \('twice.yaml'\) must be plain YAML: a name is given twice in line 2"),
        (["--top_k", "1", "--config"], "`--config` must be followed by a YAML file"),
    ],
)
def test_files_that_can_not_be_a_config(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("[1, 2]")
    Path("broken.yaml").write_text("a: {b: 1")
    Path("twice.yaml").write_text("beta: 0.1\nbeta: 0.2")
    with pytest.raises(ConfigurationError, match=message):
        check_config_option(words)


def test_configs_of_the_hub_are_not_files():
    check_config_option(["--config", "hf://org/name"])


def test_the_command_line_without_its_file():
    assert split_command_line(["--top_k", "-1", "--config", "a.yaml", "--no_bf16"]) == (
        ["--top_k", "-1", "--no_bf16"],
        "a.yaml",
    )


@pytest.mark.parametrize("name", ["", "me/x y", "a/b/c"])
def test_a_malformed_name_is_no_matter_of_the_network(name):
    with pytest.raises(
        ConfigurationError, match=rf"`repo_id` \('{name}'\) must be a name on the Hub such as 'org/name'"
    ):
        check_hub(name)


@pytest.mark.parametrize("endpoint", ["hub.example", "http://[hub", "http://hub:port"])
def test_a_malformed_address_of_the_hub(endpoint, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(ConfigurationError, match=rf"`HF_ENDPOINT` \('{re.escape(endpoint)}'\) must be an address"):
        check_hub("org/name")


def test_the_script_names_a_missing_file_before_it_loads_trl():
    done = run_script("--config", "nothing.yaml")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: `file` ('nothing.yaml')")


def test_the_script_says_that_it_loads_trl_and_names_a_wrong_flag():
    done = run_script("--config", RECIPE, "--max_stepz", "3")
    assert done.returncode == 2
    loading, line = done.stderr.splitlines()
    assert loading == "Loading TRL …"
    assert line.startswith(
        "Error: `max_stepz` is not a field of the script, the trainer or the model. Did you mean `max_steps`"
    )


def test_shipped_recipes_have_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert split_command_line(["--config", "tiny_reasoner"]) == ([], str(SHIPPED / "tiny_reasoner.yaml"))
    assert shipped_file("--accelerate_config", "fsdp2", SHIPPED / "accelerate").endswith(
        "configs/accelerate/fsdp2.yaml"
    )
    with pytest.raises(ConfigurationError, match=r"`--config` \('tiny'\) must be a YAML file, or .*, tiny_reasoner, "):
        split_command_line(["--config", "tiny"])
    Path("tiny_reasoner").write_text("")  # a file wins
    assert shipped_file("--config", "tiny_reasoner") == "tiny_reasoner"
