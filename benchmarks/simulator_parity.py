"""
The simulator against a real server: rollouts that were recorded are replayed with a curve that was measured on the
same server.

    python benchmarks/simulator_parity.py [--steps 12]

Profile and training take turns, so that both see the same weather on a shared machine. The training is the trainer's
own with a learning rate of 0; nothing is fitted to its times but the cost of a request, which a rollout of one token
each gives.
"""

import argparse
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.servers import benchmark_server
from tests.builders import length_reward, letters_dataset, make_args
from trl_darts import DARTSGRPOTrainer
from trl_darts.analysis.simulation import ClusterSpec, recorded_rollouts
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.policy import LatencyCurve
from trl_darts.profiling import ProfileOptions, profile_servers
from trl_darts.scheduling import GroupPlan, Scheduler, make_policies


PROMPTS, M = 16, 8
LIMIT = 768
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_NUM_SEQS = BATCHES[-1]  # DARTS submits more: some wait in the server's queue
ROWS: dict[str, dict[str, Any]] = {
    "grpo": {"schedule": "grpo"},
    "darts (paper)": {"schedule": "darts", "long_end_patience": None},
    "darts": {"schedule": "darts"},
}


def measured_curve(url: str) -> LatencyCurve:
    """Of batches up to the largest that the rollouts have."""
    options = ProfileOptions((url,), batch_sizes=BATCHES, context_lengths=(128,), repeats=2)
    return profile_servers(options).profile.curve


def seconds_per_request(url: str, model: str) -> float:
    """Rollouts of one token each: all that they cost is requests."""
    engine = VLLMServerEngine([url])
    body = {"model": model, "max_tokens": 1, "logprobs": 0, "return_token_ids": True}
    prompts = [[ServerPrompt([60 + index % 40, 61])] for index in range(PROMPTS)]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        scheduler = Scheduler(make_policies("grpo", M, M, 0), M)
        engine.run(scheduler, [GroupPlan(index, M) for index in range(PROMPTS)], prompts, body)
        times.append((time.perf_counter() - start) / (PROMPTS * M))
    engine.close()
    return min(times)


def train(url: str, model_dir: Path, out: Path, fields: dict[str, Any], steps: int) -> DARTSGRPOTrainer:
    """The trainer's own rollouts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = make_args(
        out,
        **fields,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_group_port=port,
        num_generations=M,
        max_num_generations=None,
        per_device_train_batch_size=PROMPTS * M,
        max_completion_length=LIMIT,
        max_steps=steps,
        learning_rate=0.0,
        save_rollout_trace=True,
    )
    trainer = DARTSGRPOTrainer(
        str(model_dir), reward_funcs=length_reward, args=args, train_dataset=letters_dataset(PROMPTS)
    )
    trainer.train()
    return trainer


def main() -> None:
    """Prints predicted over real seconds, and how many decisions are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    table = Table(title=f"{args.steps} rollouts of {PROMPTS} prompts × {M}, replayed")
    for name in ("schedule", "real (s)", "predicted (s)", "predicted / real", "worst rollout", "same rows"):
        table.add_column(name, justify="right")
    with (
        benchmark_server(max_model_len=1024, max_num_seqs=MAX_NUM_SEQS) as (url, model_dir),
        tempfile.TemporaryDirectory() as out,
    ):
        curves = [measured_curve(url)]
        for number, (name, fields) in enumerate(ROWS.items()):
            run_dir = Path(out) / str(number)
            trainer = train(url, model_dir, run_dir, fields, args.steps)
            curves.append(measured_curve(url))
            request = seconds_per_request(url, trainer.vllm_generation.facts.model)
            values = [sum(curve(size) for curve in curves[-2:]) / 2 for size in BATCHES]
            curve = LatencyCurve.fit(BATCHES, values)
            spec = ClusterSpec(curve, max_num_seqs=MAX_NUM_SEQS, seconds_per_request=request)
            settings = trainer.args.schedule_settings
            ratios, real, predicted, same, groups = [], 0.0, 0.0, 0, 0
            for rollout in list(recorded_rollouts(run_dir))[1:]:  # the first one warms up
                result = rollout.replay(settings, spec, LIMIT)
                seconds = result.timeline.times[-1] - result.timeline.times[0]
                ratios.append(seconds / rollout.seconds)
                real, predicted = real + rollout.seconds, predicted + seconds
                same += sum(g.selected == kept for g, kept in zip(result.groups, rollout.selected, strict=True))
                groups += len(rollout.plans)
            worst = max(ratios, key=lambda ratio: abs(ratio - 1))
            row = [f"{real:.2f}", f"{predicted:.2f}", f"{statistics.median(ratios):.2f}", f"{worst:.2f}"]
            table.add_row(name, *row, f"{same} of {groups}")
    Console().print(table)


if __name__ == "__main__":
    main()
