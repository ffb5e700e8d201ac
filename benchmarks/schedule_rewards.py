"""
What each schedule makes of the same training: reward, held-out accuracy, time and lengths, over several seeds.

    python benchmarks/schedule_rewards.py --results outputs/rewards

The tiny reasoner is trained from its checkpoint under each schedule, on a real vLLM server on CPU. All rows of one
seed see the same prompts, and each seed goes through all rows before the next one begins, so that a machine that
others use disturbs all of them alike. Each training leaves a JSON file in `--results`, and a benchmark that was
interrupted goes on where it stopped. At the end, and with `--only-table`, a table is printed and a picture drawn from
what is there.

Columns are means over seeds with their standard errors, or medians over seeds:

- reward at the end: mean of the last 20 steps. Held-out accuracy: on prompts that were never trained on, after the
  last step, with `generate`.
- rollouts: seconds from the first submission to the last end, over all steps.
- tokens decoded, and waited for: what does not depend on the machine. A rollout waits for its longest candidate, from
  where that was started in this rollout; the column is the sum over all steps. Up to 16 tokens more are decoded in
  truth before a candidate is called off.
- p99 length: of all candidates, over the last 20 steps. Where candidates are called off, it understates the tail.
- off-policy: tokens trained on that an older policy sampled.
- until grpo's reward: seconds of rollouts until the mean over 20 steps is first what grpo of the same seed has at its
  end, median over the seeds that get there.

All rows have the same latency curve, measured once, so that budgets don't depend on how busy the machine is. As in
`schedules.py`, the sorted rows run on a server that decodes no more than N × M sequences at once: they are made for a
queue.
"""

import argparse
import logging
import signal
import sys
import warnings
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers.utils.logging import disable_progress_bar

from benchmarks.reward_summary import draw, load_runs, table
from benchmarks.reward_training import ROOT, Training, check_results, console, one_line_errors, run_missing
from benchmarks.schedule_rows import ROWS as ALL_ROWS


LEFT_OUT = ("partial rollout, dual-end, auto", "sorted, post hoc")
ROWS = [row for row in ALL_ROWS if row.name not in LEFT_OUT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--results", type=Path, default=Path("outputs/rewards"), help="one JSON file per training")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "schedule_rewards.png")
    parser.add_argument("--only-table", action="store_true", help="train nothing: table and picture of what is there")
    options = parser.parse_args()
    for name in ("steps", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} ({getattr(options, name)}) must be at least 1.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if not options.only_table:
        seeds = range(options.seeds)
        trainings = [Training(row, seed, options.steps, options.learning_rate) for seed in seeds for row in ROWS]
        with one_line_errors():
            check_results(trainings, options.results)
        run_missing(trainings, options.results)
    with one_line_errors():
        runs = load_runs(options.results, [row.name for row in ROWS])
    print(table(runs))
    draw(runs, options.picture)
    console.print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
