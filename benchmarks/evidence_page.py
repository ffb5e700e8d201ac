"""Tables and pictures of `tiny_reasoner.py`, put in their places on a page whose words are written by hand."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.evidence_pictures import draw_distributions, draw_training, draw_waits
from benchmarks.reward_summary import BASELINE, Answers, Run, Runs, load_runs, mean_and_error


EARLY = 40  # steps in which answers still have a tail
LENGTHS = ("held-out, mean length", "… p99")
WAITS = ("waited for ÷ grpo", f"… in the first {EARLY} steps", "… after them")
PICTURES = {"training": "evidence_training.png", "waits": "evidence_waits.png", "answers": "evidence_answers.png"}


@dataclass(frozen=True)
class Evidence:
    """
    What all trainings came to.

    Args:
        both (`Mapping[str, Sequence[Run]]`):
            Trainings on both families, by row. May be empty, as those on one family may.
        families (`Mapping[str, Mapping[str, Sequence[Run]]]`):
            Trainings on one family, by family and row.
        before (`Mapping[str, Mapping[str, Answers]]`):
            Held-out answers of the model that all began with, by difficulty and family.
    """

    both: Runs
    families: Mapping[str, Runs]
    before: Mapping[str, Mapping[str, Answers]]

    @property
    def groups(self) -> dict[str, Runs]:
        """Trainings by kind of prompts; kinds without one are left out."""
        return {kind: runs for kind, runs in {"both": self.both, **self.families}.items() if runs}


def load_groups(results: Path, names: Sequence[str], families: Sequence[str]) -> tuple[Runs, dict[str, Runs]]:
    """
    The trainings of a folder on both families, and on each.

    Raises:
        [`ConfigurationError`]: If there are none, or not of one kind.
    """
    return load_runs(results, names), {family: load_runs(results, names, family) for family in families}


def write_page(evidence: Evidence, template: Path, page: Path) -> None:
    """
    Writes the page, and its pictures beside it. Where trainings are missing, the page says so, and has no picture.

    Args:
        evidence ([`Evidence`]):
            The trainings.
        template (`Path`):
            Page with a pair of marks around each table.
        page (`Path`):
            Where it goes; may be `template`.

    Raises:
        [`ValueError`]: If `template` lacks a mark.
    """
    draw_waits(evidence.groups, page.parent / PICTURES["waits"])
    if evidence.both:
        draw_training(evidence.both, page.parent / PICTURES["training"])
        draw_distributions(evidence.before, evidence.both, page.parent / PICTURES["answers"])
    text = template.read_text()
    for name, content in (
        ("extent", extent(evidence)),
        ("training", training_table(evidence.both)),
        ("families", family_table(evidence.families)),
        ("answers", answer_table(evidence.before, evidence.both)),
    ):
        text = put(text, name, content)
    page.write_text(text)


def put(text: str, name: str, content: str) -> str:
    """The text with `content` between the marks of this name."""
    begin, end = f"<!-- {name}: written by benchmarks/tiny_reasoner.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"The page must have one pair of the marks {begin!r} and {end!r}.")
    return pattern.sub(lambda _: f"{begin}\n\n{content}\n\n{end}", text)


def extent(evidence: Evidence) -> str:
    """How much was run."""
    rows = [own for runs in evidence.groups.values() for own in runs.values()]
    few, many = min(map(len, rows)), max(map(len, rows))
    seeds = f"{few} to {many} seeds" if few < many else f"{many} {'seeds' if many > 1 else 'seed'}"
    return f"{sum(map(len, rows))} trainings of {len(rows[0][0].reward)} steps, {seeds} each."


def training_table(runs: Runs) -> str:
    """What was learned, and what it took."""
    head = (
        *("method", "reward at the end", "held-out", "harder", "harder − grpo"),
        *("seconds ÷ grpo", "tokens decoded ÷ grpo", *WAITS, *LENGTHS),
    )
    lines = []
    for name, own in runs.items():
        pairs = _pairs(own, runs)
        harder = [accuracy(run, "hard") - accuracy(other, "hard") for run, other in pairs]
        lines.append(
            (
                *_learned(name, own),
                "–" if name == BASELINE or not harder else mean_and_error(harder, "{:+.3f}"),
                _ratio(pairs, lambda run: run.step_seconds.sum()),
                _ratio(pairs, lambda run: run.decoded.sum()),
                *_waits(pairs),
                *_lengths(own),
            )
        )
    return _markdown(head, lines, words=1)


def family_table(families: Mapping[str, Runs]) -> str:
    """The same for trainings on one family, without what depends on the machine."""
    head = ("prompts", "method", "reward at the end", "held-out", "harder", *WAITS, *LENGTHS)
    lines = [
        (
            f"`{family}`",
            *_learned(name, own, family),
            *_waits(_pairs(own, runs)),
            *_lengths(own, family),
        )
        for family, runs in families.items()
        for name, own in runs.items()
    ]
    return _markdown(head, lines, words=2)


def answer_table(before: Mapping[str, Mapping[str, Answers]], runs: Runs) -> str:
    """Lengths of right and wrong answers to held-out prompts, before and after."""
    head = ("prompts", "model", "right", "mean length if right", "if wrong", "p99 of all")
    lines = []
    for family in before["easy"] if runs else ():
        models = {"before": [before["easy"][family]]}
        models |= {name: [run.held_out["easy"][family] for run in own] for name, own in runs.items()}
        for name, answers in models.items():
            stats = np.array([_stats(own) for own in answers]).T
            forms = ("{:.3f}", "{:.1f}", "{:.1f}", "{:.0f}")
            cells = [mean_and_error(list(column), form) for column, form in zip(stats, forms, strict=True)]
            lines.append((f"`{family}`", name, *cells))
    return _markdown(head, lines, words=2)


def accuracy(run: Run, difficulty: str, family: str | None = None) -> float:
    """Share of right answers to held-out prompts, of one family or of all."""
    return float(np.mean([reward for _, reward in _held_out(run, difficulty, family)]))


def _held_out(run: Run, difficulty: str, family: str | None) -> Answers:
    own = run.held_out[difficulty]
    return own[family] if family else [answer for part in own.values() for answer in part]


def _lengths(own: Sequence[Run], family: str | None = None) -> list[str]:
    """Mean and p99 of complete answers: those of a training are cut short where candidates are aborted."""
    lengths = [np.array([length for length, _ in _held_out(run, "easy", family)]) for run in own]
    return [
        mean_and_error([float(values.mean()) for values in lengths], "{:.1f}"),
        mean_and_error([float(np.percentile(values, 99)) for values in lengths], "{:.0f}"),
    ]


def _stats(answers: Answers) -> tuple[float, float, float, float]:
    lengths, rewards = np.array(answers).T
    right = rewards == 1.0
    return (
        float(right.mean()),
        float(lengths[right].mean()) if right.any() else np.nan,
        float(lengths[~right].mean()) if not right.all() else np.nan,
        float(np.percentile(lengths, 99)),
    )


def _learned(name: str, own: Sequence[Run], family: str | None = None) -> tuple[str, ...]:
    return (
        name,
        mean_and_error([run.final_reward for run in own], "{:.3f}"),
        *(mean_and_error([accuracy(run, kind, family) for run in own], "{:.3f}") for kind in ("easy", "hard")),
    )


def _waits(pairs: Sequence[tuple[Run, Run]]) -> list[str]:
    """Tokens waited for, in the whole training, in the first steps and in the others, as ratios."""
    parts = (slice(None), slice(EARLY), slice(EARLY, None))
    return [_ratio(pairs, lambda run, part=part: run.critical[part].sum()) for part in parts]


def _pairs(own: Sequence[Run], runs: Runs) -> list[tuple[Run, Run]]:
    """Each run with the baseline's of the same seed."""
    baseline = {run.seed: run for run in runs.get(BASELINE, ())}
    return [(run, baseline[run.seed]) for run in own if run.seed in baseline]


def _ratio(pairs: Sequence[tuple[Run, Run]], cost: Callable[[Run], float]) -> str:
    if not pairs or not all(cost(other) for _, other in pairs):  # no baseline, or a training that ended before
        return "–"
    if all(run is other for run, other in pairs):
        return "1"
    ratios = [cost(run) / cost(other) for run, other in pairs]
    return mean_and_error(ratios, "{:.2f}")


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    """A table whose first columns are words, and the others numbers."""
    if not lines:
        return "Not among these trainings."
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))
