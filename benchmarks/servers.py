"""Shared by benchmarks: a real vLLM server of a heavy-tailed model, and the config of a run on a CPU."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.models import make_markov_model, make_tokenizer
from benchmarks.vllm_server import free_port, start_vllm_server
from trl_darts import DARTSGRPOConfig


@contextmanager
def benchmark_server(base_url: str | None = None, **options: Any) -> Iterator[tuple[str, Path]]:
    """
    Yields the address of a server of the Markov model, and the model's directory. A server is started with these
    options of `start_vllm_server` unless `base_url` names a running one.
    """
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_markov_model(Path(directory) / "markov", make_tokenizer())
        if base_url is not None:
            yield base_url, model_dir
        else:
            with start_vllm_server(model_dir, **options) as server:
                yield server.base_url, model_dir


def training_args(base_url: str, output_dir: str | Path, **fields: Any) -> DARTSGRPOConfig:
    """Returns a config for a CPU and servers, given with commas. It logs each step and saves no checkpoints."""
    defaults: dict[str, Any] = {
        "defer_unsettled_groups": False,  # each part is measured alone
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": base_url,
        "vllm_group_port": free_port(),
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }
    return DARTSGRPOConfig(output_dir=str(output_dir), **{**defaults, **fields})
