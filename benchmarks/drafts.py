"""
Measures the time that drafts save on answers that the tiny reasoner sampled, without a model.

    python -m benchmarks.drafts [--seeds 0,1,2] [--servers 1,2] [--prompts 16] [--epochs 3]

The answers are decoded with the drafter of vLLM's plugin, epoch by epoch: sequences start, change rows and end. A step
that verifies `T` tokens takes `1 + T / KNEE`. Two servers compare all answers to a prompt on one server with answers
spread over both, where each has fewer siblings to draft from.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import parts
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.lines import ROOT
from trl_darts.speculation.drafter import SuffixDrafter
from trl_darts.speculation.gain import DraftGain
from trl_darts.tiny_reasoner.task import make_dataset


CHECKPOINT = ROOT / "examples" / "tiny_reasoner" / "checkpoint"
NUM_GENERATIONS = 8
KNEE = 64.0
MAX_MODEL_LEN = 512


def make_drafter(num_speculative_tokens: int = 8, tokenizer: str | None = None) -> SuffixDrafter:
    """Creates the drafter as vLLM does. It never pauses: without a model, the time of a step tells nothing."""
    drafter = SuffixDrafter(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=num_speculative_tokens),
            model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN, tokenizer=tokenizer),
            parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
        )
    )
    drafter._gain = DraftGain(pauses=False)
    return drafter


class Decoding:
    """
    Decodes given answers, and accepts drafted tokens that equal the answer's. On sampled answers, this gives the
    acceptance of the model that sampled them.
    """

    def __init__(self, drafter: SuffixDrafter) -> None:
        self.drafter = drafter
        self.going_to_write: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.written: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}
        self.num_accepted = 0
        self.rows: list[str] = []

    def add(self, name: str, prompt: list[int], answer: list[int]) -> None:
        """Adds a sequence."""
        self.rows.append(name)
        self.prompts[name], self.going_to_write[name], self.written[name] = prompt, answer, []

    def step(self) -> list[list[int]]:
        """Verifies drafts, and returns new ones by row."""
        sampled = []
        for name in self.rows:
            rest = self.going_to_write[name][len(self.written[name]) :]
            draft = self.drafts.get(name, [])
            accepted = next((i for i, token in enumerate(draft) if rest[i : i + 1] != [token]), len(draft))
            accepted = min(accepted, len(rest) - 1)
            self.num_accepted += accepted
            sampled.append(rest[: accepted + 1])
            self.written[name] += sampled[-1]
        drafts = self.drafter.draft(self.batch(), sampled)
        self.drafts = dict(zip(self.rows, drafts, strict=True))
        self.rows = [name for name in self.rows if self.written[name] != self.going_to_write[name]]
        return drafts

    def batch(self) -> Any:
        """Returns vLLM's input batch as the drafter sees it."""
        texts = [self.prompts[name] + self.written[name] for name in self.rows]
        token_ids = np.full((len(texts) + 2, MAX_MODEL_LEN), -1, dtype=np.int32)
        for row, text in enumerate(texts):
            token_ids[row, : len(text)] = text
        return SimpleNamespace(
            req_ids=list(self.rows),
            token_ids_cpu=token_ids,
            num_tokens_no_spec=np.array([*map(len, texts), 0, 0]),
            num_prompt_tokens=np.array([*(len(self.prompts[name]) for name in self.rows), 0, 0]),
        )

    def run(self) -> int:
        """Decodes until all sequences have ended. Returns the number of steps."""
        steps = 0
        while self.rows:
            self.step()
            steps += 1
        return steps


def sample(num_prompts: int, epochs: int, seed: int) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Yields prompts and answers of the tiny reasoner, epoch by epoch."""
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
    """Returns what the drafter saves on real answers in modelled time, which has no noise."""
    found: list[dict[str, Any]] = []
    data = list(sample(num_prompts, epochs, seed))
    placements = {"spread": range(num_prompts * NUM_GENERATIONS)}
    if num_servers > 1:
        placements["together"] = np.arange(num_prompts).repeat(NUM_GENERATIONS)
    for name, places in placements.items():
        servers = [Decoding(make_drafter(16)) for _ in range(num_servers)]
        for epoch, answers in enumerate(data, start=1):
            for number, (place, (prompt, answer)) in enumerate(zip(places, answers, strict=True)):
                servers[place % num_servers].add(f"{epoch}.{number}", prompt, answer)
            control, seconds, *counted = zip(*map(decode, servers), strict=True)
            accepted, drafted, num_drafts = map(sum, counted)
            longest = max(len(answer) for _, answer in answers)
            times = {"longest": longest, "control": max(control), "time": max(seconds)}
            counts = {"accepted": accepted, "drafted": drafted, "drafts": num_drafts}
            found.append({"part": "replay", "placement": name, "epoch": epoch, **times, **counts})
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


def run(shared: Shared, seed: int, servers: int, prompts: int, epochs: int) -> list[dict[str, Any]]:
    """Replays the answers of a seed."""
    return replay(prompts, epochs, seed, servers)


BENCHMARK = Benchmark(
    "drafts",
    __doc__,
    {"seed": range(3), "servers": (1, 2)},
    run,
    parts.drafts,
    options={"prompts": 16, "epochs": 3},
    quick={"prompts": 2, "epochs": 2},
)

if __name__ == "__main__":
    main(BENCHMARK)
