"""The benchmark behind docs/evidence.md: its statistics, and all of it, shortened, on a real server."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from benchmarks import training
from benchmarks.training import DIFFICULTIES, FAMILIES, PAGE, Run, load_groups, page_of, parse, trainings_of
from trl_darts.errors import ConfigurationError


ROOT = Path(__file__).resolve().parents[2]
PICTURES = {"evidence_training.png", "evidence_waits.png", "evidence_answers.png"}
ANSWERS = {kind: {family: [(8, 1.0), (24, 0.0)] for family in FAMILIES} for kind in DIFFICULTIES}


def run_of(seed: int, waited: float = 1.0, right: float = 1.0) -> Run:
    """A training that costs and learns the same in each of 60 steps."""
    held_out = {kind: {family: [(8, right), (24, right)] for family in FAMILIES} for kind in DIFFICULTIES}
    costs = {"step_seconds": 1.0, "length": 16.0, "p99": 24.0, "decoded": 10.0, "waited": waited, "off_policy": 0.0}
    return Run(seed, pd.DataFrame({"reward": right, **costs}, index=range(60)), held_out)


def cells(runs: dict[str, list[Run]], name: str) -> dict[str, str]:
    """The row of a method in a table of all columns."""
    columns = training.LEARNED | training.HARDER | training.COSTS | training.WAITS
    lines = training.table({"both": runs}, columns).splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {name} |")]
    return dict(zip(*([cell.strip() for cell in row.strip("|").split("|")] for row in (lines[0], line)), strict=True))


def leave_file(asked: training.Training, results: Path, **changes: object) -> None:
    """What a training leaves behind, in which `changes` are other than was asked for."""
    each = dict.fromkeys(
        ("reward", "seconds", "step_seconds", "length", "p99", "off_policy", "decoded", "waited"), 1.0
    )
    steps = {name: [value] * asked.steps for name, value in each.items()}
    asked.file(results).write_text(json.dumps({**asked.facts, "by_step": steps, "held_out": ANSWERS} | changes))


def test_ratios_are_taken_seed_by_seed():
    """0.5 and 0.7 of their own baselines; of the mean baseline they would be 0.3 and 1.1, twice as far apart."""
    runs = {"grpo": [run_of(0, 10), run_of(1, 30)], "darts (paper)": [run_of(1, 21), run_of(0, 5)]}
    row = cells(runs, "darts (paper)")
    assert row["waited for ÷ grpo"] == row["… in the first 40 steps"] == "0.60 ± 0.10"
    assert cells(runs, "grpo")["waited for ÷ grpo"] == "1"


def test_differences_are_taken_seed_by_seed():
    runs = {"grpo": [run_of(0, right=0.0), run_of(1)], "shortest only": [run_of(0, right=0.0), run_of(1)]}
    row = cells(runs, "shortest only")
    assert row["harder − grpo"] == "+0.000 ± 0.000"
    assert row["harder"] == "0.500 ± 0.500"


def test_without_a_baseline_there_are_no_ratios_and_one_seed_has_no_error():
    row = cells({"darts (paper)": [run_of(0)]}, "darts (paper)")
    assert row["harder − grpo"] == row["waited for ÷ grpo"] == "–"
    assert row["held-out"] == "1.000"


@pytest.mark.parametrize(("slots", "tokens"), [(None, 9), (3, 9), (2, 12), (1, 21)])
def test_a_rollout_waits_for_its_longest_candidate_or_for_its_queue(slots, tokens):
    assert training.waited_for([9, 5, 7], slots) == tokens


def test_steps_without_a_rollout_have_waited_for_nothing():
    """And tokens of an earlier rollout don't count."""
    logs = [{"step": step, "reward": 1.0, "rewards/accuracy_reward/mean": 1.0} for step in (1, 2)]
    traces = pd.DataFrame({"step": [2, 2], "length": [10, 30], "num_carried_tokens": [0, 25]})
    steps = training.steps_of(logs, traces, 2, None)
    assert (steps["decoded"], steps["waited"]) == ([0, 15], [0, 10])


@pytest.mark.parametrize(
    ("name", "other"), [("steps", 10), ("learning_rate", 1e-4), ("settings", {"schedule": "darts"})]
)
def test_other_trainings_are_not_taken_for_those_asked_for(tmp_path, monkeypatch, capsys, name, other):
    asked = trainings_of(parse([]))
    leave_file(asked[0], tmp_path)
    assert list(load_groups(asked, tmp_path)) == ["both"]
    leave_file(asked[0], tmp_path, **{name: other})
    with pytest.raises(ConfigurationError, match=f"holds grpo.seed0.json with {name} "):
        load_groups(asked, tmp_path)
    monkeypatch.setattr(sys, "argv", ["training.py", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^error: .* is asked for"):
        training.main()


def test_a_part_of_the_trainings_has_a_page_of_its_own(tmp_path):
    """The words around the tables stay, and `docs/` is for the full set."""
    options = parse(["--results", str(tmp_path)])
    *most, last = trainings_of(options)
    for asked in most:
        leave_file(asked, tmp_path)
    page = page_of(options)
    assert page == tmp_path / "evidence.md"
    training.write_page(load_groups(most, tmp_path), ANSWERS, PAGE, page)
    text = page.read_text()
    assert "47 trainings of 100 steps, 2 to 3 seeds each." in text
    assert text.startswith("# Evidence\n")
    training.write_page(load_groups(most, tmp_path), ANSWERS, page, page)  # again and again
    assert page.read_text() == text
    assert {path.name for path in tmp_path.glob("*.png")} == PICTURES
    leave_file(last, tmp_path)
    assert page_of(options) == PAGE
    for other in (["--steps", "150"], ["--seeds", "2"], ["--quick"]):
        assert page_of(parse(["--results", str(tmp_path), *other])) == tmp_path / "evidence.md"
    with pytest.raises(ValueError, match="must have one pair of the marks"):
        training.put("nothing here", "training", "a table")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_quick_run(tmp_path):
    before = PAGE.read_text()
    command = [sys.executable, "benchmarks/training.py", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert PAGE.read_text() == before
    text = (tmp_path / "evidence.md").read_text()
    assert "7 trainings of 10 steps, 1 seed each." in text
    for line in ("| grpo | 0.", "| grpo, length penalty | 0.", "| darts, patience auto | 0.", "| `chain` | before |"):
        assert line in text
    assert "nan" not in text
    for name in PICTURES:
        with Image.open(tmp_path / name) as picture:
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 50  # something is drawn
