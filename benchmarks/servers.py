"""Shared by benchmarks: a real vLLM server of a heavy-tailed model, and trainers on a CPU."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOTrainer

from benchmarks.models import make_markov_model, make_tokenizer
from benchmarks.vllm_server import free_port, start_vllm_server
from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
from trl_darts.engines.vllm_generation import synced_generation
from trl_darts.telemetry.stopwatch import REST, StepParts, Stopwatch


@contextmanager
def benchmark_server(**options: Any) -> Iterator[tuple[str, Path]]:
    """Yields the address of a server of the Markov model, and the model's directory."""
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_markov_model(Path(directory) / "markov", make_tokenizer())
        with start_vllm_server(model_dir, **options) as server:
            yield server.base_url, model_dir


def training_args(base_url: str | None, output_dir: str | Path, **fields: Any) -> DARTSGRPOConfig:
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


def make_trainer(
    model: Any, reward: Any, args: Any, dataset: Any, tokenizer: Any = None, kind: Any = DARTSGRPOTrainer, **more: Any
) -> Any:
    """Returns a trainer that prints nothing."""
    disable_progress_bar()
    trainer = kind(model, reward, args, dataset, processing_class=tokenizer, **more)
    trainer.remove_callback(PrinterCallback)
    return trainer


class TRLTrainer(GRPOTrainer):
    """
    TRL's class, with our connection to the server: TRL's client refuses one without CUDA. It logs where the seconds of
    its steps go, as ours does.
    """

    def __init__(self, model: Any, reward: Any, args: Any, dataset: Any, processing_class: Any = None) -> None:
        self._clock = Stopwatch()
        with synced_generation(args, model, dataset):
            super().__init__(model, reward, args, dataset, processing_class=processing_class)
        self.vllm_generation.sync_weights = self._clock.on("weights")(self.vllm_generation.sync_weights)
        self.add_callback(StepParts(self))

    def _log_all(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.on("rollout"):
            return super()._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.on("scoring"):
            return super()._generate_and_score_completions(*args, **kwargs)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.on(REST):
            return super()._prepare_inputs(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.on("passes"):
            loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self._clock.switch("optimizer")
        return loss


class StepSeconds(TrainerCallback):
    """Adds the seconds of each step to the log."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to measure."""
        self.begun = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Extends the step's entry in the log."""
        if "reward" in (logs or {}):
            state.log_history[-1]["step_seconds"] = time.perf_counter() - self.begun
