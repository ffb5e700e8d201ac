"""Numbers of the README and of the results page: each has a mark, and is what its raw lines give."""

import re

import matplotlib
import pytest

from benchmarks.figures import FIGURES, FOREST, draw
from benchmarks.lines import ROOT
from benchmarks.page_numbers import MARK, NUMBERS, PAGES, claims, written


TEXTS = {page.name: page.read_text() for page in PAGES}
MISSING: set[str] = set()  # names whose raw file is yet to come


@pytest.mark.parametrize("page", TEXTS)
def test_marked_numbers_are_those_of_the_raw_lines(page):
    assert TEXTS[page].split() == written(TEXTS[page]).split()


@pytest.mark.parametrize("page", TEXTS)
def test_every_number_is_marked(page):
    assert claims(TEXTS[page]) == []


def test_every_number_is_shown_and_has_a_raw_file():
    shown = {found["name"] for text in TEXTS.values() for found in MARK.finditer(text)}
    drawn = {name for numbers in FOREST.values() for _, name, _ in numbers}
    assert shown | drawn == set(NUMBERS)
    assert {name for name, number in NUMBERS.items() if not number.is_measured} == MISSING


@pytest.mark.parametrize(
    "text",
    [
        "It is 1.7 times as fast.",
        "2.83×",
        "30 % faster",
        "ends at 0.074",
        "[3.24 times](page.md)",
        "- 12 tokens",
        "| 5 |",
    ],
)
def test_a_number_without_a_mark_is_found(text):
    assert len(claims(f"# Page\n\nSome words.\n\n{text}\n")) == 1


def test_a_setting_needs_no_mark():
    text = (
        "SmolLM2-135M on an H100, 5 seeds of 24 steps, 16 × 8 rows, a 7B model, `a=3`, [a](b/2605.30859), TRL 1.14.2"
    )
    assert claims(f"{text}\n\n```bash\npip install x==3\n```\n") == []


def test_a_wrong_number_is_corrected_and_an_unknown_name_refused():
    assert written("9.99 (0 to 1)<!--gpu.step--> and 9<!--gpu.step-->") == (
        f"{NUMBERS['gpu.step']}<!--gpu.step--> and {str(NUMBERS['gpu.step']).split()[0]}<!--gpu.step-->"
    )
    with pytest.raises(KeyError, match="nothing"):
        written("1.15<!--nothing-->")


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_those_of_the_raw_lines(name, tmp_path):
    draw(name, tmp_path / "drawn.svg")
    committed = (ROOT / "docs" / "figures" / f"{name}.svg").read_text()
    drawn = (tmp_path / "drawn.svg").read_text()
    assert labels_of(drawn) == labels_of(committed)
    if f"Matplotlib v{matplotlib.__version__}," in committed:  # others may place the same marks elsewhere
        assert drawn == committed


def labels_of(svg: str) -> list[str]:
    """Returns the texts of a figure."""
    return re.findall(r"<text[^>]*>([^<]*)<", svg)
