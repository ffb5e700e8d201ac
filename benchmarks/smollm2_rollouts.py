"""
Rollouts of SmolLM2-135M-Instruct, by every schedule, on the lengths of its own answers.

    python -m benchmarks.smollm2_rollouts [--paces bare,paced] [--groups main,others] [--repeats 0,1,2,3,4]

First, 16 answers to each prompt of examples/smollm2 (on a CPU, to 64 of them) are sampled on a real server and kept.

- bare, gpu: every row decodes answers of these lengths on a real server of the model in bfloat16, as fast as possible,
  on two cores and on a GPU.
- paced: the same lengths on a real server of a tiny model at a GPU's pace (`pacing.py`).
- bare, simulated; paced, simulated; gpu, simulated: the same lengths in virtual time, by the machine's profile or, if
  paced, by the published curve of an 8 B model.
- bare, drafts: GRPO's rollouts as in `bare`, on a server that drafts (`suffix`) over one that does not.

A repeat has the prompts of two steps: a first epoch in which no lengths are known, and a second one. A step has 8 × 8
rows, and 16 × 8 on a GPU, where answers have up to 512 tokens instead of 256. Rows take turns step by step, and are
compared with GRPO's row of the same repeat, so that the load of a shared machine affects all of them. The group `main`
is GRPO, DARTS as in the paper, and the default.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import requests
import torch
from transformers import AutoTokenizer

from benchmarks import cells
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.lines import RESULTS, ROOT, append, read
from benchmarks.schedules import DEFAULT, GRPO, PACED, ROWS, Replay, ServerCluster, train
from benchmarks.schedules import server_of as paced_cluster
from benchmarks.vllm_server import start_vllm_server
from trl_darts.analysis.simulation import ClusterSpec, RecordedLengths, Workload
from trl_darts.engines.addresses import key_of
from trl_darts.engines.server_metrics import draft_counts
from trl_darts.policy import LatencyProfile
from trl_darts.serving.options import SPECULATIVE


EXAMPLE = ROOT / "examples" / "smollm2"
CHECKPOINT = EXAMPLE / "checkpoint"
sys.path.insert(0, str(EXAMPLE))

from tasks import TEMPERATURE, accuracy_reward, make_dataset  # noqa: E402


ROLLOUTS = "smollm2.rollouts.jsonl"
NUM_ANSWERS, NUM_GENERATIONS, BATCHES, EPOCHS = 16, 8, 2, 2
AT_ONCE = 20  # prompts
MAIN = ("grpo", "darts (paper)", "default")
GROUPS = {
    "main": [row for row in ROWS if row.name in MAIN],
    "others": [GRPO, *(row for row in ROWS if row.name not in MAIN)],
    "drafts": [GRPO],
}


# A processor that only emulates bfloat16 takes several times as long with it as with float32.
HAS_BFLOAT16 = torch.cuda.is_available() or bool(torch.cpu.get_capabilities().get("avx512_bf16"))


@dataclass(frozen=True)
class Machine:
    """What a machine decodes in the minutes of a benchmark."""

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
        "smollm2.lengths.jsonl",
        num_prompts=64,
        limit=256,
        prompts=8,
        slots=128,
        profile="smollm2.cpu.latency.json",
        server={"max_model_len": 1024, "env": {"VLLM_CPU_KVCACHE_SPACE": "2"}},
    ),
    "gpu": Machine(
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
def smollm2_server(machine: Machine, max_num_seqs: int | None = None, method: str | None = None) -> Iterator[str]:
    """Yields the address of a server of the model in bfloat16, if there is any, which may draft."""
    fields = {
        "dtype": "bfloat16" if HAS_BFLOAT16 else "float32",
        "max_num_seqs": max_num_seqs or machine.slots,
        **machine.server,
    }
    options = {"speculative_config": SPECULATIVE[method]} if method else {}
    with start_vllm_server(CHECKPOINT, timeout_s=600, **fields, **options) as server:
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


def recorded_lengths(machine: Machine) -> list[dict[str, Any]]:
    """Returns the recorded answers by prompt, after sampling those of prompts that have none yet."""
    path = RESULTS / machine.lengths
    known = {line["prompt"] for line in read(path)}
    if not (todo := [place for place in range(machine.num_prompts) if place not in known]):
        return read_lengths(path)
    dataset = make_dataset(machine.num_prompts)
    prompts = tokens_of(dataset)
    with smollm2_server(machine) as url:
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
    return read_lengths(path)


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
    def of(cls, lines: Sequence[dict[str, Any]], repeat: int, machine: Machine) -> "Recorded":
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
def servers_of(machine: Machine, group: str) -> Iterator[dict[Any, str]]:
    """Yields addresses of servers: without a queue and with N × M slots, or without drafts and with them."""
    with ExitStack() as stack:
        if group == "drafts":
            options = {"grpo": (None, None), "suffix": (None, "suffix")}
        else:
            capped = dict.fromkeys(row.capped for row in GROUPS[group])
            options = {own: (machine.rows if own else None, None) for own in capped}
        yield {name: stack.enter_context(smollm2_server(machine, *own)) for name, own in options.items()}


def run(shared: Shared, pace: str, group: str, repeat: int) -> dict[str, Any]:
    """Runs all rows of a group, step by step in turn."""
    machine = MACHINES["gpu" if pace.startswith("gpu") else "cpu"]
    size: Any = Recorded.of(shared(lengths_of, machine), repeat, machine)
    with ExitStack() as stack:
        if pace.endswith("simulated"):
            spec = ClusterSpec(PACED) if pace.startswith("paced") else machine.spec
            replays = {row.name: Replay(row, size, spec, seed=repeat) for row in GROUPS[group]}
        elif pace == "paced":
            own = dict.fromkeys(row.capped for row in GROUPS[group])
            servers = {c: stack.enter_context(paced_cluster(PACED, size.rows if c else None, size)) for c in own}
            replays = {r.name: Replay(r, size, *servers[r.capped][::-1], repeat) for r in GROUPS[group]}
        else:
            kind = DraftingCluster if group == "drafts" else SmolLM2Cluster
            texts = tokens_of(make_dataset(machine.num_prompts))
            prompts = [texts[line["prompt"]] for line in size.lines]
            urls = shared(servers_of, machine, group)
            clusters = {name: kind(url, prompts) for name, url in urls.items()}
            for cluster in clusters.values():
                stack.callback(cluster.engine.close)
            if group == "drafts":
                replays = {name: Replay(GRPO, size, machine.spec, own, repeat) for name, own in clusters.items()}
            else:
                rows = {row.name: row for row in GROUPS[group]}
                replays = {n: Replay(r, size, machine.spec, clusters[r.capped], repeat) for n, r in rows.items()}
        train([*replays.values()], EPOCHS * BATCHES)
        found = {"rows": {name: facts(replay) for name, replay in replays.items()}}
        return found | (drafted(clusters["suffix"].engine) if group == "drafts" else {})


@contextmanager
def lengths_of(machine: Machine) -> Iterator[list[dict[str, Any]]]:
    """Yields the recorded answers."""
    yield recorded_lengths(machine)


def facts(replay: Replay) -> dict[str, Any]:
    """Returns what is stored of a row: seconds of each step, and totals."""
    total = replay.total
    return {"seconds": replay.outcome.rollout_seconds, "wasted": total.wasted, "off_policy": total.off_policy}


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


def tables(results: Path) -> str:
    """Returns the tables of the paces that have lines."""
    lines = read(results / ROLLOUTS)
    paces = [pace for pace in ("bare", "paced", "gpu") if any(line["pace"].startswith(pace) for line in lines)]
    drafts = ratios(lines, "bare, drafts", "suffix", slice(None))
    return "\n\n".join([*(rollouts_table(lines, pace) for pace in paces), f"Speed with drafts: {cells.ratio(drafts)}"])


PACES = ["bare", "paced", "gpu", "bare, simulated", "paced, simulated", "gpu, simulated", "bare, drafts"]
BENCHMARK = Benchmark(
    "smollm2.rollouts",
    __doc__,
    {"pace": PACES, "group": list(GROUPS), "repeat": range(5)},
    run,
    tables,
    usual={"pace": [pace for pace in PACES if not pace.startswith("gpu")]},
    quick={"pace": ["paced", "paced, simulated"], "group": ["main"]},
    exists=lambda run: (run["pace"] == "bare, drafts") == (run["group"] == "drafts"),
)

if __name__ == "__main__":
    main(BENCHMARK)
