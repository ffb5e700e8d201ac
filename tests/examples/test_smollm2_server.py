"""
SmolLM2 on real servers: log-probs of the servers agree with the trainer's forward pass on every token.

Made by `make smollm2`. Servers compute in float32, as the trainer does: in bfloat16, both would round.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.servers import training_args
from benchmarks.vllm_server import start_vllm_server
from trl_darts import DARTSGRPOTrainer


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2"
sys.path.insert(0, str(EXAMPLE))

import tasks  # noqa: E402


pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1800)]
LIMIT, STEPS = 64, 3
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def servers():
    """The addresses of two servers."""
    pytest.importorskip("reasoning_gym")
    if not (EXAMPLE / "checkpoint" / "config.json").exists():
        pytest.skip("Needs the checkpoint: run `make smollm2`, as `make test_slow` does.")
    with ExitStack() as stack:
        options = {"max_model_len": 256, "max_num_seqs": 32, "timeout_s": 900.0}
        started = [stack.enter_context(start_vllm_server(EXAMPLE / "checkpoint", **options)) for _ in range(2)]
        yield [server.base_url for server in started]


def train(urls, output_dir, **fields):
    """Trains three steps of 2 prompts × 4 rows, and returns the log."""
    args = training_args(
        ",".join(urls),
        output_dir,
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_completion_length=LIMIT,
        temperature=tasks.TEMPERATURE,
        max_steps=STEPS,
        **fields,
    )
    trainer = DARTSGRPOTrainer(str(EXAMPLE / "checkpoint"), tasks.accuracy_reward, args, tasks.make_dataset(8))
    trainer.train()
    trainer.vllm_generation.engine.close()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logs) == STEPS
    assert all(0 < entry["sampling/sampling_logp_difference/max"] < TOLERANCE for entry in logs)
    return logs


def test_weights_arrive_and_streamed_logprobs_are_those_of_a_pass(servers, tmp_path):
    """At this learning rate, log-probs of older weights differ by more."""
    logs = train(servers[:1], tmp_path, learning_rate=1e-4, stream_logprobs=True, stream_cache_gib=0.02)
    assert all(entry["darts/stream/chunks"] > 0 for entry in logs)
    assert all(entry["darts/stream/cache_bytes"] <= 0.02 * 2**30 for entry in logs)


def test_resumed_candidates(servers, tmp_path):
    logs = train(servers[:1], tmp_path, learning_rate=0.0, schedule="partial_rollout")
    assert sum(entry["darts/staleness/off_policy_share"] for entry in logs) > 0


def test_candidates_that_move_to_a_tail_server(servers, tmp_path):
    fields = {"vllm_tail_server_url": servers[1], "tail_switch_at": 4}
    logs = train(servers[:1], tmp_path, learning_rate=1e-4, **fields)
    assert sum(entry["darts/tail/moved_candidates"] for entry in logs) > 0
