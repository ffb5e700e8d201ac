"""Tests the message after Ctrl-C, and `resume_from_checkpoint` on a command line."""

import logging
import shutil

import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainerState

from tests.builders import make_args, make_trainer
from trl_darts.errors import ConfigurationError, StateMismatchError
from trl_darts.training.resume import checkpoint_to_resume, last_checkpoint, where_it_stopped


class PressCtrlC(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            logging.getLogger("trl_darts").warning("behind the bar")
            raise KeyboardInterrupt


def test_ctrl_c_says_where_it_stopped(model_dir, tmp_path, capsys):
    fields = {"save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(model_dir, make_args(tmp_path, disable_tqdm=False, **fields), callbacks=[PressCtrlC(2)])
    checkpoint = tmp_path / "checkpoint-2"
    words = rf"Stopped after step 2 of 3\. To resume from {checkpoint}: .*resume_from_checkpoint=True"
    with pytest.raises(KeyboardInterrupt, match=words) as stopped:
        trainer.train()
    assert len(stopped.traceback) == 2  # the script's frame and ours
    err = capsys.readouterr().err
    assert err.endswith("\n")  # after the bar
    assert "\rbehind the bar\n" in err
    again = make_trainer(model_dir, make_args(tmp_path, **fields))
    again.train(resume_from_checkpoint="true")  # as on a command line
    assert again.state.global_step == 3
    assert f"Resuming from {checkpoint}: step 2 of 3\n" in capsys.readouterr().out


def test_checkpoints_of_an_earlier_training_are_not_gone_on_from(tmp_path):
    args, state = make_args(tmp_path, save_strategy="steps", save_steps=20), TrainerState(global_step=2, max_steps=4)
    mine, earlier = tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"
    earlier.mkdir()
    (earlier / "trainer_state.json").write_text("{}")
    none = (
        f"Stopped after step 2 of 4. No checkpoint saved yet (`save_steps` is 20). {earlier} is from an earlier run."
    )
    assert where_it_stopped(args, state, None) == none
    words = where_it_stopped(make_args(tmp_path / "new"), state, None)
    assert words == "Stopped after step 2 of 4. No checkpoint saved yet (`save_strategy` is 'no')."
    words = where_it_stopped(args, state, str(mine))  # `True` would select the earlier run's
    assert f"To resume from {mine}: `trainer.train(resume_from_checkpoint='{mine}')`" in words
    assert f"`--resume_from_checkpoint {mine}`" in words


def test_the_last_whole_checkpoint(tmp_path):
    assert last_checkpoint(str(tmp_path / "none")) is None
    for step in (9, 10, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step < 11:  # incomplete
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(str(tmp_path)) == tmp_path / "checkpoint-10"
    assert checkpoint_to_resume(True, str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert checkpoint_to_resume(str(tmp_path / "checkpoint-9"), "elsewhere") == str(tmp_path / "checkpoint-9")
    assert checkpoint_to_resume(None, str(tmp_path)) is checkpoint_to_resume("false", str(tmp_path)) is None
    with pytest.raises(
        ConfigurationError, match=r"`resume_from_checkpoint` \(true\) needs a complete checkpoint in `output_dir`"
    ):
        checkpoint_to_resume("true", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match=r"`resume_from_checkpoint` \(5\) must be the directory of a checkp"):
        checkpoint_to_resume(5, str(tmp_path))
    with pytest.raises(
        ConfigurationError,
        match=r"checkpoint-11'\) must be the directory of a complete .* trainer_state.json is missing",
    ):
        checkpoint_to_resume(str(tmp_path / "checkpoint-11"), str(tmp_path))
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"epoch": 1')  # truncated
    assert last_checkpoint(str(tmp_path)) == tmp_path / "checkpoint-9"


@pytest.fixture(scope="module")
def finished(model_dir, tmp_path_factory):
    """Returns the directory of a run of two steps with its last checkpoint. Tests copy it before changes."""
    directory = tmp_path_factory.mktemp("finished")
    make_trainer(model_dir, make_args(directory, max_steps=2, save_strategy="epoch", num_train_epochs=1)).train()
    return directory


@pytest.mark.parametrize(
    "name",
    [
        "trainer_state.json",
        "darts_lengths.npz",
        "darts_admission.json",
        "darts_buffer.npz",
        "model.safetensors",
        "optimizer.pt",
        "rng_state.pth",
    ],
)
def test_a_file_that_is_cut_off_is_named(finished, tmp_path, name):
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(finished / "checkpoint-2", checkpoint)
    assert checkpoint_to_resume(str(checkpoint), "") == str(checkpoint)
    path = checkpoint / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ConfigurationError, match=rf"its {name} is missing or incomplete. Use another one"):
        checkpoint_to_resume(str(checkpoint), "")


def test_lengths_of_another_model_are_named(finished, model_dir, tmp_path):
    trainer = make_trainer(model_dir, make_args(tmp_path, schedule="darts"))
    trainer.length_tracker.source = "another model"
    with pytest.raises(StateMismatchError, match=r"`source` of the saved lengths .* must be that of this run"):
        trainer.train(resume_from_checkpoint=str(finished / "checkpoint-2"))


@pytest.mark.parametrize("max_steps", [1, 2])
def test_a_finished_training_trains_nothing(finished, model_dir, tmp_path, caplog, max_steps):
    checkpoint = finished / "checkpoint-2"
    written = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    trainer = make_trainer(model_dir, make_args(finished, max_steps=max_steps, save_strategy="epoch"))
    output = trainer.train(resume_from_checkpoint=True)
    assert f"{checkpoint} is from a finished run (step 2 of {max_steps}), so there is nothing to train." in caplog.text
    assert output.global_step == trainer.state.global_step == 2
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == written
    trained, saved = trainer.model.state_dict(), load_file(checkpoint / "model.safetensors")
    assert all(trained[name].equal(saved[name]) for name in saved)
    trainer = make_trainer(model_dir, make_args(tmp_path, max_steps=3))  # the run can be continued
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 3
