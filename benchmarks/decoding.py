"""
Runs the drafter in vLLM's decoding loop without a model: sequences with given answers start, change rows and end.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from trl_darts.speculation.drafter import SuffixDrafter
from trl_darts.speculation.gain import DraftGain


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
