"""Combinations that only the built trainer knows to be impossible, and that are refused before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.builders import make_args
from tests.trl_parity.vlms import load_processor, make_vlm, picture
from trl_darts import DARTSGRPOTrainer
from trl_darts.checks import check_path, has_image_columns
from trl_darts.errors import ConfigurationError


def trainer(**changes: Any) -> SimpleNamespace:
    """What the checks look at, in a training that is fine."""
    args = {
        "use_vllm": False,
        "vllm_mode": "server",
        "vllm_model_impl": "auto",
        "use_transformers_continuous_batching": False,
        "ds3_gather_for_generation": True,
    }
    fields: dict[str, Any] = {
        "model": torch.nn.Linear(1, 1),
        "train_dataset": SimpleNamespace(column_names=["prompt"]),
        "processing_class": SimpleNamespace(),
        "is_sharded": False,
        "is_deepspeed_enabled": False,
        "_is_vlm": False,
        "accelerator": SimpleNamespace(num_processes=2),
    }
    given = {name: changes.pop(name) for name in list(changes) if name in args}
    return SimpleNamespace(**{**fields, **changes}, args=SimpleNamespace(**{**args, **given}))


IMAGES = {"_is_vlm": True, "train_dataset": SimpleNamespace(column_names=["prompt", "image"])}


def test_what_can_work_passes():
    check_path(trainer())
    check_path(trainer(**IMAGES))
    check_path(trainer(use_transformers_continuous_batching=True))
    check_path(
        trainer(use_transformers_continuous_batching=True, is_sharded=True, is_deepspeed_enabled=True)
    )  # gathered for generation
    check_path(trainer(use_vllm=True, **IMAGES, processing_class=SimpleNamespace(image_token_id=7)))
    check_path(trainer(use_vllm=True, vllm_mode="colocate", **IMAGES))


def test_continuous_batching_of_a_sharded_model():
    for more in ({}, {"is_deepspeed_enabled": True, "ds3_gather_for_generation": False}):
        with pytest.raises(ConfigurationError, match=r"does not run with a sharded model on 2 processes.*DDP"):
            check_path(trainer(use_transformers_continuous_batching=True, is_sharded=True, **more))


def test_processor_without_image_token_on_a_server():
    with pytest.raises(ConfigurationError, match=r"`processing_class` \(SimpleNamespace\) has no `image_token_id`"):
        check_path(trainer(use_vllm=True, **IMAGES))


def test_model_that_vllm_has_changed():
    class Changed(torch.nn.Linear):
        def __call__(self, *args: Any) -> Any:
            return None

    Changed.__call__.__module__ = "vllm.compilation.decorators"
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), Changed(1, 1))
    with pytest.raises(ConfigurationError, match=r"`vllm_model_impl` \('auto'\) has vLLM change Changed"):
        check_path(trainer(use_vllm=True, vllm_mode="colocate", model=model))
    check_path(trainer(use_vllm=True, model=model))  # servers have processes of their own


def test_images_with_continuous_batching_are_refused_by_trl(tmp_path):
    model_dir = make_vlm(tmp_path / "vlm")
    words = [{"role": "user", "content": "What is this?"}]
    dataset = Dataset.from_list([{"prompt": words, "image": picture(i)} for i in range(4)])
    assert has_image_columns(dataset)
    args = make_args(tmp_path, use_transformers_continuous_batching=True)
    with pytest.raises(ValueError, match="does not support multimodal models"):
        DARTSGRPOTrainer(
            str(model_dir),
            lambda completions, **kwargs: [0.0] * len(completions),
            args=args,
            train_dataset=dataset,
            processing_class=load_processor(model_dir),
        )
