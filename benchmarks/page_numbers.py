"""
The numbers of README.md and docs/results.md, each computed from raw lines of `benchmarks/results`.

    python -m benchmarks.page_numbers [--write]

A number on a page has a mark right after it, an HTML comment with a name of `NUMBERS`:

    1.15 (1.10 to 1.19)<!--gpu.step-->

A page may leave out the interval, and a number without a raw file yet stays as it is. Ratios are geometric means, and
intervals are 95 % intervals of Student's t. The command prints a table of all marks with their raw files; `--write`
first puts the computed numbers into the pages. `tests/docs/test_numbers.py` fails if they differ, and if a page has a
number without a mark. Numbers that need none are those in code, links and images, and what matches `UNMARKED`.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.cells import mean, ratio, table
from benchmarks.lines import RESULTS, ROOT, latest
from benchmarks.speedups import (
    KNOWN,
    NEW,
    Run,
    accuracy_difference,
    agreement,
    continuous,
    each,
    learning,
    lines_of,
    mean_of,
    reward_at_end,
    reward_difference,
    rollouts,
    seconds_to_reward,
    simulated,
    smollm2,
    speed_of,
    step_with_equal_syncs,
    time_to_reward,
    to_reward,
    training,
    until_target,
)


PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
NUMBER = r"-?\d[\d.,]*(?:\s+±\s+[\d.]+|\s+\([\d.]+\s+to\s+[\d.]+\)|\s+of\s+\d+)?"
MARK = re.compile(rf"(?P<number>{NUMBER})<!--(?P<name>[\w.]+)-->")
HIDDEN = re.compile(  # not read as a claim: blocks of code, inline code, comments, images, targets of links
    r"^ *```.*?^ *```$|`[^`\n]*`|<!--.*?-->|!\[[^\]]*\]\([^)]*\)|(?<=\])\([^)]*\)", re.MULTILINE | re.DOTALL
)
UNMARKED = re.compile(
    r"\b[A-Za-z]+[\w.-]*\d[\w.-]*"  # names: SmolLM2-135M, H100, Apache-2.0
    r"|\b\d+ ?[BM]\b"  # sizes of models
    r"|(?:Python|TRL|vLLM|PyTorch|tested up to) \d[\d.]*\d"  # versions
    r"|\b\d+ (?:prompts )?× \d+\b|at least \d+ tokens"  # sizes of an experiment, and these:
    r"|(?:\d+ to )?\d[\d,]* (?:seeds|steps|prompts|servers|candidates|repeats|cores|GPUs|engines)\b"
    r"|95 % intervals?"
)


@dataclass(frozen=True)
class Number:
    """
    A number, its raw files (a pattern in `benchmarks/results`; of trainings, GRPO's of the same seeds count too), and
    how it is computed from them.
    """

    files: str
    values: Callable[[], Sequence[float]]  # by seed or repeat
    form: Callable[[Sequence[float]], str] = ratio

    def __str__(self) -> str:
        return self.form(self.values())

    @property
    def is_measured(self) -> bool:
        """Whether there is a raw file."""
        return any(RESULTS.glob(self.files))

    def as_in(self, text: str) -> str:
        """Returns the number, with an interval if `text` has one."""
        if not self.is_measured:
            return text
        return str(self) if "(" in text or "±" in text else re.sub(r" ± [\d.]+| \(.*?\)", "", str(self))


def _gpu(value: Callable[..., float], form: Callable[[Sequence[float]], str] = ratio) -> Number:
    return Number("smollm2.gpu.default.seed*.json", lambda: each(smollm2("smollm2.gpu", "default"), value), form)


def _over_trl(machine: str) -> Number:
    def values() -> list[float]:
        return [1 / own for own in each(smollm2(machine, "trl"), speed_of("step_seconds"))]

    return Number(f"{machine}.trl.seed*.json", values)


def _seconds(arm: str, *names: str) -> Number:
    def values() -> list[float]:
        return [mean_of(run, *names) for run, _ in smollm2("smollm2.gpu", arm)]

    return Number(f"smollm2.gpu.{arm}.seed*.json", values, partial(_rounded, digits=2))


def _rounded(values: Sequence[float], digits: int) -> str:
    return f"{round(np.mean(values), digits):,.{max(digits, 0)}f}"


def _largest(values: Sequence[float]) -> str:
    return f"{max(values):.0f}"


def _learning(
    world: str, arm: str, value: Callable[..., float] = time_to_reward, form: Callable[..., str] = ratio
) -> Number:
    return Number(f"learning.{world}.jsonl", lambda: each(learning(world, arm), value), form)


def _loss(own: Run, base: Run) -> float:
    return -reward_difference(own, base)


def _training(arm: str, world: str = "tail") -> Number:
    return Number(f"{world}.{arm}.seed*.json", lambda: each(training(world, arm), seconds_to_reward))


def _rollouts(pace: str, schedule: str, epoch: slice) -> Number:
    return Number("smollm2.rollouts.jsonl", lambda: rollouts(pace, schedule, epoch))


def _accuracy() -> list[float]:
    found = {(run["seed"], run["arm"]): run["accuracy"] for run in lines_of("reasoner.accuracy.jsonl")}
    return [value - found[seed, "grpo"] for (seed, arm), value in found.items() if arm == "default"]


def _agreement() -> list[float]:
    return [abs(math.log(virtual / real)) for *_, real, virtual in agreement()]


def _storm(column: str, digits: int, unit: float = 1.0) -> Number:
    def values() -> list[float]:
        lines = [own for own in lines_of("load.jsonl") if (own["servers"], own["candidates"]) == (64, 10_000)]
        return [unit * own[column] for own in lines]

    return Number("load.jsonl", values, partial(_rounded, digits=digits))


def _padding() -> list[float]:
    *_, last = (line for line in lines_of("padding.jsonl") if line["lengths"] == "tail")
    theirs, ours = (last["runs"][arm] for arm in ("TRL", "trim_padding=True"))
    return [a["seconds"] / b["seconds"] for a, b in zip(theirs, ours, strict=True)]


def _step(prompt: int) -> Number:
    def values() -> list[float]:
        asked = ("1.7b", prompt, "on")
        *_, last = (own for own in lines_of("step.jsonl") if (own["size"], own["prompt"], own["correction"]) == asked)
        return [a["seconds"] / b["seconds"] for a, b in zip(last["runs"]["TRL"], last["runs"]["all"], strict=True)]

    return Number("step.jsonl", values)


def _cores(arm: str, value: Callable[[Run], float]) -> Number:
    name = "peers_smollm2.jsonl"
    return Number(name, lambda: [value(run) for run in lines_of(name) if run["arm"] == arm], mean)


def _paired(
    file: str, arm: str, base: str, value: Callable[[Run, Run], float], form: Callable[..., str] = ratio, **only: Any
) -> Number:
    def values() -> list[float]:
        found = latest(lines_of(file), "arm", "seed", **only)
        return [value(run, found[base, seed]) for (name, seed), run in found.items() if name == arm]

    return Number(file, values, form)


def _peers(arm: str, value: Callable[[Run, Run], float], base: str, form: Callable[..., str] = ratio) -> Number:
    return _paired("peers.jsonl", arm, base, value, form)


def _agents(arm: str, base: str) -> Number:
    return _paired("agents.jsonl", arm, base, _as_fast)


def _epochs(value: Callable[[Run, Run], float], form: Callable[..., str] = ratio, skips: bool = False) -> Number:
    world, arm = ("half", "skip") if skips else ("tail", "reuse")

    def values() -> list[float]:
        found = {(run["arm"], run["seed"]): run for run in lines_of("epochs.jsonl") if run["world"] == world}
        return [value(run, found["grpo", seed]) for (name, seed), run in found.items() if name == arm]

    return Number("epochs.jsonl", values, form)


def _as_fast(own: Run, base: Run) -> float:
    return float(base["seconds"] / own["seconds"])


def _waited(own: Run, base: Run) -> float:
    """Returns the mean seconds of waiting for a rollout."""
    return float(own["parts"]["wait"])


def _kept(own: Run, base: Run) -> float:
    return float(own["kept_over_plain"])


def _share_of_passes(own: Run, base: Run) -> float:
    """Returns the share of passes and their pace in a step."""
    return float((own["parts"]["passes"] + own["parts"]["pace"]) * own["steps"] / own["seconds"])


def _as_early(own: Run, base: Run) -> float:
    return float(base["seconds_to_target"] / own["seconds_to_target"])


def _as_early_without_syncs(own: Run, base: Run) -> float:
    return until_target(base, with_syncs=False) / until_target(own, with_syncs=False)


WITHIN = math.log(1.1)  # simulated and real seconds differ by at most a tenth
SCHEDULES = {
    "default": "default",
    "paper": "darts (paper)",
    "tail_batching": "tail batching",
    "partial_rollout": "partial rollout",
    "sorted": "sorted, partial",
}
COLUMNS = {
    "new": ("paced", NEW),
    "known": ("paced", KNOWN),
    "virtual": ("paced, simulated", KNOWN),
    "cpu": ("bare", KNOWN),
}
NUMBERS: dict[str, Number] = {
    "gpu.step": _gpu(speed_of("step_seconds")),
    "gpu.step.equal_syncs": _gpu(step_with_equal_syncs),
    "gpu.rollout": _gpu(speed_of("darts/rollout/seconds")),
    "gpu.accuracy": _gpu(accuracy_difference, mean),
    "gpu.trl": _over_trl("smollm2.gpu"),
    "gpu.seconds.grpo": _seconds("grpo", "step_seconds"),
    "gpu.seconds.rollout": _seconds("grpo", "darts/rollout/seconds"),
    "cpu.step": Number(
        "smollm2.default.seed*.json", lambda: each(smollm2("smollm2", "default"), speed_of("step_seconds"))
    ),
    "cpu.trl": _over_trl("smollm2"),
    **{f"cpu.{machine}": _over_trl(f"smollm2.{machine}") for machine in ("exact", "exact_1")},
    "cpu.new": _rollouts("bare", "default", NEW),
    "padding.tail": Number("padding.jsonl", _padding),
    **{f"step.{prompt}": _step(prompt) for prompt in (128, 512, 2048)},
    **{f"peers.{arm}": _peers(arm, _as_early, "async-4") for arm in ("grpo", "default", "continuous")},
    **{
        f"peers.one.{arm}": _paired("peers_later.jsonl", arm, "async-4", _as_early, threads=1)
        for arm in ("default", "continuous")
    },
    **{
        f"peers.{name}.{arm.split()[-1]}{what}": _paired(f"peers_{name}.jsonl", arm, "async-4", value)
        for name, more in (("shared", ()), ("fast", ("default ahead", "default waves")))
        for arm in ("default", "continuous", *more)
        for what, value in (("", _as_early), (".no_syncs", _as_early_without_syncs))
    },
    "peers.shared.apart": _paired("peers_shared.jsonl", "default apart", "async-4", _as_early),
    "peers.shared.gain": _paired("peers_shared.jsonl", "default apart", "default", lambda a, b: 1 / _as_early(a, b)),
    **{
        f"peers.fast.{arm.split()[-1]}.oldest": _paired(
            "peers_fast.jsonl", arm, "async-4", lambda own, _: own["oldest"], _largest
        )
        for arm in ("default", "default ahead", "default waves", "continuous")
    },
    **{
        f"peers.fast.{arm.split('-')[0]}.{what}": _paired("peers_fast.jsonl", arm, "async-4", value, mean)
        for what, value, arms in (
            ("kept", _kept, ("async-4", "continuous", "default")),
            ("passes", _share_of_passes, ("async-4", "continuous")),
        )
        for arm in arms
    },
    **{
        f"peers.{name}.async.{what}": _paired(f"peers_{name}.jsonl", "async-4", "async-4", value, mean)
        for name in ("shared", "rows_first", "fast")
        for what, value in (
            ("seconds", lambda own, _: until_target(own)),
            ("sync", lambda own, _: own["parts"]["sync"]),
        )
    },
    **{
        f"peers.shared.rollout.{arm.split()[-1]}": _paired("peers_shared.jsonl", arm, "async-4", _waited, mean)
        for arm in ("default", "default apart")
    },
    "peers.rows_first": _paired("peers_rows_first.jsonl", "default", "async-4", _as_early),
    **{
        f"{arm}.{name}": _paired(f"{file}.jsonl", own, base, _as_fast, share=share)
        for arm, file, own, base in (
            ("waves", "waves", "waves", "grpo"),
            ("waves.darts", "waves", "darts waves", "darts"),
            ("waves.darts.slower", "waves_slower", "darts waves", "darts"),
        )
        for name, share in (("fifth", 0.2), ("half", 0.5), ("whole", 1.0))
    },
    "waves.darts.rows": _paired(
        "waves.jsonl", "darts waves", "darts", lambda own, base: own["trained"] / base["trained"], share=0.2
    ),
    "agents.grpo": _agents("grpo", "lockstep"),
    "agents.default": _agents("default", "grpo"),
    "peers.continuous.reward": _peers("continuous", lambda own, base: own["reward"] - base["reward"], "grpo", mean),
    **{
        f"cores.{arm.split('-')[0]}": _cores(arm, lambda own: own["seconds"] / own["steps"])
        for arm in ("async-4", "grpo", "default", "continuous")
    },
    "cores.passes.first": _cores("async-4", lambda own: own["by_step"]["passes"][0]),
    "cores.passes.last": _cores("async-4", lambda own: own["by_step"]["passes"][-1]),
    "epochs.reuse": _epochs(to_reward),
    "epochs.reuse.rollouts": _epochs(lambda own, base: base["rollouts"] / own["rollouts"]),
    "epochs.reuse.decoded": _epochs(lambda own, base: own["decoded"] / base["decoded"]),
    "epochs.reuse.reward": _epochs(lambda own, base: own["reward"] - base["reward"], mean),
    "epochs.reuse.new": _epochs(lambda own, base: own["new"], mean),
    "epochs.skip": _epochs(to_reward, skips=True),
    "epochs.skip.rollouts": _epochs(lambda own, base: base["rollouts"] / own["rollouts"], skips=True),
    "epochs.skip.reward": _epochs(lambda own, base: own["reward"] - base["reward"], mean, skips=True),
    "epochs.skip.share": _epochs(lambda own, base: fmean(own["by_step"]["skipped"]), mean, skips=True),
    "epochs.grpo.new": _epochs(lambda own, base: base["new"], mean),
    "learning.default": _learning("published", "default"),
    "learning.unguarded": _learning("published", "unguarded"),
    "learning.paper": _learning("published", "paper"),
    "learning.easy": _learning("easy", "default"),
    "learning.easy.loss": _learning("easy", "default", _loss, mean),
    "learning.needs_120": _learning("needs_120", "default"),
    "learning.needs_120.unguarded": _learning("needs_120", "unguarded"),
    "learning.needs_120.reward.grpo": _learning("needs_120", "grpo", reward_at_end, mean),
    "learning.needs_120.reward.default": _learning("needs_120", "default", reward_at_end, mean),
    "learning.needs_120.reward.every_4th": _learning("needs_120", "every 4th", reward_at_end, mean),
    "learning.needs_120.reward.unguarded": _learning("needs_120", "unguarded", reward_at_end, mean),
    "continuous.grpo": Number("continuous.jsonl", lambda: each(continuous("grpo, continuous"), time_to_reward)),
    "continuous.grpo.loss": Number("continuous.jsonl", lambda: each(continuous("grpo, continuous"), _loss), mean),
    "paced.unguarded": _training("default"),
    "paced.paper": _training("darts_paper"),
    "paced.ahead": _training("default_ahead"),
    "paced.partial_rollout": _training("partial_rollout"),
    "equal": _training("default", "equal"),
    "accuracy": Number("reasoner.accuracy.jsonl", _accuracy, mean),
    "storm.tokens": _storm("tokens / s", -2),
    "storm.cores": _storm("client (cores)", 2),
    "storm.p99": _storm("delay p99 (ms)", 1, unit=1e-3),
    "engines.1": Number("simulator.jsonl", lambda: simulated("engines", "1", lengths="llama_8b_deepscaler")),
    "slots.between": Number("simulator.jsonl", lambda: simulated("slots", "N·M", lengths="equal within a prompt")),
    "agreement": Number(
        "smollm2.rollouts.jsonl", _agreement, lambda own: f"{sum(value < WITHIN for value in own)} of {len(own)}"
    ),
    **{
        f"rollouts.{name}.{column}": _rollouts(pace, schedule, epoch)
        for name, schedule in SCHEDULES.items()
        for column, (pace, epoch) in COLUMNS.items()
    },
}


def written(text: str) -> str:
    """Returns a page with the computed numbers at its marks."""
    return MARK.sub(lambda found: f"{NUMBERS[found['name']].as_in(found['number'])}<!--{found['name']}-->", text)


def claims(text: str) -> list[str]:
    """Returns the numbers of a page that have no mark, each with the words before it."""
    shown = " ".join(HIDDEN.sub(" ", MARK.sub("", text)).split())
    return re.findall(r".{0,30}\d[\d.,]*", UNMARKED.sub("", shown))


def rows_of(page: Path) -> Iterator[list[str]]:
    """Yields page, name, number and raw file of each mark."""
    for found in MARK.finditer(page.read_text()):
        own = NUMBERS[found["name"]]
        file = own.files if own.is_measured else f"{own.files} (missing)"
        yield [str(page.relative_to(ROOT)), found["name"], own.as_in(found["number"]), file]


def main() -> None:
    """Prints all marked numbers, after writing them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the numbers into the pages")
    options = parser.parse_args()
    for page in PAGES if options.write else ():
        page.write_text(written(page.read_text()))
    print(table(["page", "name", "number", "raw file"], [row for page in PAGES for row in rows_of(page)]))


if __name__ == "__main__":
    main()
