"""
The page and its pictures.

Invariants: the page loads nothing; it is the same for the same runs; what a run's log says is text on it and never
code; whatever is missing is said on it.
"""

import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve
from trl_darts.reporting import drawing, write_report

from .builders import SETTINGS, make_entry, make_trace, write_run


PANELS = ("reward", "time", "occupancy", "lengths", "selection", "budget", "tokens", "prediction")
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Outline(HTMLParser):
    """Checks that elements nest, and collects what tests ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.headings, self.ids, self.images = [], [], [], []
        self.links, self.tables = [], []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "svg":
            self.images.append(values)
        if tag == "a":
            self.links.append(values["href"])
        if tag == "th":
            self.tables.append(values.get("scope"))

    def handle_startendtag(self, tag, attrs):
        if "id" in dict(attrs):
            self.ids.append(dict(attrs)["id"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def no_pictures(monkeypatch):
    """Half of a report's time goes into the PNG files."""
    monkeypatch.setattr("trl_darts.reporting.page._write_pictures", lambda *args: [])


def outline(page):
    parser = Outline()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_real_runs(real_page):
    page = real_page.read_text()
    found = outline(page)
    for key in PANELS:
        assert page.count(f'<section id="{key}"') == 1
        with Image.open(real_page.with_name(f"report-{key}.png")) as picture:
            assert picture.width >= 700
            assert len(set(picture.convert("L").resize((60, 40)).tobytes())) > 5
    assert "darts against grpo" in page
    assert "were left out" not in page
    assert "same prompts in" not in page  # they did see the same
    assert found.headings[0] == 1
    assert all(after - before <= 1 for before, after in zip(found.headings, found.headings[1:], strict=False))


def test_nothing_is_loaded(real_page):
    page = real_page.read_text()
    assert "http" not in page
    assert "<script" not in page
    assert "@import" not in page
    references = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)|url\(["']?([^"')]+)""", page)
    assert references
    assert all((a or b).startswith(("#", "data:")) for a, b in references)


def test_parts_refer_to_what_is_there(real_page):
    page = real_page.read_text()
    found = outline(page)
    assert len(found.ids) == len(set(found.ids))
    targets = re.findall(r'(?:href="#|url\(#|aria-labelledby=")([^")]+)', page)
    assert set(targets) <= set(found.ids)
    assert len([image for image in found.images if image.get("role") == "img"]) >= 15
    assert all(image.get("role") == "img" or image.get("aria-hidden") == "true" for image in found.images)
    assert set(found.tables) == {"col", "row"}
    assert len(page) < 500_000


def test_charts_leave_colours_to_the_page(real_page):
    charts = re.findall(r"<svg viewBox.*?</svg>", real_page.read_text(), flags=re.DOTALL)
    assert len(charts) >= 15
    for chart in charts:
        assert not re.findall(r"#[0-9a-fA-F]{6}", chart)
        assert "var(--ink)" in chart
        assert re.search(r"<title id=[^>]*>[^<]{20,}</title>", chart)


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_stand_out(mode):
    def contrast(a, b):
        brighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
        return (brighter + 0.05) / (darker + 0.05)

    ink = drawing.INK[mode]
    assert contrast(ink["ink"], ink["surface"]) > 7
    assert contrast(ink["muted"], ink["surface"]) > 4.5
    for color in drawing.RUN_COLORS[mode]:
        assert contrast(color, ink["surface"]) > 4.5


def test_same_runs_same_page(tmp_path, no_pictures):
    run = write_run(tmp_path / "run", traces=2, log=2)
    pages = [write_report([run], tmp_path / f"{i}" / "report.html")[0].read_text() for i in range(2)]
    assert pages[0] == pages[1]


def test_text_of_a_run_is_text(tmp_path, no_pictures):
    settings = {**SETTINGS, "model": "<script>alert(1)</script>"}
    run = write_run(tmp_path / "a&b <i>", traces=2, log=2, settings=settings)
    page = write_report([run], tmp_path / "report.html")[0].read_text()
    outline(page)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "a&amp;b &lt;i&gt;" in page
    assert "<i>" not in page


@pytest.mark.parametrize(
    ("kwargs", "notes"),
    [
        (
            {"traces": 3},
            ["No log: rewards", "run: no log.", "no latency curve was given"],
        ),
        (
            {"log": 3},
            ["No traces: length", "from the log (no traces)", "a budget needs them", "no traces to draw from"],
        ),
        ({"traces": 1, "log": 1}, ["No prompt came back within these steps"]),
        (
            {"log": [{"step": 1, "reward": 1.0}]},
            [
                "neither traces nor",
                "lacks <code>step_time</code>",
                "no <code>step_time</code>",
                "nothing is known of its rollouts",
            ],
        ),
    ],
)
def test_what_is_missing_is_said(tmp_path, no_pictures, kwargs, notes):
    page = write_report([write_run(tmp_path / "run", **kwargs)], tmp_path / "report.html")[0].read_text()
    outline(page)
    for note in notes:
        assert note in page
    for key in PANELS:
        assert f'<section id="{key}"' in page


def test_pictures_of_an_earlier_report_go(tmp_path):
    run = write_run(tmp_path / "run", log=1)
    (tmp_path / "report-budget.png").write_bytes(b"old")
    write_report([run], tmp_path / "report.html")
    assert not (tmp_path / "report-budget.png").exists()


def test_step_of_the_timeline(tmp_path, no_pictures):
    run = write_run(tmp_path / "run", traces=3)
    page = write_report([run], tmp_path / "report.html", step=3)[0].read_text()
    assert "This is step 3" in page
    with pytest.raises(ConfigurationError, match=r"`step` \(4\).*traces are there 1 to 3"):
        write_report([run], tmp_path / "report.html", step=4)


@pytest.mark.parametrize(
    ("metadata", "fits"),
    [({}, True), ({"model": "/models/tiny-1b/"}, True), ({"model": "some/Other-7B"}, False)],
)
def test_curve_must_be_of_the_runs_model(tmp_path, metadata, fits):
    run = write_run(tmp_path / "run", traces=3, log=3)
    LatencyCurve([1, 8], [0.5, 1.0], metadata).save(tmp_path / "curve.json")
    arguments = ([run], tmp_path / "report.html")
    if not fits:
        with pytest.raises(ConfigurationError, match=r"`latency_curve` \('.*curve.json'\).*'some/Other-7B'.*Tiny-1B"):
            write_report(*arguments, latency_curve=tmp_path / "curve.json")
        return
    page = write_report(*arguments, latency_curve=tmp_path / "curve.json")[0].read_text()
    assert ("curve: model /models/tiny-1b/" if metadata else "does not tell its model") in page
    assert "report-prediction.png" in [path.name for path in tmp_path.iterdir()]


def test_six_runs(tmp_path):
    runs = [
        write_run(
            tmp_path / f"a run with a long name, number {i}",
            traces={f"rollout_{s:05d}_00.parquet": make_trace(step=s) for s in range(i + 1)},
            log=[make_entry(s + 1) for s in range(i + 1)],
        )
        for i in range(6)
    ]
    outline(write_report(runs, tmp_path / "report.html")[0].read_text())


def test_settings_that_differ_are_marked(tmp_path, no_pictures):
    other = {**SETTINGS, "schedule": "grpo", "model": "some/Other-7B"}
    runs = [write_run(tmp_path / "a", log=2), write_run(tmp_path / "b", log=2, settings=other)]
    page = write_report(runs, tmp_path / "report.html")[0].read_text()
    assert '<tr class="matters"><th scope="row">‼ model' in page
    assert '<tr class="differs"><th scope="row">≠ schedule' in page
    assert "The runs did different work: they differ in model." in page
