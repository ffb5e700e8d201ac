"""
Tests that training with as many candidates as rows equals TRL's: the same seed gives exactly the same parameters. On
two processes: `tests/launches/test_two_processes.py::test_equal_to_trl`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

from tests.builders import length_reward, letters_dataset, make_args, make_trainer
from tests.engines.settings import engine_settings
from tests.trl_parity import common
from tests.trl_parity.tool_calls import ADD, FAILING, RIGHT, TOOLS, Counter, caller_maker
from tests.trl_parity.vlms import load_processor, make_vlm, some_images
from tests.zoo import random_model, save
from trl_darts import DARTSGRPOTrainer


STEPS = 3
BITS = {"trim_padding": False}  # trimming changes the rounding, see `tests/training/test_padding.py`
OURS = {"grpo": {"schedule": "grpo", **BITS}, "darts": {"schedule": "darts", "max_num_generations": 4, **BITS}}
OFF_POLICY = {"num_iterations": 2, "learning_rate": 1e-2}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
        "num_iterations": 2,
    },
    "reference model": {"beta": 0.1, "temperature": 0.7, "top_k": 20},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8},
    "lora": {"peft_config": LoraConfig(target_modules="all-linear"), "beta": 0.1},
    "stream": {"train_dataset": letters_dataset().to_iterable_dataset()},
    "continuous batching": engine_settings("continuous_batching"),
    "masks and entropy": {
        "mask_truncated_completions": True,
        "max_completion_length": 20,
        "top_entropy_quantile": 0.5,
        "entropy_coef": 0.1,
        "use_adaptive_entropy": True,
        "entropy_target": 5.0,
    },
    # One loss with ratios represents all, because TRL computes them.
    "cispo": {**OFF_POLICY, "loss_type": "cispo", "off_policy_mask_threshold": 0.5, "scale_rewards": "batch"},
}
OF_TRL_ALONE = ("reference model", "lora", "masks and entropy", "cispo")  # not read by our code
BASE = (
    "output_dir",
    "use_cpu",
    "bf16",
    "report_to",
    "per_device_train_batch_size",
    "num_generations",
    "max_completion_length",
    "logging_steps",
    "save_strategy",
    "disable_tqdm",
    "seed",
)
ARGUMENTS = ("peft_config", "train_dataset", "reward_funcs", "processing_class", "tools", "environment_factory")


def trained(
    model_dir: Path,
    out: Path,
    schedule: str | None,
    prepare: Callable[[Any], None] = lambda trainer: None,
    **settings: Any,
) -> Any:
    """
    Trains three steps; with TRL's trainer for `schedule=None`. Some settings are arguments of the trainer, which
    `prepare` is called with before.
    """
    fields = {"max_steps": STEPS, "learning_rate": 1e-3, **settings}
    set_seed(fields.get("seed", 42))  # before TRL 1.16, an adapter is created before TRL sets the seed
    more = {name: fields.pop(name) for name in ARGUMENTS if name in fields}
    if fields.get("eval_strategy"):
        more["eval_dataset"] = letters_dataset(4)
    if schedule is None:
        ours = make_args(out, **fields)
        fields = {**fields, **{name: getattr(ours, name) for name in BASE}}
        trainer = make_trainer(model_dir, GRPOConfig(**fields), GRPOTrainer, **more)
    else:
        trainer = make_trainer(model_dir, make_args(out, **fields, **OURS[schedule]), DARTSGRPOTrainer, **more)
    prepare(trainer)
    trainer.train()
    return trainer


def assert_equal_parameters(ours: Any, theirs: Any) -> None:
    mine, other = dict(ours.model.named_parameters()), dict(theirs.model.named_parameters())
    assert mine.keys() == other.keys()
    for name, parameter in mine.items():
        assert torch.equal(parameter, other[name]), name
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (ours, theirs)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS


def assert_equal_training(model_dir: Path, tmp_path: Path, schedules: Iterable[str] = OURS, **settings: Any) -> Any:
    """Compares TRL with each schedule. Returns the last trainer."""
    theirs = trained(model_dir, tmp_path / "theirs", None, **settings)
    for schedule in schedules:
        ours = trained(model_dir, tmp_path / schedule, schedule, **settings)
        assert_equal_parameters(ours, theirs)
    return ours


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(model_dir, tmp_path, setting):
    schedules = ["grpo"] if setting in OF_TRL_ALONE else OURS
    assert_equal_training(model_dir, tmp_path, schedules, **SETTINGS[setting])


def test_the_comparison_can_fail(model_dir, tmp_path):
    theirs = trained(model_dir, tmp_path / "theirs", None)
    ours = trained(model_dir, tmp_path / "ours", "grpo", seed=1)
    with pytest.raises(AssertionError):
        assert_equal_parameters(ours, theirs)


async def letters_reward(completions: list[str], **kwargs: Any) -> list[float | None]:
    """Only some schedules support these settings."""
    return [len(set(text)) if row % 2 else None for row, text in enumerate(completions)]


def test_rewards_of_all_kinds(model_dir, tmp_path):
    judge = random_model("Qwen2ForSequenceClassification", AutoConfig.from_pretrained(model_dir, num_labels=1), seed=1)
    judge_dir = save(tmp_path / "judge", judge, AutoTokenizer.from_pretrained(model_dir))
    settings = {"reward_funcs": [length_reward, str(judge_dir), letters_reward], "reward_weights": [1.0, 0.5, 2.0]}
    settings["multi_objective_aggregation"] = "normalize_then_sum"
    ours = assert_equal_training(model_dir, tmp_path, ["grpo"], **settings)
    assert len(ours._metrics["train"]) == 0  # all metrics are logged
    assert {name for line in ours.state.log_history for name in line} >= {
        "rewards/length_reward/mean",
        "rewards/judge/mean",
        "rewards/letters_reward/mean",
    }


@pytest.mark.parametrize("actors", [{"tools": TOOLS}, {"environment_factory": Counter}], ids=",".join)
@pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")
def test_tools_and_environments(tmp_path, actors):
    model_dir = caller_maker(lambda: tmp_path / "caller")(RIGHT, FAILING, ADD)
    # At a higher learning rate, all answers go on to the limit without a call after one step.
    data = {"train_dataset": common.chats(), "max_completion_length": 100, "learning_rate": 1e-5}
    ours = assert_equal_training(model_dir, tmp_path, **data, **actors)
    assert min(common.step_logs(ours, "tools/call_frequency")) > 0


def test_images(tmp_path):
    model_dir = make_vlm(tmp_path / "vlm", "qwen2_vl")
    data = {"train_dataset": some_images([2, 1, 3])}
    assert_equal_training(model_dir, tmp_path, processing_class=load_processor(model_dir), **data)
