"""A config knows the published one that it was made of, and no other config is taken for it."""

import copy
import pickle

import pytest
from trl import ModelConfig, TrlParser

from tests.hub.test_transfer import REPO
from trl_darts import DARTSGRPOConfig
from trl_darts.hub import push_config, resolve_config_arguments
from trl_darts.hub.mixin import published_fields
from trl_darts.hub.origin import withdraw
from trl_darts.recipes import ScriptArguments


CPU = {"use_cpu": True, "bf16": False}
MIXED = {
    **CPU,
    "dataset_name": "org/math",
    "num_generations": 4,
    "learning_rate": "3e-6",
    "lr_scheduler_type": "cosine",
    "optim": "adamw_torch",
    "weight_decay": 1,
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "reward_weights": [1, 2],
    "scale_rewards": "none",
    "long_end_patience": "auto",
    "target_redundancy": 1.25,
    "eval_strategy": "steps",
    "eval_steps": 7,
    "shuffle_dataset": False,
}


@pytest.fixture(autouse=True)
def _nothing_waits():
    yield
    withdraw()


def parsed(words):
    resolved = resolve_config_arguments(words)
    return TrlParser((ScriptArguments, DARTSGRPOConfig, ModelConfig)).parse_args_and_config(resolved)[1]


@pytest.mark.parametrize(
    "words",
    [[], ["--num_generations", "8", "--eval-steps", "3"], ["--learning_r=1e-5", "--seed=1"], ["--shuffle_dataset"]],
    ids=["as it is", "other values", "short for it", "a switch"],
)
def test_a_command_line(hub, tmp_path, words):
    commit = push_config(MIXED, REPO).commit
    config = parsed(["--config", f"hf://{REPO}@main", "--output_dir", str(tmp_path), *words])
    assert config.origin == f"hf://{REPO}@{commit}"


def test_from_pretrained(hub, tmp_path):
    commit = push_config(CPU | {"num_generations": 4}, REPO, revision="v1").commit
    config = DARTSGRPOConfig.from_pretrained(f"{REPO}@v1", num_generations=8, output_dir=str(tmp_path))
    assert config.origin == f"hf://{REPO}@{commit}"
    config.save_pretrained(tmp_path)
    for local in (tmp_path, tmp_path / "darts_config.yaml"):
        assert DARTSGRPOConfig.from_pretrained(local).origin is None


def test_it_is_no_field(hub):
    push_config(CPU, REPO)
    config = DARTSGRPOConfig.from_pretrained(REPO)
    assert published_fields(config) == CPU
    assert config.to_dict() == DARTSGRPOConfig(**CPU).to_dict()
    assert REPO not in config.to_json_string() + str(config)


def test_copies_and_other_processes_know_it(hub):
    push_config(CPU, REPO)
    config = DARTSGRPOConfig.from_pretrained(REPO)
    assert copy.deepcopy(config).origin == config.origin
    assert pickle.loads(pickle.dumps(config)).origin == config.origin


def test_two_trainings_in_one_process(hub, tmp_path):
    first = push_config(CPU | {"num_generations": 4}, REPO).commit
    second = push_config(CPU | {"num_generations": 2}, REPO).commit
    words = ["--output_dir", str(tmp_path)]
    configs = [parsed(["--config", f"hf://{REPO}@{commit}", *words]) for commit in (first, second)]
    assert [config.origin for config in configs] == [f"hf://{REPO}@{first}", f"hf://{REPO}@{second}"]
    assert parsed([*words, "--use_cpu", "--bf16", "false"]).origin is None


def test_only_the_config_that_was_parsed(hub, tmp_path):
    commit = push_config(CPU | {"num_generations": 4}, REPO).commit
    resolved = resolve_config_arguments(["--config", f"hf://{REPO}", "--output_dir", str(tmp_path)])
    assert DARTSGRPOConfig(**CPU).origin is None  # says something else
    parser = TrlParser((DARTSGRPOConfig,))
    assert parser.parse_args_and_config(resolved)[0].origin == f"hf://{REPO}@{commit}"
    assert DARTSGRPOConfig(**CPU, num_generations=4).origin is None


def test_a_command_line_that_was_never_parsed(hub):
    push_config(CPU, REPO)
    resolve_config_arguments(["--config", f"hf://{REPO}"])
    resolve_config_arguments([])
    assert DARTSGRPOConfig(**CPU).origin is None
