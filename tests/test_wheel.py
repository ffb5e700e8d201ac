"""A wheel of the repository, installed in an environment of its own, works away from the checkout."""

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import trl_darts
from datasets import Dataset
from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer

args = DARTSGRPOConfig(
    "out", use_cpu=True, bf16=False, num_generations=4, per_device_train_batch_size=8, max_completion_length=16,
    max_steps=2, logging_steps=1, report_to="none", save_rollout_trace=True,
)
data = Dataset.from_list([{"prompt": f"{i}A"} for i in range(8)])
trainer = DARTSGRPOTrainer(MODEL, lambda completion_ids, **kwargs: [float(len(i)) for i in completion_ids], args, data)
trainer.train()
trainer.save_model()
print(trl_darts.__file__)
"""


@pytest.mark.slow
def test_wheel(tmp_path, model_dir):
    def run(*words: object) -> str:
        done = subprocess.run([str(word) for word in words], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    source = tmp_path / "source"  # a build writes beside what it builds
    shutil.copytree(ROOT / "trl_darts", source / "trl_darts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("trl_darts-*.whl")
    # An environment that is empty but for what the wheel needs: of this one, its packages alone, without the `.pth`
    # file that leads to the checkout.
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)
    (own,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (own / "needs.pth").write_text("\n".join(site.getsitepackages()))
    shutil.rmtree(source)
    assert "report" in run(python.with_name("trl-darts"), "--help")
    run(python.with_name("trl-darts"), "quickstart", "--steps", "1")  # its model is in the wheel
    assert (tmp_path / "outputs" / "quickstart" / "comparison.png").exists()
    run(python.with_name("trl-darts"), "grpo", "--config", "tiny_reasoner", "--cpu", "--max_steps", "1")
    assert (tmp_path / "outputs" / "tiny_reasoner" / "model.safetensors").exists()
    (tmp_path / "script.py").write_text(SCRIPT.replace("MODEL", repr(str(model_dir))))
    assert Path(run(python, "script.py").splitlines()[-1]).is_relative_to(own)
    run(python.with_name("trl-darts"), "report", "out", "--output", "report.html")  # its page is in the wheel
    assert "by trl_darts " in (tmp_path / "out" / "README.md").read_text()
