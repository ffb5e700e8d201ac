"""
Sections of benchmarks/REPORT.md about whole trainings: beside a peer, with tools, over several passes. As in
`parts.py`, each function returns nothing as long as there are no lines.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cells
from benchmarks.parts import last, origin, prose, section
from benchmarks.speedups import to_reward, until_target


PEERS_GAINED: cells.Columns = {
    "seconds": (lambda own, base: own["seconds"], cells.mean),
    "to the reward": (lambda own, base: until_target(own), cells.mean),
    "speed-up": (lambda own, base: until_target(base) / until_target(own), cells.ratio),
    "without syncs": (lambda own, base: until_target(base, False) / until_target(own, False), cells.ratio),
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
    arms = cells.arms_of(runs)
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
    found = (
        ("peers_fast", 1, "async-4", "Since candidates share HTTP requests, and with AVX-512"),
        ("peers_shared", 1, "async-4", "Since candidates share HTTP requests (*apart*: one for each)"),
        ("peers_rows_first", 1, "async-4", "Since spare candidates start after all rows"),
        ("peers_later", 1, "async-4", "Before that"),
        ("peers_later", 2, "default", "Before that"),
    )
    blocks = []
    for name, threads, base, when in found:
        lines = last(results, name, "arm", "seed", threads=threads)
        if runs := list(lines.values()):
            arms = cells.arms_of(runs)
            text = f"""
                {when}, on another machine {origin(lines)}, whose seconds are not those above, with {threads} of
                PyTorch's threads in each trainer. *Waves* have `stream_training`. Speed-ups are over its own
                *{base}*."""
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
    arms = cells.arms_of(runs)
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
    shares = _by_share(lines.values())
    paces = [[run["per_token"] for run in runs] for runs in shares.values()]
    text = f"""
        `python -m benchmarks.waves`: `stream_training` on a real server at [a GPU's pace](#how-it-was-run), where
        passes take a share of the seconds of GRPO's rollout {origin(lines)}. Rollout and passes are those of *grpo*,
        which has one after the other; *ahead* is `rollout_ahead=1`, whose rows are a step old. The seconds of a
        token's passes were measured anew when arms were added, and differ by up to
        {max(max(own) / min(own) for own in paces) - 1:.0%} within a table."""
    blocks = _waves(shares)
    if earlier := last(results, "waves_slower", "share", "seed", "arm"):
        when = f"""
            Before waves stopped waiting for the answers to their aborts, on a slower machine {origin(earlier)}."""
        blocks += [prose(when), *_waves(_by_share(earlier.values()))]
    return section("Training while the tail decodes", text, *blocks)


def _by_share(runs: Iterable[Any]) -> dict[float, list[Any]]:
    share = itemgetter("share")
    return {value: [*own] for value, own in groupby(sorted(runs, key=share), share)}


def _waves(shares: Mapping[float, list[Any]]) -> list[str]:
    """Returns a table for each share."""
    return [
        cells.compare(f"passes {share:g} of a rollout (seeds)", {"": runs}, WAVES, cells.arms_of(runs), "grpo")
        for share, runs in shares.items()
    ]


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
    arms = cells.arms_of(runs)
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
            arms = cells.arms_of(own)
            found.append(cells.compare("arm (seeds)", {"": own}, SMALL_CACHE, arms, kind))
    return section("Homes of conversations", text, *found)
