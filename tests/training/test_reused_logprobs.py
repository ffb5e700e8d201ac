"""
Tests that log-probs of the training pass train the same model as TRL's pass before it, by the parameters and the logs
of two optimizer steps. On two processes: `tests/launches/test_two_processes.py::test_reused_logprobs`.
"""

from __future__ import annotations

import math
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from tests.given_completions import GivenCompletions, make_model, rows_of_prompts, trained
from tests.training.test_padding import SETTINGS, TOLERANCE
from tests.trl_parity import common
from trl_darts.errors import ConfigurationError
from trl_darts.training import reused_logprobs as module
from trl_darts.training.reused_logprobs import METRICS, OLD, RATIO, SAMPLED, ReusedLogprobs
from trl_darts.trl_compat import has_fused_lm_head


LONG = rows_of_prompts(least=30)  # worth sharing
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
SEVERAL_VERSIONS = {"two optimizer steps per generation", "windows that straddle"}


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("lm"))


@pytest.fixture
def passes(monkeypatch):
    """Counts TRL's calls for log-probs, by whether it asks for entropies, as it does in the training pass."""
    counted: list[bool] = []
    compute = GRPOTrainer._get_per_token_logps_and_entropies

    @wraps(compute)
    def counting(self, *args, **kwargs):
        counted.append(bool(kwargs.get("compute_entropy")))
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counting)
    return counted


def corrected(name: str) -> dict[str, Any]:
    """Returns a setting of the table with a correction, and with one optimizer step per batch."""
    settings = {**SETTINGS[name], "sampler": True}
    settings.pop("num_iterations", None)
    if settings.get("loss_type") == "vespo":
        settings["vllm_importance_sampling_mode"] = "token_truncate"
    return {"vllm_importance_sampling_mode": "sequence_truncate", **settings}


def difference(model_dir: Path, tmp_path: Path, **settings: Any) -> tuple[float, Any]:
    """
    Returns the difference by reusing log-probs relative to the change of the parameters, and our trainer. Both have
    logged the same.
    """
    trims = settings.pop("trims", False)
    whole, before = trained(model_dir, tmp_path / "whole", False, **settings)
    reused, _ = trained(model_dir, tmp_path / "reused", trims, reuses=None, **settings)
    after, found = dict(whole.model.named_parameters()), dict(reused.model.named_parameters())
    moved = torch.cat([(after[name] - value).flatten() for name, value in before.items()]).norm()
    apart = torch.cat([(after[name] - found[name]).flatten() for name in before]).norm()
    assert moved > 0
    for name in METRICS:
        logged = common.step_logs(reused, name)
        assert len(logged) == 2
        assert logged == pytest.approx(common.step_logs(whole, name), rel=1e-4), name
    return (apart / moved).item(), reused


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name not in SEVERAL_VERSIONS])
def test_same_parameters_and_metrics(lm, tmp_path, passes, setting):
    apart, trainer = difference(lm, tmp_path, **corrected(setting))
    assert apart < TOLERANCE
    # Two steps of both trainers, of which ours does not ask for the policy's, except for TRL's metrics of filler rows.
    asked = 2 * (1 + 2 * (trainer.beta > 0) + (setting == "a dropped group"))
    assert passes.count(False) == asked


@pytest.mark.parametrize("mode", MODES)
def test_with_trimmed_rows_and_shared_prompts(lm, tmp_path, mode):
    fields = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.2, "beta": 0.1}
    apart, trainer = difference(lm, tmp_path, trims=True, sampler=True, train_dataset=LONG, **fields)
    assert apart < TOLERANCE
    assert (trainer._trimming.shared is not None) == has_fused_lm_head()


@pytest.mark.parametrize(
    "fields",
    [
        {"gradient_checkpointing": True},
        {"use_bias_correction_kl": True, "beta": 0.1},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 2},
    ],
    ids=["checkpointing", "KL", "two batches in a step", "two iterations in a step"],
)
def test_other_steps(lm, tmp_path, fields):
    apart, trainer = difference(lm, tmp_path, sampler=True, **fields)
    assert apart < TOLERANCE
    assert trainer._reused is not None


def test_the_comparison_can_fail(lm, tmp_path, monkeypatch):
    ratios = module.importance_ratios
    monkeypatch.setattr(module, "importance_ratios", lambda *args: ratios(*args) ** 2)
    with pytest.raises(AssertionError, match="sampling/"):
        difference(lm, tmp_path / "metrics", sampler=True, **TOKENS)
    monkeypatch.setattr("tests.training.test_reused_logprobs.METRICS", ())
    assert difference(lm, tmp_path / "parameters", sampler=True, **TOKENS)[0] > 1000 * TOLERANCE


# TRL computes the correction inline

TOKENS = {"vllm_importance_sampling_mode": "token_truncate"}
BOUNDS = [(None, 3.0), (0.9, 1.2), (0.9, None)]


class Scored(GivenCompletions):
    """Keeps what TRL's scoring returns. Some log-probs are unknown."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        logprobs[1] = [math.nan] * len(logprobs[1])
        logprobs[2][0] = None
        return ids, logprobs

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        self.scored = super()._generate_and_score_completions(*args, **kwargs)
        self.logged = {name: self._metrics["train"][name][-1] for name in METRICS}
        return self.scored


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_ratios_and_metrics_are_those_of_trl(lm, tmp_path, mode, bounds, monkeypatch):
    """`GRPOTrainer._generate_and_score_completions` computes the ratios and logs them: we compute both later."""
    monkeypatch.setattr("tests.given_completions.GivenCompletions", Scored)
    low, high = (f"vllm_importance_sampling_clip_{end}" for end in ("min", "max"))
    fields = {"vllm_importance_sampling_mode": mode, low: bounds[0], high: bounds[1], "max_steps": 1}
    trainer, _ = trained(lm, tmp_path, False, sampler=True, **fields)
    batch = trainer.scored
    ratios = module.importance_ratios(trainer, batch[OLD], batch[SAMPLED], batch["completion_mask"])
    assert torch.equal(ratios, batch[RATIO])
    assert module.correction_metrics(trainer, batch) == pytest.approx(trainer.logged)


# Where it is off


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampler": False}, r"`use_vllm` \(False\)"),
        ({"vllm_importance_sampling_correction": False}, r"`vllm_importance_sampling_correction` \(False\)"),
        ({"num_iterations": 2}, r"`gradient_accumulation_steps` \(4\).*`num_iterations` \(2\)"),
        ({"steps_per_generation": 8}, r"`gradient_accumulation_steps` \(4\).*`steps_per_generation` \(8\)"),
        ({"neftune_noise_alpha": 5.0}, r"`neftune_noise_alpha` \(5\.0\)"),
        ({"peft_config": LoraConfig(lora_dropout=0.5)}, r"`base_model.*lora_dropout.default.dropout` \(0\.5\)"),
    ],
)
def test_what_is_refused(lm, tmp_path, caplog, fields, words):
    fields = {"sampler": True, "max_steps": 1, **fields}
    with pytest.raises(ConfigurationError, match=rf"`reuse_logprobs` \(True\) does not run with {words}"):
        trained(lm, tmp_path, True, reuses=True, **fields)
    caplog.clear()
    assert trained(lm, tmp_path / "unset", True, reuses=None, **fields)[0]._reused is None
    warned = [message for message in caplog.messages if "computed once more" in message]
    assert len(warned) == ("dropout" in words or "neftune" in words)


def test_a_rate_of_the_config(lm, tmp_path):
    trainer, _ = trained(lm, tmp_path, True, sampler=True, reuses=None, max_steps=1)
    assert trainer._reused is not None
    trainer.model.config.attention_dropout = 0.1
    assert ReusedLogprobs.of(trainer) is None


def test_a_subclass_that_may_read_the_log_probs(lm, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tests.given_completions.GivenCompletions", Scored)
    trainer, _ = trained(lm, tmp_path, True, sampler=True, reuses=None, max_steps=1)
    assert trainer._reused is None
    assert "because of Scored._generate_and_score_completions, which may read them" in caplog.text


def test_evaluation_has_its_own_pass(lm, tmp_path, passes):
    fields = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows_of_prompts(4), "num_generations_eval": 2}
    trainer, _ = trained(lm, tmp_path, True, sampler=True, reuses=True, max_steps=1, **fields)
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert all(f"eval_{name}" in logged[0] for name in METRICS)
    assert passes.count(False) > 0
