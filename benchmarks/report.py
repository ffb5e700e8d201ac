"""
Writes the tables of benchmarks/REPORT.md from the lines in benchmarks/results.

    python -m benchmarks.report [--check]

With `--check`, nothing is written, and the exit status is 1 if a table differs from what the lines give.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

from benchmarks import (
    continuous,
    learning,
    parts,
    reasoner,
    simulator,
    smollm2,
    smollm2_rollouts,
    training,
    training_parts,
)
from benchmarks.lines import RESULTS, ROOT, read


PAGE = ROOT / "benchmarks" / "REPORT.md"
PARTS: tuple[Callable[[Path], str], ...] = (
    training_parts.peers,
    training_parts.peers_smollm2,
    training_parts.waves,
    training_parts.agents,
    training_parts.agent_example,
    training_parts.homes,
    training_parts.epochs,
    parts.gpu,
    parts.padding,
    parts.step,
    parts.schedules,
    parts.decisions,
    parts.server_overhead,
    parts.in_flight,
    parts.adapters,
    parts.sharing,
    parts.drafts,
    parts.faults,
    parts.checkpoints,
    parts.listed,
    parts.load,
)


def put(text: str, name: str, content: str) -> str:
    """Replaces the text between the marks of this name."""
    begin, end = f"<!-- {name}: written by benchmarks/report.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"The page must have one pair of the marks {begin!r} and {end!r}.")
    inner = f"{content}\n\n" if content else ""
    return pattern.sub(lambda _: f"{begin}\n\n{inner}{end}", text)


def tables(results: Path = RESULTS) -> Iterator[tuple[str, str]]:
    """Yields the name and the content of every pair of marks."""
    yield from smollm2_tables(results)
    trainings = training.runs_of(results)
    for name in ("SPEED", "SPENT", "LEARNED", "ROWS"):
        yield f"training, {name.lower()}", training.table(trainings, getattr(training, name))
    yield "training, rest", training.rest_table(trainings["tail"])
    yield from learning_tables(results)
    runs = read(results / "continuous.jsonl")
    yield "continuous, gained", continuous.table(runs, continuous.GAINED)
    yield "continuous, stale", continuous.table(runs, continuous.STALE)
    lines = read(results / "simulator.jsonl")
    yield "simulator, paper", simulator.paper_tables(lines)
    yield "simulator, spare", simulator.spare_table(lines)
    yield "simulator, slots", simulator.slots_table(lines)
    yield "simulator, engines", simulator.engines_table(lines)
    yield "parts", "\n\n".join(filter(None, (part(results) for part in PARTS)))


def smollm2_tables(results: Path) -> Iterator[tuple[str, str]]:
    """Yields the tables of the language model."""
    lengths = smollm2_rollouts.read_lengths(results / smollm2_rollouts.MACHINES["cpu"].lengths)
    yield "smollm2, lengths", smollm2_rollouts.lengths_table(lengths)
    rollouts = read(results / smollm2_rollouts.ROLLOUTS)
    for pace in ("bare", "paced"):
        yield f"smollm2, {pace}", smollm2_rollouts.rollouts_table(rollouts, pace)
    yield "smollm2, shares", smollm2_rollouts.shares_table(rollouts, "paced")
    yield "smollm2, agreement", smollm2_rollouts.agreement_table(rollouts)
    yield "smollm2, exact", smollm2.exact_tables(results)
    for machine, name in product(("cpu", "gpu"), ("speed", "learned", "parts", "progress", "rounds")):
        yield f"smollm2 on a {machine}, {name}", getattr(smollm2, f"{name}_table")(results, machine)


def learning_tables(results: Path) -> Iterator[tuple[str, str]]:
    """Yields the tables of learning where length matters."""
    worlds = {name: read(results / f"learning.{name}.jsonl") for name in learning.WORLDS}
    yield "learning, reward", learning.table(worlds)
    yield "learning, kept", learning.kept_table(worlds)
    yield "learning, guard", learning.guard_table(worlds)
    yield "learning, audits", learning.audit_table(worlds)
    longer = {f"{name}, {steps} steps": read(results / f"learning.{name}.{steps}.jsonl") for name, steps in LONGER}
    yield "learning, longer", learning.table(longer)
    yield "learning, longer audits", learning.audit_table(longer)
    yield "learning, server", learning.table({"needs_120": read(results / "learning.needs_120.server.jsonl")})
    frozen = {"spread, 200 steps": read(results / "learning.spread.200.lr0.jsonl")}
    yield "learning, frozen", learning.table(frozen, learning.SPEED, "unguarded")
    yield "learning, accuracy", reasoner.accuracy_table(read(results / "reasoner.accuracy.jsonl"))


LONGER = (("spread", 400), ("needs_120_small", 200), ("needs_120_small", 400))


def written(text: str, results: Path = RESULTS) -> str:
    """Returns the page with its tables as the results give them."""
    for name, content in tables(results):
        text = put(text, name, content)
    return text


def main() -> None:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table differs")
    options = parser.parse_args()
    before = PAGE.read_text()
    after = written(before)
    if not options.check:
        PAGE.write_text(after)
    elif before != after:
        name = str(PAGE.name)
        sys.stdout.writelines(
            difflib.unified_diff(*(own.splitlines(True) for own in (before, after)), name, "results")
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
