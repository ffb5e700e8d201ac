"""
Rollouts of SmolLM2-135M-Instruct, by every schedule, on the lengths of its own answers.

    python benchmarks/smollm2_rollouts.py lengths|bare|paced|simulated|drafts [--rows main|others] [--repeats 5]
                                          [--machine cpu|gpu]

- lengths: samples 16 answers to each prompt of examples/smollm2 (on a CPU, to 64 of them) on a real server.
- bare: every row decodes answers of these lengths on a real server of the model in bfloat16, as fast as possible.
- paced: the same lengths on a real server of a tiny model at a GPU's pace (`pacing.py`).
- simulated: the same lengths in virtual time, by the machine's profile and, for a CPU's, by the published curve of an
  8 B model.
- drafts: GRPO's rollouts as in `bare`, on a server that drafts (`suffix`) over one that does not.

A repeat has the prompts of two steps: a first epoch in which no lengths are known, and a second one. A step has 8 × 8
rows, and 16 × 8 on a GPU, where answers have up to 512 tokens instead of 256.
Rows take turns step by step, and are compared with GRPO's row of the same repeat, so that the load of a shared machine
affects all of them. Each repeat is a line of `benchmarks/results/smollm2.rollouts.jsonl`, and is run once: a later
call goes on where this one stopped. `--rows main` are GRPO, DARTS as in the paper, and the default.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "smollm2"))

import numpy as np
import requests
from tasks import TEMPERATURE, accuracy_reward, make_dataset
from transformers import AutoTokenizer

from benchmarks import cells
from benchmarks.lines import append, read
from benchmarks.pacing import CURVES, NUM_ENGINES, SCALE, scaled
from benchmarks.schedules import DEFAULT, GRPO, ROWS, Replay, Row, ServerCluster, console, server_of, train
from benchmarks.vllm_server import start_vllm_server
from trl_darts.analysis.simulation import ClusterSpec, RecordedLengths, Workload
from trl_darts.engines.addresses import key_of
from trl_darts.engines.vllm_api import draft_counts
from trl_darts.policy import LatencyProfile
from trl_darts.serving.options import SPECULATIVE


ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "examples" / "smollm2" / "checkpoint"
RESULTS = ROOT / "benchmarks" / "results"
ROLLOUTS = "smollm2.rollouts.jsonl"
DRAFTS = "bare, drafts"  # the pace of rows with and without them
NUM_ANSWERS, NUM_GENERATIONS, BATCHES, EPOCHS = 16, 8, 2, 2
AT_ONCE = 20  # prompts
MAIN = ("grpo", "darts (paper)", "default")
GROUPS = {"main": MAIN, "others": ("grpo", *(row.name for row in ROWS if row.name not in MAIN))}


@dataclass(frozen=True)
class Machine:
    """What a machine decodes in the minutes of a benchmark."""

    pace: str
    lengths: str  # file of the recorded answers
    num_prompts: int  # with recorded answers
    limit: int  # tokens
    prompts: int  # per step
    slots: int  # of a server without a queue
    profile: str  # file of its latency profile
    server: Mapping[str, Any]  # options

    @property
    def rows(self) -> int:
        return self.prompts * NUM_GENERATIONS

    @property
    def spec(self) -> ClusterSpec:
        """Returns a simulated engine with its profile and room for all sequences."""
        profile = LatencyProfile.load(RESULTS / self.profile)
        return ClusterSpec.of(profile.curve, profile.prefill, max_num_seqs=None)


MACHINES = {
    "cpu": Machine(
        "bare",
        "smollm2.lengths.jsonl",
        num_prompts=64,
        limit=256,
        prompts=8,
        slots=128,
        profile="smollm2.cpu.latency.json",
        server={"max_model_len": 1024, "env": {"VLLM_CPU_KVCACHE_SPACE": "2"}},
    ),
    "gpu": Machine(
        "gpu",
        "smollm2.gpu.lengths.jsonl",
        num_prompts=128,
        limit=512,
        prompts=16,
        slots=256,
        profile="smollm2.gpu.latency.json",  # of an H100
        # A part of the memory, because the trainer is on the same GPU
        server={"max_model_len": 2048, "enforce_eager": None, "gpu_memory_utilization": 0.25},
    ),
}
CPU = MACHINES["cpu"]


@contextmanager
def smollm2_server(
    max_num_seqs: int | None = None, machine: Machine = CPU, base_url: str | None = None, **options: Any
) -> Iterator[str]:
    """Yields the address of a server of the model in bfloat16, which is started unless `base_url` names one."""
    if base_url is not None:
        yield base_url
        return
    fields = {"dtype": "bfloat16", "max_num_seqs": max_num_seqs or machine.slots, **machine.server, **options}
    with start_vllm_server(CHECKPOINT, timeout_s=600, **fields) as server:
        yield server.base_url


def read_lengths(path: Path) -> list[dict[str, Any]]:
    """Returns the recorded answers by prompt."""
    return sorted(read(path), key=lambda line: line["prompt"])


# Lengths


def sample(
    url: str, prompts: Sequence[Sequence[int]], num_answers: int, limit: int = CPU.limit, **fields: Any
) -> list[dict[str, Any]]:
    """Asks a server for answers to prompts, and returns its choices, by prompt."""
    body = {"model": str(CHECKPOINT), "prompt": list(prompts), "n": num_answers, "max_tokens": limit}
    body |= {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": 0, "return_token_ids": True, **fields}
    key = key_of(url)  # of a server of `trl-darts serve`
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=3600)
    response.raise_for_status()
    choices: list[dict[str, Any]] = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    return choices


def tokens_of(dataset: Any) -> list[list[int]]:
    """Returns the tokens of its prompts."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    return [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        for prompt in dataset["prompt"]
    ]


def score(dataset: Any, choices: Sequence[dict[str, Any]], num_answers: int) -> list[float]:
    """Returns the rewards of answers to its prompts."""
    rows = [dataset[number // num_answers] for number in range(len(choices))]
    completions = [[{"role": "assistant", "content": choice["text"]}] for choice in choices]
    return accuracy_reward(completions, [row["family"] for row in rows], [row["entry"] for row in rows])


def record_lengths(path: Path, machine: Machine, base_url: str | None) -> None:
    """Samples the answers of prompts that have none yet."""
    dataset = make_dataset(machine.num_prompts)
    prompts, known = tokens_of(dataset), {line["prompt"] for line in read(path)}
    if not (todo := [place for place in range(machine.num_prompts) if place not in known]):
        return
    with smollm2_server(machine=machine, base_url=base_url) as url:
        for first in range(0, len(todo), AT_ONCE):
            places = todo[first : first + AT_ONCE]
            choices = sample(url, [prompts[place] for place in places], NUM_ANSWERS, machine.limit)
            rewards = score(dataset.select(places), choices, NUM_ANSWERS)
            for number, place in enumerate(places):
                own = slice(number * NUM_ANSWERS, (number + 1) * NUM_ANSWERS)
                lengths = [len(choice["token_ids"]) for choice in choices[own]]
                cut = [choice["finish_reason"] == "length" for choice in choices[own]]
                line = {"prompt": place, "family": dataset[place]["family"], "lengths": lengths, "cut": cut}
                append(path, line | {"rewards": rewards[own]})
            console.print(f"{first + len(places)} of {len(todo)} prompts")


# Rollouts


@dataclass(frozen=True)
class Recorded:
    """The prompts of a repeat, with the lengths of their answers. Takes the place of `schedules.Size`."""

    lines: Sequence[dict[str, Any]]
    prompts: int
    rows: int
    limit: int
    num_generations: int = NUM_GENERATIONS
    steps: int = EPOCHS * BATCHES

    @classmethod
    def of(cls, lines: Sequence[dict[str, Any]], repeat: int, machine: Machine = CPU) -> "Recorded":
        """Returns the prompts of a repeat. They recur after all were used."""
        size = machine.prompts * BATCHES
        first = repeat * size % len(lines)
        return cls(lines[first : first + size], machine.prompts, machine.rows, machine.limit)

    @property
    def workload(self) -> Workload:
        """Returns the workload with these lengths."""
        lengths = RecordedLengths([own["lengths"] for own in self.lines], [own["cut"] for own in self.lines])
        return Workload(lengths, self.prompts, self.limit)


class SmolLM2Cluster(ServerCluster):
    """A server of the model, with the prompts of a repeat."""

    eos_id = 2

    def __init__(self, url: str, prompts: Sequence[list[int]]) -> None:
        super().__init__(url)
        self.prompts = prompts

    def prompt(self, key: int) -> list[int]:
        """Returns the tokens of a prompt of the workload."""
        return self.prompts[key]


class DraftingCluster(SmolLM2Cluster):
    """The same for a server that drafts, which refuses `logit_bias`: answers go on where they would have ended."""

    sampling: Mapping[str, Any] = {"temperature": TEMPERATURE}

    def of_length(self, tokens: int, max_length: int) -> dict[str, Any]:
        """Returns the parameters of an answer with this length."""
        return {"max_tokens": min(tokens, max_length), "ignore_eos": True}


@contextmanager
def clusters_of(
    kind: type[SmolLM2Cluster], urls: Mapping[Any, str], lines: Sequence[dict[str, Any]], prompts: Sequence[list[int]]
) -> Iterator[dict[Any, Any]]:
    """Yields a cluster for each server, with the prompts of a repeat, and closes them."""
    own = [prompts[line["prompt"]] for line in lines]
    clusters = {name: kind(url, own) for name, url in urls.items()}
    yield clusters
    for cluster in clusters.values():
        cluster.engine.close()


def facts(replay: Replay) -> dict[str, Any]:
    """Returns what is stored of a row: seconds of each step, and totals."""
    total = replay.total
    seconds = [float(f"{value:.5g}") for value in replay.outcome.rollout_seconds]
    return {"seconds": seconds, "wasted": round(total.wasted, 4), "off_policy": round(total.off_policy, 4)}


def missing(path: Path, pace: str, group: str, repeats: int) -> list[int]:
    """Returns the repeats that were not run yet."""
    done = {line["repeat"] for line in read(path) if (line["pace"], line["group"]) == (pace, group)}
    return [repeat for repeat in range(repeats) if repeat not in done]


def rows_of(group: str) -> list[Row]:
    return [row for row in ROWS if row.name in GROUPS[group]]


def run_repeat(
    path: Path,
    pace: str,
    group: str,
    repeat: int,
    replays: Mapping[str, Replay],
    count: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Runs all rows of a group, by their names, step by step in turn, and appends a line, with the counts."""
    train([*replays.values()], EPOCHS * BATCHES)
    rows = {name: facts(replay) for name, replay in replays.items()}
    append(path, {"pace": pace, "group": group, "repeat": repeat, "rows": rows, **count()})
    console.print(pace, group, repeat, {name: sum(own["seconds"]) for name, own in rows.items()})


def run_bare(
    path: Path, lines: Sequence[dict[str, Any]], group: str, repeats: int, machine: Machine, base_url: str | None
) -> None:
    """Runs what is missing on real servers of the model: one without a queue, and one with N × M slots."""
    if not (todo := missing(path, machine.pace, group, repeats)):
        return
    prompts, spec = tokens_of(make_dataset(machine.num_prompts)), machine.spec
    with ExitStack() as stack:
        rows = rows_of(group)
        urls = {False: stack.enter_context(smollm2_server(machine=machine, base_url=base_url))}
        if any(row.capped for row in rows):
            urls[True] = stack.enter_context(smollm2_server(machine.rows, machine))
        for repeat in todo:
            size: Any = Recorded.of(lines, repeat, machine)
            with clusters_of(SmolLM2Cluster, urls, size.lines, prompts) as clusters:
                replays = {row.name: Replay(row, size, spec, clusters[row.capped], repeat) for row in rows}
                run_repeat(path, machine.pace, group, repeat, replays)


def run_paced(path: Path, lines: Sequence[dict[str, Any]], group: str, repeats: int) -> None:
    """Runs what is missing on a real server at a GPU's pace."""
    curve = scaled(CURVES["llama-8b"], SCALE, NUM_ENGINES)
    rows = rows_of(group)
    for repeat in missing(path, "paced", group, repeats):
        size: Any = Recorded.of(lines, repeat)
        with ExitStack() as stack:
            capped = {row.capped: size.rows if row.capped else None for row in rows}
            servers = {own: stack.enter_context(server_of(curve, slots, size)) for own, slots in capped.items()}
            replays = {
                row.name: Replay(row, size, servers[row.capped][1], servers[row.capped][0], repeat) for row in rows
            }
            run_repeat(path, "paced", group, repeat, replays)


def run_simulated(path: Path, lines: Sequence[dict[str, Any]], repeats: int, machine: Machine = CPU) -> None:
    """Runs what is missing in virtual time, by each curve."""
    specs = {f"{machine.pace}, simulated": machine.spec}
    if machine is CPU:
        specs["paced, simulated"] = ClusterSpec(scaled(CURVES["llama-8b"], SCALE, NUM_ENGINES))
    for pace, spec in specs.items():
        for group in GROUPS:
            for repeat in missing(path, pace, group, repeats):
                size: Any = Recorded.of(lines, repeat, machine)
                replays = {row.name: Replay(row, size, spec, seed=repeat) for row in rows_of(group)}
                run_repeat(path, pace, group, repeat, replays)


def run_drafts(path: Path, lines: Sequence[dict[str, Any]], repeats: int) -> None:
    """Runs what is missing on two real servers of the model, of which one drafts, and prints its speed."""
    prompts, spec = tokens_of(make_dataset(CPU.num_prompts)), CPU.spec
    with ExitStack() as stack:
        methods = {GRPO.name: None, "suffix": SPECULATIVE["suffix"]}
        urls = {name: stack.enter_context(smollm2_server(speculative_config=own)) for name, own in methods.items()}
        for repeat in missing(path, DRAFTS, "drafts", repeats):
            size: Any = Recorded.of(lines, repeat)
            with clusters_of(DraftingCluster, urls, size.lines, prompts) as clusters:
                replays = {name: Replay(GRPO, size, spec, cluster, repeat) for name, cluster in clusters.items()}
                run_repeat(path, DRAFTS, "drafts", repeat, replays, partial(drafted, clusters["suffix"].engine))
    console.print("speed with drafts", cells.ratio(ratios(read(path), DRAFTS, "suffix", slice(None))))


def drafted(engine: Any) -> dict[str, Any]:
    """Returns the counts of a server's drafts since it started."""
    (counts,) = engine.query(draft_counts).values()
    return {"drafts": asdict(counts)}


# The report


def ratios(results: Sequence[dict[str, Any]], pace: str, name: str, epoch: slice) -> list[float]:
    """Returns GRPO's seconds over a row's, by repeat, in some of the steps."""
    return [
        sum(line["rows"][GRPO.name]["seconds"][epoch]) / sum(line["rows"][name]["seconds"][epoch])
        for line in results
        if line["pace"] == pace and name in line["rows"]
    ]


def rollouts_table(results: Sequence[dict[str, Any]], pace: str) -> str:
    """Returns the table of speeds over GRPO's in the first epoch and in the second one, real and simulated."""
    epochs = {"new prompts": slice(0, BATCHES), "known lengths": slice(BATCHES, None)}
    columns = {
        f"{name}{kind}": (pace + suffix, epoch)
        for kind, suffix in (("", ""), (", simulated", ", simulated"))
        for name, epoch in epochs.items()
    }
    rows = [
        [row.name, *(cells.ratio(ratios(results, own, row.name, epoch)) for own, epoch in columns.values())]
        for row in ROWS
    ]
    numbers = [len(ratios(results, own, DEFAULT.name, slice(None))) for own in (pace, f"{pace}, simulated")]
    caption = f"{numbers[0]} repeats on the server and {numbers[1]} simulated, twice as many of GRPO."
    return f"{caption}\n\n{cells.table(['schedule', *columns], rows)}"


def shares_table(results: Sequence[dict[str, Any]], pace: str) -> str:
    """Returns the shares of wasted and of off-policy tokens in virtual time."""
    found = [line["rows"] for line in results if line["pace"] == f"{pace}, simulated"]
    rows = []
    for row in ROWS:
        own = [line[row.name] for line in found if row.name in line]
        rows.append([row.name, *(f"{np.mean([run[name] for run in own]):.0%}" for name in ("wasted", "off_policy"))])
    return cells.table(["schedule", "wasted", "off-policy"], rows)


def agreement_table(results: Sequence[dict[str, Any]]) -> str:
    """Returns the server's speed-ups over the simulator's in the same repeats, with known lengths."""
    rows = []
    for row in [row for row in ROWS if row is not GRPO]:
        own = []
        for pace in ("bare", "paced"):
            known = slice(BATCHES, None)
            real = ratios(results, pace, row.name, known)
            simulated = ratios(results, f"{pace}, simulated", row.name, known)[: len(real)]
            own.append(cells.ratio([a / b for a, b in zip(real, simulated, strict=True)]))
        rows.append([row.name, *own])
    return cells.table(["schedule", "two cores", "at a GPU's pace"], rows)


def lengths_table(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the table of the recorded answers by family."""
    rows = []
    for family in [*dict.fromkeys(line["family"] for line in lines), "all"]:
        own = [line for line in lines if family in (line["family"], "all")]
        rewards = np.array([line["rewards"] for line in own])
        percentiles = np.percentile([line["lengths"] for line in own], (50, 90, 99))
        both = np.mean([0 < reward.mean() < 1 for reward in rewards[:, :NUM_GENERATIONS]])
        lengths = ", ".join(f"{value:.0f}" for value in percentiles)
        cut = np.mean([line["cut"] for line in own])
        rows.append([family, f"{rewards.mean():.0%}", f"{both:.0%}", lengths, f"{cut:.1%}"])
    return cells.table(["family", "right", "prompts with both", "p50, p90, p99", "cut off"], rows)


def main() -> None:
    """Runs what is missing of a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("lengths", "bare", "paced", "simulated", "drafts"))
    parser.add_argument("--rows", choices=GROUPS, default="main")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--machine", choices=MACHINES, default="cpu")
    parser.add_argument("--base-url", help="a running server of the checkpoint without a queue, instead of a new one")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    machine = MACHINES[options.machine]
    path, lengths = options.results / ROLLOUTS, options.results / machine.lengths
    if options.part == "lengths":
        return record_lengths(lengths, machine, options.base_url)
    lines = read_lengths(lengths)
    if len(lines) < machine.num_prompts:
        parser.error(f"{lengths} must have {machine.num_prompts} prompts. Run the part `lengths` first.")
    if options.part == "simulated":
        run_simulated(path, lines, options.repeats, machine)
    elif options.part == "drafts":
        run_drafts(path, lines, options.repeats)
    elif options.part == "bare":
        run_bare(path, lines, options.rows, options.repeats, machine, options.base_url)
    else:
        run_paced(path, lines, options.rows, options.repeats)


if __name__ == "__main__":
    main()
