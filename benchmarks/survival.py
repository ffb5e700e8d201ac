"""
Sections of benchmarks/REPORT.md about what happens when servers, nodes and trainers die, and about many servers. They
are like those of `parts.py`.
"""

import statistics
from pathlib import Path

from benchmarks import cells
from benchmarks.lines import read
from benchmarks.parts import Line, last, median, origin, quotients, section


def faults(results: Path) -> str:
    lines = {str(line["options"]): line for line in read(results / "faults.jsonl")}
    rows = []
    for line in lines.values():
        asked = [
            name.replace("_", "-")
            for name, value in line["options"].items()
            if value and name not in ("kills", "freezes", "seed")
        ]
        for kind in sorted({fault["kind"] for fault in line["faults"]}):
            rows.append([f"{', '.join(asked) or 'default'}: {kind}", *_fault_cells(line, kind)])
    if not rows:
        return ""
    worst = max(line["worst"] for line in lines.values())
    rollouts = sum(len(line["rollouts"]) for line in lines.values())
    complete = sum(line["nothing_lost"] for line in lines.values())
    text = f"""
        `python benchmarks/faults.py` starts two servers with `trl-darts serve --restart`. At random moments, also
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


def nodes(results: Path) -> str:
    lines = last(results, "nodes", "fault")
    if not lines:
        return ""
    rows = []
    for line in lines.values():
        at = line["at"]
        moments = [
            f"{at[name]:.2f}" if name in at else "–" for name in ("pool knows", "Ray knows", "replacement decodes")
        ]
        rows.append([line["fault"], *moments[:2], f"{max(line['submitted'], default=0.0):.2f}", moments[2]])
    lost = "Nothing was lost." if all(line["nothing_lost"] for line in lines.values()) else "Tokens were lost."
    text = f"""
        `python benchmarks/nodes.py` kills or freezes a node of a Ray cluster in the middle of a rollout
        {origin(lines)}. Seconds from the fault on. {lost}"""
    header = ["fault", "the pool knows", "Ray knows", "all are submitted elsewhere", "the replacement decodes"]
    return section("A lost node", text, cells.table(header, rows))


def checkpoints(results: Path) -> str:
    lines = last(results, "checkpoints", "schedule")
    if not lines:
        return ""
    rows = [
        [
            line["schedule"],
            str(line["kills"]),
            f"{line['epochs']}",
            f"{median(line['tokens'])}, {max(line['tokens'])}",
            str(len(line["wrong"])),
        ]
        for line in lines.values()
    ]
    text = f"""
        `python benchmarks/checkpoints.py` kills trainers at random moments of a checkpoint; another one resumes
        from the newest complete one {origin(lines)}."""
    header = ["schedule", "kills", "epochs", "tokens restored: median, most", "prompts lost or repeated"]
    return section("Checkpoints", text, cells.table(header, rows))


def listed(results: Path) -> str:
    lines = read(results / "listed.jsonl")
    rows = []
    for size in dict.fromkeys((line["prompts"], line["tokens"]) for line in lines):
        own = [line for line in lines if (line["prompts"], line["tokens"]) == size]
        ratios = quotients([line["ray"] for line in own], [line["fixed"] for line in own])
        rows.append([f"{size[0]} × 8", str(size[1]), str(len(own)), cells.ratio(ratios)])
    text = """
        `python benchmarks/listed.py`: seconds of rollouts on servers that a list in a Ray cluster names, over those
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
        `python benchmarks/load.py`: the client with 64 stubs of servers that stream 16 tokens at a time, and 10,000
        candidates at once, `schedule="darts"`."""
    header = ["stubs", "tokens/s", "client (cores)", "delay p50, p99 (ms)", "memory (MiB)"]
    return section("The client's load", text, cells.table(header, rows)) if rows else ""
