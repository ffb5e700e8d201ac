"""Models whose log-probs can't be streamed are refused before any GPU time is spent."""

from types import SimpleNamespace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from tests.streaming.test_forward import SIZES, make_model
from trl_darts.errors import ConfigurationError
from trl_darts.streaming.setup import _check_model


def check(model):
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    args = SimpleNamespace(gradient_accumulation_steps=1, steps_per_generation=1)
    settings = {"vllm_importance_sampling_correction": True, "num_iterations": 1, "beta": 0.0}
    _check_model(SimpleNamespace(model=model, accelerator=accelerator, args=args, **settings))


@pytest.mark.parametrize("name", ["llama", "sliding", "sinks"])
def test_models_that_can(name):
    check(make_model(name))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1)), "no rotary positions"),
        (MambaForCausalLM(MambaConfig(hidden_size=8, num_hidden_layers=1)), "can't be kept chunk by chunk"),
        (
            LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0})),
            "depend on how long the text will be",
        ),
    ],
    ids=["learned positions", "state", "dynamic positions"],
)
def test_models_that_cannot(model, words):
    with pytest.raises(ConfigurationError, match=f"`stream_logprobs`.*{type(model).__name__}.*{words}"):
        check(model)
