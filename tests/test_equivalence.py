"""
Without more candidates than rows there is nothing to decide, and training is TRL's, to the last bit: the same seed
gives the same parameters.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from tests.builders import letters_dataset, make_args, make_trainer
from tests.engines.settings import engine_settings
from tests.launches.leaving import leave
from tests.launches.test_two_processes import CONFIGS, run_launcher
from trl_darts import DARTSGRPOTrainer


STEPS = 5
OURS = {"grpo": {"schedule": "grpo"}, "darts": {"schedule": "darts", "max_num_generations": 4}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 2,
        "num_iterations": 2,
    },
    "reference_model": {"beta": 0.1, "temperature": 0.7, "top_k": 20},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8},
    "lora": {"peft": True, "beta": 0.1},
}

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


def trained(model_dir: Path, out: Path, schedule: str | None, peft: bool = False, **settings: Any) -> Any:
    """A trainer after five steps; TRL's own for `schedule=None`."""
    fields = {"max_steps": STEPS, "learning_rate": 1e-3, **settings}
    more: dict[str, Any] = {"peft_config": LoraConfig(target_modules="all-linear")} if peft else {}
    if fields.get("eval_strategy"):
        more["eval_dataset"] = letters_dataset(4)
    if schedule is None:
        ours = make_args(out, **fields)
        fields = {**fields, **{name: getattr(ours, name) for name in BASE}}
        trainer = make_trainer(model_dir, GRPOConfig(**fields), GRPOTrainer, **more)
    else:
        trainer = make_trainer(model_dir, make_args(out, **fields, **OURS[schedule]), DARTSGRPOTrainer, **more)
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


@pytest.mark.parametrize("schedule", OURS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_transformers_generate(model_dir, tmp_path, schedule, setting):
    theirs = trained(model_dir, tmp_path / "theirs", None, **SETTINGS[setting])
    ours = trained(model_dir, tmp_path / "ours", schedule, **SETTINGS[setting])
    assert_equal_parameters(ours, theirs)


def test_the_comparison_can_fail(model_dir, tmp_path):
    theirs = trained(model_dir, tmp_path / "theirs", None)
    ours = trained(model_dir, tmp_path / "ours", "grpo", seed=1)
    with pytest.raises(AssertionError):
        assert_equal_parameters(ours, theirs)


@pytest.mark.parametrize("schedule", OURS)
def test_continuous_batching(model_dir, tmp_path, schedule):
    settings = engine_settings("continuous_batching")
    theirs = trained(model_dir, tmp_path / "theirs", None, **settings)
    ours = trained(model_dir, tmp_path / "ours", schedule, **settings)
    assert_equal_parameters(ours, theirs)


@pytest.mark.distributed
def test_two_processes(model_dir, tmp_path):
    """Groups straddle the processes, and each process's rows are sampled where TRL samples them."""
    digests = {}
    for who in ("theirs", *OURS):
        run_launcher(CONFIGS / "ddp.yaml", "tests.test_equivalence", [model_dir, tmp_path / who, who])
        digests[who] = json.loads((tmp_path / who / "parameters.json").read_text())
    assert digests["grpo"] == digests["theirs"]
    assert digests["darts"] == digests["theirs"]


def main() -> None:
    model_dir, out, who = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    trainer = trained(model_dir, out, None if who == "theirs" else who, per_device_train_batch_size=6)
    if trainer.accelerator.is_main_process:
        values = {
            name: hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
            for name, parameter in trainer.model.named_parameters()
        }
        (out / "parameters.json").write_text(json.dumps(values))
    leave(trainer.accelerator)


if __name__ == "__main__":
    main()
