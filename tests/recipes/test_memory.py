"""The memory estimate on numbers computed by hand, and sizes of real models."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM
from transformers.training_args import OptimizerNames
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
    values = {**defaults, **fields}
    return SimpleNamespace(**values, colocates=values["use_vllm"] and values["vllm_mode"] == "colocate")


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
        ({"optim": OptimizerNames.ADAMW_BNB}, ModelConfig(), 4 + 4 + 2),
        ({"optim": OptimizerNames.PAGED_ADAMW_8BIT}, ModelConfig(), 4 + 4 + 2),
        ({"optim": "adamw_torch_4bit"}, ModelConfig(), 4 + 4 + 1),
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


@pytest.mark.parametrize("half", [{"bf16": True}, {"bf16": False, "fp16": True}])
def test_fsdp_trains_weights_in_full_precision(half):
    """Accelerate makes float32 of what is trained in mixed precision, and leaves the rest as it is."""
    fsdp = read_sharding(ACCELERATE / "fsdp2.yaml")
    parts = states(fsdp, model=ModelConfig(dtype="bfloat16"), beta=0.04, **half)
    assert parts["weights"] == parts["gradients"] == 4 * P / N
    assert parts["optimizer states"] == 8 * P / N
    assert parts["reference model"] == 2 * P / N
    lora = states(fsdp, model=ModelConfig(dtype="bfloat16", use_peft=True), **half)
    assert lora["weights"] == (2 * P + 4 * 10_000_000) / N
    without = states(fsdp, model=ModelConfig(dtype="bfloat16"), bf16=False)
    assert without["weights"] == 2 * P / N


def offloaded(tmp_path, name, *fields):
    path, text = tmp_path / "offload.yaml", (ACCELERATE / name).read_text()
    for field in fields:
        assert field in text
        text = text.replace(f"{field}: none", f"{field}: cpu").replace(f"{field}: false", f"{field}: true")
    path.write_text(text)
    return states(read_sharding(path), beta=0.04)


@pytest.mark.parametrize("name", ["deepspeed_zero2.yaml", "deepspeed_zero3.yaml"])
def test_gradients_are_where_the_optimizer_is(tmp_path, name):
    parts = offloaded(tmp_path, name, "offload_optimizer_device")
    assert parts["optimizer states"] == parts["gradients"] == 0
    share = 2 * P / N if "zero3" in name else 2 * P
    assert parts["weights"] == parts["reference model"] == share


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepspeed_zero3.yaml", ["offload_param_device", "offload_optimizer_device"]),
        ("fsdp2.yaml", ["fsdp_offload_params"]),
    ],
)
def test_the_reference_model_is_where_weights_are(tmp_path, name, fields):
    assert set(offloaded(tmp_path, name, *fields).values()) == {0}


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
    assert "`optim` (sgd) as it is: its states are counted as Adam's" in notes(optim=OptimizerNames.SGD)
    assert "`optim` (lion_8bit)" in notes(optim=OptimizerNames.LION_8BIT)
    for name in (OptimizerNames.PAGED_ADAMW_8BIT, OptimizerNames.ADAMW_BNB, "adamw_torch_fused"):
        assert "optim" not in notes(optim=name)


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
        ("[1, 2]", "must be a YAML mapping of names to values, not a list"),
        ("{distributed_type: 'NO', num_processes: two}", r"`num_processes` \('two'\) .* must be a whole number of at"),
        ("{distributed_type: 'NO', num_processes: -1}", r"`num_processes` \(-1\) of .* must be a whole number of at"),
        ("{distributed_type: 'NO', num_processes: true}", r"`num_processes` \(True\) of .* must be a whole number"),
        ("{distributed_type: DEEPSPEED}", r"`zero_stage` \(None\) .* must be 0, 1, 2 or 3"),
        ("{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: true}}", r"`zero_stage` \(True\) .* must be 0"),
        (
            "{distributed_type: DEEPSPEED, deepspeed_config: ds.json}",
            r"`deepspeed_config` \('ds.json'\) of .* must be a mapping. What stands in a file of its own is not read",
        ),
        ("{distributed_type: FSDP, fsdp_config: fsdp.json}", r"`fsdp_config` \('fsdp.json'\) of .* must be a mapping"),
        (
            "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 2, offload_param_device: cpu}}",
            r"`offload_param_device` \('cpu'\) .* needs `zero_stage` 3 or more, and that is 2",
        ),
        (
            "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 0, offload_optimizer_device: nvme}}",
            r"`offload_optimizer_device` \('nvme'\) .* needs `zero_stage` 1 or more, and that is 0",
        ),
        (
            "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3, offload_param_device: disk}}",
            r"`offload_param_device` \('disk'\) .* must be one of 'none', 'cpu', 'nvme'",
        ),
        (
            "{distributed_type: FSDP, fsdp_config: {fsdp_version: 2, fsdp_offload_params: maybe}}",
            r"`fsdp_offload_params` \('maybe'\) .* must be `true` or `false`",
        ),
        ("{distributed_type: FSDP, fsdp_config: {fsdp_version: 1}}", r"`fsdp_version` \(1\) .* must be 2"),
        ("a: [", "must be plain YAML"),
        ("{a: &b [1], c: *b}", "must have no aliases"),
    ],
)
def test_accelerate_configs_that_are_not_estimated(tmp_path, content, message):
    path = tmp_path / "accelerate.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        read_sharding(path)


def test_missing_accelerate_config():
    with pytest.raises(ConfigurationError, match="must be a file that can be read: No such file"):
        read_sharding("nowhere.yaml")
