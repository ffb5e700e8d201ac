"""Models, settings and rollouts that can't be streamed are rejected. Without streams, nothing is done."""

from types import SimpleNamespace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from tests.builders import make_args, make_trainer
from tests.streaming.test_forward import SIZES
from trl_darts.engines.batch import PromptBatch
from trl_darts.errors import ConfigurationError
from trl_darts.scheduling.ledger import Ledger
from trl_darts.streaming import Streams, make_streams
from trl_darts.streaming.streams import check_model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1)), "no rotary positions"),
        (MambaForCausalLM(MambaConfig(hidden_size=8, num_hidden_layers=1)), "can't be cached chunk by chunk"),
        (
            LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0})),
            "depend on the final length",
        ),
    ],
    ids=["learned positions", "state", "dynamic positions"],
)
def test_models_that_cannot(model, words):
    with pytest.raises(ConfigurationError, match=f"`stream_logprobs`.*{type(model).__name__}.*{words}"):
        check_model(model)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"rollout_func": print}, "`rollout_func`"),
        ({"tools": [print]}, "tools or environments"),
        ({"environment_factories": {}}, "tools or environments"),
        ({"_is_vlm": True}, "vision-language models yet \\(str\\)"),
    ],
)
@pytest.mark.parametrize("name", ["stream_logprobs", "stream_rewards"])
def test_rollouts_that_cannot(name, attributes, words):
    trainer = {"rollout_func": None, "tools": None, "environment_factories": None, "_is_vlm": False}
    args = SimpleNamespace(**{"stream_logprobs": False, "stream_rewards": False, name: True})
    trainer |= {"args": args, "accelerator": None, "processing_class": "", **attributes}
    with pytest.raises(ConfigurationError, match=f"`{name}` \\(True\\) does not support {words}"):
        make_streams(SimpleNamespace(**trainer))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_vllm": False, "vllm_server_base_url": None}, "`stream_logprobs`.*only has an effect with vLLM servers"),
        ({"vllm_importance_sampling_correction": False}, "`stream_logprobs`.*has nothing to compute"),
        ({"stream_chunk_tokens": 0}, "`stream_chunk_tokens` \\(0\\) must be at least 1"),
        ({"stream_cache_gib": 0.0}, "`stream_cache_gib` \\(0.0\\) must be positive"),
        ({"stream_reward_timeout_s": 0.0}, "`stream_reward_timeout_s` \\(0.0\\) must be positive"),
        ({"stream_batch_tokens": 8}, "`stream_batch_tokens` \\(8\\) must be at least `stream_chunk_tokens` \\(256\\)"),
    ],
)
def test_settings_that_cannot(model_dir, tmp_path, fields, words):
    """They are rejected before any request to a server."""
    servers = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://127.0.0.1:9"}
    with pytest.raises(ConfigurationError, match=words):
        make_trainer(model_dir, make_args(tmp_path, stream_logprobs=True, **{**servers, **fields}))


def test_without_streams_nothing_is_done():
    streams, seen = Streams(), []
    assert not streams
    with streams.serving([{"prompt": "p"}].__getitem__) as metrics, streams.serving_rewards():
        streams.watch(PromptBatch.alone([[1]], 1), seen.append)(ledger := Ledger())
        streams.follow()
    assert seen == [ledger]
    assert metrics == {}
