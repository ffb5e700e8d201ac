"""The memory estimate on numbers computed by hand, and sizes of real models."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM
from trl import ModelConfig, get_peft_config

from trl_darts.errors import ConfigurationError
from trl_darts.recipes import ModelSize, Sharding, estimate_memory, read_model_size, read_sharding


ACCELERATE = Path(__file__).resolve().parents[2] / "configs" / "accelerate"
N, P = 8, 1e9
GIB = 2**30


def config(**fields):
    defaults = {
        "bf16": True,
        "fp16": False,
        "optim": "adamw_torch_fused",
        "beta": 0.0,
        "per_device_train_batch_size": 2,
        "max_completion_length": 900,
        "gradient_checkpointing": True,
        "use_vllm": True,
        "vllm_mode": "server",
    }
    return SimpleNamespace(**{**defaults, **fields})


def states(sharding, num_processes=N, model=None, **fields):
    size = ModelSize(P, num_adapter_parameters=10_000_000)
    return estimate_memory(size, config(**fields), model or ModelConfig(), sharding, num_processes).states


@pytest.mark.parametrize(
    ("name", "weights", "gradients", "optimizer"),
    [
        # ZeRO, Section 3.1 and Figure 1: 2 + 2 + 12 bytes, of which each stage shares out one part more.
        ("deepspeed_zero2.yaml", 2, 2 / N, 12 / N),
        ("deepspeed_zero3.yaml", 2 / N, 2 / N, 12 / N),
        # 4 + 4 + 8 bytes: weights in full precision, and autocast.
        ("ddp.yaml", 4, 4, 8),
        ("fsdp2.yaml", 4 / N, 4 / N, 8 / N),
        ("fsdp2_large.yaml", 4 / N, 4 / N, 8 / N),
    ],
)
def test_bytes_per_parameter(name, weights, gradients, optimizer):
    parts = states(read_sharding(ACCELERATE / name))
    assert parts["weights"] == P * weights
    assert parts["gradients"] == P * gradients
    assert parts["optimizer states"] == P * optimizer
    assert parts.get("buckets of DDP", 0) == (P * 4 if name == "ddp.yaml" else 0)


def test_one_process_takes_16_bytes_per_parameter():
    assert sum(states(Sharding(), num_processes=1).values()) == 16 * P


@pytest.mark.parametrize(
    ("fields", "model", "total"),
    [
        ({}, ModelConfig(dtype="bfloat16"), 2 + 2 + 4),
        ({"optim": "adamw_bnb_8bit"}, ModelConfig(), 4 + 4 + 2),
        ({"beta": 0.04}, ModelConfig(), 16 + 4),
        ({"bf16": False}, ModelConfig(), 16),
    ],
)
def test_precision_optimizer_and_reference(fields, model, total):
    assert sum(states(Sharding(), num_processes=1, model=model, **fields).values()) == total * P


@pytest.mark.parametrize(
    ("fields", "frozen"), [({"dtype": "bfloat16"}, 2), ({"load_in_4bit": True}, 0.5), ({"load_in_8bit": True}, 1)]
)
def test_lora_trains_the_adapter_alone(fields, frozen):
    model = ModelConfig(use_peft=True, **fields)
    parts = states(Sharding(), num_processes=1, model=model, beta=0.04)  # the reference is the model without adapter
    assert sum(parts.values()) == frozen * P + 16 * 10_000_000


def test_offloading(tmp_path):
    path = tmp_path / "offload.yaml"
    text = (ACCELERATE / "deepspeed_zero3.yaml").read_text()
    path.write_text(text.replace("offload_optimizer_device: none", "offload_optimizer_device: cpu"))
    parts = states(read_sharding(path))
    assert parts["optimizer states"] == 0
    assert parts["weights"] == 2 * P / N


def test_activations_and_head():
    size = ModelSize(P, hidden_size=1000, num_layers=10, vocab_size=50_000)
    estimate = estimate_memory(size, config(), ModelConfig(), Sharding(), 1, max_prompt_length=100)
    tokens = 2 * (100 + 900)
    assert estimate.rough["activations"] == tokens * 1000 * (2 * 10 + 34)
    tile = 2 * tokens * 32_768  # bfloat16 logits of one tile
    assert estimate.rough["LM head"] == 4 * 50_000 * 1000 + 4 * tokens * 1000 + tile
    assert estimate.total_bytes == 16 * P + sum(estimate.rough.values())
    assert estimate.notes == ()
    whole = estimate_memory(size, config(gradient_checkpointing=False), ModelConfig(), Sharding(), 1, 100)
    assert whole.rough["activations"] == tokens * 1000 * 34 * 10


def test_what_is_not_counted_is_named():
    def notes(model=None, **fields):
        return " ".join(estimate_memory(ModelSize(P), config(**fields), model or ModelConfig(), Sharding(), 1).notes)

    assert "activations and the LM head" in notes()
    assert "the adapter" in notes(ModelConfig(use_peft=True))
    assert "generation" in notes(use_vllm=False)
    assert "40% of the GPU" in notes(vllm_mode="colocate", vllm_gpu_memory_utilization=0.4)
    assert "counted as Adam's" in notes(optim="sgd")


def test_size_of_a_model_is_that_of_its_weights(tiny_model_dir, tied_model_dir):
    for path in (tiny_model_dir, tied_model_dir):
        real = AutoModelForCausalLM.from_pretrained(path)
        size = read_model_size(ModelConfig(model_name_or_path=str(path)))
        assert size.num_parameters == real.num_parameters()
        assert (size.hidden_size, size.num_layers) == (real.config.hidden_size, real.config.num_hidden_layers)
        assert size.vocab_size == real.get_output_embeddings().weight.shape[0]
        assert size.num_adapter_parameters is None


def test_size_of_an_adapter_is_that_of_its_weights(tiny_model_dir):
    from peft import get_peft_model

    model = ModelConfig(model_name_or_path=str(tiny_model_dir), use_peft=True, lora_r=4)
    real = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), get_peft_config(model))
    trained = sum(parameter.numel() for parameter in real.parameters() if parameter.requires_grad)
    assert read_model_size(model).num_adapter_parameters == trained > 0


def test_a_model_that_is_not_there():
    with pytest.raises(ConfigurationError, match=r"'/no/model'\) could not be read: .* Give `--num-parameters`"):
        read_model_size(ModelConfig(model_name_or_path="/no/model"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("distributed_type: MEGATRON_LM", r"`distributed_type` \('MEGATRON_LM'\) .* must be one of 'NO'"),
        ("[1, 2]", r"`distributed_type` \(None\)"),
        ("{distributed_type: DEEPSPEED}", r"`zero_stage` \(None\) .* must be 0, 1, 2 or 3"),
        ("{distributed_type: FSDP, fsdp_config: {fsdp_version: 1}}", r"`fsdp_version` \(1\) .* must be 2"),
        ("a: [", "must be a YAML file that can be read"),
    ],
)
def test_accelerate_configs_that_are_not_estimated(tmp_path, content, message):
    path = tmp_path / "accelerate.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        read_sharding(path)


def test_missing_accelerate_config():
    with pytest.raises(ConfigurationError, match="must be a YAML file that can be read: No such file"):
        read_sharding("nowhere.yaml")
