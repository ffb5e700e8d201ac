"""Tests `length_history` from checkpoints and traces, and its errors."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from tests.builders import make_args, make_trainer
from trl_darts import VarianceTrackerCallback
from trl_darts.errors import ConfigurationError
from trl_darts.policy import LengthTracker
from trl_darts.scheduling import GroupSummary, UniformAdmission
from trl_darts.telemetry.length_history import length_source, load_history
from trl_darts.telemetry.run_log import append_entry
from trl_darts.telemetry.traces import write_trace


@pytest.fixture
def source(model_dir):
    return length_source(AutoConfig.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir))


def recorded(directory: Path, source: str, tracker: LengthTracker) -> LengthTracker:
    """Returns a run of three steps, each with a carried-over prompt, and its tracker."""
    rng = np.random.default_rng(0)
    append_entry(directory, {"run": {"model": "anything", "source": source}})
    admission = UniformAdmission(2, tracker)
    for step in range(3):
        groups = [
            GroupSummary(
                group_id=i,
                prompt_key=2**64 - 1 - (2 * step + i) % 7,
                lengths=rng.integers(1, 90, 4).tolist(),
                finish_reasons=["stop", "stop", "abort", "length"],
                selected=[0, 1],
                num_prompt_tokens=5 + i,
                times=[(0.0, 1.0)] * 4,
            )
            for i in range(4)
        ]
        write_trace(directory, step, 0, groups, carried_over=groups[3:])
        admission.observe(groups[:3])
    return tracker


def test_a_history_is_what_the_run_had_learned(model_dir, tmp_path, source):
    learned = recorded(tmp_path / "run", source, make_args(tmp_path).tracker(48, source))
    learned.save(tmp_path / "darts_lengths.npz")
    for path in ("run", ".", "darts_lengths.npz"):
        history = load_history(make_args(tmp_path, length_history=str(tmp_path / path)), str(model_dir))
        assert len(history) == 7
        for name, array in learned.state_dict().items():
            np.testing.assert_array_equal(history.state_dict()[name], array)


def test_a_history_is_used_from_the_first_step_and_saved_with_its_source(model_dir, tmp_path, source):
    fields = {"num_generations": 4, "min_num_generations": 4, "learning_rate": 0.0, "save_rollout_trace": True}
    first = make_trainer(model_dir, make_args(tmp_path / "a", max_steps=1, save_strategy="steps", **fields))
    first.train()
    assert first.length_tracker.source == source
    for history in ("a", "a/checkpoint-1"):
        args = make_args(tmp_path / "b", max_steps=1, length_history=str(tmp_path / history), **fields)
        trainer = make_trainer(model_dir, args)
        assert len(trainer.length_tracker) == 4
        trainer.train()
        assert trainer.state.log_history[0]["darts/budget/rho"] == pytest.approx(first.length_tracker.rho)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing", r"has neither darts_lengths.npz nor rollouts/rollout_\*.parquet. Use a checkpoint"),
        ("text", r"must name a file that `LengthTracker.save` wrote"),
        ("arrays", r"must have the keys and shapes of a `LengthTracker` with 0 distinct prompts"),
        ("tracker of another model", r"\(llama 2×8, tokenizer 1\) must be that of this run \(qwen2 .* tokenizer"),
        ("traces of another model", r"\(llama 2×8, tokenizer 1\) must be that of this run \(qwen2 .* tokenizer"),
    ],
)
def test_what_is_no_history_is_refused_before_the_model_is_loaded(model_dir, tmp_path, content, message):
    path, other = tmp_path / "history", LengthTracker(source="llama 2×8, tokenizer 1")
    path.mkdir()
    if content == "text":
        (path / "darts_lengths.npz").write_text("nonsense")
    elif content == "arrays":
        np.savez(path / "darts_lengths.npz", weights=np.zeros(3))
    elif content == "tracker of another model":
        other.save(path / "darts_lengths.npz")
    elif content == "traces of another model":
        recorded(path, other.source, other)
    empty = shutil.copytree(model_dir, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ConfigurationError, match=message) as caught:
        make_trainer(empty, make_args(tmp_path, length_history=str(path)))
    assert str(caught.value).startswith(f"`length_history` ({str(path)!r}) can't be used: ")
    assert "\n" not in str(caught.value)


def test_another_tokenizer_is_another_source(model_dir, source):
    config, tokenizer = AutoConfig.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    assert length_source(config, SimpleNamespace(tokenizer=tokenizer)) == source  # a processor
    other = SimpleNamespace(encode=lambda text, **options: [1, *tokenizer.encode(text, **options)])
    assert length_source(config, other).split(",")[0] == source.split(",")[0]
    assert length_source(config, other) != source


def test_a_history_that_nobody_would_read_is_refused(model_dir, tmp_path):
    with pytest.raises(ConfigurationError, match=r"`length_history` \('x'\) has no effect with `schedule` \('grpo'\)"):
        make_args(tmp_path, schedule="grpo", length_history="x")
    tail = {"vllm_server_base_url": "http://127.0.0.1:1", "vllm_tail_server_url": "http://127.0.0.1:2"}
    servers = {"use_vllm": True, "vllm_mode": "server", **tail}
    make_args(tmp_path, schedule="grpo", length_history="x", latency_curve="y", **servers)  # predicts a switch
    with pytest.raises(ConfigurationError, match="do not depend on lengths"):
        make_args(tmp_path, schedule="grpo", length_history="x", tail_switch_at=2, **servers)
    args, callbacks = make_args(tmp_path, length_history=str(tmp_path)), [VarianceTrackerCallback(LengthTracker())]
    with pytest.raises(ConfigurationError, match=r"`length_history` \(.*\) has no effect with a `VarianceTracker"):
        make_trainer(model_dir, args, callbacks=callbacks)
