"""Names that are no field are told before torch, TRL or transformers load, and the names are the parser's."""

import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from trl import TrlParser

from tests.test_imports import loaded
from trl_darts.analysis.recipe import ARGUMENTS
from trl_darts.errors import ConfigurationError
from trl_darts.fields import check_command_line, field_defaults, field_names, split_command_line
from trl_darts.settings import RolloutSettings


ROOT = Path(__file__).resolve().parents[1]
RECIPE = str(ROOT / "configs" / "tiny_reasoner.yaml")


def test_names_are_those_of_the_parser():
    assert field_names() == {action.dest for action in TrlParser(ARGUMENTS)._actions} - {"help"}


def test_defaults_are_those_of_the_classes():
    """But for what a class computes, which a source does not say."""
    known = {own.name: own.default for cls in reversed(ARGUMENTS) for own in fields(cls) if own.default is not MISSING}
    found = field_defaults()
    assert {name: known[name] for name in found if name in known} == {n: found[n] for n in found if n in known}
    assert len(found.keys() & known.keys()) > 200


def test_nothing_heavy_is_loaded():
    assert loaded(f"from trl_darts.fields import *; check_command_line(['--config', {RECIPE!r}])") == set()


def test_help_of_our_fields_alone():
    """In the script, without what takes seconds to load."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "train_grpo.py", "--help-fields"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert {f"--{own.name}" for own in fields(RolloutSettings)} == set(re.findall(r"^  (--\w+)", done.stdout, re.M))


@pytest.mark.parametrize(
    "words",
    [
        ["--config", RECIPE, "--num_longest", "2", "--top_k", "-1", "--use_vllm"],
        [f"--config={RECIPE}", "--max-num-generations=9", "--no_bf16", "--help"],
        ["--config", "hf://org/name", "--max_num_gen", "9"],  # the parser completes it
        ["-h"],
        ["--num_generations", "4", "--max_num_gen", "6", "--target_redundancy=1.25"],
        ["--config", "hf://org/name", "--max_num_generations", "4"],  # of what it is the most, only the file knows
        ["--config", RECIPE, "--scale_rewards", "false", "--no_use_vllm", "--generation_kwargs", "a word"],
        ["--config", RECIPE, "--tail_pruning", "1"],  # the parser makes it `True`
        ["--num_generations", "some", "--long_end_patience", "none"],  # a type is the parser's to refuse
    ],
)
def test_what_the_parser_takes(words):
    check_command_line(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_generationz", "8"], "^`num_generationz` is no field of .* Did you mean `num_generations`"),
        (["--schedul=grpo", "--frobnicate"], "`frobnicate` is no field of .* Take it out"),
        (
            ["--config", "configs/nothing.yaml"],
            r"`file` \('configs/nothing.yaml'\) must be a file that can be read: No",
        ),
        (
            ["--config", RECIPE, "--max-num-gen=4"],
            r"`max_num_generations` \(4\) must be at least `num_generations` \(8\)",
        ),
        (["--config"], "`--config` must be followed by a YAML file"),
        (["--config", RECIPE, "--rollout_ahead", "1"], r"`rollout_ahead` \(1\) .* trainer's own process"),
        (["--config", RECIPE, "--length_history", "nowhere"], r"`length_history` \('nowhere'\) must be a checkpoint"),
        (["--config", RECIPE, "--per_device_train_batch_size", "60"], r"\(60 rows: .* × 1 process × .* divisible by"),
        (["--config", RECIPE, "--dataset_name", "org/other"], r"`num_prompts` \(64\) .* only for `dataset_name`"),
        (["--config", RECIPE, "--reward_funcs", "no_such"], r"`reward_funcs` \(\['no_such'\]\) must be among"),
        (
            ["--config", RECIPE, "--resume_from_checkpoint", "true", "--output_dir", "nowhere"],
            r"`resume_from_checkpoint` \(true\) needs a whole checkpoint in `output_dir` \('nowhere'\)",
        ),
    ],
)
def test_what_it_does_not_take(words, message):
    with pytest.raises(ConfigurationError, match=message):
        check_command_line(words)


def test_unknown_names_in_the_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("{num_generation: 8, env: {A: 1}}")
    with pytest.raises(ConfigurationError, match=r"^\S+/recipe\.yaml: `num_generation` is no .* `num_generations`"):
        check_command_line(["--config", str(path)])


def test_the_command_line_without_its_file():
    assert split_command_line(["--top_k", "-1", "--config", "a.yaml", "--no_bf16"]) == (
        ["--top_k", "-1", "--no_bf16"],
        "a.yaml",
    )


def test_the_training_script_ends_with_the_line():
    command = [sys.executable, str(ROOT / "examples" / "train_grpo.py"), "--config", RECIPE]
    done = subprocess.run([*command, "--max_stepz", "3"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: `max_stepz` is no field of the script, the trainer or the model. Did you mean ")
