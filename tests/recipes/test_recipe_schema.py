"""Tests the errors of the recipes' schema, and that the file in `configs` is up to date."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator
from trl import GRPOConfig
from typer.testing import CliRunner

from trl_darts.cli import app
from trl_darts.config import DARTSGRPOConfig
from trl_darts.recipes.fields import ARGUMENTS
from trl_darts.recipes.schema import recipe_schema
from trl_darts.recipes.script import ScriptArguments


CONFIGS = Path(__file__).parents[2] / "configs"
FILE = CONFIGS / "recipe.schema.json"
RECIPES = sorted(CONFIGS.glob("*.yaml"))


@pytest.fixture(scope="module")
def validator():
    schema = recipe_schema()
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_fit(validator, path):
    assert [error.message for error in validator.iter_errors(yaml.safe_load(path.read_text()))] == []
    first = path.read_text().splitlines()[0]
    assert first == f"# yaml-language-server: $schema={FILE.name}"


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"num_generation": 8}, "'num_generation' was unexpected"),
        ({"num_generations": "eight"}, "not of type 'integer'"),
        ({"num_generations": None}, "not of type 'integer'"),
        ({"save_strategy": "never"}, "is not one of"),
        ({"schedule": "dart"}, "is not one of"),
        ({"reward_funcs": "accuracy_reward"}, "not valid under any"),
        ({"long_end_patience": []}, "not of type"),
    ],
)
def test_what_does_not_fit(validator, recipe, words):
    (error,) = validator.iter_errors(recipe)
    assert words in error.message


@pytest.mark.parametrize(
    "recipe",
    [
        {"sorted_mode": None, "schedule": "sorted"},
        {"max_num_generations": None, "long_end_patience": 2.5, "learning_rate": 1.0e-6, "save_steps": 100},
        {"long_end_patience": "auto", "env": {"A": "1"}, "reward_weights": [1, 0.5], "dtype": "bfloat16"},
    ],
)
def test_what_fits(validator, recipe):
    assert list(validator.iter_errors(recipe)) == []


def test_every_field_has_its_help():
    properties = recipe_schema()["properties"]
    assert {own.name for cls in ARGUMENTS for own in fields(cls)} | {"env"} == properties.keys()
    assert all(own["description"] for own in properties.values())


def test_the_file_is_what_the_command_prints(tmp_path):
    """Only for our fields, because those of TRL and transformers depend on their versions."""
    result = CliRunner().invoke(app, ["config", "schema"])
    CliRunner().invoke(app, ["config", "schema", "--output", str(tmp_path / "schema.json")])
    assert (tmp_path / "schema.json").read_text() == result.stdout
    printed, written = (json.loads(text)["properties"] for text in (result.stdout, FILE.read_text()))
    ours = {own.name for own in fields(DARTSGRPOConfig)} - {own.name for own in fields(GRPOConfig)}
    ours |= ScriptArguments.__annotations__.keys()
    assert len(ours) > 40
    stale = [name for name in sorted(ours) if written.get(name) != printed[name]]
    assert stale == [], f"run `trl-darts config schema --output configs/{FILE.name}`"


def test_a_file_that_can_not_be_written_is_named(tmp_path):
    result = CliRunner().invoke(app, ["config", "schema", "--output", str(tmp_path)])
    assert f"Is a directory: '{tmp_path}'" in result.stderr
    assert result.exit_code == 2
