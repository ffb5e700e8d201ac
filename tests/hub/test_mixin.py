"""Configs as objects: what is saved is what someone set, and comes back the same."""

from pathlib import Path

import pytest
import yaml

from trl_darts import DARTSGRPOConfig
from trl_darts.errors import ConfigurationError
from trl_darts.hub import HubError
from trl_darts.hub.files import CARD_NAME, CONFIG_NAME
from trl_darts.hub.mixin import published_fields


CPU = {"use_cpu": True, "bf16": False}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"schedule": "sorted", "num_generations": 4, "sorted_mode": "partial"},
        {"steps_per_generation": 4, "per_device_train_batch_size": 4, "num_generations": 16},
        {"eval_strategy": "steps", "eval_steps": 7, "lr_scheduler_type": "cosine", "optim": "adamw_torch"},
        {"max_num_generations": 12, "target_redundancy": 1.25, "long_end_patience": 3.0, "stream_chunk_tokens": 8},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}, "generation_kwargs": {"min_tokens": 2}},
        {"fp16": True, "loss_type": "grpo", "epsilon_high": 0.28, "scale_rewards": "none"},
    ],
)
def test_what_is_set_is_saved_and_comes_back(tmp_path, given):
    config = DARTSGRPOConfig(**{**CPU, **given})
    assert published_fields(config).items() >= given.items()
    assert config.save_pretrained(tmp_path) == []
    assert yaml.safe_load((tmp_path / CONFIG_NAME).read_text()) == published_fields(config)
    for saved in (tmp_path, tmp_path / CONFIG_NAME):
        assert DARTSGRPOConfig.from_pretrained(saved).to_dict() == config.to_dict()


def test_nothing_but_what_is_set():
    config = DARTSGRPOConfig(**CPU, num_generations=4)
    assert published_fields(config) == {"bf16": False, "use_cpu": True, "num_generations": 4}


def test_steps_per_generation_stands_for_the_batch():
    config = DARTSGRPOConfig(**CPU, generation_batch_size=64, per_device_train_batch_size=8)
    assert published_fields(config) == {"bf16": False, "use_cpu": True, "steps_per_generation": 8}


def test_left_out(tmp_path):
    config = DARTSGRPOConfig(str(tmp_path / "out"), **CPU, vllm_api_key="very-secret-key", report_to=["tensorboard"])
    assert sorted(config.save_pretrained(tmp_path)) == ["output_dir", "report_to", "vllm_api_key"]
    assert "very-secret-key" not in (tmp_path / CONFIG_NAME).read_text() + (tmp_path / CARD_NAME).read_text()


def test_the_card_names_no_path_of_this_machine(tmp_path):
    DARTSGRPOConfig(**CPU).save_pretrained(tmp_path)
    card = (tmp_path / CARD_NAME).read_text()
    assert str(tmp_path) not in card
    assert f"--config {CONFIG_NAME} " in card


def test_overrides_are_the_callers_own(tmp_path):
    DARTSGRPOConfig(**CPU, num_generations=4).save_pretrained(tmp_path)
    config = DARTSGRPOConfig.from_pretrained(tmp_path, num_generations=8, output_dir=str(tmp_path), run_name="mine")
    assert (config.num_generations, config.output_dir, config.run_name) == (8, str(tmp_path), "mine")


def test_the_scripts_fields_are_named(tmp_path, caplog):
    path = tmp_path / "config.yaml"
    path.write_text("num_generations: 4\nuse_cpu: true\nmodel_name_or_path: Qwen/Qwen2.5-3B\n")
    assert DARTSGRPOConfig.from_pretrained(path).num_generations == 4
    assert "also says {'model_name_or_path': 'Qwen/Qwen2.5-3B'}" in caplog.text


def test_a_changed_file_is_refused(tmp_path):
    DARTSGRPOConfig(**CPU).save_pretrained(tmp_path)
    with (tmp_path / CONFIG_NAME).open("a") as file:
        file.write("seed: 1\n")
    with pytest.raises(ConfigurationError, match=r"is not the file that its card was written for"):
        DARTSGRPOConfig.from_pretrained(tmp_path)


def test_a_models_card_is_not_overwritten(tmp_path):
    (tmp_path / CARD_NAME).write_text("# A model")
    with pytest.raises(HubError, match=r"has a README.md of something else"):
        DARTSGRPOConfig(**CPU).save_pretrained(tmp_path)
    assert not (tmp_path / CONFIG_NAME).exists()


def test_a_path_has_no_revision(tmp_path):
    with pytest.raises(ConfigurationError, match=r"`revision` \('v1'\) only means something on the Hub"):
        DARTSGRPOConfig.from_pretrained(tmp_path, revision="v1")


def test_an_unknown_field_is_refused(tmp_path):
    path = Path(tmp_path / "config.yaml")
    path.write_text("num_generation: 4\n")
    with pytest.raises(ConfigurationError, match=r"'num_generation' is no field .* `num_generations`"):
        DARTSGRPOConfig.from_pretrained(path)
