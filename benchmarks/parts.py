"""
Sections of benchmarks/REPORT.md about single parts, from the lines that their benchmarks append.

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
from benchmarks.speedups import to_reward


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


def _until_target(run: Line) -> float:
    return run["seconds_to_target"] or math.inf


PEERS_GAINED: cells.Columns = {
    "seconds": (lambda own, base: own["seconds"], cells.mean),
    "to the reward": (lambda own, base: _until_target(own), cells.mean),
    "speed-up": (lambda own, base: _until_target(base) / _until_target(own), cells.ratio),
    "reward at the end": (lambda own, base: own["reward"], cells.mean),
}
PEERS_SPENT: cells.Columns = {
    "1,000 tokens trained on": (lambda own, base: own["trained_tokens"] / 1e3, cells.mean),
    "mean age": (lambda own, base: own["staleness"], cells.mean),
    "kept ÷ plain length": (lambda own, base: own["kept_over_plain"], cells.ratio),
    "groups thrown away": (lambda own, base: own["thrown_groups"], cells.mean),
}


def peers(results: Path) -> str:
    """What each arm took to the target, what it spent, and where its steps' seconds went."""
    lines = last(results, "peers", "arm", "seed")
    runs = list(lines.values())
    if not runs:
        return ""
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    base = "async-4" if "async-4" in arms else arms[0]
    names = {"wait": "rollout (s)", "scoring": "scoring (s)", "sync": "sync (s)", "passes": "passes (s)"}
    rows = []
    for arm in arms:
        own = [run["parts"] for run in runs if run["arm"] == arm]
        means = {name: float(np.mean([parts[name] for parts in own])) for name in own[0]}
        rows.append([arm, *(f"{means[name]:.2f}" for name in names), f"{means['rest']:.2f}"])
    text = f"""
        `python -m benchmarks.peers`: TRL's AsyncGRPO, with its `max_staleness`, and ours on one server at [a GPU's
        pace](#how-it-was-run), each from the same model {origin(lines)}. The reward is
        {runs[0]["target"]} of plain sampling, which was named before any run, and the speed-up to it is over
        *{base}*. *Age* is in optimizer steps. A step also
        takes {runs[0]["per_token"]:g} s for each token, which is in no column of the last table."""
    made = [cells.compare("arm (seeds)", {"": runs}, own, arms, base) for own in (PEERS_GAINED, PEERS_SPENT)]
    parts = cells.table(["seconds between two steps", *names.values(), "rest (s)"], rows)
    return section("Beside TRL's AsyncGRPO", text, *made, parts, *_peers_later(results))


def _peers_later(results: Path) -> list[str]:
    """Of another machine, so beside arms of its own, by the threads of the trainer."""
    blocks = []
    for threads, base in ((1, "async-4"), (2, "default")):
        lines = last(results, "peers_later", "arm", "seed", threads=threads)
        if runs := list(lines.values()):
            arms = list(dict.fromkeys(run["arm"] for run in runs))
            text = f"""
                On another machine {origin(lines)}, whose seconds are not those above, with {threads} of PyTorch's
                threads in each trainer. *Waves* have `stream_training`. Speed-ups are over its own *{base}*."""
            blocks += [prose(text), cells.compare("arm (seeds)", {"": runs}, PEERS_GAINED, arms, base)]
    return blocks


PEERS_SMOLLM2: cells.Columns = {
    "a step (s)": (lambda own, base: own["seconds"] / own["steps"], cells.mean),
    "times as fast": (lambda own, base: base["seconds"] / own["seconds"], cells.ratio),
    "tokens trained on": (lambda own, base: own["trained_tokens"], cells.mean),
    "tokens a second": (lambda own, base: own["trained_tokens"] / own["seconds"], cells.mean),
    "passes (s)": (lambda own, base: float(np.mean(own["by_step"]["passes"])), cells.mean),
    "sync (s)": (lambda own, base: float(np.mean(own["by_step"]["sync"])), cells.mean),
    "age": (lambda own, base: float(np.mean(own["by_step"]["staleness"])), cells.mean),
}


def peers_smollm2(results: Path) -> str:
    """What each arm took on the language model."""
    lines = last(results, "peers_smollm2", "arm", "seed")
    runs = list(lines.values())
    if not runs:
        return ""
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    base = "async-4" if "async-4" in arms else arms[0]
    text = f"""
        `python -m benchmarks.peers_smollm2`: SmolLM2-135M with LoRA, trainer and server on the same two cores
        {origin(lines)}. Nothing is paced. *Times as fast* is over *{base}*, with as many rows. What samples
        ahead decodes on the cores that passes need, most of all in the first step."""
    table = cells.compare("arm (seeds)", {"": runs}, PEERS_SMOLLM2, arms, base)
    return section("Beside TRL's AsyncGRPO, SmolLM2", text, table)


WAVES: cells.Columns = {
    "step (s)": (lambda own, base: own["seconds"], cells.mean),
    "÷ the longer of rollout and passes": (
        lambda own, base: own["seconds"] / max(base["rollout"], base["passes"]),
        cells.ratio,
    ),
    "times as fast": (lambda own, base: base["seconds"] / own["seconds"], cells.ratio),
    "kept ÷ pool": (lambda own, base: own["kept_over_pool"], cells.mean),
}


def waves(results: Path) -> str:
    """Steps whose training runs beside their rollout."""
    lines = last(results, "waves", "share", "seed", "arm")
    if not lines:
        return ""
    runs = list(lines.values())
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    text = f"""
        `python -m benchmarks.waves`: `stream_training` on a real server at [a GPU's pace](#how-it-was-run), where
        passes take a share of the seconds of GRPO's rollout {origin(lines)}. Rollout and passes are those of *grpo*,
        which has one after the other; *ahead* is `rollout_ahead=1`, whose rows are a step old."""
    blocks = []
    for share in sorted({run["share"] for run in runs}):
        own = [run for run in runs if run["share"] == share]
        blocks.append(cells.compare(f"passes {share:g} of a rollout (seeds)", {"": own}, WAVES, arms, "grpo"))
    return section("Training while the tail decodes", text, *blocks)


EPOCHS: cells.Columns = {
    "to GRPO's reward": (to_reward, cells.ratio),
    "rollouts": (lambda own, base: base["rollouts"] / own["rollouts"], cells.ratio),
    "decoded tokens": (lambda own, base: own["decoded"] / base["decoded"], cells.ratio),
    "reward at the end": (lambda own, base: own["reward"], cells.mean),
    "kept ÷ plain length": (lambda own, base: own["kept_over_plain"], cells.ratio),
    "distinct in a group": (lambda own, base: own["distinct"], cells.mean),
    "new since the last pass": (lambda own, base: own["new"], cells.mean),
}


def epochs(results: Path) -> str:
    """Several passes over the same prompts."""
    lines = last(results, "epochs", "world", "seed", "arm")
    if not lines:
        return ""
    runs = list(lines.values())
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    steps = " and ".join(
        f"{count} steps (*{world}*)" for world, count in {r["world"]: r["steps"] for r in runs}.items()
    )
    text = f"""
        `python -m benchmarks.epochs`: {steps} over 128 prompts, four steps a pass, on a real server at [a GPU's
        pace](#how-it-was-run) {origin(lines)}. Speed-ups are over *grpo*, and the reward is what that has after three
        quarters of its steps. *New* answers were not among those of the last pass."""
    blocks = [
        cells.compare(f"{world} (seeds)", {"": [run for run in runs if run["world"] == world]}, EPOCHS, arms, "grpo")
        for world in dict.fromkeys(run["world"] for run in runs)
    ]
    return section("Several passes over the same prompts", text, *blocks)


AGENTS: cells.Columns = {
    "step (s)": (lambda own, base: own["seconds"], cells.mean),
    "as fast as *lockstep*": (lambda own, base: base["seconds"] / own["seconds"], cells.ratio),
    "all calls per row": (lambda own, base: own["calls_per_row"], cells.mean),
    "kept ÷ plain calls": (lambda own, base: own["kept_calls"] / base["kept_calls"], cells.ratio),
    "kept ÷ plain tokens": (lambda own, base: own["kept_tokens"] / base["kept_tokens"], cells.ratio),
}


def agents(results: Path) -> str:
    """Steps with tools."""
    lines = last(results, "agents", "seed", "arm")
    if not lines:
        return ""
    runs = list(lines.values())
    text = f"""
        `python -m benchmarks.agents`: {runs[0]["rows"]} conversations a step on a real server at [a GPU's
        pace](#how-it-was-run), up to six turns, with tools of 0.05 to 5 s {origin(lines)}. *lockstep* is TRL's loop on
        the same server; *grpo* runs each conversation by itself; *default* also has spare candidates, and waits for
        all in one rollout of four; *unguarded* in none. Calls and tokens of the kept rows are over *lockstep*'s."""
    arms = ["lockstep", "grpo", "default", "unguarded"]
    table = cells.compare("arm (seeds)", {"": runs}, AGENTS, arms, "lockstep")
    return section("Conversations with tools", text, table)


def _until(run: dict[str, Any]) -> float:
    """Seconds until the reward was there, or all of them."""
    return float(min(run["to_goal"], run["seconds"]))


AGENT_EXAMPLE: cells.Columns = {
    "seconds to reward 0.7": (lambda own, base: _until(own), cells.mean),
    "as early as *lockstep*": (lambda own, base: _until(base) / _until(own), cells.ratio),
    "reached it": (lambda own, base: float(np.isfinite(own["to_goal"])), cells.mean),
    "all seconds": (lambda own, base: own["seconds"], cells.mean),
    "held-out accuracy before": (lambda own, base: own["before"], cells.mean),
    "after": (lambda own, base: own["after"], cells.mean),
}


def agent_example(results: Path) -> str:
    """The agent of `examples/agent`."""
    lines = last(results, "agent_example", "seed", "arm")
    if not lines:
        return ""
    runs = list(lines.values())
    text = f"""
        `python -m benchmarks.agent_example`: {runs[0]["steps"]} steps of `examples/agent` {origin(lines)}, 8 questions
        × 8 conversations, on a real server without a pace. Its tools take milliseconds, and trainer and server share
        the cores. A run that does not reach the reward counts with all of its seconds."""
    table = cells.compare("arm (seeds)", {"": runs}, AGENT_EXAMPLE, ["lockstep", "grpo", "default"], "lockstep")
    return section("The example's agent", text, table)


HOMES: cells.Columns = {
    "prompt tokens found in a cache": (lambda own, base: own["hit"] / own["queried"], cells.mean),
    **{
        f"turn {turn}": (lambda own, base, turn=turn: own["found_by_turn"][turn], cells.mean)
        for turn in (0, 1, 2, 4, 7)
    },
    "turns": (lambda own, base: own["turns"], cells.mean),
}


SMALL_CACHE: cells.Columns = {
    "prompt tokens found in a cache": (lambda own, base: own["hit"] / own["queried"], cells.mean),
    "a rollout (s)": (lambda own, base: own["seconds"], cells.mean),
    "times as fast": (lambda own, base: base["seconds"] / own["seconds"], cells.ratio),
}


def homes(results: Path) -> str:
    """What turns find in prefix caches."""
    lines = last(results, "homes", "seed", "arm")
    if not lines:
        return ""
    text = f"""
        `python -m benchmarks.homes`: two real servers, 64 conversations of up to eight turns {origin(lines)}. With
        *homes*, a conversation's turns go to the server that has its beginning; *least_loaded* takes no account of
        it. *small* has homes, and caches that a dozen conversations fill; the number is
        `max_concurrent_conversations`. In *long*, tools answer with a thousand tokens, and caches are as much larger.
        Nothing is paced."""
    runs = list(lines.values())
    found = [cells.compare("arm (seeds)", {"": runs}, HOMES, ["homes", "least_loaded"], "homes")]
    for kind in ("small", "long"):
        if own := [run for run in runs if run["arm"].startswith(kind)]:
            arms = list(dict.fromkeys(run["arm"] for run in own))
            found.append(cells.compare("arm (seeds)", {"": own}, SMALL_CACHE, arms, kind))
    return section("Homes of conversations", text, *found)


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
        theirs, ours = line["seconds"].values()
        tokens = ", ".join(f"{number:,}" for number in dict.fromkeys(line["tokens"].values()))
        rows.append([line["workload"], tokens, median(theirs), median(ours), cells.ratio(quotients(theirs, ours))])
    line = next(iter(lines.values()))
    text = f"""
        `python -m benchmarks.server_overhead`: generation by TRL's path, one request with all prompts, and by ours,
        one request per candidate. {line["prompts"]} prompts × {line["generations"]}, `schedule="grpo"`
        {origin(lines)}. With a few tokens per answer, requests are all that takes time, and ours lose."""
    header = ["workload", "tokens", "TRL (s)", "trl_darts (s)", "TRL ÷ trl_darts"]
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
