"""
The scenarios that every engine must pass. For vLLM inside the process, which changes it, a program of its own, see
`run_scenarios`.

Each scenario is one call of TRL's `_generate_single_turn` on a real trainer. What came of it is JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.builders import make_args, make_trainer, record_rollouts
from tests.conformance.process import main
from tests.engines.settings import engine_settings
from trl_darts.scheduling import Admission, ScheduleSettings


M, M_UP = 4, 8
LIMIT = 300  # tokens: long enough that a server is still decoding when a client on a busy machine calls it off
LETTERS = "ABCDEABCDE"
COUNTS = [4, 5, 6, 8, 8, 7, 6, 7, 8, 8]  # saturated are those with long answers: there is time to call some off


class FixedAdmission:
    """A budget that does not depend on history."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self.observed = 0

    def plan(self, prompts: Any) -> Admission:
        counts = [count if prompt.extendable else M for count, prompt in zip(self.counts, prompts, strict=True)]
        return Admission(counts, saturated=sum(count == M_UP for count in counts))

    def observe(self, summaries: Any) -> None:
        self.observed += len(summaries)


def settings(schedule: str = "darts", long_end_patience: Any = None, **kwargs: Any) -> ScheduleSettings:
    most = M_UP if schedule == "darts" else None
    return ScheduleSettings(schedule, M, most, long_end_patience=long_end_patience, **kwargs)


def play(
    trainer: Any, records: list[Any], prompts: list[str], counts: list[int], schedule_settings: Any
) -> dict[str, Any]:
    """One rollout: rows as TRL gets them, and everything that is known of the outcome."""
    vars(trainer.args).update(vars(schedule_settings))
    trainer._admission = FixedAdmission(counts)
    prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
    completions, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, M)
    record = records[-1]
    return {
        "prompts": prompts,
        "completions": completions,
        "logprobs": logprobs,
        "budgets": record.admission.num_candidates,
        "groups": [[s.lengths, s.finish_reasons, s.selected] for s in record.summaries],
        "metrics": {name: values[-1] for name, values in trainer._metrics["train"].items()},
        "observed": trainer._admission.observed,
        "peak": record.occupancy.peak,
    }


def play_until_called_off(*args: Any) -> dict[str, Any]:
    """On a busy machine, a server may have decoded all before a client calls anything off: then it is played again."""
    for _ in range(3):
        result = play(*args)
        if result["metrics"]["darts/rollout/aborted_candidates"] >= 3:
            break
    return result


def scenarios(engine: str, model_dir: Path, out: Path, url: str | None = None) -> dict[str, Any]:
    """What came of all of them on one engine."""
    args = make_args(
        out / "run",
        per_device_train_batch_size=40,
        max_completion_length=LIMIT,
        defer_unsettled_groups=False,  # batches of the loader, on every engine
        **engine_settings(engine, url),
    )
    trainer = make_trainer(model_dir, args)
    trainer.model.train()
    records = record_rollouts(trainer)
    rows = [f"{i}{letter}" for i, letter in enumerate(LETTERS) for _ in range(M)]
    mixed = [
        f"{i}{LETTERS[(i + j) % 5]}" if i == 2 else f"{i}{letter}"
        for i, letter in enumerate(LETTERS)
        for j in range(M)
    ]
    results = {
        "darts": play_until_called_off(trainer, records, rows, COUNTS, settings()),
        "no_pruning": play(trainer, records, rows, COUNTS, settings(tail_pruning=False)),
        "patience": play(trainer, records, rows, [7] * 10, settings(long_end_patience=1.5)),
        "grpo": play(trainer, records, rows, [M] * 10, settings("grpo")),
        "mixed": play(trainer, records, mixed, COUNTS, settings()),
    }
    trainer.model.eval()
    prompt_ids = trainer.processing_class(text=rows[:8])["input_ids"]
    before = trainer._admission.observed
    completions, _ = trainer._generate_single_turn(prompt_ids, None, {}, M)
    learned = trainer._admission.observed - before
    results["evaluation"] = {"prompts": rows[:8], "completions": completions, "learned": learned}
    if engine == "vllm_colocated":
        results["room"] = trainer.vllm_generation.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    return results


if __name__ == "__main__":
    main(scenarios)
