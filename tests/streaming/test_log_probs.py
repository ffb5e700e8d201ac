"""A training whose log-probs are streamed from a real server has those that TRL computes itself."""

import pytest
import torch
from peft import LoraConfig

from tests.builders import compare_with_trl, letters_dataset, make_trainer, record_batches
from tests.test_trainer_server import rollout_logs, server_args
from trl_darts.errors import ConfigurationError


pytestmark = pytest.mark.vllm
STREAM = {"stream_logprobs": True, "stream_chunk_tokens": 16, "stream_batch_tokens": 256}


def train(server, model_dir, out, peft_config=None, **fields):
    args = server_args(out, server, **{"learning_rate": 3e-3, "max_steps": 3, **STREAM, **fields})
    trainer = make_trainer(model_dir, args, train_dataset=letters_dataset(10), peft_config=peft_config)
    differences = compare_with_trl(trainer)
    batches = record_batches(trainer)
    trainer.train()
    assert len(batches) == args.max_steps
    return trainer, differences, rollout_logs(trainer)


def test_policy(server, model_dir, tmp_path):
    # Seconds of decoding, so that some of it is seen before the end also on a busy machine.
    fields = {"generation_kwargs": {"ignore_eos": True}, "max_completion_length": 400}
    trainer, differences, logs = train(server, model_dir, tmp_path, **fields)
    assert [name for name, _, _ in differences] == ["policy"] * 3
    assert max(difference for _, difference, _ in differences) < 1e-5
    for entry in logs:
        assert entry["darts/stream/missed_rows"] == 0
        assert entry["darts/stream/chunks"] > 16  # of 16 rows: some came in several
        assert entry["darts/stream/hidden_seconds"] > 0
        assert entry["darts/stream/cache_bytes"] > 0
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
    assert not trainer._streams.log_probs.worker.complete  # nothing outlives its weights


def test_reference_model(server, model_dir, tmp_path):
    _, differences, logs = train(server, model_dir, tmp_path, beta=0.1)
    assert [name for name, _, _ in differences] == ["policy", "reference"] * 3
    assert max(difference for _, difference, _ in differences) < 1e-5
    assert logs[-1]["kl"] > 1e-4  # the two models are not the same any more


def test_adapter_and_its_base(server, model_dir, tmp_path):
    lora = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    _, differences, logs = train(server, model_dir, tmp_path, peft_config=lora, beta=0.1, learning_rate=3e-2)
    assert [name for name, _, _ in differences] == ["policy", "reference"] * 3
    assert max(difference for _, difference, _ in differences) < 1e-5
    assert logs[-1]["kl"] > 1e-4


def test_without_room_trl_computes(server, model_dir, tmp_path):
    """A cache that holds a few tokens: the long candidates are set aside, and their rows are TRL's own."""
    _, differences, logs = train(server, model_dir, tmp_path, stream_cache_gib=5e-6)
    assert max(difference for _, difference, _ in differences) < 1e-5
    assert all(entry["darts/stream/missed_rows"] > 0 for entry in logs)
    assert all(entry["darts/stream/cache_bytes"] <= 5e-6 * 2**30 for entry in logs)


@pytest.mark.parametrize(
    "schedule",
    ["partial_rollout", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tail_batching", "sorted"))],
)
def test_other_schedules(server, model_dir, tmp_path, schedule):
    """Rows that come from a buffer were sampled under other weights: TRL computes theirs, and ours are right."""
    _, differences, _ = train(server, model_dir, tmp_path, schedule=schedule)
    assert len(differences) == 3
    assert differences[0][2] == 0  # nothing was older in the first batch
    assert max(difference for _, difference, _ in differences) < 1e-5


def test_truncated_rows_and_checkpointing(server, model_dir, tmp_path):
    fields = {"mask_truncated_completions": True, "max_completion_length": 24, "gradient_checkpointing": True}
    _, differences, logs = train(server, model_dir, tmp_path, **fields)
    assert max(difference for _, difference, _ in differences) < 1e-5
    assert all(entry["darts/stream/missed_rows"] == 0 for entry in logs)


def test_same_training_with_and_without(server, model_dir, tmp_path):
    """The weights after three steps on the same rows."""
    weights = []
    for stream in ({}, STREAM):
        fields = {"generation_kwargs": {"seed": 3}, "schedule": "grpo", "learning_rate": 3e-3, "max_steps": 3}
        args = server_args(tmp_path, server, **fields, **stream)
        trainer = make_trainer(model_dir, args, train_dataset=letters_dataset(10))
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    torch.testing.assert_close(*weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_vllm": False}, "`stream_logprobs`.*only has an effect on vLLM servers"),
        ({"vllm_importance_sampling_correction": False}, "`stream_logprobs`.*has nothing to compute"),
        ({"stream_chunk_tokens": 0}, "`stream_chunk_tokens` \\(0\\) must be at least 1"),
        ({"stream_cache_gib": 0.0}, "`stream_cache_gib` \\(0.0\\) must be positive"),
        ({"stream_batch_tokens": 8}, "`stream_batch_tokens` \\(8\\) must be at least `stream_chunk_tokens` \\(16\\)"),
        ({"schedule": "sorted", "stream_rewards": True}, "`stream_rewards`.*does not run with `schedule` \\('sorted'"),
    ],
)
def test_what_cannot_work(server, model_dir, tmp_path, fields, words):
    with pytest.raises(ConfigurationError, match=words):
        make_trainer(model_dir, server_args(tmp_path, server, **{**STREAM, **fields}))
