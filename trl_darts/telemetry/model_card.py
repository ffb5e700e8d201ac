"""What the card of a trained model says of its rollouts, beside what TRL writes."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]  # exported lazily

from .. import __version__
from ..hub import field_defaults, is_withheld


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
PAGE = "https://pypi.org/project/trl-darts"
# Headings of TRL's template, before which something is added.
VERSIONS, CITATION = "### Framework versions", "Cite TRL as:"
EFFECTS = {
    "darts/rollout/seconds": "seconds per rollout",
    "darts/rollout/bubble_ratio": "share of decoding slots that stood idle",
    "darts/budget/redundancy": "candidates planned per row trained on",
    "darts/rollout/aborted_candidates": "candidates aborted per rollout",
    "darts/rollout/generated_tokens": "tokens generated per rollout",
    "darts/rollout/kept_tokens": "tokens kept per rollout",
    "darts/selection/kept_vs_pool_length_ratio": "mean length of what was kept / of what was sampled",
    "darts/bias/reward_gap": "mean reward of what was kept − estimate for an unbiased sample",
}


def add_rollouts(path: Path, config: Any, log_history: list[dict[str, float]]) -> None:
    """
    Adds to a trained model's card how rollouts were shaped and what that did, and TRL's citation of GRPO. What TRL has
    no name for, a model from a directory and one that is not on the Hub, is not called None.
    """
    card = ModelCard.load(path)
    text = _before(card.text, VERSIONS, f"### Rollouts\n\n{_settings(config)}\n{_effects(log_history)}\n")
    if config.schedule == "darts":  # with another, TRL cites GRPO by itself
        grpo = GRPOTrainer._paper["citation"]
        words = f"DARTS shapes the rollouts of GRPO. Cite GRPO as:\n\n```bibtex\n{grpo}\n```\n\n"
        text = _before(text, CITATION, words)
    text = text.replace("[None](https://huggingface.co/None)", "a model from a directory")
    card.text = text.replace('model="None"', f'model="{Path(config.output_dir).name}"')
    card.save(path)


def _settings(config: Any) -> str:
    of_trl = field_defaults(GRPOConfig)
    given = {name: value for name, value in config.given_fields.items() if name not in of_trl}
    shown = {"schedule": config.schedule, "num_generations": config.num_generations} | {
        name: value for name, value in given.items() if not is_withheld(name)
    }
    wait = ""
    if config.schedule == "darts":
        shown["long_end_patience"] = patience = config.long_end_patience
        wait = " The wait for the long end was the paper's."
        if patience == "auto":
            wait = " The wait for the long end was not the paper's: it ended when no prompt was short of rows."
        elif patience is not None:
            wait = (
                f" The wait for the long end was not the paper's: it ended at {patience} × the M-th shortest length."
            )
        if config.long_end_every is not None:
            wait += f" One in {config.long_end_every} rollouts waited as in the paper."
    method = "DARTS" if config.schedule == "darts" else f"TRL's GRPO with the schedule `{config.schedule}`"
    words = ", ".join(f"`{name}={value!r}`" for name, value in shown.items())
    origin = (
        f"\n\nThe training was set up with `{config.origin}`, and what was given beside it." if config.origin else ""
    )
    return f"{method}, by [trl_darts]({PAGE}) {__version__}, with {words}.{wait}{origin}\n"


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
    return f"{table}\n\nThese are no speed-up: that takes a training of TRL's own beside it.\n"


def _before(text: str, heading: str, section: str) -> str:
    start, found, rest = text.partition(heading)
    return f"{start}{section}{found}{rest}" if found else f"{text}\n{section}"
