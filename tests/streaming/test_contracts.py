"""Contracts of TRL and transformers that streaming uses beyond their documented interface."""

import inspect

import pytest
import torch
from transformers import DynamicCache
from trl.trainer import utils
from trl.trainer.grpo_trainer import GRPOTrainer

from tests.streaming.test_forward import make_model
from trl_darts.trl_compat import has_fused_lm_head


streams_logprobs = pytest.mark.skipif(not has_fused_lm_head(), reason="TRL before 1.15 has no fused LM head")


@streams_logprobs
def test_log_probs_are_asked_for_by_one_method():
    parameters = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert parameters[1:6] == ["model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"], (
        "GRPOTrainer._get_per_token_logps_and_entropies: we override it, and call it with some of the rows"
    )
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert source.count("self._get_per_token_logps_and_entropies(") == 3, (
        "GRPOTrainer._generate_and_score_completions must ask it for the policy, the reference model, and the policy "
        "without its adapter"
    )
    assert 'use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)' in source, (
        "GRPOTrainer._generate_and_score_completions: by the state of the adapter we tell which model is meant"
    )
    assert "self.args.gradient_accumulation_steps % generate_every != 0" in source, (
        "GRPOTrainer._generate_and_score_completions: we refuse to stream log-probs that it would not ask for"
    )


@streams_logprobs
def test_fused_head_passes_on_a_cache_and_takes_shifted_labels():
    model = make_model("llama")
    cache = DynamicCache()
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([[1, 2, 3]]),
            past_key_values=cache,
            shift_labels=torch.tensor([[2, 3, 4]]),
            fused_lm_head=True,
        )
    words = "add_fused_lm_head: the forward must "
    assert output.log_probs.shape == (1, 3), words + "score every position of `shift_labels`"
    assert cache.get_seq_length() == 3, words + "fill the cache that it is given, although it sets `use_cache=False`"


@streams_logprobs
def test_a_fresh_cache_keeps_all_tokens_of_layers_with_a_window():
    model = make_model("sliding")
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.ones(1, 40, dtype=torch.long), past_key_values=cache, use_cache=True)
    assert cache.layers[0].keys.shape[-2] == 40, "DynamicCache() must not cut layers: we align rows in it ourselves"


def test_rewards_are_asked_for_by_one_method():
    source = inspect.getsource(GRPOTrainer._calculate_rewards)
    for part in ("self.reward_funcs, self.reward_processing_classes, self.reward_func_names", "self.async_loop"):
        assert part in source, f"GRPOTrainer._calculate_rewards must use `{part}`: we put our own functions there"
    for name in ("trainer_state", "log_extra", "log_metric"):
        assert f'reward_kwargs["{name}"]' in source, f"GRPOTrainer._calculate_rewards must pass `{name}`: so do we"
    assert "is_async_callable" in source
    assert hasattr(utils, "use_adapter")
