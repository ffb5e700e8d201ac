"""What is trained: kinds of models, adapters, reference models, precision."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.trl_parity.common import (
    chats,
    make_args,
    make_trainer,
    params_of,
    step_logs,
    texts,
    train,
    train_all,
)
from trl_darts import DARTSGRPOTrainer


def load(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.mark.parametrize("data", [texts, chats])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_tied", "llama"])
def test_every_parameter_of_a_dense_model_trains(zoo, tmp_path, kind, data):
    train_all(make_trainer(zoo.lm(kind), make_args(tmp_path), train_dataset=data()))


def test_mixture_of_experts_logs_its_load_balancing_loss(zoo, tmp_path):
    trainer = make_trainer(zoo.lm("qwen3_moe"), make_args(tmp_path, router_aux_loss_coef=0.1))
    train_all(trainer)
    assert all(loss > 0 for loss in step_logs(trainer, "aux_loss"))


def test_model_as_an_object_and_a_reward_model_as_a_path_are_enough(zoo, tmp_path):
    trainer = DARTSGRPOTrainer(load(zoo.lm()), str(zoo.reward()), make_args(tmp_path), texts())
    train_all(trainer)


def test_model_init_kwargs_reach_the_model(lm, tmp_path):
    args = make_args(tmp_path, model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "eager"})
    trainer = make_trainer(lm, args)
    assert trainer.model.dtype == torch.bfloat16
    assert trainer.model.config._attn_implementation == "eager"
    train_all(trainer)


def test_mixed_precision(lm, tmp_path):
    train_all(make_trainer(lm, make_args(tmp_path, bf16=True)))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_tied"])
def test_lm_head_in_float32(zoo, tmp_path, kind):
    args = make_args(tmp_path, model_init_kwargs={"dtype": "bfloat16"}, cast_lm_head_to_fp32=True, beta=0.1)
    trainer = make_trainer(zoo.lm(kind), args)
    train_all(trainer)
    for model in (trainer.model, trainer.ref_model):
        assert model.lm_head.weight.dtype == torch.float32
        assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [None, {"use_reentrant": True}])
def test_gradient_checkpointing(lm, tmp_path, options):
    args = make_args(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
    trainer = make_trainer(lm, args)
    train_all(trainer)
    assert trainer.model.is_gradient_checkpointing


# Adapters


def is_adapter(name):
    return "lora_" in name


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_new_adapter_trains_and_the_base_stays(lm, tmp_path, beta, checkpointing):
    args = make_args(tmp_path, beta=beta, gradient_checkpointing=checkpointing, max_steps=3)
    trainer = make_trainer(load(lm), args, peft_config=LoraConfig())
    names = {name for name, _ in trainer.model.named_parameters() if is_adapter(name)}
    assert isinstance(trainer.model, PeftModel)
    assert trainer.ref_model is None
    assert train(trainer) == names
    assert len(names) == 8  # A and B of q and v in two layers
    kl = step_logs(trainer, "kl")
    assert (len(kl) == 3 and kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-6) if beta else kl == []


def test_model_that_is_given_as_a_path_gets_an_adapter_too(lm, tmp_path):
    trainer = make_trainer(lm, make_args(tmp_path, max_steps=3), peft_config=LoraConfig(target_modules="all-linear"))
    changed = train(trainer)
    assert changed == {name for name, _ in trainer.model.named_parameters() if is_adapter(name)}
    assert any("mlp" in name for name in changed)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_pretrained_adapter_is_trained_on_against_a_copy_of_itself(lm, tmp_path, beta):
    model = get_peft_model(load(lm), LoraConfig(init_lora_weights=False))  # not zero, so that it does something
    start = params_of(model)
    trainer = make_trainer(model, make_args(tmp_path, beta=beta))
    assert train(trainer) == {name for name in start if is_adapter(name)}
    if beta:
        assert step_logs(trainer, "kl")[0] == pytest.approx(0, abs=1e-6)
        for name, param in start.items():
            if is_adapter(name):
                assert torch.equal(param, trainer.model.get_parameter(name.replace(".default.", ".ref.")))


def test_modules_to_save_train_beside_the_adapter(lm, tmp_path):
    config = LoraConfig(modules_to_save=["lm_head"])
    trainer = make_trainer(load(lm), make_args(tmp_path, max_steps=3), peft_config=config)
    changed = train(trainer)
    assert [name for name in changed if "modules_to_save" in name]
    assert not [name for name in changed if "original_module" in name]


# Reference models


def test_reference_model_stays_and_kl_grows_from_zero(lm, tmp_path):
    trainer = make_trainer(lm, make_args(tmp_path, beta=0.1, max_steps=3))
    start, reference = params_of(trainer.model), params_of(trainer.ref_model)
    train_all(trainer)
    assert all(torch.equal(start[name], param) for name, param in reference.items())
    assert all(torch.equal(param, trainer.ref_model.get_parameter(name)) for name, param in reference.items())
    kl = step_logs(trainer, "kl")
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-4


def test_reference_model_is_synced(lm, tmp_path):
    args = make_args(tmp_path, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.75)
    trainer = make_trainer(lm, args)
    start = params_of(trainer.ref_model)
    train_all(trainer)  # two steps: one sync, after the second
    for name, param in trainer.model.named_parameters():
        torch.testing.assert_close(trainer.ref_model.get_parameter(name), 0.75 * param + 0.25 * start[name])
