"""What a user runs first: the training script and the quickstart. The script's details: `test_train_grpo.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trl_darts.cli import app


ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no"]


def test_training_script(tmp_path):
    script = ["examples/train_grpo.py", "--config", "configs/tiny_reasoner.yaml", "--output_dir", str(tmp_path)]
    small = ["--max_steps", "1", "--per_device_train_batch_size", "16", "--max_completion_length", "64"]
    command = [*LAUNCH, *script, *small, "--save_strategy", "steps", "--save_steps", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert sum("darts/rollout/seconds" in entry for entry in state["log_history"]) == 1
    assert (tmp_path / "model.safetensors").exists()


def test_the_command_runs_the_quickstart(monkeypatch):
    started = []
    monkeypatch.setattr("os.execv", lambda *command: started.append(command))
    result = CliRunner().invoke(app, ["quickstart", "--steps", "3", "--output-dir", "out"])
    assert result.exit_code == 0, result.output
    ((program, (_, script, *words)),) = started
    assert program == sys.executable
    assert Path(script).samefile(ROOT / "examples" / "tiny_reasoner" / "quickstart.py")
    assert words == ["--steps", "3", "--output-dir", "out"]


@pytest.mark.slow
def test_quickstart(tmp_path):
    command = [sys.executable, "examples/tiny_reasoner/quickstart.py", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "seconds in rollouts" in done.stdout
    assert "prompts that keep their longest" in done.stdout
    assert "long_end_ratio" not in done.stderr  # the warning: the table says it
    assert (tmp_path / "comparison.png").stat().st_size > 20_000
