"""
Measures what `rollout_ahead` saves: seconds per step with and without it, if training takes 0.5, 1 and 2 times as long
as a rollout. The expected time is that of the longer of the two, plus the weight sync.

    python benchmarks/ahead.py [--quick]

The runs are those of GRPO in `training.py`, on its paced server, one after the other from the same checkpoint.
`training.py` and `reasoner.py` measure the effect on rewards. Appends to benchmarks/results/ahead.jsonl.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lines import record
from benchmarks.long_tail import LIMIT, make_checkpoint
from benchmarks.pacing import CURVES, NUM_ENGINES, SCALE, paced_server, scaled
from benchmarks.training import ARMS, BASELINE, EPOCH, WORLDS, Training, train


AHEAD = "grpo, ahead"
SHARES = (0.5, 1.0, 2.0)  # training time over rollout time
STEPS = 8


def seconds(quick: bool) -> None:
    """Trains with each share, without and with `rollout_ahead`, and prints a table."""
    steps, shares = (2, SHARES[:1]) if quick else (STEPS, SHARES)
    ARMS[AHEAD] = {**ARMS[BASELINE], "rollout_ahead": 1}
    print("| train ÷ rollout | rollout (s) | step (s) | step, ahead (s) | expected (s) | ahead ÷ expected |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as directory:
        start = make_checkpoint(Path(directory) / "start", equal=False)
        curve, slots = scaled(CURVES["llama-8b"], SCALE, NUM_ENGINES), WORLDS["tail"].slots
        with paced_server(start, curve, max_num_seqs=slots, max_model_len=2 * LIMIT) as (server, pace):
            shared = train(Training("tail", 0, steps), server.base_url, pace, start, Path(directory) / "shared")
            checkpoint = Path(directory) / "shared" / f"checkpoint-{EPOCH}"
            for share in shares:
                per_token = share * sum(shared["rollout"][1:]) / sum(shared["trained"][1:])
                runs = {}
                for arm in (BASELINE, AHEAD):
                    training, output = Training("tail", 0, steps, arm), Path(directory) / f"{arm} {share}"
                    runs[arm] = train(training, server.base_url, pace, checkpoint, output, per_token, target=0.0)
                record(
                    "ahead", {"share": share, "per_token": per_token, "apart": runs[BASELINE], "ahead": runs[AHEAD]}
                )
                print(line(share, per_token, runs[BASELINE], runs[AHEAD]), flush=True)
            print(f"\n{steps - 1} steps each, without the first, which can't be sampled ahead. {pace()}")


def line(share: float, per_token: float, apart: dict[str, list[float]], ahead: dict[str, list[float]]) -> str:
    """Formats a row of the table with means."""
    rollout, both, step = (np.mean(own[1:]) for own in (apart["rollout"], apart["real"], ahead["real"]))
    expected = max(rollout, per_token * np.mean(ahead["trained"][1:])) + np.nanmean(apart["sync"])
    return f"| {share:g} | {rollout:.2f} | {both:.2f} | {step:.2f} | {expected:.2f} | {step / expected:.2f} |"


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smoke test: two steps of one kind")
    seconds(parser.parse_args().quick)


if __name__ == "__main__":
    main()
