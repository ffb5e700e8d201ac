"""Adds a section about rollouts to the model card that TRL writes."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]  # exported lazily

from .. import __version__
from ..recipes.hub import field_defaults, is_withheld


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
# Headings of TRL's template before which sections are inserted.
VERSIONS, CITATION = "### Framework versions", "Cite TRL as:"
EFFECTS = {
    "darts/rollout/seconds": "seconds per rollout",
    "darts/rollout/bubble_ratio": "share of decoding slots that stood idle",
    "darts/budget/redundancy": "candidates planned per row trained on",
    "darts/rollout/aborted_candidates": "candidates aborted per rollout",
    "darts/rollout/generated_tokens": "tokens generated per rollout",
    "darts/rollout/kept_tokens": "tokens kept per rollout",
    "darts/selection/kept_vs_pool_length_ratio": "mean length of kept candidates / of all candidates",
}


def add_rollouts(path: Path, config: Any, log_history: list[dict[str, float]]) -> None:
    """
    Adds the rollout settings, their measured effects and TRL's citation of GRPO to a model card. Also replaces the
    "None" that TRL writes for a base model without a name and for a model that is not on the Hub.
    """
    card = ModelCard.load(path)
    text = _before(card.text, VERSIONS, f"### Rollouts\n\n{_settings(config)}\n{_effects(log_history)}\n")
    if config.schedule == "darts":  # otherwise TRL cites GRPO itself
        grpo = GRPOTrainer._paper["citation"]
        text = _before(
            text, CITATION, f"DARTS shapes the rollouts of GRPO. Cite GRPO as:\n\n```bibtex\n{grpo}\n```\n\n"
        )
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
            wait = " The wait for the long end was not the paper's: it ended when every prompt had enough rows."
        elif patience is not None:
            wait = (
                f" The wait for the long end was not the paper's: it ended at {patience} × the M-th shortest length."
            )
        if config.long_end_every is not None:
            wait += f" One in {config.long_end_every} rollouts waited as in the paper."
    method = "DARTS" if config.schedule == "darts" else f"TRL's GRPO with the schedule `{config.schedule}`"
    settings = ", ".join(f"`{name}={value!r}`" for name, value in shown.items())
    origin = f"\n\nThe run was configured with `{config.origin}` and additional arguments." if config.origin else ""
    return f"{method}, by trl_darts {__version__}, with {settings}.{wait}{origin}\n"


def _effects(log_history: list[dict[str, float]]) -> str:
    rows = []
    for metric, label in EFFECTS.items():
        values = [logs[metric] for logs in log_history if metric in logs]
        if values:
            mean = sum(values) / len(values)
            rows.append(f"| {label} (`{metric}`) | {mean:.4g} | {values[0]:.4g} | {values[-1]:.4g} |")
    if not rows:
        return "No rollout was logged before this card was written.\n"
    table = "\n".join(["| measured in this run | mean | first log | last log |", "|---|---|---|---|", *rows])
    return f"{table}\n\nThese values are not a speed-up, which requires a comparison with a run of TRL.\n"


def _before(text: str, heading: str, section: str) -> str:
    start, found, rest = text.partition(heading)
    return f"{start}{section}{found}{rest}" if found else f"{text}\n{section}"
