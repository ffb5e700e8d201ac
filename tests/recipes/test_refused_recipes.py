"""What `trl-darts config check` ends with exit code 2 for, and what looks like it and runs."""

import math

import pytest

from .commands import run


SERVERS = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://127.0.0.1:1"}
NO_LOGPROBS = {"vllm_importance_sampling_correction": False, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset_name": None}, "`dataset_name` (empty) must be a data set of the Hub"),
        ({"reward_weights": [1.0, 2.0]}, "`reward_weights` ([1.0, 2.0]) must be as many as the rewards (1)"),
        (
            {"reward_weights": [1.0], "reward_model_name_or_path": "some/reward"},
            "`reward_weights` ([1.0]) must be as many as the rewards (2)",
        ),
        (
            {"use_vllm": True, "vllm_tensor_parallel_size": 2},
            "`vllm_tensor_parallel_size` (2) must divide the processes (1)",
        ),
        ({"load_in_4bit": True}, "`load_in_4bit` (True) needs `use_peft`"),
        ({"load_in_8bit": True}, "`load_in_8bit` (True) needs `use_peft`"),
        ({"sync_ref_model": True, "beta": 0.1, "use_peft": True}, "`sync_ref_model` (True) does not run with `use_pe"),
        ({"sync_ref_model": True}, "`sync_ref_model` (True) needs a reference model"),
        ({"loss_type": "gpro"}, "`loss_type` ('gpro') must be one of 'grpo'"),
        ({"scale_rewards": "rows"}, "`scale_rewards` ('rows') must be one of 'group'"),
        ({"importance_sampling_level": "word"}, "`importance_sampling_level` ('word') must be one of 'token'"),
        ({"use_vllm": True, "vllm_mode": "local"}, "`vllm_mode` ('local') must be one of 'server'"),
        ({"use_vllm": True, "loss_type": "vespo"}, "`vllm_importance_sampling_mode` ('sequence_mask') must be one of"),
        ({"temperature": 0.0}, "`temperature` (0.0) must be positive"),
        ({"learning_rate": -1.0}, "`learning_rate` (-1.0) must be at least 0"),
        ({"epsilon": -1.0}, "`epsilon` (-1.0) must be at least 0"),
        ({"ignore_bias_buffers": True}, "`ignore_bias_buffers` (True) has no effect"),
        ({"schedule": "tail_batching"}, "`schedule` ('tail_batching') trains on other prompts than the data loader's"),
        ({"schedule": "sorted"}, "`schedule` ('sorted') trains on other prompts than the data loader's"),
        (
            {"schedule": "partial_rollout", "use_vllm": True, "vllm_mode": "colocate"},
            "`schedule` ('partial_rollout') trains on other prompts than the data loader's",
        ),
        ({**SERVERS, **NO_LOGPROBS, "stream_logprobs": True}, "`stream_logprobs` (True) has nothing to compute"),
        ({"num_train_epochs": -1}, "`num_train_epochs` (-1.0) must be positive and finite where `max_steps` (-1)"),
        ({"num_train_epochs": 0}, "`num_train_epochs` (0.0) must be positive"),
        ({"num_train_epochs": math.inf}, "`num_train_epochs` (inf) must be finite"),
        ({"num_train_epochs": math.nan}, "`num_train_epochs` (nan) must be finite"),
        ({"reward_weights": [math.nan]}, "`reward_weights` ([nan]) must be finite"),
        ({"top_p": 5.0}, "`top_p` (5.0) must be greater than 0 and at most 1"),
        ({"use_peft": True, "lora_r": 0}, "`lora_r` (0) must be at least 1"),
        ({"use_peft": True, "lora_dropout": 7}, "`lora_dropout` (7.0) must be between 0 and 1"),
    ],
)
def test_recipes_that_would_end_the_training(recipe, fields, message):
    path = recipe(**fields)
    result = run(path, "--num-parameters", 1000)
    assert result.exit_code == 2
    assert f"Error: {path}: {message}" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"reward_weights": [1.0]},
        {"reward_weights": [1.0, 2.0], "reward_model_name_or_path": "some/reward"},
        {"reward_funcs": None, "reward_model_name_or_path": "some/reward", "reward_weights": [1.0]},
        {"use_vllm": True, "vllm_mode": "server", "vllm_tensor_parallel_size": 2},
        {"vllm_tensor_parallel_size": 2},
        {"load_in_4bit": True, "use_peft": True},
        {"sync_ref_model": True, "beta": 0.1},
        {"scale_rewards": False},
        {**SERVERS, "schedule": "sorted"},
        {**SERVERS, "stream_logprobs": True},
        {**SERVERS, **NO_LOGPROBS, "stream_logprobs": True, "beta": 0.1},
        {**SERVERS, **NO_LOGPROBS, "stream_logprobs": True, "num_iterations": 2},
        {"num_train_epochs": 0, "max_steps": 5},
        {"lora_r": 0, "lora_dropout": 7},
    ],
)
def test_recipes_that_look_like_those_and_run(recipe, fields):
    result = run(recipe(**fields), "--num-parameters", 1000)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""


def test_tensor_parallel_engines_share_the_processes(recipe):
    path = recipe(use_vllm=True, vllm_tensor_parallel_size=2)
    assert run(path, "--num-processes", 4, "--num-parameters", 1000).exit_code == 0
    result = run(path, "--num-processes", 3, "--num-parameters", 1000)
    assert result.exit_code == 2
    assert "`vllm_tensor_parallel_size` (2) must divide the processes (3)" in result.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"lora_target_modules": ["nonsense"]},
            "`lora_target_modules` ('nonsense') must fit the model: Target modules",
        ),
        ({"lora_target_modules": ["("]}, "`lora_target_modules` ('(') must fit the model: "),
        ({"lora_task_type": "NONE"}, "`lora_task_type` ('NONE') must fit the model: Invalid task type"),
        ({"lora_target_modules": ["lm_head"]}, "`lora_target_modules` ('lm_head') must leave the LM head out"),
    ],
)
def test_adapters_that_do_not_fit_the_model(recipe, fields, message):
    bad, good = recipe("bad.yaml", use_peft=True, **fields), recipe("good.yaml", use_peft=True)
    result = run(bad, good)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {bad}: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert str(good) in " ".join(result.stdout.split())


def test_without_peft_the_adapter_is_unknown(recipe, monkeypatch):
    monkeypatch.setattr("trl_darts.recipes.models.is_peft_available", lambda: False)
    result = run(recipe(use_peft=True))
    assert result.exit_code == 0
    assert "unknown. `use_peft` (True) needs PEFT. Install it: pip install 'trl-darts[peft]'" in result.stdout
