"""
A training with pictures on one engine; for vLLM inside the process a program of its own, see `run_scenarios`.

All prompts are the same words; only the pictures differ, and so do the answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

import tests.conformance.vlm  # noqa: F401  AutoProcessor loads Idefics3's processor once it is imported
from tests.builders import make_args, record_batches
from tests.conformance.process import main
from tests.engines.settings import engine_settings
from tests.trl_parity.vlms import load_processor, picture
from trl_darts import DARTSGRPOTrainer


NUM_PICTURES = 8
STEPS = 4


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def scores(trainer: Any, batch: dict[str, Any]) -> list[list[float]]:
    """Mean log-prob of each row's answer under each row's picture: a row's own must explain it best."""
    model, pixels = trainer.model, batch["pixel_values"]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = batch["completion_ids"].shape[1]
    rows = []
    with torch.no_grad():
        for other in range(len(ids)):
            logits = model(input_ids=ids, attention_mask=mask, pixel_values=pixels[other].expand_as(pixels)).logits
            logps = logits[:, -length - 1 : -1].log_softmax(-1).gather(2, batch["completion_ids"][..., None])[..., 0]
            rows.append(((logps * batch["completion_mask"]).sum(1) / batch["completion_mask"].sum(1)).tolist())
    return rows  # (picture, row)


def scenarios(engine: str, model_dir: Path, out: Path, url: str | None = None) -> dict[str, Any]:
    """Some steps, and what is known of their rows."""
    # It learns, so that an engine that keeps what its old weights saw in a picture is found out.
    words = [{"role": "user", "content": "What is this?"}]
    dataset = Dataset.from_list([{"prompt": words, "image": picture(i), "which": i} for i in range(NUM_PICTURES)])
    args = make_args(
        out / "run", max_steps=STEPS, max_completion_length=16, learning_rate=2e-3, **engine_settings(engine, url)
    )
    trainer = DARTSGRPOTrainer(
        str(model_dir), reward, args=args, train_dataset=dataset, processing_class=load_processor(model_dir)
    )
    batches = record_batches(trainer)
    trainer.train()
    return {
        "log": [{k: v for k, v in line.items() if "/" in k} for line in trainer.state.log_history],
        "which": [[row["which"] for row in batch["inputs"]] for batch in batches],
        # vLLM's log-probs are compared with the trainer's, see `test_answers_are_to_the_own_picture`.
        "scores": [scores(trainer, batch) for batch in batches if engine == "transformers"],
        "tracked": len(trainer.length_tracker),
    }


if __name__ == "__main__":
    main(scenarios)
