"""A recipe is parsed by the real dataclasses; what they would pass over is one clear error."""

import os

import pytest
import yaml

from trl_darts.errors import ConfigurationError
from trl_darts.recipes import read_recipe


SMALL = {
    "model_name_or_path": "some/model",
    "dataset_name": "some/data",
    "reward_funcs": ["accuracy_reward"],
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "report_to": "none",
}


def write(tmp_path, **fields):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **fields}))
    return path


def test_processes_that_are_not_there_make_the_batch(tmp_path):
    recipe = read_recipe(write(tmp_path, gradient_accumulation_steps=3), num_processes=5)
    assert recipe.config.generation_batch_size == recipe.plan.generation_batch_size == 8 * 5 * 3
    assert recipe.config.steps_per_generation == recipe.plan.steps_per_generation == 3
    assert recipe.config.world_size == 5


def test_fields_of_a_gpu_are_no_obstacle_without_one(tmp_path):
    recipe = read_recipe(write(tmp_path, bf16=True, tf32=True, use_cpu=False))
    assert recipe.config.bf16


def test_values_are_those_of_the_file(tmp_path):
    recipe = read_recipe(
        write(
            tmp_path, learning_rate="1e-6", long_end_patience=None, lora_target_modules=["all-linear"], use_peft=True
        )
    )
    assert recipe.config.learning_rate == 1e-6
    assert recipe.config.long_end_patience is None
    assert recipe.config.max_num_generations == 8
    assert recipe.model.lora_target_modules == "all-linear"
    assert recipe.script.reward_funcs == ["accuracy_reward"]


def test_what_has_no_bound_may_be_infinite(tmp_path):
    recipe = read_recipe(write(tmp_path, max_grad_norm=float("inf"), epsilon_high=float("inf")))
    assert recipe.config.max_grad_norm == recipe.config.epsilon_high == float("inf")


def test_environment_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.delenv("RECIPE_VARIABLE", raising=False)
    read_recipe(write(tmp_path, env={"RECIPE_VARIABLE": "1"}))
    assert "RECIPE_VARIABLE" not in os.environ


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_generation": 8}, "`num_generation` must be a field of .* Did you mean `num_generations`"),
        ({"zzzzzzzz": 8}, "`zzzzzzzz` must be a field of .* Take it out."),
        ({"num_generations": "eight"}, r"`num_generations` \('eight'\) must be of type int"),
        ({"num_generations": 8.5}, r"`num_generations` \(8.5\) must be of type int"),
        ({"num_generations": [8]}, r"`num_generations` \(\[8\]\) must be of type int"),
        ({"num_generations": True}, r"`num_generations` \(True\) must be of type int"),
        ({"num_generations": None}, r"`num_generations` \(None\) must be at least 2"),
        (
            {"bf16_full_eval": None},
            r"`bf16_full_eval` \(None\) must be of type bool, not NoneType",
        ),
        ({"bf16": "perhaps"}, r"`bf16` \('perhaps'\) must be of type bool"),
        ({"learning_rate": {"a": 1}}, r"`learning_rate` \({'a': 1}\) must be of type float"),
        ({"reward_funcs": [["a"]]}, r"`reward_funcs` \(\[\['a'\]\]\) must be of type list\[str\]"),
        ({"reward_funcs": []}, r"`reward_funcs` \(empty\) must name at least one reward"),
        ({"reward_funcs": ["acuracy_reward"]}, r"`reward_funcs` \('acuracy_reward'\) must be one of accuracy_reward"),
        ({"reward_funcs": [".foo"]}, r"`reward_funcs` \('.foo'\) must be one of accuracy_reward"),
        ({"reward_funcs": ["my_rewards."]}, r"`reward_funcs` \('my_rewards.'\) must be one of accuracy_reward"),
        ({"dataset_name": None}, r"`dataset_name` \(empty\) must be a data set of the Hub"),
        ({"ignore_bias_buffers": True}, r"`ignore_bias_buffers` \(True\) has no effect"),
        ({"reward_funcs": ["get_cosine_scaled_reward"]}, r"`reward_funcs` \('get_cosine_scaled_reward'\) must be one"),
        (
            {"reward_funcs": "accuracy_reward"},
            r"`reward_funcs` \('accuracy_reward'\) must be .* in brackets: \[accuracy_reward\]",
        ),
        (
            {"reward_weights": 2.0},
            r"`reward_weights` \(2.0\) must be .* Put it in brackets: \[2.0\]",
        ),
        ({"temperature": float("inf")}, r"`temperature` \(inf\) must be finite"),
        ({"learning_rate": ".inf"}, r"`learning_rate` \('.inf'\) must be of type float"),
        ({"learning_rate": "inf"}, r"`learning_rate` \(inf\) must be finite"),
        ({"long_end_patience": float("nan")}, r"`long_end_patience` \(nan\) must be finite"),
        ({"max_grad_norm": float("nan")}, r"`max_grad_norm` \(nan\) must be finite"),
        ({"epsilon_high": float("-inf")}, r"`epsilon_high` \(-inf\) must be finite"),
        ({"use_cpu": "perhaps"}, r"`use_cpu` \('perhaps'\) must be of type bool"),
        ({"env": 3}, r"`env` \(3\) must be a mapping"),
        ({"model_name_or_path": None}, r"`model_name_or_path` \(empty\) must be a model"),
        ({"max_completion_length": None}, r"`max_completion_length` \(None\) must be at least 1"),
        ({"max_num_generations": 2}, r"`max_num_generations` \(2\) must be at least `num_generations` \(4\)"),
        (
            {"loss_type": "dapo", "lr_scheduler_type": "straight"},
            r"`lr_scheduler_type` \('straight'\) must be one of 'linear'",
        ),
        ({"load_in_8bit": True, "load_in_4bit": True}, "8 bit and 4 bit"),
        ({"num_prompts": 0}, r"`num_prompts` \(0\) must be at least 1"),
        (
            {"num_prompts": 8},
            r"`num_prompts` \(8\) only has an effect with `dataset_name` 'tiny_reasoner', and that is",
        ),
    ],
)
def test_bad_fields(tmp_path, fields, message):
    with pytest.raises(ConfigurationError, match=message):
        read_recipe(write(tmp_path, **fields))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1", "must be plain YAML: "),
        ("a: &b [1]\nc: *b\n", "must be plain YAML: it must have no aliases .* in line 2"),
        ("- a\n- b\n", "must be a YAML mapping of names to values, not a list"),
        ("", "must be a YAML mapping of names to values, not a NoneType"),
        (b"\xff\xfe\x00a", "must be a file that can be read: it is no text"),
    ],
)
def test_no_recipe(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigurationError, match=message):
        read_recipe(path)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nowhere.yaml'\) must be a file that can be read: No such file"):
        read_recipe(tmp_path / "nowhere.yaml")


def test_number_of_processes(tmp_path):
    with pytest.raises(ConfigurationError, match=r"`num_processes` \(0\) must be at least 1"):
        read_recipe(write(tmp_path), num_processes=0)
