"""A small recipe, with the fields that a test is about."""

import pytest
import yaml


FIELDS = {
    "dataset_name": "some/data",
    "reward_funcs": ["think_format_reward"],
    "num_generations": 4,
    "max_num_generations": 6,
    "target_redundancy": 1.25,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 100,
    "num_train_epochs": 2,
    "report_to": "none",
}


@pytest.fixture
def recipe(tmp_path, tiny_model_dir):
    def write(name="recipe.yaml", **fields):
        path = tmp_path / name
        path.write_text(yaml.safe_dump({"model_name_or_path": str(tiny_model_dir), **FIELDS, **fields}))
        return path

    return write
