"""`trl-darts config push` and `pull`, as commands of their own and in this process; and the script's `--config hf://`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from typer.testing import CliRunner

from tests.hub.stand_in import TOKEN, StandIn
from trl_darts.cli import app
from trl_darts.hub.files import CARD_NAME, CONFIG_NAME, checksum, publishable


ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "tiny_reasoner.yaml"
REPO = "me/tiny"
PUSH = ["push", str(RECIPE), REPO, "--without", "model_name_or_path", "--without", "reward_funcs"]


def config(*words: str) -> Any:
    return CliRunner().invoke(app, ["config", *words])


def command(hub: StandIn, home: Path, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """A process of its own, which finds the Hub through the environment, as a user's does."""
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in offline}
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, cwd=home)


def expected() -> tuple[dict[str, Any], list[str]]:
    """What of the recipe leaves, and what stays."""
    recipe = yaml.safe_load(RECIPE.read_text())
    public, left_out = publishable(recipe, [name for name in recipe if name in PUSH])
    assert public.keys() >= {"max_steps", "learning_rate"}
    assert {*left_out} == {"output_dir", "model_name_or_path", "reward_funcs"}
    return public, left_out


def test_push_and_pull_in_processes_of_their_own(hub, tmp_path):
    pushed = command(hub, tmp_path, "-m", "trl_darts.cli", "config", *PUSH)
    assert pushed.returncode == 0, pushed.stderr
    public, left_out = expected()
    assert f"Left out, to be set where the training is started: {', '.join(left_out)}\n" in pushed.stderr
    address = pushed.stdout.strip()
    assert address == f"{REPO}@{hub.repositories[REPO].branches['main']}"
    card = hub.repositories[REPO].files("main")[CARD_NAME].decode()
    assert f"started: {', '.join(f'`{name}`' for name in left_out)}.\n" in card

    pulled = command(hub, tmp_path, "-m", "trl_darts.cli", "config", "pull", address, "--output", "mine.yaml")
    assert pulled.returncode == 0, pulled.stderr
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text()) == public


def test_private_is_no_promise_for_a_public_repository(hub):
    assert config(*PUSH).exit_code == 0
    result = config(*PUSH, "--private")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: `private` (True) must hold for {REPO!r}, which exists and is public.")


def test_the_script_takes_a_config_of_the_hub(hub, tmp_path):
    content = b"num_generations: 7\nper_device_train_batch_size: 8\nuse_cpu: true\n"
    card = f"---\ndarts_config_sha256: {checksum(content)}\n---\n"
    hub.add(REPO, {CONFIG_NAME: content, CARD_NAME: card.encode()})
    script = str(ROOT / "examples" / "train_grpo.py")
    ran = command(hub, tmp_path, script, "--config", f"hf://{REPO}", "--output_dir", "out")
    assert "generation_batch_size (8) must be divisible by num_generations (7)" in ran.stderr


def test_pull_says_where_it_is_from(hub, tmp_path):
    assert config(*PUSH).exit_code == 0
    path = tmp_path / "mine.yaml"
    result = config("pull", REPO, "--output", str(path))
    assert result.exit_code == 0
    assert f"From {REPO}@{hub.repositories[REPO].branches['main']}" in result.stderr
    assert path.read_bytes() == hub.repositories[REPO].files("main")[CONFIG_NAME]


def test_options_reach_the_hub(hub):
    result = config(*PUSH, "--private", "--revision", "v1", "--measured", "two cores: 1.3×", "--message", "First")
    assert result.exit_code == 0, result.stderr
    repository = hub.repositories[REPO]
    assert repository.private
    assert "two cores: 1.3×" in repository.files("v1")[CARD_NAME].decode()
    assert "--config hf://me/tiny@v1 " in repository.files("v1")[CARD_NAME].decode()
    assert CONFIG_NAME not in repository.files("main")
    assert '"summary": "First"' in hub.sent.replace('"summary":"', '"summary": "')


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["push", str(RECIPE), REPO], r"`model_name_or_path` ('examples/tiny_reasoner/checkpoint') must be a name on"),
        (["push", "none.yaml", REPO], "`file` ('none.yaml') must be a file that can be read: No such file"),
        ([*PUSH, "--without", "beta"], "`without` ('beta') must be a field of"),
        (["push", str(RECIPE), "a/b/c", *PUSH[3:]], "`repo_id` ('a/b/c') must be a name on the Hub"),
        (["pull", "me/nothing"], "`repo_id` ('me/nothing') must be a repository of the Hub"),
        (["pull", "me/nothing@"], "`repo_id` ('me/nothing@') must be of the form org/name or org/name@revision"),
        (["pull", REPO, "--output", str(RECIPE)], "must be a new file, and exists"),
        (["pull", REPO, "--output", "no/where.yaml"], "must be a new file, and is in a directory that does not exist"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(hub, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = config(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.glob("*.yaml")) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"num_generations: 8\nnum_generation: 4\n", "'num_generation' is no field"),
        (b"trust_remote_code: true\n", "`trust_remote_code` must not stand in a published config"),
        (b"a: !!python/name:os.system\n", "must be plain YAML: it must have no tags"),
    ],
)
def test_a_hostile_config_is_not_written(hub, tmp_path, content, message):
    hub.add(REPO, {CONFIG_NAME: content, CARD_NAME: f"---\ndarts_config_sha256: {checksum(content)}\n---\n".encode()})
    result = config("pull", REPO, "--output", str(tmp_path / "mine.yaml"))
    assert result.exit_code == 2
    assert f"Error: `{REPO}` is refused: " in result.stderr
    assert message in result.stderr
    assert not (tmp_path / "mine.yaml").exists()


def test_an_unreachable_hub(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the port of "discard", where nothing listens
    for words in (PUSH, ["pull", REPO, "--output", str(tmp_path / "mine.yaml")]):
        result = config(*words)
        assert result.exit_code == 2
        assert "the Hub can't be reached" in result.stderr
        assert result.stderr.count("\n") == 1
