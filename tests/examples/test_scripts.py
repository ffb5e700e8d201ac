"""What a user runs first: the training script and the quickstart."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.vllm_server import free_port


ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no"]


def train_grpo(output_dir, *arguments: str, launch=(sys.executable,)) -> subprocess.CompletedProcess:
    script = ["examples/train_grpo.py", "--config", "configs/tiny_reasoner.yaml", "--output_dir", str(output_dir)]
    small = ["--max_steps", "3", "--per_device_train_batch_size", "16", "--max_completion_length", "64"]
    command = [*launch, *script, *small, "--save_strategy", "steps", "--save_steps", "3", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)


def logged(output_dir) -> list[dict]:
    state = json.loads((output_dir / "checkpoint-3" / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "darts/rollout/seconds" in entry]


def test_training_script_without_a_server(tmp_path):
    done = train_grpo(tmp_path, launch=LAUNCH)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(logged(tmp_path)) == 3
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.vllm
def test_training_script_with_a_server(server, model_dir, tmp_path):
    arguments = ["--model_name_or_path", str(model_dir), "--use_vllm", "--vllm_mode", "server"]
    arguments += ["--vllm_server_base_url", server.base_url, "--vllm_group_port", str(free_port())]
    done = train_grpo(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logged(tmp_path))


@pytest.mark.slow
def test_quickstart(tmp_path):
    command = [sys.executable, "examples/tiny_reasoner/quickstart.py", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "seconds in rollouts" in done.stdout
    assert (tmp_path / "comparison.png").stat().st_size > 20_000
