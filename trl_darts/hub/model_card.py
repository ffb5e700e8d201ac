"""What the card of a trained model says of its rollouts, beside what TRL writes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from trl import GRPOTrainer  # type: ignore[attr-defined]

from .. import __version__
from ..scheduling import ScheduleSettings
from .mixin import published_fields


PAPER = {  # in TRL's form
    "title": "DARTS: Distribution-Aware Active Rollout Trajectory Shaping for Accelerating LLM Reinforcement Learning",
    "id": "2605.30859",
    "citation": """@article{wang2026darts,
    title        = {{DARTS: Distribution-Aware Active Rollout Trajectory Shaping for Accelerating LLM Reinforcement
                    Learning}},
    author       = {Yujie Wang and Siwei Chen and Longzan Luo and Xinyi Liu and Xupeng Miao and Fangcheng Fu and
                    Bin Cui},
    year         = 2026,
    eprint       = {arXiv:2605.30859},
}""",
}
# Headings of TRL's template, before which something is added. A test sees to it that they are there.
VERSIONS, CITATION = "### Framework versions", "Cite TRL as:"
EFFECTS = {
    "darts/rollout/seconds": "seconds per rollout",
    "darts/rollout/bubble_ratio": "share of decoding slots that stood idle",
    "darts/budget/redundancy": "candidates planned per row trained on",
    "darts/rollout/aborted_candidates": "candidates called off per rollout",
    "darts/rollout/generated_tokens": "tokens generated per rollout",
    "darts/rollout/kept_tokens": "tokens kept per rollout",
    "darts/selection/kept_vs_pool_length_ratio": "mean length of what was kept / of what was sampled",
    "darts/bias/reward_gap": "mean reward of what was kept − estimate for an unbiased sample",
}


def add_rollouts(path: Path, config: Any, log_history: list[dict[str, float]]) -> None:
    """
    Adds to a card how rollouts were shaped and what that did, and TRL's citation of GRPO.

    Args:
        path (`Path`):
            Of the card that TRL wrote.
        config ([`DARTSGRPOConfig`]):
            Of the training.
        log_history (`list[dict[str, float]]`):
            What the trainer logged so far.
    """
    card = ModelCard.load(path)
    text = _before(card.text, VERSIONS, f"{_settings(config)}\n{_effects(log_history)}\n")
    if config.schedule == "darts":  # with another, TRL cites GRPO by itself
        grpo = GRPOTrainer._paper["citation"]
        text = _before(
            text, CITATION, f"DARTS shapes the rollouts of GRPO. Cite GRPO as:\n\n```bibtex\n{grpo}\n```\n\n"
        )
    card.text = text
    card.save(path)


def _settings(config: Any) -> str:
    shaping = {field.name for field in fields(ScheduleSettings)} | {n for n in vars(config) if n.startswith("stream_")}
    given = {name: value for name, value in published_fields(config).items() if name in shaping}
    first = {"schedule": config.schedule, "num_generations": config.num_generations}
    words = ", ".join(f"`{name}={value!r}`" for name, value in {**first, **given}.items())
    if config.latency_curve is not None:  # its path is nobody's business
        words += ", and a latency curve of the engine"
    origin = config.origin and (
        f"\nThe training was set up with the config `{config.origin}`, but for what was given beside it where it was "
        "started.\n"
    )
    return (
        "### Rollouts\n\nThey were shaped by [trl_darts](https://huggingface.co/papers/2605.30859) "
        f"{__version__} with {words}; its other settings were the defaults.\n{origin or ''}"
    )


def _effects(log_history: list[dict[str, float]]) -> str:
    rows = []
    for metric, words in EFFECTS.items():
        values = [logs[metric] for logs in log_history if metric in logs]
        if values:
            mean = sum(values) / len(values)
            rows.append(f"| {words} (`{metric}`) | {mean:.4g} | {values[0]:.4g} | {values[-1]:.4g} |")
    if not rows:
        return "No rollout was logged before this card was written.\n"
    table = "\n".join(["| measured in this training | mean | first log | last log |", "|---|---|---|---|", *rows])
    return f"{table}\n{_wasted(log_history)}\nWithout a training of TRL's own beside it, these are no speed-up.\n"


def _wasted(log_history: list[dict[str, float]]) -> str:
    logs = [entry for entry in log_history if "darts/rollout/generated_tokens" in entry]
    generated = sum(entry["darts/rollout/generated_tokens"] for entry in logs)
    if not generated:
        return ""
    wasted = 1 - sum(entry["darts/rollout/kept_tokens"] for entry in logs) / generated
    return f"\nOf all tokens generated, {wasted:.0%} were not trained on."


def _before(text: str, heading: str, section: str) -> str:
    """With a section before a heading, or at the end where there is no such heading."""
    start, found, rest = text.partition(heading)
    return f"{start}{section}{found}{rest}" if found else f"{text}\n{section}"
