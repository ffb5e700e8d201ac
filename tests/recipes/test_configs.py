"""Every recipe of `configs`: its commands parse and agree with each other and with it, and it passes the check."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from typer.testing import CliRunner

from trl_darts.cli import app
from trl_darts.recipes import read_recipe, read_sharding

from .commands import RECIPES, ROOT, command, option


# Of the models' cards. Their configs are on the Hub, which no test asks.
PARAMETERS = {
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54e9,
    "Qwen/Qwen2.5-3B": 3.09e9,
    "Qwen/Qwen2.5-7B-Instruct": 7.61e9,
    "Qwen/Qwen2.5-Math-7B": 7.61e9,
    "Qwen/Qwen2.5-14B": 14.7e9,
    "Qwen/Qwen2.5-32B": 32.5e9,
    "Qwen/Qwen3-30B-A3B": 30.5e9,
}
OF_THE_PAPER = [path for path in RECIPES if "DARTS (https" in path.read_text()]
recipes = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def launch(path: Path):
    """The launch command, parsed by accelerate."""
    line = command(path, "accelerate launch")
    return launch_command_parser().parse_args(line[2:])


def num_processes(path: Path) -> int:
    """Those that the launch command starts."""
    args = launch(path)
    return args.num_processes or (read_sharding(ROOT / args.config_file).num_processes if args.config_file else 1)


@recipes
def test_launch_command(path):
    args = launch(path)
    assert (ROOT / args.training_script).exists()
    assert args.training_script_args == ["--config", f"configs/{path.name}"]
    assert args.config_file is None or (ROOT / args.config_file).exists()


@recipes
def test_server_command(path, monkeypatch):
    """What it starts is what the recipe speaks to."""
    fields = yaml.safe_load(path.read_text())
    line = command(path, "trl-darts serve")
    if fields.get("vllm_mode") != "server":
        assert line is None
        return
    seen = {}
    monkeypatch.setattr("trl_darts.cli.serve._serve", lambda options, *rest: seen.update(options=options))
    result = CliRunner().invoke(app, line[1:])
    assert result.exit_code == 0, result.output
    options = seen["options"]
    assert options.model == fields["model_name_or_path"]
    urls = [url.strip() for url in fields["vllm_server_base_url"].split(",")]
    hosts = list(dict.fromkeys(url.rpartition(":")[0] for url in urls))
    assert f"http://{options.host}" == hosts[0]
    ports = range(options.port, options.port + options.num_servers)
    assert urls == [f"{host}:{port}" for host in hosts for port in ports]


@recipes
def test_recipe_passes_its_own_check(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    line = command(path, "trl-darts config check") or ["trl-darts", "config", "check", f"configs/{path.name}"]
    model = yaml.safe_load(path.read_text())["model_name_or_path"]
    size = ["--num-parameters", str(PARAMETERS[model])] if model in PARAMETERS else []
    result = CliRunner().invoke(app, [*line[1:], *size])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert option(line, "--accelerate-config") == launch(path).config_file
    assert f"processes {num_processes(path)} " in " ".join(result.stdout.split())
    server = command(path, "trl-darts serve")
    if server is not None:
        assert option(line, "--max-model-len") == option(server, "--max-model-len")


@pytest.mark.parametrize("path", OF_THE_PAPER, ids=lambda path: path.stem)
def test_recipes_have_the_papers_values(path):
    recipe = read_recipe(path, num_processes(path))
    config = recipe.config
    assert (config.schedule, config.num_generations, config.num_longest) == ("darts", 8, 1)  # M and L
    assert config.max_num_generations == 16  # M_up = 2M
    assert config.target_redundancy == 1.5  # M_total / (N·M)
    assert config.tail_pruning
    assert config.stream_logprobs
    assert config.long_end_patience is None
    assert "long_end_patience" in yaml.safe_load(path.read_text())  # said, not left to a default that may change
    assert (config.epsilon, config.epsilon_high) == (0.2, 0.28)  # clip-higher
    assert config.loss_type == "dapo"  # token-level loss
    assert config.beta == 0.0
    assert recipe.script.reward_funcs == ["accuracy_reward", "get_soft_overlong_punishment"]
    assert len(config.reward_weights) == 2
    assert config.max_steps == 500
    assert recipe.plan.steps_of_generation == 1  # on-policy
    assert recipe.plan.prompts_per_step == 128


def test_the_papers_recipes_are_all_there():
    models = {yaml.safe_load(path.read_text())["model_name_or_path"] for path in OF_THE_PAPER}
    sizes = ("2.5-3B", "2.5-Math-7B", "2.5-14B", "2.5-32B", "3-30B-A3B")
    assert models == {f"Qwen/Qwen{size}" for size in sizes}


@pytest.mark.parametrize("path", OF_THE_PAPER, ids=lambda path: path.stem)
def test_gpus_of_the_title_are_those_of_the_commands(path):
    """Those that train, and those of the servers of all nodes."""
    gpus = int(path.read_text().splitlines()[0].split(", ")[1].removesuffix(" GPUs"))
    num_servers = yaml.safe_load(path.read_text())["vllm_server_base_url"].count("http://")
    tensor_parallel = int(option(command(path, "trl-darts serve"), "--tensor-parallel-size") or 1)
    assert num_processes(path) + num_servers * tensor_parallel == gpus
