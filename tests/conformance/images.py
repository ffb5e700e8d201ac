"""
A training with pictures on vLLM; inside the process a program of its own, see `run_scenarios`.

All prompts are the same words; only the pictures differ, and so do the answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset

import tests.conformance.vlm  # noqa: F401  AutoProcessor loads Idefics3's processor once it is imported
from tests.builders import make_args
from tests.conformance.process import main
from tests.engines.settings import engine_settings
from tests.trl_parity.vlms import load_processor, picture
from trl_darts import DARTSGRPOTrainer


NUM_PICTURES = 8
STEPS = 4


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def scenarios(engine: str, model_dir: Path, out: Path, url: str | None = None) -> dict[str, Any]:
    """Some steps, and their log."""
    # It learns, so that an engine that keeps what its old weights saw in a picture is found out.
    words = [{"role": "user", "content": "What is this?"}]
    dataset = Dataset.from_list([{"prompt": words, "image": picture(i)} for i in range(NUM_PICTURES)])
    args = make_args(
        out / "run", max_steps=STEPS, max_completion_length=16, learning_rate=2e-3, **engine_settings(engine, url)
    )
    trainer = DARTSGRPOTrainer(
        str(model_dir), reward, args=args, train_dataset=dataset, processing_class=load_processor(model_dir)
    )
    trainer.train()
    return {
        "log": [{k: v for k, v in line.items() if "/" in k} for line in trainer.state.log_history],
        "tracked": len(trainer.length_tracker),
    }


if __name__ == "__main__":
    main(scenarios)
