"""
Sections of benchmarks/REPORT.md about single parts, from the lines that their benchmarks append.

Each function gets the folder of the results, and returns its section with the heading. It returns nothing as long as
there are no lines, so that the report has no section about what was not measured. Of several runs the last one counts.
"""

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
    prose = textwrap.fill(" ".join(text.split()), 119, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join([f"## {title}", prose, *blocks])


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


GPU_ARMS = ("grpo", "darts (paper)", "unguarded", "default")


def gpu_server(results: Path) -> str:
    """Of the last server: each arm's rollouts, and the same in virtual time with latencies of the first context."""
    lines = read(results / "gpu_server.jsonl")
    begins = [place for place, line in enumerate(lines) if line["kind"] == "server"]
    if not begins:
        return ""
    server, *own = lines[begins[-1] :]
    context = next((line["context"] for line in own if line["kind"] == "simulated"), None)
    kinds = {name: [line for line in own if line["kind"] == name] for name in ("rollout", "simulated")}
    kinds["simulated"] = [line for line in kinds["simulated"] if line["context"] == context]
    real, simulated = (
        {arm: [line["seconds"] for line in lines if line["arm"] == arm] for arm in GPU_ARMS}
        for lines in kinds.values()
    )
    steps = min(map(len, real.values()))
    rows = []
    for arm in GPU_ARMS:
        speeds = [quotients(kind["grpo"][:steps], kind[arm][:steps]) for kind in (real, simulated) if kind["grpo"]]
        rows.append([f"{arm} ({steps})", f"{np.mean(real[arm][:steps]):.3g}", cells.ratio(speeds[0])])
        rows[-1] += [cells.ratio(speeds[0][2:]), cells.ratio(speeds[1]) if len(speeds) > 1 else "–"]
    text = f"""
        `python benchmarks/gpu_server.py`: rollouts of given lengths on a real server of a model with random weights
        and the sizes of Qwen3 {server["size"]}, on one {server["device"]} with vLLM {server["vllm"]}. Rows take turns
        step by step on the same lengths."""
    header = ["arm (steps)", "s per rollout", "speed-up", "from the third step on", "simulated"]
    return section("Rollouts on a GPU", text, cells.table(header, rows))


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
        `python benchmarks/padding.py`: one optimizer step, forward and backward passes alone, completions given, a
        Qwen2 with random weights in float32, paired repeats. {sizes}. *Spent on rows* is the share of the step that
        ordering, cutting and counting rows takes. Gradients differ from TRL's by at most {worst:.0e} of their norm
        {origin(lines)}."""
    header = ["lengths: trainer", "s per step", "speed-up over TRL's", "spent on rows", "padding ratio"]
    return section("Training without padding", text, cells.table(header, rows))


def ahead(results: Path) -> str:
    lines = last(results, "ahead", "share")
    if not lines:
        return ""
    rows = []
    for line in lines.values():
        apart, own = line["apart"], line["ahead"]
        rollout, both, step = (np.mean(values[1:]) for values in (apart["rollout"], apart["real"], own["real"]))
        expected = max(rollout, line["per_token"] * np.mean(own["trained"][1:])) + np.nanmean(apart["sync"])
        rows.append([f"{line['share']:g}", *(f"{value:.2f}" for value in (rollout, both, step, expected))])
    text = f"""
        `python benchmarks/ahead.py`: GRPO on the paced server of [the training
        runs](#training-runs-at-a-gpus-pace), with a training that takes a given share of a rollout's time.
        *Expected* is the longer of the two, and the weight sync {origin(lines)}."""
    header = ["training ÷ rollout", "rollout (s)", "step (s)", "step, ahead (s)", "expected (s)"]
    return section("One rollout ahead", text, cells.table(header, rows))


def schedules(results: Path) -> str:
    """Of each title the last run on a server, or else the last simulation."""
    simulated = last(results, "schedules", "title")
    if not simulated:
        return ""
    measured = {line["title"]: line for line in read(results / "schedules.jsonl") if "measured" in line}
    blocks = [_schedules_of(title, measured.get(title, line)) for (title,), line in simulated.items()]
    text = """
        `python benchmarks/schedules.py [--virtual]`: rollouts of given lengths over those of the first row, at [a
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


def parity(results: Path) -> str:
    lines = last(results, "simulator", "schedule", part="parity")
    if not lines:
        return ""
    rows = [
        [
            line["schedule"],
            f"{sum(line['real']):.1f}",
            f"{sum(line['predicted']):.1f}",
            cells.ratio(quotients(line["predicted"], line["real"])),
            f"{line['same']} of {line['groups']}",
        ]
        for line in lines.values()
    ]
    text = f"""
        `python benchmarks/simulator.py parity` records a run and replays each rollout with a curve that was
        measured on the same server: 16 prompts × 8 rows of up to 768 tokens {origin(lines)}. Decisions differ where
        two candidates end almost together."""
    header = ["schedule", "real (s)", "predicted (s)", "predicted ÷ real", "prompts with the same rows"]
    return section("The simulator against a server", text, cells.table(header, rows))


def speed(results: Path) -> str:
    lines = last(results, "simulator", "schedule", part="speed")
    if not lines:
        return ""
    rows = [
        [
            line["schedule"],
            f"{line['candidates']:,}",
            median([line["seconds"]]),
            f"{line['seconds'] / line['steps']:.3f}",
        ]
        for line in lines.values()
    ]
    text = f"`python benchmarks/simulator.py speed`: steps of 512 prompts × 16, processor time {origin(lines)}."
    return section("The simulator's own time", text, cells.table(["schedule", "candidates", "s", "s per step"], rows))


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
        `python benchmarks/decisions.py`: processor time of all decisions of one step on one core, with 16
        candidates per prompt on average, and with eight times the prompts {origin(lines)}. Medians."""
    return section("Decisions", text, cells.table(["stage", "ms", "ms, larger batch", "times as long"], rows))


def server_overhead(results: Path) -> str:
    lines = last(results, "server_overhead", "workload")
    if not lines:
        return ""
    rows = []
    for line in lines.values():
        theirs, ours = line["seconds"].values()
        tokens = ", ".join(f"{number:,}" for number in dict.fromkeys(line["tokens"].values()))
        rows.append([line["workload"], tokens, median(theirs), median(ours), cells.ratio(quotients(theirs, ours))])
    line = next(iter(lines.values()))
    text = f"""
        `python benchmarks/server_overhead.py`: generation by TRL's path, one request with all prompts, and by ours,
        one request per candidate. {line["prompts"]} prompts × {line["generations"]}, `schedule="grpo"`
        {origin(lines)}. With a few tokens per answer, requests are all that takes time, and ours lose."""
    header = ["workload", "tokens", "TRL (s)", "trl_darts (s)", "TRL ÷ trl_darts"]
    return section("Client overhead", text, cells.table(header, rows))


def late_binding(results: Path) -> str:
    lines = last(results, "late_binding", "part")
    rows = []
    for line in [line for line in lines.values() if "seconds" in line]:
        (before, slow), (after, fast) = line["seconds"].items()
        rows.append(
            [
                line["part"],
                f"{before} {median(slow)} s",
                f"{after} {median(fast)} s",
                cells.ratio(quotients(slow, fast)),
            ]
        )
    if not rows:
        return ""
    text = f"""
        `python benchmarks/late_binding.py`: candidates that wait for the first free server, over those that are all
        submitted at the start; and candidates of a prompt together on one server, which shares its prefix cache,
        over spread ones {origin(lines)}. Medians of seconds."""
    if queue := lines.get(("queue",)):
        text += f"""
        With 256 candidates on 8 slots, and a first-token deadline of a tenth of the rollout, {queue["lost"]}
        servers were lost and {queue["resumed"]} candidates resumed."""
    return section("Late binding", text, cells.table(["case", "before", "after", "speed-up"], rows))


def streaming(results: Path) -> str:
    lines = last(results, "streaming", "regime", "share")
    if not lines:
        return ""
    rows = []
    for line in lines.values():
        off, on = ([pair[place] for pair in line["pairs"]] for place in (0, 1))
        name = "rewards" if line["regime"] == "rewards" else "forward"
        after = [step[name] + step.get("exposed_seconds", 0.0) for step in on]
        speed = cells.ratio(quotients([step["seconds"] for step in off], [step["seconds"] for step in on]))
        title = f"{line['regime']} ({len(off)})" + (", one core" if line["share"] else "")
        rows.append([title, *(median([step["seconds"] for step in own]) for own in (off, on)), speed])
        rows[-1].append(f"{1 - statistics.median(after) / statistics.median(step[name] for step in off):.0%}")
    text = f"""
        `python benchmarks/streaming.py`: steps without and with streaming on the same lengths, server and trainer
        on a core each {origin(lines)}. *Hidden* is the share of the seconds after a rollout that streaming saves."""
    header = ["lengths (pairs)", "step (s)", "streamed (s)", "speed-up", "hidden"]
    return section("Streaming", text, cells.table(header, rows))


def in_flight(results: Path) -> str:
    lines = {(line["options"]["schedule"], line["options"]["kv"]): line for line in read(results / "in_flight.jsonl")}
    if not lines:
        return ""
    rows = []
    for (schedule, kv), line in lines.items():
        times = [line["ms"][name]["quartiles"] for name in ("stall", "load", "engine step")]
        rows.append([f"{schedule}, {kv}", *(f"{middle:.1f} ({low:.1f}–{high:.1f})" for low, middle, high in times)])
        rows[-1].append(f"{line['wrong']} of {line['candidates']}")
    text = f"""
        `python benchmarks/in_flight.py`: weight syncs in the middle of rollouts that never end {origin(lines)}.
        Milliseconds in the engine, medians and quartiles, and candidates whose tokens' versions differ from the
        server's own record."""
    header = ["schedule, keys and values", "stall", "of it loading", "an engine step", "wrong versions"]
    return section("Weight syncs in flight", text, cells.table(header, rows))


def drafts(results: Path) -> str:
    blocks = [table for table in (_replayed(results), _drafting_servers(results)) if table]
    text = """
        `python benchmarks/drafts.py`: rollouts with drafts from other answers to the same prompt over rollouts
        without, by epoch: answers of the tiny reasoner in modelled time, and a Markov chain on servers at [a GPU's
        pace](#how-it-was-run)."""
    return section("Drafts", text, *blocks) if blocks else ""


def _replayed(results: Path) -> str:
    lines = last(results, "drafts", "seed", "servers", "placement", "epoch", part="replay").values()
    rows = []
    for key in dict.fromkeys((line["servers"], line["placement"], line["epoch"]) for line in lines):
        own = [line for line in lines if (line["servers"], line["placement"], line["epoch"]) == key]
        speed = cells.ratio([line["control"] / line["time"] for line in own])
        accepted = f"{sum(line['accepted'] for line in own) / sum(line['drafted'] for line in own):.0%}"
        rows.append([f"{key[0]}, {key[1]} ({len(own)})", str(key[2]), speed, accepted])
    return cells.table(["servers, answers (seeds)", "epoch", "speed-up", "accepted"], rows) if rows else ""


def _drafting_servers(results: Path) -> str:
    lines = last(results, "drafts", "schedule", "arm", "epoch", part="servers")
    rows = []
    for (schedule, arm, epoch), line in lines.items():
        if arm != "no drafts":
            control = lines[schedule, "no drafts", epoch]["seconds"]
            accepted = f"{line['counts'][2] / line['counts'][1]:.0%}"
            rows.append([f"{schedule}, {arm}", str(epoch), cells.ratio(quotients(control, line["seconds"])), accepted])
    return cells.table(["schedule, drafts", "epoch", "speed-up", "accepted"], rows) if rows else ""


def tail(results: Path) -> str:
    lines = last(results, "tail", "title", "schedule", "servers")
    rows = []
    for title, schedule in dict.fromkeys(key[:2] for key in lines):
        own = {name: lines[title, schedule, name] for name in ("main", "tail", "switch")}
        real, simulated = ({name: line[kind] for name, line in own.items()} for kind in ("seconds", "simulated"))
        cell = [f"{sum(real[name]):.1f}" for name in own]
        speeds = [quotients(min(kind["main"], kind["tail"], key=sum), kind["switch"]) for kind in (real, simulated)]
        rows.append([f"{title}: {schedule}", ", ".join(cell), *map(cells.ratio, speeds)])
    if not rows:
        return ""
    text = f"""
        `python benchmarks/tail.py`: rollouts on main servers alone, on tail servers alone, and with a switch
        between them {origin(lines)}. The speed-up is over the better of the two."""
    header = ["lengths: schedule", "seconds: main, tail, switch", "speed-up", "simulated"]
    return section("Tail servers", text, cells.table(header, rows))


def reasoner(results: Path) -> str:
    lines = last(results, "reasoner", "arm", "seed")
    rows = []
    for arm in dict.fromkeys(arm for arm, _ in lines):
        own = [line for (name, _), line in lines.items() if name == arm]
        means = [
            [float(np.mean(line[metric][-20:])) for line in own] for metric in ("reward", "completions/mean_length")
        ]
        rows.append([f"{arm} ({len(own)})", *map(cells.mean, means)])
    if not rows:
        return ""
    text = f"""
        `python benchmarks/reasoner.py`: what the tiny reasoner learns per step, means over the last 20 of 40 steps
        {origin(lines)}."""
    return section("Learning per step", text, cells.table(["arm (seeds)", "reward", "tokens of an answer"], rows))
