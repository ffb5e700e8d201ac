"""Launches of two processes: one for each backend, in which all of its scenarios run."""

import json
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import pytest
import yaml

from benchmarks.vllm_server import free_port, vllm_available
from tests.forks import run, start_server
from tests.launches.launch import log_of
from tests.launches.scenarios import BACKENDS, NEED_A_SERVER


ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "accelerate"


class Launches:
    """`launches(backend, scenario)`: what each of the two processes saw. Launches a backend on its first call."""

    def __init__(self, model_dir, root, stack):
        self.model_dir, self.root, self.stack = model_dir, root, stack
        self.errors = {}

    @cached_property
    def url(self):
        """A server of these launches alone: nothing else waits for it, and they for nothing."""
        return self.stack.enter_context(start_server(self.model_dir, max_model_len=512)).base_url

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
            arguments.append(self.url)
        launch = ["tests.launches.launch", out / "log", "--config_file", config_of(backend, out)]
        launch += ["--main_process_port", free_port(), "-m", "tests.launches.scenarios"]
        error = run(*launch, *arguments, log=out / "log", timeout=550)
        if not error:
            return ""
        own = [log_of(out / "log", rank) for rank in (0, 1)]
        return "\n".join([error, *(path.read_text()[-5000:] for path in own if path.exists())])


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


@pytest.fixture(scope="session")
def launches(model_dir, tmp_path_factory):
    """See [`Launches`]."""
    with ExitStack() as stack:
        yield Launches(model_dir, tmp_path_factory.mktemp("launches"), stack)
