"""`trl-darts grpo`: which words it gives to accelerate and which to the script, its help, and its errors."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trl_darts.cli import app
from trl_darts.cli.grpo import SCRIPT, split_words
from trl_darts.config import OWN_FIELDS
from trl_darts.recipes.files import SHIPPED


RUNNER = CliRunner()
TINY = ["--config", "tiny_reasoner"]


@pytest.mark.parametrize(
    ("words", "launch", "script"),
    [
        (["--max_steps", "2", "--bf16", "false"], [], ["--max_steps", "2", "--bf16", "false"]),
        (
            # `2` stays with both, and a field of the script that accelerate has too, --debug, is the script's.
            [
                "--max_steps",
                "2",
                "--num_machines",
                "2",
                "--multi_gpu",
                "--debug",
                "underflow_overflow",
                "--top_k",
                "-1",
            ],
            ["--num_machines", "2", "--multi_gpu"],
            ["--max_steps", "2", "--debug", "underflow_overflow", "--top_k", "-1"],
        ),
        (
            ["--num-processes=2", "--accelerate_config", "ddp", "--reward_funcs", "a.b", "c.d"],
            ["--num_processes", "2", "--config_file", str(SHIPPED / "accelerate" / "ddp.yaml")],
            ["--reward_funcs", "a.b", "c.d"],
        ),
    ],
)
def test_words_of_the_launcher_and_of_the_script(words, launch, script):
    assert split_words([*TINY, *words]) == (launch, [*TINY, *script])


def test_a_recipe_names_its_processes(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("num_processes: 8\n")
    config = ["--config", str(recipe)]
    assert split_words(config) == (["--num_processes", "8"], config)
    assert split_words([*config, "--num_processes", "2"]) == (["--num_processes", "2"], config)
    assert split_words([*config, "--accelerate_config", "ddp"])[0][0] == "--config_file"  # which has its own number


def test_it_launches_the_script(monkeypatch):
    launched = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
    result = RUNNER.invoke(app, ["grpo", *TINY, "--cpu", "--max_steps", "2"])
    assert result.exit_code == 0, result.output
    (arguments,) = launched
    assert arguments.module
    assert arguments.cpu
    assert (arguments.training_script, arguments.training_script_args) == (SCRIPT, [*TINY, "--max_steps", "2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "tiny"], "`--config` ('tiny') must be a YAML file, or one of those that come with trl_darts: o"),
        ([*TINY, "--accelerate_config", "fsdp"], "`--accelerate_config` ('fsdp') must be a YAML file, or one of thos"),
        ([*TINY, "--max_stepz", "2"], "`max_stepz` is not a field of the script, the trainer or the model. Did you m"),
        ([*TINY, "--max_steps", "two"], "Argument --max_steps/--max-steps: invalid int value: 'two'. Correct it"),
        ([*TINY, "--num_machines", "two"], "Argument --num_machines/--num-machines: invalid int value: 'two'. `acce"),
        ([*TINY, "2"], "`2` is no option. Write `--FIELD VALUE`, or leave it out."),
    ],
)
def test_wrong_words_are_one_line(words, message):
    result = RUNNER.invoke(app, ["grpo", *words])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"Error: {message}")


def test_help():
    shown = RUNNER.invoke(app, ["grpo", "--help"]).stdout
    own = set(re.findall(r"^  --(\w+)", shown, re.MULTILINE))
    assert own >= OWN_FIELDS | {"prompt_column", "num_prompts"}
    assert "learning_rate" not in own
    headings = [
        line.removeprefix("## ")
        for line in Path(__file__).parents[2].joinpath("docs/settings.md").read_text().splitlines()
        if "## " in line
    ]
    assert re.findall(r"^(\S.*):$", shown, re.MULTILINE)[1:] == headings  # after the script's own
    assert "--learning_rate" in RUNNER.invoke(app, ["grpo", "--help-all"]).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("simulate --sead 3", "No such option: --sead (Possible options: --schedule, --seeds, --sweep)"),
        ("simulate --steps x", "Invalid value for '--steps': "),
        ("profile", "Missing argument 'URL'"),
        ("report --output x.html", "Missing argument 'RUN_DIR...'"),
        ("nothing", "No such command 'nothing'"),
    ],
)
def test_wrong_options_of_any_command_are_one_line(words, message):
    result = RUNNER.invoke(app, words.split(), prog_name="trl-darts")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: {message}")
    command = "trl-darts" if words == "nothing" else f"trl-darts {words.split()[0]}"
    assert line.endswith(f"`{command} --help` lists what it takes.")
