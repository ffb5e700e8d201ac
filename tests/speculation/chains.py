"""A Markov chain as a model whose answers can be checked: log-probs one by one, frequencies by a chi-square test."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from benchmarks.models import SHORT_HEAVY_TAIL, VOCAB_SIZE, make_markov_model


PROMPTS = [[40 + letter, 60] for letter in range(10)]


def make_chain(out_dir: Path, tokenizer: Any) -> Path:
    """Returns a chain in which no two tokens are equally likely, so that top-k and top-p are unambiguous."""
    make_markov_model(out_dir, tokenizer, follow=0.8, classes=SHORT_HEAVY_TAIL)
    model = AutoModelForCausalLM.from_pretrained(out_dir, dtype=torch.float32)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.lm_head.weight += 0.03 * torch.randn_like(model.lm_head.weight)
    model.save_pretrained(out_dir)
    return out_dir


def transitions(model_dir: Path, temperature: float, top_k: int = -1, top_p: float = 1.0) -> torch.Tensor:
    """Returns the log-probs of the next token after each token, `(V, V)`, -inf if top-k or top-p exclude it."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(VOCAB_SIZE)[:, None]).logits[:, 0] / temperature
    if top_k > 0:
        logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
    probs, tokens = logits.softmax(-1).sort(descending=True)
    beyond = probs.cumsum(-1) - probs >= top_p  # what is more likely suffices
    return logits.masked_fill(
        torch.zeros_like(logits, dtype=torch.bool).scatter(1, tokens, beyond), -torch.inf
    ).log_softmax(-1)


def sample(
    server: Any, num_answers: int, num_per_request: int = 8, max_tokens: int = 48, **sampling: Any
) -> list[tuple[list[int], list[float]]]:
    """Returns answers as token IDs, starting with the prompt's last token, with log-probs."""
    answers = []
    for start in range(0, num_answers, num_per_request):
        prompt = PROMPTS[start // num_per_request % len(PROMPTS)]
        body = {"model": server.model, "prompt": prompt, "n": num_per_request, "max_tokens": max_tokens, "logprobs": 0}
        reply = server.request("/v1/completions", {**body, "return_token_ids": True, **sampling})
        for choice in reply["choices"]:
            logprobs = (choice["logprobs"] or {}).get("token_logprobs", [])
            answers.append(([prompt[-1], *choice["token_ids"]], logprobs))
    return answers


def largest_error(answers: list[tuple[list[int], list[float]]], expected: torch.Tensor) -> float:
    """Returns the largest error of the log-probs."""
    pairs = torch.tensor([pair for tokens, _ in answers for pair in pairwise(tokens)])
    found = torch.tensor([logprob for _, logprobs in answers for logprob in logprobs])
    return float((expected[pairs[:, 0], pairs[:, 1]] - found).abs().max())


def p_value(answers: list[tuple[list[int], list[float]]], expected: torch.Tensor) -> float:
    """
    Returns the p-value of a chi-square test that tokens follow the transitions. Cells with an expectation below 5 are
    merged.
    """
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for tokens, _ in answers:
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    statistic, degrees = 0.0, 0
    for seen, probs in zip(counts, expected.double().exp().numpy(), strict=True):
        wanted = probs * seen.sum()
        large = wanted >= 5
        cells = np.append(seen[large], seen[~large].sum()), np.append(wanted[large], wanted[~large].sum())
        if cells[1][-1] < 5:  # what is left goes with the smallest that is large
            if large.sum() < 2:
                continue
            smallest = int(np.argmin(cells[1][:-1]))
            cells = tuple(
                np.append(np.delete(cell, [smallest, len(cell) - 1]), cell[smallest] + cell[-1]) for cell in cells
            )
        statistic += float(((cells[0] - cells[1]) ** 2 / cells[1]).sum())
        degrees += len(cells[0]) - 1
    return float(stats.chi2.sf(statistic, degrees))
