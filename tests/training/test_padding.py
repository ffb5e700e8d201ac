"""
Tests that micro-batches without padding train the same model, by the parameters after two optimizer steps. With plain
SGD, they differ as much as the gradients. On two processes:
`tests/launches/test_two_processes.py::test_trimmed_padding`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

from benchmarks.models import EOS_ID
from tests.given_completions import make_model, rows_of_prompts, trained
from tests.trl_parity import common
from tests.trl_parity.tool_calls import FAILING, RIGHT, TOOLS, caller_maker, tool_trainer
from tests.trl_parity.vlms import load_processor, make_vlm, some_images
from tests.zoo import text_config, text_options
from trl_darts.training.padding import MIN_COLUMNS, Trimming, padding_metrics


TOLERANCE = 1e-5  # relative to the change by two steps
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")


def difference(model_dir: Path, tmp_path: Path, **settings: Any) -> tuple[float, Any, Any]:
    """Returns the difference by padding relative to the change of the parameters, and both trainers."""
    whole, before = trained(model_dir, tmp_path / "whole", False, **settings)
    trimmed, _ = trained(model_dir, tmp_path / "trimmed", True, **settings)
    after, ours = dict(whole.model.named_parameters()), dict(trimmed.model.named_parameters())
    moved = torch.cat([(after[name] - value).flatten() for name, value in before.items()]).norm()
    apart = torch.cat([(after[name] - ours[name]).flatten() for name in before]).norm()
    assert moved > 0
    return (apart / moved).item(), whole, trimmed


def computed(trainer: Any) -> float:
    """Returns the mean ratio of computed tokens to actual ones."""
    return float(np.mean(common.step_logs(trainer, "darts/train/padding_ratio")))


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("lm"))


# The same gradients

SETTINGS: dict[str, dict[str, Any]] = {
    **{f"{loss}, two iterations": {"loss_type": loss, "num_iterations": 2} for loss in LOSSES},
    **{
        f"{loss}, sequences": {"loss_type": loss, "importance_sampling_level": "sequence", "num_iterations": 2}
        for loss in LOSSES
    },
    "one iteration": {},
    "two optimizer steps per generation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "windows that straddle": {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "num_iterations": 2},
    "one micro-batch per step": {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16},
    "one row per micro-batch": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16},
    "reference model": {"beta": 0.1},
    "lora": {"peft_config": LoraConfig(target_modules="all-linear"), "beta": 0.1, "num_iterations": 2},
    "off-policy mask": {"off_policy_mask_threshold": 0.001, "num_iterations": 2},
    "truncated rows masked": {"mask_truncated_completions": True},
    "a dropped group": {"fillers": (4, 5, 6, 7), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
    "widths of eight": {"pad_to_multiple_of": 8},
    # Not the median: rows of a prompt have the same first entropy, and rounding decides which ones exceed it.
    "high entropy alone": {"top_entropy_quantile": 0.2},
    "entropy bonus": {"entropy_coef": 0.1, "use_adaptive_entropy": True, "entropy_target": 5.0},
    **{
        f"corrected, {mode}": {"sampler": True, "vllm_importance_sampling_mode": mode, "beta": 0.1}
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "corrected, vespo": {
        "sampler": True,
        "loss_type": "vespo",
        "vllm_importance_sampling_mode": "token_truncate",
    },
}
# Here, the loss of a row depends on the other rows of its micro-batch.
KEEPS_PLACES = {"bnpo, two iterations", "bnpo, sequences", "high entropy alone", "entropy bonus"}


@pytest.mark.parametrize("setting", SETTINGS)
def test_same_parameters(lm, tmp_path, setting):
    apart, whole, trimmed = difference(lm, tmp_path, **SETTINGS[setting])
    assert apart < TOLERANCE
    window = np.gcd(trimmed.args.gradient_accumulation_steps, trimmed.args.steps_per_generation)
    assert trimmed._trimming.window == (1 if setting in KEEPS_PLACES else window)
    if trimmed._trimming.window > 1:
        assert computed(trimmed) < 0.8 * computed(whole)
    elif setting in KEEPS_PLACES or (window == 1 and setting != "one micro-batch per step"):
        assert computed(trimmed) < computed(whole)


def test_the_comparison_can_fail(lm, tmp_path, monkeypatch):
    """Orders rows over two optimizer steps, or where the loss depends on the other rows of a micro-batch."""
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}
    with monkeypatch.context() as patch:
        patch.setattr("trl_darts.training.padding.gcd", max)
        assert difference(lm, tmp_path, **settings)[0] > 100 * TOLERANCE
    monkeypatch.setattr("trl_darts.training.padding._mixes_rows", lambda trainer: False)
    assert difference(lm, tmp_path / "bnpo", loss_type="bnpo")[0] > 100 * TOLERANCE


ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
MODELS: dict[str, Any] = {
    # class, config, (whether rows are ordered, whether prompts are cut), or `None` without trimming
    "mixture of experts": (
        "Qwen3MoeForCausalLM",
        lambda: transformers.Qwen3MoeConfig(
            **text_options("qwen3", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        ),
        (1, True),
    ),
    "sliding windows": (
        "Gemma3ForCausalLM",
        lambda: transformers.Gemma3TextConfig(
            **text_options("gemma3", head_dim=32, query_pre_attn_scalar=32, sliding_window=8, sliding_window_pattern=2)
        ),
        (4, True),
    ),
    "learned positions": (
        "GPT2LMHeadModel",
        lambda: transformers.GPT2Config(
            vocab_size=128,
            n_embd=32,
            n_layer=2,
            n_head=2,
            initializer_range=0.2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=EOS_ID,
            pad_token_id=0,
        ),
        (4, False),
    ),
    "linear attention": (
        "Qwen3NextForCausalLM",
        lambda: transformers.Qwen3NextConfig(
            **text_options("qwen3", head_dim=32, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32),
            shared_expert_intermediate_size=32,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            router_aux_loss_coef=0.0,
        ),
        (4, False),
    ),
    "dynamic rope": ("Qwen3ForCausalLM", lambda: text_config("qwen3", rope_parameters=ROPE), None),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models(tmp_path, kind):
    class_name, config, expected = MODELS[kind]
    model_dir = make_model(tmp_path / "model", class_name, config())
    apart, whole, trimmed = difference(model_dir, tmp_path, beta=0.1)
    assert apart < TOLERANCE
    found = trimmed._trimming
    assert (found and (found.window, found.cuts_prompts)) == expected
    if expected is None:
        assert computed(trimmed) == computed(whole)
    else:
        assert computed(trimmed) < computed(whole)


def test_mixture_of_experts_without_their_loss(tmp_path):
    """The loss of a row then does not depend on other rows."""
    class_name, config, _ = MODELS["mixture of experts"]
    model_dir = make_model(tmp_path / "model", class_name, config())
    apart, _, trimmed = difference(model_dir, tmp_path, model_init_kwargs={"router_aux_loss_coef": 0.0})
    assert trimmed._trimming.window == 4
    assert apart < TOLERANCE


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2_vl"])
def test_images(tmp_path, kind):
    """Also in passes before the loss."""
    model_dir = make_vlm(tmp_path / "vlm", kind)
    data = {"train_dataset": some_images([2, 1, 3], num_rows=16), "processing_class": load_processor(model_dir)}
    apart, whole, trimmed = difference(model_dir, tmp_path, beta=0.1, num_iterations=2, **data)
    assert apart < TOLERANCE
    assert computed(trimmed) < 0.9 * computed(whole)


def test_tools(tmp_path):
    """Tool results are not trained on, but have a length."""
    model_dir = caller_maker(lambda: tmp_path / "caller")(RIGHT, FAILING)
    fields = {"schedule": "grpo", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 2}
    fields |= {"optim": "sgd", "learning_rate": 1e-6, "max_grad_norm": 0.0, "max_completion_length": 600}
    states = []
    for trims in (False, True):
        trainer = tool_trainer(model_dir, tmp_path, tools=TOOLS, fields={**fields, "trim_padding": trims})
        before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
        assert max(common.step_logs(trainer, "tools/call_frequency")) > 0
        states.append(torch.cat([(value - before[n]).flatten() for n, value in trainer.model.named_parameters()]))
    assert states[0].norm() > 0
    assert (states[1] - states[0]).norm() < TOLERANCE * states[0].norm()
    assert computed(trainer) < 1.5


def test_compiled_models_meet_few_widths(lm, tmp_path):
    trainer, _ = trained(lm, tmp_path, True)
    trainer.args.torch_compile = True
    found = Trimming.of(trainer)
    assert found is not None
    assert (found.few_widths, found.cuts_prompts) == (True, False)


def test_evaluation_is_left_alone(lm, tmp_path):
    """An evaluation has no micro-batches, and its seconds don't count as training."""
    data = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    apart, _, trimmed = difference(lm, tmp_path, eval_dataset=rows_of_prompts(4), **data)
    assert apart < TOLERANCE
    assert len(common.step_logs(trimmed, "eval_loss")) == 2
    assert len(common.step_logs(trimmed, "darts/train/seconds")) == 2
    assert min(common.step_logs(trimmed, "darts/train/seconds")) > 0
    assert sum(common.step_logs(trimmed, "darts/step/seconds")) > sum(common.step_logs(trimmed, "darts/train/seconds"))
    assert not any("padding" in name for line in trimmed.state.log_history for name in line if name.startswith("eval"))


def test_vespo_with_padding_in_its_weights(lm, tmp_path):
    """VESPO sums the logarithms of clipped ratios over padding, where they are 1, so nothing may be cut."""
    settings = {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate", "sampler": True}
    settings["vllm_importance_sampling_clip_max"] = 0.9
    trainer, _ = trained(lm, tmp_path, True, **settings)
    trainer._trimming = None
    assert Trimming.of(trainer) is None
    trainer.vllm_importance_sampling_clip_max = 3.0
    assert Trimming.of(trainer) is not None


# Rows

NUM_ROWS = st.sampled_from([(1, 1), (1, 4), (2, 3), (3, 2), (4, 2)])  # rows per micro-batch, micro-batches per window


def make_batches(prompts: list[int], completions: list[int], batch_size: int, extra: int = 0) -> list[dict[str, Any]]:
    """Builds padded rows whose tokens are the row's number."""
    widths = max(prompts) + extra, max(completions) + extra
    rows: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "prompt_mask", "completion_ids")}
    rows |= {name: [] for name in ("completion_mask", "token_type_ids")}
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), 1):
        left, right = [0] * (widths[0] - prompt), [0] * (widths[1] - completion)
        rows["prompt_ids"].append([*left, *[number] * prompt])
        rows["prompt_mask"].append([*left, *[1] * prompt])
        rows["completion_ids"].append([*[number] * completion, *right])
        rows["completion_mask"].append([*[1] * completion, *right])
        rows["token_type_ids"].append([*left, *[number] * (prompt + completion), *right])
    batch: dict[str, Any] = {name: torch.tensor(value) for name, value in rows.items()}
    batch["importance_sampling_ratio"] = torch.arange(1.0, len(prompts) + 1)[:, None]
    batch["advantages"] = torch.arange(1.0, len(prompts) + 1)
    batch["num_items_in_batch"] = torch.tensor(7)
    batch["num_images"] = None
    return [
        {
            name: value if value is None or value.ndim == 0 else value[start : start + batch_size]
            for name, value in batch.items()
        }
        for start in range(0, len(prompts), batch_size)
    ]


@st.composite
def generations(draw: Any) -> tuple[list[dict[str, Any]], int]:
    """Draws micro-batches of one to three windows, and their number per window. Completions may be empty."""
    batch_size, window = draw(NUM_ROWS)
    num_rows = batch_size * window * draw(st.integers(1, 3))
    lengths = [draw(st.lists(st.integers(least, 12), min_size=num_rows, max_size=num_rows)) for least in (1, 0)]
    lengths[1][draw(st.integers(0, num_rows - 1))] += 1
    return make_batches(*lengths, batch_size, draw(st.integers(0, 5))), window


def row_numbers(batches: list[dict[str, Any]]) -> list[int]:
    return [int(number) for batch in batches for number in batch["advantages"]]


@given(generations(), st.integers(1, 5), st.booleans(), st.booleans())
def test_rows_stay_in_their_optimizer_step_and_whole(generation, multiple, cuts_prompts, few_widths):
    batches, window = generation
    trimmed = Trimming(window, cuts_prompts, multiple, few_widths).micro_batches(batches)
    assert [len(batch["advantages"]) for batch in trimmed] == [len(batch["advantages"]) for batch in batches]
    for start in range(0, len(batches), window):
        part = slice(start, start + window)
        assert Counter(row_numbers(trimmed[part])) == Counter(row_numbers(batches[part]))
    for batch in trimmed:
        assert batch["num_items_in_batch"] == 7
        assert batch["num_images"] is None
        numbers = batch["advantages"].long()[:, None]
        assert torch.equal(batch["importance_sampling_ratio"], numbers.float())
        for side in ("prompt", "completion"):
            mask = batch[f"{side}_mask"]
            assert torch.equal(batch[f"{side}_ids"], numbers * mask)
            whole = {int(n): row for b in batches for n, row in zip(b["advantages"], b[f"{side}_mask"], strict=True)}
            assert all(whole[int(n)].sum() == row.sum() for n, row in zip(numbers, mask, strict=True))
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        assert torch.equal(batch["token_type_ids"], numbers * mask)


@given(generations())
def test_no_micro_batch_is_wider_than_its_longest_row(generation):
    batches, window = generation
    for batch in Trimming(window).micro_batches(batches):
        full = batches[0]["completion_ids"].shape[1]
        longest = int(batch["completion_mask"].sum(1).max())
        assert batch["prompt_ids"].shape[1] == int(batch["prompt_mask"].sum(1).max())
        assert batch["completion_ids"].shape[1] == min(full, max(MIN_COLUMNS, longest))


@given(generations())
def test_ordering_never_adds_padding(generation):
    batches, window = generation
    accelerator = Accelerator(cpu=True)
    metrics = [padding_metrics(each, accelerator) for each in (batches, Trimming(1).micro_batches(batches))]
    metrics.append(padding_metrics(Trimming(window).micro_batches(batches), accelerator))
    ratios = [each["darts/train/padding_ratio"] for each in metrics]
    assert ratios[0] >= ratios[1] - 1e-6
    assert ratios[0] >= ratios[2] - 1e-6


def test_longest_rows_come_first():
    """Micro-batches are then long on all processes at once, and a lack of memory shows in the first one."""
    trimmed = Trimming(3).micro_batches(make_batches([1] * 6, [3, 9, 2, 8, 1, 7], 2))
    assert row_numbers(trimmed) == [2, 4, 6, 1, 3, 5]


def test_few_widths():
    widths = {
        Trimming(1, few_widths=True)
        .micro_batches(make_batches([3], [length], 1, extra=100))[0]["completion_ids"]
        .shape[1]
        for length in range(1, 100)
    }
    assert widths == {2, 4, 8, 16, 32, 64, 128}


@given(generations(), st.integers(1, 4))
def test_log_probs_come_back_in_their_places(generation, batch_size):
    """Uses a model whose log-probs are the row's number in every counted column."""
    batches, _ = generation
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in ("prompt_ids", "completion_ids")}
    masks = {name: torch.cat([batch[name] for batch in batches]) for name in ("prompt_mask", "completion_mask")}
    num_columns = rows["completion_ids"].shape[1]
    passes: list[tuple[int, int]] = []

    def compute(model: Any, ids: Any, mask: Any, logits_to_keep: int) -> Any:
        passes.append(tuple(ids.shape))
        return (ids * mask)[:, -logits_to_keep:].float(), None, None

    ids, mask = (torch.cat(list(each.values()), dim=1) for each in (rows, masks))
    found = Trimming(1).per_token_logps(compute, None, ids, mask, num_columns, batch_size=batch_size, num_images=None)
    assert torch.equal(found[0], (ids * mask)[:, -num_columns:].float())
    assert len(passes) == -(-len(ids) // batch_size)
    assert all(num_rows <= batch_size for num_rows, _ in passes)
