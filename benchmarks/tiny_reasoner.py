"""
The evidence for shaped rollouts, on two cores: what each way to over-provision makes of the same trainings.

    python benchmarks/tiny_reasoner.py --results outputs/evidence

The tiny reasoner of examples/tiny_reasoner is trained from its checkpoint on a real vLLM server on CPU, with equal
numbers of prompts and the same prompts for all rows of a seed: TRL's GRPO, DARTS as in its paper, with other ratios of
long and short rows, with bounded waits, and the alternatives that the paper argues against. Each seed goes through all
rows before the next one begins. Then the same on one family of prompts at a time: where long answers are mostly wrong
("sum"), and where short ones are ("chain").

At the end, and with `--only-page`, the tables and pictures of docs/evidence.md are written anew from what is in
`--results`; the words around them are not. A benchmark that was interrupted goes on where it stopped.

`--quick` shows within minutes that all of it works, in a folder of its own. Its page and pictures are left there, as
are those of every set of trainings that is not the full one.
"""

import argparse
import json
import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers.utils.logging import disable_progress_bar
from trl.rewards import get_soft_overlong_punishment

from benchmarks.evidence_page import Evidence, load_groups, write_page
from benchmarks.reward_training import (
    ROOT,
    Training,
    check_results,
    console,
    evaluate_checkpoint,
    one_line_errors,
    run_missing,
    write,
)
from benchmarks.schedule_rows import Row


PAGE = ROOT / "docs" / "evidence.md"
FAMILIES = ("sum", "chain")
PENALIZED = "grpo, length penalty"
# An aggressive one: half of all answers are longer than the 16 tokens at which it begins; it is 1 from 48 on.
PENALTY = get_soft_overlong_punishment(max_completion_len=48, soft_punish_cache=32)


def _darts(name: str, long_end_patience: float | str | None = None, **settings: object) -> Row:
    return Row(name, {"schedule": "darts", "long_end_patience": long_end_patience, **settings})


GRPO = Row("grpo", {"schedule": "grpo"})
PAPER, PATIENCE, AUTO = (
    _darts("darts (paper)"),
    _darts("darts, patience 2", 2.0),
    _darts("darts, patience auto", "auto"),
)
ROWS = [
    GRPO,
    Row(PENALIZED, GRPO.settings),
    PAPER,  # L : K is 1 : 7
    _darts("darts, L : K 2 : 6", num_longest=2),
    _darts("darts, L : K 4 : 4", num_longest=4),
    _darts("shortest only", num_longest=0),
    # 1.5 · M candidates of every prompt, and all of them are waited for.
    _darts("uniform redundancy", max_num_generations=12, tail_pruning=False),
    PATIENCE,
    AUTO,
    _darts("uniform selection, auto", "auto", selection="uniform"),
]
FAMILY_ROWS = [GRPO, PAPER, AUTO]
QUICK_ROWS = [GRPO, Row(PENALIZED, GRPO.settings), AUTO]


def trainings(options: argparse.Namespace) -> list[Training]:
    """All of them, seed by seed."""
    rows, family_rows = (QUICK_ROWS, [GRPO, AUTO]) if options.quick else (ROWS, FAMILY_ROWS)
    kinds = [(row, None) for row in rows] if "both" in options.prompts else []
    kinds += [(row, family) for family in FAMILIES if family in options.prompts for row in family_rows]
    return [
        Training(row, seed, options.steps, options.learning_rate, family, PENALTY if row.name == PENALIZED else None)
        for seed in range(options.seeds)
        for row, family in kinds
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, or another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and short trainings; docs/evidence.md is left alone")
    parser.add_argument("--steps", type=int, help="optimizer steps of each training (default: 100; 10 if quick)")
    parser.add_argument("--seeds", type=int, help="default: 3; 1 if quick")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument(
        "--prompts", nargs="+", choices=("both", *FAMILIES), default=("both", *FAMILIES), help="what to train on"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="one JSON file per training (default: outputs/evidence; outputs/evidence-quick if quick)",
    )
    parser.add_argument("--only-page", action="store_true", help="train nothing: page and pictures of what is there")
    options = parser.parse_args(arguments)
    options.steps = options.steps or (10 if options.quick else 100)
    options.seeds = options.seeds or (1 if options.quick else 3)
    for name in ("steps", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} ({getattr(options, name)}) must be at least 1.")
    # Not the same one: a short training would be taken for one that is finished.
    options.results = options.results or Path("outputs/evidence-quick" if options.quick else "outputs/evidence")
    return options


def page_of(options: argparse.Namespace) -> Path:
    """Where the page goes: to docs/ if all of the published trainings are there, or beside the results."""
    full = parse([])
    complete = all((options.results / training.file_name).exists() for training in trainings(full))
    same = (options.steps, options.learning_rate) == (full.steps, full.learning_rate)
    return PAGE if complete and same and not options.quick else options.results / PAGE.name


def main() -> None:
    options = parse()
    with one_line_errors():
        check_results(trainings(options), options.results)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if not options.only_page:
        run_missing(trainings(options), options.results)
    with one_line_errors():
        runs = load_groups(options.results, [row.name for row in ROWS], FAMILIES)
    before = options.results / "before.checkpoint"  # not one of the trainings
    if not before.exists():
        write(before, evaluate_checkpoint())
    evidence = Evidence(*runs, json.loads(before.read_text())["held_out"])
    page = page_of(options)
    write_page(evidence, template=PAGE, page=page)
    console.print(f"page: {page}")


if __name__ == "__main__":
    main()
