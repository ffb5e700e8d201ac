"""The tables of benchmarks/REPORT.md are what the lines in benchmarks/results give: `python -m benchmarks.report`."""

import math

import pytest

from benchmarks import cells, harness, lines, parts, report
from benchmarks.report import PAGE, put


def test_every_table_is_what_its_lines_give():
    text = PAGE.read_text()
    assert report.written(text) == text


def test_a_changed_line_changes_the_page(tmp_path):
    lines.append(tmp_path / "listed.jsonl", {"prompts": 4, "tokens": 300, "fixed": 1.0, "ray": 2.0})
    assert "| 4 × 8 | 300 | 1 | 2.00 |" in parts.listed(tmp_path)


@pytest.mark.parametrize("part", report.PARTS)
def test_a_part_that_was_not_measured_has_no_section(part, tmp_path):
    assert part(tmp_path) == ""


def test_marks_must_be_there_once():
    with pytest.raises(ValueError, match="one pair of the marks"):
        put("no marks", "parts", "text")


def test_numbers_have_two_or_three_digits():
    assert cells.ratio([2.0, 0.5, 1.0]) == "1.00 (0.18 to 5.59)"
    assert cells.ratio([1, 1.0]) == "1"
    assert cells.ratio([1.234]) == "1.23"
    assert cells.mean([0.7412, 0.7478, 0.7441]) == "0.744 ± 0.008"
    assert cells.mean([-0.001, 0.0012, 0.0]) == "0.0001 ± 0.0027"
    assert cells.mean([]) == cells.ratio([]) == "–"
    assert math.isnan(cells.geometric([2.0])[1])


@pytest.mark.parametrize("name", ["name.jsonl", "name.json"])
def test_a_stored_line_says_where_it_comes_from(tmp_path, name):
    harness.store(tmp_path / name, {"seconds": [0.123456789], "number": 3})
    (line,) = harness.load(tmp_path / name)
    assert line["seconds"] == [0.12346]
    assert line["number"] == 3
    assert line["machine"]["cores"] >= 1
    assert line["machine"]["device"]
    assert {"torch", "trl"} <= line["versions"].keys()
