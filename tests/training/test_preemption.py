"""Tests SIGTERM: a checkpoint, no open requests, exit code 143, and a resume without lost or repeated prompts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from _thread import interrupt_main
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from benchmarks.vllm_server import free_port
from tests.builders import letters_dataset, make_args, make_trainer, record_batches
from tests.model_server import model_server
from trl_darts.training import preemption
from trl_darts.training.preemption import Preemption


pytestmark = pytest.mark.vllm  # only imported by TRL

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "configs" / "accelerate" / "ddp.yaml")]
SAVED = {"save_strategy": "steps", "save_steps": 100}
SCRIPT = """
import sys
from pathlib import Path
from transformers import TrainerCallback
from tests.builders import make_args, make_trainer

out = Path(sys.argv[2])

class Reached(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        (out / f"step-{state.global_step}").touch()

fields = {"max_steps": 1000, "save_strategy": "steps", "save_only_model": True}
trainer = make_trainer(Path(sys.argv[1]), make_args(out, **fields), callbacks=[Reached()])
trainer.train()
print("went on")
"""


def terminate() -> None:
    """Sends SIGTERM to this process. If its handler is gone a moment later, this does not end the other tests."""
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "nothing would handle the signal"
    interrupt_main(signal.SIGTERM)


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_a_process_that_gets_sigterm(model_dir, tmp_path, num_processes):
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    launch = [] if num_processes == 1 else [*LAUNCH, "--main_process_port", str(free_port())]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"}
    with (tmp_path / "err").open("w") as err:
        command = [sys.executable, *launch, str(script), str(model_dir), str(out)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=err, text=True)
        while process.poll() is None and not (out / "step-2").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        stdout, _ = process.communicate(timeout=60)
    errors = (tmp_path / "err").read_text()
    (checkpoint,) = out.glob("checkpoint-*")
    step = checkpoint.name.removeprefix("checkpoint-")
    assert (checkpoint / "trainer_state.json").exists()
    assert not (out / f"step-{int(step) + 1}").exists()
    line = f"SIGTERM: Stopped after step {step} of 1000. To resume from {checkpoint}: `trainer.train(resume_from_"
    assert errors.count(line) == 1
    assert "went on" not in stdout
    if num_processes == 1:
        assert process.returncode == 143
        assert errors.splitlines()[-1].startswith(line)
    else:  # torchrun prints a traceback for its own signal
        assert "SignalException" in errors.splitlines()[-1]


class InRollout(TrainerCallback):
    """Sends SIGTERM while a server decodes for the step after `step`."""

    def __init__(self, server: Any, step: int) -> None:
        self.server, self.step = server, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.server.step_s = 0.05  # so that the rollout outlasts the signal
            threading.Thread(target=self.send).start()

    def send(self) -> None:
        while not self.server.open:
            time.sleep(0.01)
        terminate()


def in_training(trainer: Any, step: int) -> None:
    """Sends SIGTERM in the first backward pass of the step after `step`."""
    plain = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == step:
            terminate()
        return plain(*args, **kwargs)

    trainer.compute_loss = compute_loss


@pytest.mark.parametrize(
    ("schedule", "where", "step"),  # two steps per epoch
    [
        ("darts", "rollout", 1),
        ("darts", "late", 1),
        ("partial_rollout", "rollout", 1),
        ("partial_rollout", "rollout", 2),
        ("partial_rollout", "step", 1),
        ("partial_rollout", "late", 2),
    ],
)
def test_every_prompt_is_trained_on_once(model_dir, tmp_path, monkeypatch, capsys, schedule, where, step):
    """With `late`, the optimizer step would take too long."""
    monkeypatch.setattr(preemption, "STEP_S", 0.0 if where == "late" else 60.0)
    prompts = letters_dataset(8)
    fields = {"schedule": schedule, "max_completion_length": 64, "max_steps": 4, "num_generations": 2, **SAVED}
    fields |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    with model_server(model_dir, monkeypatch) as (server, settings):

        def make() -> Any:
            trainer = make_trainer(model_dir, make_args(tmp_path, **settings, **fields), train_dataset=prompts)
            return trainer, record_batches(trainer)

        first, batches = make()
        if where == "rollout":
            first.add_callback(InRollout(server, step))
        else:
            in_training(first, step)
        with pytest.raises(SystemExit) as exit_of:
            first.train()
        done = step + (where == "step")
        assert exit_of.value.code == 143
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(
            f"SIGTERM: Stopped after step {done} of 4. To resume from {tmp_path}/checkpoint-{done}:"
        )
        assert not server.open
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        trained, server.step_s = batches[:done], 0.0
        second, batches = make()
        second.train(resume_from_checkpoint=True)
    trained += batches
    rows: Counter[str] = Counter()
    for batch in trained:
        is_filler = batch["completion_mask"].sum(1) == 0
        rows.update(row["prompt"] for row, filler in zip(batch["inputs"], is_filler, strict=True) if not filler)
    waiting = [entry.row["prompt"] for entry in second._batches.buffer.entries.values()]  # that filler rows stand for
    rows.update(2 * waiting)
    assert second.state.global_step == len(trained) == 4
    assert rows == dict.fromkeys(prompts["prompt"], 4)  # two epochs of two rows each


def test_without_checkpoints_nothing_is_saved(model_dir, tmp_path, capsys):
    trainer = make_trainer(model_dir, make_args(tmp_path))
    in_training(trainer, 1)
    with pytest.raises(SystemExit):
        trainer.train()
    assert capsys.readouterr().err.endswith("No checkpoint saved yet (`save_strategy` is 'no').\n")
    assert not list(tmp_path.glob("checkpoint-*"))


def test_another_handler_stays(monkeypatch):
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        with Preemption(None, uses_servers=False).handled():
            terminate()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [1]


def test_a_second_signal_kills_but_for_one_that_was_forwarded():
    script = (
        "import os, signal, time\nfrom trl_darts.training import preemption\n"
        "with preemption.Preemption(None, uses_servers=False).handled():\n"
        "    for _ in range(3):\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('there', flush=True)\n    preemption.REPEAT_S = 0.0\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    print('still there')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "there\n")
