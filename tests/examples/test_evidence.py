"""The benchmark behind docs/evidence.md: its statistics, and all of it, shortened, on a real server."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.evidence_page import PICTURES, Evidence, put, training_table, write_page
from benchmarks.reward_summary import Run


ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence.md"


def run_of(seed: int, critical: float = 1.0, right: float = 1.0, steps: int = 60) -> Run:
    """A training that costs and learns the same in every step."""
    each = np.full(steps, 1.0)
    answers = [(8, right), (24, right)]
    held_out = {kind: {"sum": answers, "chain": answers} for kind in ("easy", "hard")}
    return Run(seed, right, right * each, each, each, 16 * each, 24 * each, each, 10 * each, critical * each, held_out)


def cells(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


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
    names = ("extent", "training", "families", "answers")
    marks = "\n".join(f"<!-- {n}: written by benchmarks/tiny_reasoner.py -->\nold\n<!-- end of {n} -->" for n in names)
    template.write_text(f"before\n{marks}\nafter\n")
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
