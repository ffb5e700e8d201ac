"""
Wrong settings: TRL's own errors come through, from the config, the trainer, or the first step. Those that the config
alone can refuse are refused when it is made, see tests/test_field_checks.py.
"""

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trl_parity.common import make_args, make_trainer, texts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"per_device_train_batch_size": 6}, r"generation_batch_size \(6\) must be divisible by num_generations"),
        ({"generation_batch_size": 20}, r"generation_batch_size \(20\) must be divisible by the global batch size"),
        ({"generation_batch_size": 8, "steps_per_generation": 2}, "can not be both configured"),
        ({"num_generations": 1, "num_longest": 0}, "at least 2 generations"),
        ({"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6}, r"global eval batch size"),
        (
            {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 5, "per_device_eval_batch_size": 8},
            r"generations used for evaluation \(5\)",
        ),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"log_completions_hub_repo": "someone/some"}, "log_completions is False"),
        (
            {"vllm_importance_sampling_clip_min": 4.0, "vllm_importance_sampling_clip_max": 3.0},
            "vllm_importance_sampling_clip_min",
        ),
    ],
)
def test_config(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        make_args(tmp_path, **fields)


def peft_model(lm):
    return get_peft_model(AutoModelForCausalLM.from_pretrained(lm), LoraConfig())


TRAINER_ERRORS = {
    "data set missing": ({}, {"train_dataset": None}, ValueError, "`train_dataset` is required"),
    "data set of another kind": ({}, {"train_dataset": [{"prompt": "a"}]}, TypeError, "must be a `Dataset`"),
    "stream without length": (
        {"max_steps": -1},
        {"train_dataset": texts().to_iterable_dataset()},
        ValueError,
        "max_steps",
    ),
    "stream dispatched": (
        {"accelerator_config": {"dispatch_batches": True}},
        {"train_dataset": texts().to_iterable_dataset()},
        ValueError,
        "dispatch_batches=False",
    ),
    "reward missing": ({}, {"reward_funcs": None}, ValueError, "No reward source"),
    "too many weights": ({"reward_weights": [0.5, 0.5]}, {}, ValueError, r"reward weights \(2\)"),
    "too many reward tokenizers": (
        {},
        {"reward_processing_classes": [None, None]},
        ValueError,
        r"reward processing classes \(2\) must match",
    ),
    "tokenizer of another kind": ({}, {"processing_class": "gpt2"}, TypeError, "processing_class"),
    "adapter settings of another kind": ({}, {"peft_config": {"r": 8}}, TypeError, "peft.PeftConfig"),
    "adapter on the head": (
        {},
        {"peft_config": LoraConfig(target_modules=["lm_head"])},
        ValueError,
        "`lm_head` is not supported",
    ),
    "sync of an adapter": (
        {"sync_ref_model": True, "beta": 0.1},
        {"peft_config": LoraConfig()},
        NotImplementedError,
        "sync_ref_model=True",
    ),
    "router loss of a dense model": ({"router_aux_loss_coef": 0.1}, {}, ValueError, "not a Mixture-of-Experts"),
}


@pytest.mark.parametrize("case", TRAINER_ERRORS)
def test_trainer(lm, tmp_path, case):
    fields, kwargs, error, message = TRAINER_ERRORS[case]
    with pytest.raises(error, match=message):
        make_trainer(lm, make_args(tmp_path, **fields), **kwargs)


def test_adapter_on_an_adapter(lm, tmp_path):
    with pytest.raises(ValueError, match="together with a `peft_config`"):
        make_trainer(peft_model(lm), make_args(tmp_path), peft_config=LoraConfig())


def test_two_reward_models_with_one_tokenizer(zoo, tmp_path):
    models = [str(zoo.reward()), str(zoo.reward("llama"))]
    tokenizer = AutoTokenizer.from_pretrained(zoo.reward())
    with pytest.raises(ValueError, match="must match"):
        make_trainer(zoo.lm(), make_args(tmp_path), reward_funcs=models, reward_processing_classes=tokenizer)


def test_data_without_prompts(lm, tmp_path):
    with pytest.raises(KeyError, match="prompt"):
        make_trainer(lm, make_args(tmp_path), train_dataset=Dataset.from_dict({"text": ["a", "b"]})).train()
