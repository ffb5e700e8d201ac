"""
Measures the cost of drafts, and the time that they save.

    python benchmarks/drafts.py [--only cost|replay|servers] [--engines 4] [--prompts 16] [--epochs 3] [--steps 3]

- cost: microseconds of the drafter by the number of tokens in its index.
- replay: answers that the tiny reasoner sampled are decoded with the drafter, epoch by epoch. A step that verifies `T`
  tokens takes `1 + T / KNEE`. `--servers 2` compares all answers to a prompt on one server with answers spread over
  two, where each has fewer siblings to draft from.
- servers: rollouts on real servers of a Markov chain, one server at a time, at a GPU's pace (see `pacing.py`). A
  drafted token takes as much time as one more sequence. The arms are no drafts (synchronous, model runner V1, as
  drafts require), vLLM's `ngram`, and our `suffix`. All replay the same lengths; in the first epoch, no prompt has a
  history. `--follow` is the probability that the chain takes its most likely step. `--engines` is the number of
  engines that a server represents; with 1, it is nearly full.

Results are appended to benchmarks/results/drafts.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.cells import ratio
from benchmarks.decoding import Decoding, make_drafter
from benchmarks.lines import record
from benchmarks.models import make_markov_model, make_tokenizer
from benchmarks.pacing import CURVES, NUM_ENGINES, SCALE, paced_server, scaled
from benchmarks.vllm_server import V1_RUNNER, VLLMServer
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.scheduling import GroupPlan, Scheduler, ScheduleSettings
from trl_darts.serving.options import SPECULATIVE
from trl_darts.speculation.index import SuffixIndex


NUM_GENERATIONS, MAX_NUM_GENERATIONS = 8, 12
MAX_LENGTH = 1000
ARMS: dict[str, dict[str, Any]] = {
    "no drafts": {},
    "ngram": {"speculative_config": SPECULATIVE["ngram"]},
    "suffix": {"speculative_config": SPECULATIVE["suffix"]},
}
KNEE = 64.0
REASONER = Path(__file__).resolve().parents[1] / "examples" / "tiny_reasoner"
CHECKPOINT = REASONER / "checkpoint"
COUNTED = ("drafts", "draft_tokens", "accepted_tokens")
POSITIONS = (1, 2, 4, 8, 16)  # in a draft
console = Console(width=150)


def cost(rng: np.random.Generator) -> None:
    """Measures and records the index alone, on texts of which half is repeated."""
    table = Table("tokens in the index", "add, µs per token", "propose 8, µs", title="Cost of the index")
    for num_texts in (8, 32, 128):
        phrases = rng.integers(0, 50_000, (200, 16))
        texts = [phrases[rng.integers(0, 200, 125)].ravel() for _ in range(num_texts)]
        for text in texts:
            text[rng.random(text.size) < 0.1] = 7
        index = SuffixIndex()
        start = time.perf_counter()
        for text in texts:
            index.add(text.tolist())
        added = (time.perf_counter() - start) / (num_texts * texts[0].size)
        name, times = index.add([]), []
        for token in texts[0].tolist():
            index.extend(name, [token])
            start = time.perf_counter()
            index.propose(name, 8)
            times.append(time.perf_counter() - start)
        size, proposed = num_texts * texts[0].size, statistics.mean(times)
        record("drafts", {"part": "cost", "tokens": size, "add_s": added, "propose_s": proposed})
        table.add_row(f"{size:,}", f"{added * 1e6:.2f}", f"{proposed * 1e6:.1f}")
    console.print(table)


def sample(num_prompts: int, epochs: int, seed: int) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Yields prompts and answers of the tiny reasoner, epoch by epoch."""
    sys.path.insert(0, str(REASONER))
    from task import make_dataset

    torch.manual_seed(seed)
    tokenizer, model = AutoTokenizer.from_pretrained(CHECKPOINT), AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    texts = [row["prompt"] for row in make_dataset(num_prompts, seed)]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    width = inputs["input_ids"].shape[1]
    for _ in range(epochs):
        answers = []
        rows = model.generate(**inputs, do_sample=True, max_new_tokens=256, num_return_sequences=NUM_GENERATIONS)
        for index, row in enumerate(rows[:, width:].tolist()):
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            answers.append((tokenizer(texts[index // NUM_GENERATIONS])["input_ids"], row[:end]))
        yield answers


def replay(num_prompts: int, epochs: int, seed: int, num_servers: int) -> list[dict[str, Any]]:
    """Prints and returns what the drafter saves on real answers in modelled time, which has no noise."""
    found: list[dict[str, Any]] = []
    data = list(sample(num_prompts, epochs, seed))
    placements = {"spread": range(num_prompts * NUM_GENERATIONS)}
    if num_servers > 1:
        placements["together"] = np.arange(num_prompts).repeat(NUM_GENERATIONS)
    columns = ("answers of a prompt", "epoch", "longest answer", "time", "accepted", "per draft")
    table = Table(*columns, title=f"Tiny reasoner, replayed on {num_servers} server(s)")
    for name, places in placements.items():
        servers = [Decoding(make_drafter(16)) for _ in range(num_servers)]
        for epoch, answers in enumerate(data):
            for number, (place, (prompt, answer)) in enumerate(zip(places, answers, strict=True)):
                servers[place % num_servers].add(f"{epoch}.{number}", prompt, answer)
            runs = [decode(server) for server in servers]
            control, seconds, *counted = zip(*runs, strict=True)
            accepted, drafted, num_drafts = map(sum, counted)
            longest = str(max(len(answer) for _, answer in answers))
            facts = {"placement": name, "epoch": epoch + 1, "longest": int(longest), "control": max(control)}
            facts |= {"time": max(seconds), "accepted": accepted, "drafted": drafted, "drafts": num_drafts}
            found.append({"part": "replay", "seed": seed, "servers": num_servers, **facts})
            time_saved = f"{max(control) / max(seconds):.2f}×, {max(seconds):.0f}"
            shares = f"{accepted / drafted:.0%}", f"{accepted / num_drafts:.2f}"
            table.add_row(name, str(epoch + 1), longest, time_saved, *shares)
    console.print(table)
    return found


def decode(decoding: Decoding) -> tuple[float, float, int, int, int]:
    """Returns the time without and with drafts, and the numbers of accepted tokens, drafted tokens and drafts."""
    lengths = np.array([len(decoding.going_to_write[name]) for name in decoding.rows])
    control = sum(1 + (lengths > step).sum() / KNEE for step in range(lengths.max()))
    before, seconds, drafted = decoding.num_accepted, 0.0, []
    while decoding.rows:
        sizes = [len(decoding.drafts.get(name, [])) for name in decoding.rows]
        drafted += [size for size in sizes if size]
        seconds += 1 + (len(sizes) + sum(sizes)) / KNEE
        decoding.step()
    decoding.drafter.new_policy()
    if decoding.drafter.num_failures:  # it survives them, and drafts nothing
        raise RuntimeError("Drafting failed, see the warning above.")
    return control, seconds, decoding.num_accepted - before, sum(drafted), len(drafted)


def rollout(server: VLLMServer, schedule: str, lengths: np.ndarray, prompts: list[list[int]]) -> float:
    """Returns the seconds of one rollout with these lengths, `(N, M_up)`."""
    per_prompt = MAX_NUM_GENERATIONS if schedule == "darts" else NUM_GENERATIONS
    settings = ScheduleSettings(schedule, NUM_GENERATIONS, max_num_generations=per_prompt, long_end_patience=None)
    plans = [GroupPlan(group, per_prompt) for group in range(len(prompts))]
    body = {"model": server.model, "temperature": 1.0, "ignore_eos": True}
    engine = VLLMServerEngine([server.base_url])
    start = time.perf_counter()
    try:
        engine.run(
            Scheduler(settings.policies(), NUM_GENERATIONS),
            plans,
            [[ServerPrompt(prompt)] for prompt in prompts],
            body,
            lambda command: {"max_tokens": int(lengths[command.group_id, command.index])},
        )
    finally:
        engine.close()
    return time.perf_counter() - start


def training(
    rng: np.random.Generator, num_prompts: int, num_batches: int, epochs: int
) -> Iterator[tuple[int, Any, Any]]:
    """Yields epoch, lengths and prompts of each step. Lengths are log-normal, with p99 / p50 of about 10."""
    prompts = [[3 + number % 90, 3 + number // 90, 60] for number in range(num_prompts * num_batches)]
    means = rng.normal(np.log(60), 0.7, len(prompts))
    for epoch in range(epochs):
        for batch in range(num_batches):
            rows = slice(batch * num_prompts, (batch + 1) * num_prompts)
            drawn = rng.lognormal(means[rows, None], 0.6, (num_prompts, MAX_NUM_GENERATIONS))
            yield epoch, np.clip(drawn, 2, MAX_LENGTH).astype(int), prompts[rows]


def counts(server: VLLMServer) -> np.ndarray:
    """Returns counts of drafts, drafted and accepted tokens, and of drafts accepted up to each of `POSITIONS`."""
    by_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    own = [server.metric(f"vllm:spec_decode_num_{name}_total") for name in COUNTED]
    return np.array([*own, *(server.metric(by_position, f'position="{place - 1}"') for place in POSITIONS)])


def servers(args: argparse.Namespace) -> None:
    """Runs each step on all arms in turn, and prints tables."""
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = make_markov_model(Path(directory) / "markov", make_tokenizer(), follow=args.follow)
        curve = scaled(CURVES["llama-8b"], SCALE, args.engines)
        common = {"env": V1_RUNNER, "max_num_seqs": 512}
        paced = {
            name: stack.enter_context(paced_server(model, curve, **common, **options))
            for name, options in ARMS.items()
        }
        running = {name: server for name, (server, _) in paced.items()}
        for schedule in args.schedules.split(","):
            seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
            drafted: dict[tuple[str, int], np.ndarray] = defaultdict(lambda: np.zeros(len(COUNTED) + len(POSITIONS)))
            for epoch, lengths, prompts in training(rng, args.prompts, args.steps, args.epochs):
                for name in rng.permutation(list(running)).tolist():
                    before = counts(running[name])
                    seconds[name, epoch].append(rollout(running[name], schedule, lengths, prompts))
                    drafted[name, epoch] += counts(running[name]) - before
                    console.log(f"{schedule}, epoch {epoch + 1}, {name}: {seconds[name, epoch][-1]:.1f} s")
            for name, epoch in seconds:
                facts = {"arm": name, "epoch": epoch + 1, "seconds": seconds[name, epoch]}
                facts |= {"counts": drafted[name, epoch].tolist()}
                record("drafts", {"part": "servers", "options": vars(args), "schedule": schedule, **facts})
            show(schedule, seconds, drafted, args.epochs)
        for name, (_, pace) in paced.items():
            console.print(f"{name}: {pace()}")


def show(schedule: str, seconds: Any, drafted: Any, epochs: int) -> None:
    """Prints seconds of each epoch, and the speed relative to no drafts."""
    title = (
        f"{schedule}: seconds of rollouts, ratio with a 95 % interval over steps; accepted tokens per draft, and "
        f"their share; share of drafts with {', '.join(map(str, POSITIONS))} accepted tokens"
    )
    table = Table("arm", *(f"epoch {epoch + 1}" for epoch in range(epochs)), title=title)
    for name in ARMS:
        cells = []
        for epoch in range(epochs):
            own, control = seconds[name, epoch], seconds["no drafts", epoch]
            cell = f"{sum(own):.1f}, {ratio([other / mine for mine, other in zip(own, control, strict=True)])}"
            number, tokens, accepted, *places = drafted[name, epoch]
            if number:
                cell += f"; {accepted / number:.2f}, {accepted / tokens:.0%}"
                cell += f"; {', '.join(f'{count / number:.0%}' for count in places)}"
            cells.append(cell)
        table.add_row(name, *cells)
    console.print(table)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("cost", "replay", "servers"))
    parser.add_argument("--follow", type=float, default=0.9)
    parser.add_argument("--engines", type=int, default=NUM_ENGINES)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--servers", type=int, default=1, help="number of servers in the replay")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps per epoch")
    parser.add_argument("--schedules", default="grpo,darts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.only in (None, "cost"):
        cost(np.random.default_rng(args.seed))
    if args.only in (None, "replay"):
        for line in replay(args.prompts, args.epochs, args.seed, args.servers):
            record("drafts", line)
    if args.only in (None, "servers"):
        servers(args)


if __name__ == "__main__":
    main()
