"""
Sections of benchmarks/REPORT.md about single parts, from the lines that their benchmarks append. Those about
whole trainings are in `training_parts.py`.

Each function gets the folder of the results, and returns its section with the heading. It returns nothing as long as
there are no lines, so that the report has no section about what was not measured. Of several runs the last one counts.
"""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cells
from benchmarks.lines import latest, read


Line = Mapping[str, Any]


def last(results: Path, name: str, *keys: str, **only: Any) -> dict[Any, Line]:
    """Returns the latest lines of a benchmark."""
    return latest(read(results / f"{name}.jsonl"), *keys, **only)


def section(title: str, text: str, *blocks: str) -> str:
    """Joins a heading, its text, and tables or further text."""
    return "\n\n".join([f"## {title}", prose(text), *blocks])


def prose(text: str) -> str:
    """Fills lines."""
    return textwrap.fill(" ".join(text.split()), 119, break_long_words=False, break_on_hyphens=False)


def origin(lines: Mapping[Any, Line]) -> str:
    """Says when and where lines were measured, in brackets."""
    found = {
        f"{line['date']}, {line['machine']['cores']} cores of {line['machine']['device']}" for line in lines.values()
    }
    return f"({'; '.join(sorted(found))})"


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g}" if len(values) else "–"


def gpu(results: Path) -> str:
    """Of the last runs: each row's rollouts, on the server and in virtual time, and each arm's steps."""
    lines = last(results, "gpu", "size", "part", "arm")
    blocks = []
    for (size, part, _), line in lines.items():
        if part == "rollouts":
            rows = [
                [
                    name,
                    median(own),
                    *(_speed(line[kind]["grpo"], line[kind][name]) for kind in ("seconds", "simulated")),
                ]
                for name, own in line["seconds"].items()
            ]
            header = [f"{size}, rollouts", "s per rollout", "speed-up", "simulated"]
            blocks.append(cells.table(header, rows))
    steps = {arm: line for (_, part, arm), line in lines.items() if part == "steps"}
    if "grpo" in steps:
        base = steps["grpo"]["seconds"]
        rows = [
            [
                arm,
                *(_known_median(line[name]) for name in ("seconds", "rollout", "sync")),
                _speed(base, line["seconds"]),
            ]
            for arm, line in steps.items()
        ]
        blocks.append(cells.table(["whole steps", "s per step", "rollout (s)", "sync (s)", "speed-up"], rows))
    if not blocks:
        return ""
    text = f"""
        `python -m benchmarks.gpu`: a chain with the size of a real model, on a real server {origin(lines)}.
        {next(iter(lines.values()))["lengths"]}. Medians of seconds."""
    return section("On a GPU", text, *blocks)


def _known_median(values: Sequence[float]) -> str:
    return median([value for value in values if not math.isnan(value)])


def _speed(base: Sequence[float], own: Sequence[float]) -> str:
    return cells.ratio(quotients(base[: len(own)], own[: len(base)]))


def padding(results: Path) -> str:
    lines = last(results, "padding", "lengths", "hidden_size")
    if not lines:
        return ""
    rows = []
    for (name, hidden), line in lines.items():
        theirs = [run["seconds"] for run in line["runs"]["TRL"]]
        for arm, runs in line["runs"].items():
            own = [run["seconds"] for run in runs]
            padded = statistics.median(run["padding"] for run in runs)
            share = f"{np.mean([run['share'] for run in runs]):.2%}" if arm.endswith("True") else "–"
            speed = cells.ratio(quotients(theirs, own))
            rows.append(
                [f"{name}, width {hidden}: {arm}", median(own), speed, share, f"{padded:.2f}".replace("nan", "–")]
            )
    worst = max(apart for line in lines.values() for apart in line["gradient"].values())
    sizes = "; ".join(dict.fromkeys(f"*{line['lengths']}*: {line['rows']}" for line in lines.values()))
    text = f"""
        `python -m benchmarks.padding`: one optimizer step, forward and backward passes alone, completions given, a
        Qwen2 with random weights in float32, paired repeats. {sizes}. *Spent on rows* is the share of the step that
        ordering, cutting and counting rows takes. Gradients differ from TRL's by at most {worst:.0e} of their norm
        {origin(lines)}."""
    header = ["lengths: trainer", "s per step", "speed-up over TRL's", "spent on rows", "padding ratio"]
    return section("Training without padding", text, cells.table(header, rows))


def step(results: Path) -> str:
    lines = last(results, "step", "size", "correction", "checkpointing", "prompt")
    if not lines:
        return ""
    settings = dict.fromkeys(key[:3] for key in lines)
    blocks = [_step_table(*own, {key[3]: line for key, line in lines.items() if key[:3] == own}) for own in settings]
    text = f"""
        `python -m benchmarks.step`: as above, with a prompt of its own for each group of 8 rows, and micro-batches of
        a group. *Computed* are tokens through the model over tokens there are, *memory* is the peak of the passes
        above what was there before them {origin(lines)}."""
    return section("Shared prompts", text, *blocks)


def _step_table(size: str, correction: str, checkpointing: str, lines: Mapping[int, Line]) -> str:
    rows = []
    for prompt, line in sorted(lines.items()):
        theirs = [run["seconds"] for run in line["runs"]["TRL"]]
        for arm, runs in line["runs"].items():
            own, there, memory = ([run[name] for run in runs] for name in ("seconds", "padding", "memory"))
            computed = f"{statistics.median(there):.2f}".replace("nan", "–")
            mib = f"{statistics.median(memory):,.0f}"
            rows.append([f"{prompt} tokens: {arm}", median(own), cells.ratio(quotients(theirs, own)), computed, mib])
    line = next(iter(lines.values()))
    worst = np.nanmax([apart for line in lines.values() for apart in line["gradient"].values()])
    text = prose(
        f"**Model {size}, correction for sampling log-probs {correction}, gradient checkpointing {checkpointing}.** "
        f"{line['rows'].replace(' by 4', '')}. Gradients differ from TRL's by at most {worst:.0e} of their norm. "
        f"{line['machine']['device']}{', beside other programs' * line['machine'].get('busy', False)}."
    )
    header = ["prompt: rows", "s per step", "speed-up over TRL's", "computed", "memory (MiB)"]
    return f"{text}\n\n{cells.table(header, rows)}"


def schedules(results: Path) -> str:
    """Of each title the last run on a server, or else the last simulation."""
    simulated = last(results, "schedules", "title")
    if not simulated:
        return ""
    measured = {line["title"]: line for line in read(results / "schedules.jsonl") if "measured" in line}
    blocks = [_schedules_of(title, measured.get(title, line)) for (title,), line in simulated.items()]
    text = """
        `python -m benchmarks.schedules`: rollouts of given lengths over those of the first row, at [a
        GPU's pace](#how-it-was-run), and on simulated clusters with an assumed curve of a 14 B model. A dash in
        *server* means that only the simulator ran. Without a server it leaves out what a request costs, so it is
        too favourable, by a tenth or more. No guard is on. Intervals are over repeats or seeds."""
    return section("Schedules on given lengths", text, *blocks)


def _schedules_of(title: str, line: Line) -> str:
    speeds = [_speedups(line[kind]) if kind in line else {} for kind in ("measured", "simulated")]
    rows = []
    for name, runs in line.get("measured", line["simulated"]).items():
        shares = [f"{statistics.median(run[key] for run in runs):.0%}" for key in ("wasted", "off_policy")]
        rows.append([name, *(own.get(name, "–") for own in speeds), *shares])
    header = ["schedule", "speed-up, server", "simulated", "wasted", "off-policy"]
    return f"**{title}** ({line['size']})\n\n{cells.table(header, rows)}"


def _speedups(runs: Mapping[str, Sequence[Line]]) -> dict[str, str]:
    seconds = {name: [run["seconds"] for run in own] for name, own in runs.items()}
    base = next(iter(seconds.values()))
    return {name: cells.ratio(quotients(base, own)) for name, own in seconds.items()}


def decisions(results: Path) -> str:
    lines = last(results, "decisions", "prompts", "factor")
    if not lines:
        return ""
    rows = []
    for line in lines.values():
        small, large = ({**own, "all": sum(own.values())} for own in (line["seconds"], line["seconds_larger"]))
        rows += [
            [
                f"{stage}, {line['prompts']} prompts",
                f"{1e3 * own:.3g}",
                f"{1e3 * large[stage]:.3g}",
                f"{large[stage] / own:.3g}",
            ]
            for stage, own in small.items()
        ]
    text = f"""
        `python -m benchmarks.decisions`: processor time of all decisions of one step on one core, with 16
        candidates per prompt on average, and with eight times the prompts {origin(lines)}. Medians."""
    return section("Decisions", text, cells.table(["stage", "ms", "ms, larger batch", "times as long"], rows))


def server_overhead(results: Path) -> str:
    lines = last(results, "server_overhead", "workload")
    if not lines:
        return ""
    rows = []
    for line in lines.values():
        theirs, ours, apart = line["seconds"].values()
        tokens = ", ".join(f"{number:,}" for number in dict.fromkeys(line["tokens"].values()))
        seconds = map(median, (theirs, ours, apart))
        rows.append([line["workload"], tokens, *seconds, *(cells.ratio(quotients(x, ours)) for x in (theirs, apart))])
    line = next(iter(lines.values()))
    text = f"""
        `python -m benchmarks.server_overhead`: generation by TRL's path, one request with all prompts, and by ours, a
        stream for each candidate, with up to 16 in one request, or with a request for each. {line["prompts"]} prompts
        × {line["generations"]}, `schedule="grpo"` {origin(lines)}. With heavy-tailed lengths, each candidate has a
        seed, and so a request of its own. Above 1, ours is faster."""
    sides = ["TRL (s)", "trl_darts (s)", "a request each (s)"]
    header = ["workload", "tokens", *sides, "TRL ÷ trl_darts", "a request each ÷ trl_darts"]
    return section("Client overhead", text, cells.table(header, rows))


def adapters(results: Path) -> str:
    lines = last(results, "adapters", "model", "rank")
    if not lines:
        return ""
    rows = []
    for line in lines.values():
        name = f"{line['model']}, {line['num_parameters'] / 1e6:.3g} M, rank {line['rank']}"
        for key, shown, unit in (
            ("bytes", "MiB", 2**-20),
            ("seconds", "sync (ms)", 1e3),
            ("stall", "stall (ms)", 1e3),
            ("decode", "decoding (s)", 1),
        ):
            merged, adapter = ([unit * value for value in line[key][arm]] for arm in ("merged", "adapter"))
            ratio = "–" if key == "stall" else cells.ratio(quotients(merged, adapter))
            rows.append([name, shown, median(merged), median(adapter), ratio])
    text = f"""
        `python -m benchmarks.adapters`: weight syncs with an adapter of all linear layers, while an answer decodes
        {origin(lines)}. Its stall is the longest pause between two tokens, beyond the usual one. Decoding is of 32
        answers at once, with merged weights and with the adapter. `smollm2` has two servers."""
    return section("Adapters", text, cells.table(["model", "", "merged", "adapter", "merged ÷ adapter"], rows))


def sharing(results: Path) -> str:
    lines = last(results, "sharing", "seed")
    if not lines:
        return ""
    rows = []
    for name in next(iter(lines.values()))["alone"]:
        cells_of = []
        for way in ("alone", "together"):
            own = [line[way][name] for line in lines.values()]
            rewards = [reward for one in own for reward in one["reward"]]
            cells_of += [cells.mean([one["end"] - one["begin"] for one in own]), cells.mean(rewards)]
        rows.append([name, *cells_of])
    ratio = cells.ratio([line["ratio"] for line in lines.values()])
    text = f"""
        `python -m benchmarks.sharing`: two LoRA trainings with different learning rates on one server at a GPU's pace
        {origin(lines)}. Together they take {ratio} times less than one after the other ({len(lines)} seeds). Rewards
        are means over all steps."""
    header = ["learning rate", "seconds alone", "reward alone", "seconds together", "reward together"]
    return section("Two trainings on one server", text, cells.table(header, rows))


def in_flight(results: Path) -> str:
    lines = last(results, "in_flight", "schedule", "kv")
    if not lines:
        return ""
    rows = []
    for (schedule, kv), line in lines.items():
        times = [line["ms"][name]["quartiles"] for name in ("stall", "load", "engine step")]
        rows.append([f"{schedule}, {kv}", *(f"{middle:.1f} ({low:.1f}–{high:.1f})" for low, middle, high in times)])
        rows[-1].append(f"{line['wrong']} of {line['candidates']}")
    text = f"""
        `python -m benchmarks.in_flight`: weight syncs in the middle of rollouts that never end {origin(lines)}.
        Milliseconds in the engine, medians and quartiles, and candidates whose tokens' versions differ from the
        server's own record."""
    header = ["schedule, keys and values", "stall", "of it loading", "an engine step", "wrong versions"]
    return section("Weight syncs in flight", text, cells.table(header, rows))


def drafts(results: Path) -> str:
    lines = last(results, "drafts", "seed", "servers", "placement", "epoch", part="replay").values()
    rows = []
    for key in dict.fromkeys((line["servers"], line["placement"], line["epoch"]) for line in lines):
        own = [line for line in lines if (line["servers"], line["placement"], line["epoch"]) == key]
        speed = cells.ratio([line["control"] / line["time"] for line in own])
        accepted = f"{sum(line['accepted'] for line in own) / sum(line['drafted'] for line in own):.0%}"
        rows.append([f"{key[0]}, {key[1]} ({len(own)})", str(key[2]), speed, accepted])
    text = """
        `python -m benchmarks.drafts`: rollouts with drafts from other answers to the same prompt over rollouts
        without, by epoch: answers of the tiny reasoner in modelled time."""
    table = cells.table(["servers, answers (seeds)", "epoch", "speed-up", "accepted"], rows)
    return section("Drafts", text, table) if rows else ""


def faults(results: Path) -> str:
    lines = last(results, "faults", "arm")
    rows = [
        [f"{line['arm']}: {kind}", *_fault_cells(line, kind)]
        for line in lines.values()
        for kind in sorted({fault["kind"] for fault in line["faults"]})
    ]
    if not rows:
        return ""
    worst = max(line["worst"] for line in lines.values())
    rollouts = sum(len(line["rollouts"]) for line in lines.values())
    complete = sum(line["nothing_lost"] for line in lines.values())
    text = f"""
        `python -m benchmarks.faults` starts two servers with `trl-darts serve --restart`. At random moments, also
        during weight syncs, it kills one (SIGKILL) or stops it for 15 s (SIGSTOP) {origin(lines)}. In {complete} of
        {len(lines)} runs with {rollouts} rollouts nothing was lost, and each token arrived once. Log-probs of
        resumed candidates are at most {worst:.1e} off those of a forward pass. Medians of seconds, and the worst."""
    header = ["run: fault", "number", "noticed after", "back after", "lost in a rollout"]
    return section("Faults", text, cells.table(header, rows))


def _fault_cells(line: Line, kind: str) -> list[str]:
    own = [fault for fault in line["faults"] if fault["kind"] == kind]
    times = [[fault[name] or 0.0 for fault in own] for name in ("noticed", "back")]
    hit = [[start <= fault["at"] <= end for fault in line["faults"]] for start, end in line["rollouts"]]
    lengths = [end - start for start, end in line["rollouts"]]
    usual = statistics.median(length for length, faults in zip(lengths, hit, strict=True) if not any(faults))
    is_own = [fault["kind"] == kind for fault in line["faults"]]
    lost = [
        length - usual
        for length, faults in zip(lengths, hit, strict=True)
        if any(here and own for here, own in zip(faults, is_own, strict=True))
    ]
    return [str(len(own)), *(f"{median(v)} (≤ {max(v):.1f})" if v else "–" for v in (*times, lost))]


def checkpoints(results: Path) -> str:
    lines = last(results, "checkpoints", "arm")
    if not lines:
        return ""
    rows = [
        [
            line["arm"],
            str(line["kills"]),
            f"{line['epochs']}",
            f"{median(line['tokens'])}, {max(line['tokens'])}",
            str(len(line["wrong"])),
        ]
        for line in lines.values()
    ]
    text = f"""
        `python -m benchmarks.checkpoints` kills trainers at random moments of a checkpoint; another one resumes
        from the newest complete one {origin(lines)}."""
    header = ["arm", "kills", "epochs", "tokens restored: median, most", "prompts lost or repeated"]
    return section("Checkpoints", text, cells.table(header, rows))


def listed(results: Path) -> str:
    lines = read(results / "listed.jsonl")
    rows = []
    for size in dict.fromkeys((line["prompts"], line["tokens"]) for line in lines):
        own = [line for line in lines if (line["prompts"], line["tokens"]) == size]
        ratios = quotients([line["ray"] for line in own], [line["fixed"] for line in own])
        rows.append([f"{size[0]} × 8", str(size[1]), str(len(own)), cells.ratio(ratios)])
    text = """
        `python -m benchmarks.listed`: seconds of rollouts on servers that a list in a Ray cluster names, over those
        on the same servers' addresses, in alternating pairs on two cores."""
    header = ["candidates", "tokens each", "pairs", "ray ÷ addresses"]
    return section("A list of servers", text, cells.table(header, rows)) if rows else ""


def load(results: Path) -> str:
    rows = [
        [
            f"{line['tokens_per_s']:,.0f} tokens/s each",
            f"{line['tokens / s']:,.0f}",
            f"{line['client (cores)']:.2f}",
            f"{line['delay p50 (ms)']:.1f}, {line['delay p99 (ms)']:.0f}",
            f"{line['memory (MiB)']:.0f}",
        ]
        for line in read(results / "load.jsonl")
    ]
    text = """
        `python -m benchmarks.load`: the client with 64 stubs of servers that stream 16 tokens at a time, and 10,000
        candidates at once, `schedule="darts"`."""
    header = ["stubs", "tokens/s", "client (cores)", "delay p50, p99 (ms)", "memory (MiB)"]
    return section("The client's load", text, cells.table(header, rows)) if rows else ""
