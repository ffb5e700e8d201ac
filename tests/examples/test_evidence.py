"""The benchmark behind docs/evidence.md: its statistics, and all of it, shortened, on a real server."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.evidence_page import PICTURES, Evidence, family_table, load_groups, put, training_table, write_page
from benchmarks.reward_summary import Run
from benchmarks.reward_training import DIFFICULTIES, Training, check_results
from benchmarks.tiny_reasoner import FAMILIES, PAGE, ROWS, main, page_of, parse, trainings
from trl_darts.errors import ConfigurationError


ROOT = Path(__file__).resolve().parents[2]
MARKS = "".join(
    f"<!-- {name}: written by benchmarks/tiny_reasoner.py -->\nold\n<!-- end of {name} -->\n"
    for name in ("extent", "training", "families", "answers")
)


def run_of(seed: int, critical: float = 1.0, right: float = 1.0, steps: int = 60) -> Run:
    """A training that costs and learns the same in every step."""
    each = np.full(steps, 1.0)
    answers = [(8, right), (24, right)]
    held_out = {kind: {"sum": answers, "chain": answers} for kind in ("easy", "hard")}
    return Run(seed, right, right * each, each, each, 16 * each, 24 * each, each, 10 * each, critical * each, held_out)


def cells(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def leave_file(training: Training, results: Path, **changes: object) -> Path:
    """What a training leaves behind, in which `changes` are other than was asked for."""
    answers = [[8, 1.0], [24, 0.0]]
    numbers = range(1, training.steps + 1)
    logged = dict.fromkeys(("reward", "rewards/accuracy_reward/mean", "step_time", "darts/rollout/seconds"), 1.0)
    logged |= {"darts/pool/length_mean": 16.0, "darts/pool/length_p99": 24.0}
    outcome = {
        **training.facts,
        "accuracy": 0.5,
        "held_out": {kind: dict.fromkeys(FAMILIES, answers) for kind in DIFFICULTIES},
        "rollouts": [{"step": number, "decoded": 10, "critical": 5} for number in numbers],
        "log_history": [{"step": number, **logged} for number in numbers],
    }
    results.mkdir(exist_ok=True)
    path = results / training.file_name
    path.write_text(json.dumps(outcome | changes))
    return path


def test_ratios_are_taken_seed_by_seed():
    """0.5 and 0.7 of their own baselines; of the mean baseline they would be 0.3 and 1.1, twice as far apart."""
    runs = {"grpo": [run_of(0, 10), run_of(1, 30)], "darts (paper)": [run_of(1, 21), run_of(0, 5)]}
    row = cells(training_table(runs), "darts (paper)")
    assert row[7] == row[8] == "0.60 ± 0.10"
    assert cells(training_table(runs), "grpo")[7] == "1"


def test_differences_are_taken_seed_by_seed():
    runs = {"grpo": [run_of(0, right=0.0), run_of(1, right=1.0)], "shortest only": [run_of(0, right=0.0), run_of(1)]}
    row = cells(training_table(runs), "shortest only")
    assert row[4] == "+0.000 ± 0.000"
    assert row[3] == "0.500 ± 0.500"


def test_one_seed_has_no_error():
    assert "±" not in training_table({"grpo": [run_of(0)]})


def test_words_around_the_tables_stay(tmp_path):
    template = tmp_path / "template.md"
    template.write_text(f"before\n{MARKS}after\n")
    runs = {"grpo": [run_of(0)], "darts (paper)": [run_of(0)]}
    evidence = Evidence(runs, {"sum": runs, "chain": runs}, runs["grpo"][0].held_out)
    write_page(evidence, template, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "6 trainings of 60 steps, 1 seed each." in text
    assert text.count("| darts (paper) |") == 1 + 2 + 2
    write_page(evidence, tmp_path / "page.md", tmp_path / "page.md")  # again and again
    assert (tmp_path / "page.md").read_text() == text


def test_a_page_without_its_place_is_refused():
    with pytest.raises(ValueError, match="must have one pair of the marks"):
        put("nothing here", "training", "a table")


def test_lengths_are_those_of_complete_answers():
    """Those of all candidates, 16 on average, are cut short where candidates are aborted."""
    own = [replace(run_of(0), held_out={"easy": {"sum": [(10, 1.0), (90, 0.0)], "chain": [(50, 1.0), (50, 1.0)]}})]
    own[0].held_out["hard"] = own[0].held_out["easy"]
    assert cells(training_table({"grpo": own}), "grpo")[-2:] == ["50.0", "89"]
    assert family_table({"chain": {"grpo": own}}).splitlines()[-1].endswith("| 50.0 | 50 |")


def test_quick_results_have_a_folder_of_their_own():
    assert parse(["--quick"]).results != parse([]).results
    assert parse(["--quick", "--results", "here"]).results == parse(["--results", "here"]).results == Path("here")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 10}, "steps 10, and 100 is asked for"),
        ({"learning_rate": 1e-4}, "learning_rate 0.0001, and 0.0002 is asked for"),
        ({"settings": {"schedule": "darts"}}, "settings {'schedule': 'darts'}, and {'schedule': 'grpo'} is asked"),
    ],
)
def test_other_trainings_are_not_taken_for_those_asked_for(tmp_path, changes, words):
    asked = trainings(parse([]))
    leave_file(asked[0], tmp_path)
    check_results(asked, tmp_path)
    check_results(asked, tmp_path / "not there")
    path = leave_file(asked[0], tmp_path, **changes)
    with pytest.raises(ConfigurationError) as error:
        check_results(asked, tmp_path)
    assert f"`--results` ({tmp_path}) holds {path.name} with {words}" in str(error.value)


def test_a_file_of_another_kind_is_found_though_its_training_is_not_asked_for(tmp_path):
    leave_file(trainings(parse([]))[0], tmp_path, steps=10)
    with pytest.raises(ConfigurationError, match="steps 10, and 100 is asked for"):
        check_results(trainings(parse(["--prompts", "sum"])), tmp_path)


@pytest.mark.parametrize("arguments", [(), ("--only-page",)])
def test_the_command_refuses_in_one_line(tmp_path, monkeypatch, capsys, arguments):
    leave_file(trainings(parse([]))[0], tmp_path, steps=10)
    monkeypatch.setattr(sys, "argv", ["tiny_reasoner.py", "--results", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "grpo.seed0.json with steps 10, and 100 is asked for." in line


def test_a_page_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="must hold trainings of one kind, and holds none"):
        load_groups(tmp_path, ["grpo"], FAMILIES)


@pytest.mark.parametrize("kinds", [("sum",), ("chain",), FAMILIES, ("both",), ("both", "chain")])
def test_a_part_of_the_trainings_has_a_page_of_its_own(tmp_path, kinds):
    options = parse(["--results", str(tmp_path), "--seeds", "2", "--prompts", *kinds])
    for training in trainings(options)[:-1]:  # interrupted before the last one
        leave_file(training, tmp_path)
    held_out = json.loads((tmp_path / trainings(options)[0].file_name).read_text())["held_out"]
    (tmp_path / "template.md").write_text(MARKS)
    assert page_of(options) == tmp_path / "evidence.md"
    evidence = Evidence(*load_groups(tmp_path, [row.name for row in ROWS], FAMILIES), held_out)
    write_page(evidence, tmp_path / "template.md", page_of(options))
    text = page_of(options).read_text()
    assert "1 to 2 seeds each." in text
    assert text.count("Not among these trainings.") == 2 * ("both" not in kinds) + (not set(kinds) & set(FAMILIES))
    drawn = {name for name, file in PICTURES.items() if (tmp_path / file).exists()}
    assert drawn == ({"training", "waits", "answers"} if "both" in kinds else {"waits"})


def test_a_row_without_its_baseline_has_no_ratios():
    row = cells(training_table({"darts (paper)": [run_of(0)]}), "darts (paper)")
    assert row[4:10] == ["–"] * 6


def test_only_the_full_set_is_published(tmp_path):
    options = parse(["--results", str(tmp_path)])
    *most, last = trainings(options)
    for training in most:
        (tmp_path / training.file_name).touch()
    assert page_of(options) == tmp_path / "evidence.md"
    (tmp_path / last.file_name).touch()
    assert page_of(options) == PAGE
    for others in (["--steps", "150"], ["--learning-rate", "1e-4"], ["--quick", "--steps", "100"]):
        assert page_of(parse(["--results", str(tmp_path), *others])) == tmp_path / "evidence.md"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_quick_run(tmp_path):
    before = PAGE.read_text()
    command = [sys.executable, "benchmarks/tiny_reasoner.py", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert PAGE.read_text() == before
    text = (tmp_path / "evidence.md").read_text()
    assert "7 trainings of 10 steps, 1 seed each." in text
    for line in ("| grpo | 0.", "| grpo, length penalty | 0.", "| darts, patience auto | 0.", "| `chain` | before |"):
        assert line in text
    assert "nan" not in text
    for name in PICTURES.values():
        with Image.open(tmp_path / name) as picture:
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 50  # something is drawn
