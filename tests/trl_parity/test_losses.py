"""Losses and what shapes them: types, off-policy steps, clipping, masks, entropy."""

from types import SimpleNamespace

import pytest
import torch

from tests.builders import record_batches
from tests.trl_parity.common import (
    make_args,
    make_trainer,
    params_of,
    record_losses,
    step_logs,
    texts,
    train,
    train_all,
)
from trl_darts import DARTSGRPOTrainer


MAX_LENGTH, EPSILON_HIGH = 12, 0.3


def on_policy_loss(loss_type, inputs, logps):
    """The loss of one of two micro-batches where the model is the one that sampled: all ratios are 1."""
    advantages, mask = inputs["advantages"], inputs["completion_mask"]
    weighted = advantages * mask.sum(1)  # (B,)
    temperature = torch.where(advantages > 0, 0.8, 1.2)
    policy_gradient = -(advantages * (logps * mask).sum(1)).sum() / inputs["num_items_in_batch"]
    return {
        "grpo": -advantages.mean() / 2,
        "sapo": -(advantages * 2 / temperature).mean() / 2,
        "bnpo": -weighted.sum() / mask.sum() / 2,
        "dr_grpo": -weighted.sum() / (len(advantages) * MAX_LENGTH) / 2,
        "luspo": -weighted.mean() / 2,
        "dapo": -weighted.sum() / inputs["num_items_in_batch"],
        "cispo": EPSILON_HIGH * policy_gradient,
        "vespo": policy_gradient,
    }[loss_type]


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "bnpo", "dr_grpo", "luspo", "dapo", "cispo", "vespo"])
def test_loss_is_that_of_the_kept_rows(lm, tmp_path, loss_type):
    args = make_args(
        tmp_path,
        loss_type=loss_type,
        gradient_accumulation_steps=2,
        epsilon_high=EPSILON_HIGH,
        sapo_temperature_pos=0.8,
        sapo_temperature_neg=1.2,
    )
    trainer = make_trainer(lm, args)
    records = record_losses(trainer)
    train_all(trainer)
    assert len(records) == 4
    for inputs, logps, loss in records:
        assert len(inputs["advantages"]) == 8
        assert loss == pytest.approx(on_policy_loss(loss_type, inputs, logps).item(), abs=1e-5)
    tokens = records[0][0]["completion_mask"].sum() + records[1][0]["completion_mask"].sum()
    assert tokens == records[0][0]["num_items_in_batch"]
    assert step_logs(trainer, "loss") == pytest.approx(
        [records[0][2] + records[1][2], records[2][2] + records[3][2]], abs=1e-5
    )
    extra = {"cispo": "cispo_clip_ratio", "vespo": "vespo/phi_seq_mean", "sapo": "entropy"}
    assert len(step_logs(trainer, extra.get(loss_type, "clip_ratio/region_mean"))) == 2


@pytest.mark.parametrize(
    ("fields", "generations", "off_policy"),
    [
        ({}, 4, False),
        ({"gradient_accumulation_steps": 2}, 4, False),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, 8, False),
        ({"num_iterations": 2}, 2, True),
        ({"steps_per_generation": 2}, 2, True),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, 3, True),
    ],
)
def test_old_log_probs_are_kept_where_the_policy_moves(lm, tmp_path, fields, generations, off_policy):
    trainer = make_trainer(lm, make_args(tmp_path, max_steps=4, **fields), train_dataset=texts(24))
    records, batches = record_losses(trainer), record_batches(trainer)
    train_all(trainer)
    assert len(batches) == generations
    ratios = []
    for inputs, logps, _ in records:
        assert ("old_per_token_logps" in inputs) == off_policy
        difference = (logps - inputs.get("old_per_token_logps", logps)) * inputs["completion_mask"]
        ratios.append(difference.abs().max().item())
    assert ratios[0] < 1e-5
    assert (max(ratios) > 1e-3) == off_policy


@pytest.fixture(scope="module")
def trained(lm, curve, tmp_path_factory):
    """Parameters after a training with these settings; always the same seed, three steps on one batch."""
    made = {}

    def run(**fields):
        key = str(sorted(fields.items()))
        if key not in made:
            args = {"num_iterations": 3, "max_steps": 3, "learning_rate": 0.05, "latency_curve": curve, **fields}
            trainer = make_trainer(lm, make_args(tmp_path_factory.mktemp("run"), **args))
            train(trainer)
            made[key] = trainer, params_of(trainer.model)
        return made[key]

    return run


def test_same_settings_train_the_same(trained):
    (_, first), (_, second) = trained(), trained(logging_first_step=True)
    assert all(torch.equal(param, second[name]) for name, param in first.items())


@pytest.mark.parametrize(
    ("base", "setting"),
    [
        ({}, {"delta": 0.9}),
        ({"learning_rate": 0.002}, {"epsilon": 0.001}),
        ({}, {"epsilon_high": 5.0}),
        ({}, {"importance_sampling_level": "sequence"}),
        ({"loss_type": "grpo"}, {"importance_sampling_level": "sequence"}),
        ({}, {"top_entropy_quantile": 0.2}),
        ({"epsilon": 10.0}, {"off_policy_mask_threshold": 1e-4}),
        ({}, {"entropy_coef": 0.1}),
        ({}, {"beta": 0.1}),
        ({"beta": 0.1}, {"use_bias_correction_kl": False}),
        ({"loss_type": "sapo"}, {"sapo_temperature_neg": 3.0}),
        ({"loss_type": "vespo"}, {"vespo_lambda_neg": 5.0}),
        ({"max_completion_length": 4}, {"mask_truncated_completions": True}),
    ],
)
def test_setting_changes_the_training_and_not_the_rollout(trained, base, setting):
    (plain, without), (trainer, with_it) = trained(**base), trained(**base, **setting)
    assert any(not torch.equal(param, with_it[name]) for name, param in without.items())
    for name in ("reward", "completions/mean_length"):
        assert step_logs(plain, name)[0] == step_logs(trainer, name)[0]


@pytest.mark.parametrize(("epsilon", "epsilon_high"), [(0.0, 0.0), (0.0, 1e6), (1e6, 0.0), (1e6, 1e6)])
def test_clip_ratios_are_logged(trained, epsilon, epsilon_high):
    trainer, _ = trained(epsilon=epsilon, epsilon_high=epsilon_high)
    low, high, region = (step_logs(trainer, f"clip_ratio/{part}_mean") for part in ("low", "high", "region"))
    assert low[0] == high[0] == 0  # on policy
    assert (max(low) > 0) == (epsilon == 0)
    assert (max(high) > 0) == (epsilon_high == 0)
    assert region == pytest.approx([a + b for a, b in zip(low, high, strict=True)])


# Masks


def trainer_without_init():
    """TRL's own tests build one so: what is called must need no more than it is given."""
    trainer = object.__new__(DARTSGRPOTrainer)
    trainer.accelerator = SimpleNamespace(gather=lambda x: x, pad_across_processes=lambda x, dim, pad_index: x)
    return trainer


@pytest.mark.parametrize(
    ("mask", "threshold", "kept"),
    [
        ([[1, 1, 1], [1, 1, 0]], 0.0, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]),
        ([[1, 1, 1], [1, 1, 0]], 0.5, [(0, 2), (1, 0), (1, 1)]),
        ([[1, 1, 1], [1, 1, 0]], 0.8, [(1, 1)]),
        ([[1, 1, 1], [1, 1, 0]], 1.0, [(1, 1)]),
        ([[1, 1, 1], [0, 0, 0]], 0.5, [(0, 1), (0, 2)]),
        ([[0, 0, 0], [0, 0, 0]], 0.5, []),
    ],
)
def test_entropy_mask_keeps_the_most_uncertain_tokens(mask, threshold, kept):
    entropies = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 9.0]])
    result = trainer_without_init().get_high_entropy_mask(entropies, torch.tensor(mask), threshold)
    assert [tuple(index) for index in result.nonzero().tolist()] == kept


@pytest.mark.parametrize(
    ("advantage", "drift", "kept"), [(1.0, 2.0, 1), (0.0, 2.0, 1), (-1.0, 0.5, 1), (-1.0, 2.0, 0), (-1.0, -9.0, 1)]
)
def test_off_policy_mask_drops_bad_rows_that_drifted(advantage, drift, kept):
    now = torch.tensor([[-drift, -drift, -1e4, 1e4]])  # the last two are padding
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    result = DARTSGRPOTrainer.get_off_policy_mask(torch.tensor([[advantage]]), now, torch.zeros(1, 4), mask, 1.0)
    assert result.tolist() == [[kept]]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_vespo_weights_fall_with_the_distance_from_the_policy(advantage):
    drift = torch.tensor([[0.0], [0.5], [-0.5], [2.0]]).expand(4, 3)
    weights = DARTSGRPOTrainer.get_gamma_weights(torch.full((4, 1), advantage), drift, torch.ones(4, 3), None)
    assert weights[0] == pytest.approx(1)
    assert ((weights[1:] < 1) & (weights[1:] >= 0)).all()
    assert weights[3] < weights[1]


def test_truncated_rows_are_masked(lm, tmp_path):
    args = make_args(tmp_path, max_completion_length=5, mask_truncated_completions=True)
    trainer = make_trainer(lm, args)
    batches = record_batches(trainer)
    train_all(trainer)
    masked = [(batch["completion_mask"].sum(1) == 0) for batch in batches]
    for batch, is_masked in zip(batches, masked, strict=True):
        has_end = (batch["completion_ids"] == trainer.processing_class.eos_token_id).any(1)
        assert torch.equal(is_masked, ~has_end)
    assert any(rows.any() for rows in masked)
    assert [rows.float().mean().item() for rows in masked] == step_logs(trainer, "completions/clipped_ratio")


def test_nothing_is_learnt_where_all_rows_are_truncated(zoo, tmp_path):
    args = make_args(tmp_path, max_completion_length=4, mask_truncated_completions=True)
    trainer = make_trainer(zoo.lm(mean_length=10_000), args)
    assert train(trainer) == set()
    assert step_logs(trainer, "completions/clipped_ratio") == [1, 1]
    assert step_logs(trainer, "darts/pool/truncated_ratio") == [1, 1]


# Entropy bonus


@pytest.mark.parametrize(("target", "expected"), [(100.0, [0.12, 0.14, 0.16]), (0.0, [0.08, 0.06, 0.04])])
def test_entropy_coefficient_adapts(lm, tmp_path, target, expected):
    fields = {"entropy_coef": 0.1, "use_adaptive_entropy": True, "entropy_coef_delta": 0.02, "entropy_target": target}
    trainer = make_trainer(lm, make_args(tmp_path, max_steps=3, gradient_accumulation_steps=2, **fields))
    train_all(trainer)
    assert step_logs(trainer, "entropy_coef") == pytest.approx(expected)
    assert len(step_logs(trainer, "policy_loss")) == 3


def test_entropy_bonus_is_subtracted_from_the_policy_loss(lm, tmp_path):
    trainer = make_trainer(lm, make_args(tmp_path, entropy_coef=0.1))
    train_all(trainer)
    for entry in (e for e in trainer.state.log_history if "policy_loss" in e):
        assert entry["loss"] == pytest.approx(entry["policy_loss"] - 0.1 * entry["entropy"], abs=1e-4)


def test_entropy_controller_is_resumed(lm, tmp_path):
    fields = {"use_adaptive_entropy": True, "entropy_target": 100.0, "save_strategy": "steps", "save_steps": 2}
    train(make_trainer(lm, make_args(tmp_path, **fields)))
    resumed = make_trainer(lm, make_args(tmp_path, max_steps=3, **fields))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert step_logs(resumed, "entropy_coef") == pytest.approx([0.005, 0.01, 0.015])
