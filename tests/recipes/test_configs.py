"""Tests every recipe of `configs`: the commands in its first lines are valid and agree with it, and it passes."""

import shlex
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from typer.testing import CliRunner

from trl_darts.cli import app
from trl_darts.recipes.recipe import read_recipe


ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
OF_THE_PAPER = [path for path in RECIPES if "DARTS (https" in path.read_text()]
recipes = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
of_the_paper = pytest.mark.parametrize("path", OF_THE_PAPER, ids=lambda path: path.stem)


def command(path: Path, start: str) -> list[str]:
    """Returns the arguments of a command in the recipe's first lines, by its `start`. Empty without it."""
    head = path.read_text().partition("\n#   ")[2].partition("\nmodel")[0]
    text = head.replace("\\\n#", " ")
    line = next((line for line in text.splitlines() if start in line), start)
    return shlex.split(line.partition(start)[2], comments=False)


def num_processes(path: Path) -> int:
    return launch_command_parser().parse_args(command(path, "accelerate launch")).num_processes or 1


def option(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


@recipes
def test_commands_agree_with_the_recipe(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    fields = yaml.safe_load(path.read_text())
    launch = launch_command_parser().parse_args(command(path, "accelerate launch"))
    assert Path(launch.training_script).exists()
    assert launch.training_script_args == ["--config", f"configs/{path.name}"]
    check = command(path, "trl-darts config check")
    result = CliRunner().invoke(app, ["config", "check", *check])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert check[0] == f"configs/{path.name}"
    assert option(check, "--accelerate-config") == launch.config_file
    assert f"processes         {num_processes(path)}\n" in result.stdout
    assert fields.get("num_processes", 1) == num_processes(path)

    serve = command(path, "trl-darts serve")
    assert bool(serve) == (fields.get("vllm_mode") == "server")
    if serve:
        assert serve[0] == fields["model_name_or_path"]
        assert option(check, "--max-model-len") == option(serve, "--max-model-len")
        urls = [url.strip() for url in fields["vllm_server_base_url"].split(",")]
        hosts = list(dict.fromkeys(url.rpartition(":")[0] for url in urls))
        assert hosts[0] == f"http://{option(serve, '--host') or '127.0.0.1'}"
        ports = range(8000, 8000 + int(option(serve, "--num-servers") or 1))
        assert urls == [f"{host}:{port}" for host in hosts for port in ports]


@recipes
def test_fsdp_keeps_gradients_sharded_where_they_are_accumulated(path):
    fields = yaml.safe_load(path.read_text())
    config_file = option(command(path, "accelerate launch"), "--config_file")
    launch = yaml.safe_load((ROOT / config_file).read_text()) if config_file else {}
    accumulates = launch.get("distributed_type") == "FSDP" and fields["gradient_accumulation_steps"] > 1
    kwargs = fields.get("accelerator_config", {}).get("gradient_accumulation_kwargs", {})
    assert kwargs.get("sync_each_batch", False) == accumulates
    assert accumulates == (path in OF_THE_PAPER or path.stem == "qwen3_8b_8gpu")


@of_the_paper
def test_recipes_have_the_papers_values(path):
    recipe = read_recipe(path, num_processes(path))
    config = recipe.config
    assert (config.schedule, config.num_generations, config.num_longest) == ("darts", 8, 1)  # M and L
    assert config.max_num_generations == 16  # M_up = 2M
    assert config.target_redundancy == 1.5  # M_total / (N·M)
    assert config.tail_pruning
    assert config.stream_logprobs
    assert config.long_end_patience is None
    assert "long_end_patience" in yaml.safe_load(path.read_text())  # set explicitly, because the default may change
    assert (config.epsilon, config.epsilon_high) == (0.2, 0.28)  # clip-higher
    assert (config.loss_type, config.beta) == ("dapo", 0.0)  # token-level loss, no KL term
    assert recipe.script.reward_funcs == ["accuracy_reward", "get_soft_overlong_punishment"]
    assert config.max_steps == 500
    assert config.steps_per_generation == config.gradient_accumulation_steps  # on-policy
    assert recipe.prompts_per_step == 128
