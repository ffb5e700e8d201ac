"""Launches of two processes: one for each backend, in which all of its scenarios run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.vllm_server import free_port, vllm_available
from tests.launches.scenarios import BACKENDS, NEED_A_SERVER


ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "accelerate"


class Launches:
    """`launches(backend, scenario)`: what each of the two processes saw. Launches a backend on its first call."""

    def __init__(self, model_dir, root, server):
        self.model_dir, self.root, self.server = model_dir, root, server
        self.errors = {}

    def __call__(self, backend, scenario):
        if backend not in self.errors:
            self.errors[backend] = self.launch(backend)
        paths = [self.root / backend / scenario / f"rank{rank}.json" for rank in (0, 1)]
        assert all(path.exists() for path in paths), self.errors[backend]
        return [json.loads(path.read_text()) for path in paths]

    def launch(self, backend):
        """Plays all scenarios. Returns what the processes said last, if they ended with an error."""
        out = self.root / backend
        out.mkdir()
        arguments = [backend, self.model_dir, out]
        if NEED_A_SERVER & BACKENDS[backend].keys() and vllm_available():
            arguments.append(self.server().base_url)
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config_of(backend, out)]
        command += ["--main_process_port", free_port(), "-m", "tests.launches.scenarios", *arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [str(part) for part in command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550
        )
        (out / "stdout").write_text(done.stdout)
        return "\n".join(last_lines(done.stderr)) if done.returncode else ""


def config_of(backend, out):
    """The configuration that we ship, for ZeRO-3 with every parameter sharded: by default it leaves small ones."""
    if backend in ("colocated", "tensor_parallel"):
        return CONFIGS / "ddp.yaml"
    if backend != "deepspeed_zero3":
        return CONFIGS / f"{backend}.yaml"
    settings = yaml.safe_load((CONFIGS / f"{backend}.yaml").read_text())
    stage3 = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    path = out / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": stage3, **batch, "train_batch_size": "auto"}))
    settings["deepspeed_config"] = {"deepspeed_config_file": str(path), "zero3_init_flag": True}
    settings.pop("mixed_precision")  # DeepSpeed's file decides about it
    (out / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    return out / "accelerate.yaml"


def last_lines(stderr):
    """What each process said last; the launcher's own lines come after that, and say nothing."""
    lines = stderr.splitlines()
    own = [line for rank in (0, 1) for line in [x for x in lines if x.startswith(f"[rank{rank}]")][-20:]]
    ends = (index for index, line in enumerate(lines) if "Signal" in line or "failed (exitcode" in line)
    end = next(ends, len(lines))
    return [*own, *lines[max(0, end - 30) : end + 10]]


@pytest.fixture(scope="session")
def launch_server(model_dir, log_of):
    """A server of their own: launches are a third of the time of all tests with servers, and run beside the others."""
    from benchmarks.vllm_server import start_vllm_server

    with start_vllm_server(model_dir, log_path=log_of("launches"), max_model_len=512) as server:
        yield server


@pytest.fixture(scope="session")
def launches(model_dir, tmp_path_factory, request):
    """See [`Launches`]."""
    return Launches(model_dir, tmp_path_factory.mktemp("launches"), lambda: request.getfixturevalue("launch_server"))
