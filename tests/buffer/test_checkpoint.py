"""A trainer that is killed within a checkpoint: what is whole resumes, with every prompt trained on once."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Trainer, TrainerState
from transformers import trainer as transformers_trainer

from tests.builders import letters_dataset, make_args, make_trainer, record_batches
from tests.model_server import model_server
from trl_darts import callbacks
from trl_darts.errors import ConfigurationError
from trl_darts.training.resume import BUFFER_FILE, TRAINER_STATE, last_checkpoint


pytestmark = pytest.mark.vllm  # TRL imports it, and nothing here runs it

PROMPTS = letters_dataset(16)
STEPS, KILLED_AT = 4, 3  # of an epoch; the save in which the trainer is killed


class Killed(BaseException):
    """Nothing catches it: what is in the directory then is what SIGKILL leaves."""


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def half_removed(path: Any, **kwargs: Any) -> None:
    """Of a rotation: the model is gone, the state is still there."""
    (Path(path) / "model.safetensors").unlink()


# What was about to happen, and how far it came. The last step that is whole then.
MOMENTS: dict[str, tuple[Any, str, Any, int]] = {
    "before all": (callbacks.VarianceTrackerCallback, "save", None, 2),
    "before the buffer": (callbacks, "save_rollouts", None, 2),
    "within the buffer": (callbacks, "save_rollouts", lambda _, path, has_batch: cut(path / BUFFER_FILE), 2),
    "before the model": (Trainer, "save_model", None, 2),
    "before the state": (TrainerState, "save_to_json", None, 2),
    "within the state": (TrainerState, "save_to_json", lambda _, path: cut(Path(path)), 2),
    "before the rotation": (transformers_trainer, "rotate_checkpoints", None, 3),
    "within the rotation": (shutil, "rmtree", half_removed, 3),
}


def train_until_killed(trainer: Any, patch: Any, moment: str) -> None:
    owner, name, how_far, _ = MOMENTS[moment]
    plain = getattr(owner, name)

    def killed(*args: Any, **kwargs: Any) -> Any:
        is_other = name == "rmtree" and "checkpoint" not in Path(args[0]).name
        if trainer.state.global_step != KILLED_AT or is_other:
            return plain(*args, **kwargs)
        if how_far is not None:
            if how_far is not half_removed:
                plain(*args, **kwargs)
            how_far(*args, **kwargs)
        raise Killed

    patch.setattr(owner, name, killed)
    with pytest.raises(Killed):
        trainer.train()


@pytest.mark.parametrize(
    ("moment", "again"),
    [*((moment, False) for moment in MOMENTS), ("before the buffer", True), ("before the state", True)],
)
def test_killed_within_a_checkpoint(model_dir, tmp_path, monkeypatch, moment, again):
    """`again`: an earlier training has left whole checkpoints of the same steps, which are not of this one."""
    fields = {"schedule": "partial_rollout", "max_completion_length": 64, "max_steps": STEPS}
    fields |= {"num_generations": 2, "per_device_train_batch_size": 8}
    fields |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    with model_server(model_dir, monkeypatch) as (_, settings):

        def trainer() -> Any:
            return make_trainer(model_dir, make_args(tmp_path, **settings, **fields), train_dataset=PROMPTS)

        if again:
            trainer().train()
            shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
        first = trainer()
        batches = record_batches(first)
        with monkeypatch.context() as patch:
            train_until_killed(first, patch, moment)
        whole = MOMENTS[moment][3]
        assert last_checkpoint(str(tmp_path)) == tmp_path / f"checkpoint-{whole}"
        with np.load(tmp_path / f"checkpoint-{whole}" / BUFFER_FILE) as saved:
            assert len(saved["tokens"]) == len(saved["logprobs"]) > 0
        prompts = [[row["prompt"] for row in batch["inputs"]] for batch in batches[:whole]]
        second = trainer()
        batches = record_batches(second)
        second.train(resume_from_checkpoint="true")
    prompts += [[row["prompt"] for row in batch["inputs"]] for batch in batches]
    assert Counter(prompt for batch in prompts for prompt in batch) == dict.fromkeys(PROMPTS["prompt"], 2)
    assert last_checkpoint(str(tmp_path)) == tmp_path / f"checkpoint-{STEPS}"


def test_a_checkpoint_without_its_buffer_is_no_checkpoint(model_dir, tmp_path, monkeypatch, caplog):
    fields = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "max_completion_length": 8}
    with model_server(model_dir, monkeypatch) as (_, settings):

        def trainer(**own: Any) -> Any:
            return make_trainer(model_dir, make_args(tmp_path, **settings, **fields, **own))

        trainer(schedule="sorted").train()
        complete, last = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
        (last / BUFFER_FILE).unlink()
        with pytest.raises(ConfigurationError, match=rf"checkpoint-2'\) must be .* complete .* its {BUFFER_FILE} is"):
            trainer(schedule="sorted").train(resume_from_checkpoint=str(last))
        assert last_checkpoint(str(tmp_path)) == complete
        assert f"{last} is skipped, because its {BUFFER_FILE} is missing or incomplete" in caplog.text
        for path in last.glob("darts_*"):
            path.unlink()
        caplog.clear()
        trainer(schedule="sorted").train(resume_from_checkpoint=str(last))  # as one of TRL's
        assert f"{last} has no rollout buffer: it begins empty" in caplog.text
        trainer(schedule="grpo").train()  # nor has one of a schedule without a buffer
        caplog.clear()
        trainer(schedule="sorted").train(resume_from_checkpoint=str(complete))
        assert f"{complete} has no rollout buffer: it begins empty" in caplog.text


def test_the_directory_is_that_of_transformers(model_dir, tmp_path, monkeypatch):
    """A search for hyperparameters has one for each trial."""
    trainer = make_trainer(model_dir, make_args(tmp_path, max_steps=1, save_strategy="steps", save_steps=1))
    monkeypatch.setattr(trainer, "_get_output_dir", lambda trial: str(tmp_path / "run-0"))
    trainer.train()
    assert (tmp_path / "run-0" / "checkpoint-1" / "darts_lengths.npz").exists()
    assert (tmp_path / "run-0" / "checkpoint-1" / TRAINER_STATE).exists()
    assert last_checkpoint(str(tmp_path)) is None
