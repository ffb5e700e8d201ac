"""What a person sees: the progress line and the figures."""

import sys

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from PIL import Image

from tests.stub_engine import StubEngine
from trl_darts.plots import PALETTES, SURFACES, plot_comparison, save_light_and_dark, series, smooth
from trl_darts.progress import RolloutProgress, describe
from trl_darts.scheduling import GroupPlan, Scheduler, make_policies


@pytest.fixture
def ledger():
    scheduler = Scheduler(make_policies("darts", 2, 4, num_longest=1), 2)
    StubEngine({0: [5, 90, 7, 30]}).run(scheduler, [GroupPlan(0, 4)])
    return scheduler.ledger


def test_line_says_what_runs(ledger):
    assert describe(ledger) == "rollout: 0 running, 2 complete, 2 aborted of 4 candidates"


@pytest.mark.parametrize(
    ("enabled", "terminal", "shown"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_line_is_shown_on_terminals_only(ledger, monkeypatch, capsys, enabled, terminal, shown):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with RolloutProgress(enabled) as progress:
        progress(ledger)
        progress(ledger)  # too soon after the first: left out
    assert ("2 aborted of 4 candidates" in capsys.readouterr().err) is shown


def test_series_leaves_out_what_was_not_logged():
    log = [{"reward": 1}, {"loss": 2.0}, {"reward": None}, {"reward": 0.5}]
    assert series(log, "reward") == [1.0, 0.5]
    assert smooth([1.0, 3.0, 5.0], window=2) == [1.0, 2.0, 4.0]


def test_comparison_is_drawn(tmp_path):
    names = ("reward", "completions/mean_length", "darts/pool/length_p99", "darts/rollout/seconds")
    log = [{name: float(step + 1) for name in names} for step in range(8)]
    plot_comparison({"GRPO": log, "DARTS": log}, tmp_path / "picture.png")
    light, dark = (pixels(tmp_path / name).mean() for name in ("picture.png", "picture_dark.png"))
    assert light > 230
    assert dark < 60


def pixels(path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def test_a_figure_has_the_colors_of_each_scheme(tmp_path):
    def draw():
        figure, axes = plt.subplots(figsize=(2, 2))
        axes.bar([0], [1], color="C3")
        axes.set_axis_off()
        return figure

    before = plt.rcParams["axes.prop_cycle"]
    save_light_and_dark(draw, str(tmp_path / "a.b.png"))
    for scheme, name in (("light", "a.b.png"), ("dark", "a.b_dark.png")):
        picture = pixels(tmp_path / name)
        assert picture[0, 0].tolist() == [round(255 * part) for part in to_rgb(SURFACES[scheme])]
        assert picture[150, 150].tolist() == [round(255 * part) for part in to_rgb(PALETTES[scheme][3])]
    assert plt.rcParams["axes.prop_cycle"] == before
    assert plt.get_fignums() == []


def luminance(color: str) -> float:
    """Relative, as WCAG defines it."""
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize(("scheme", "least"), [("light", 2.1), ("dark", 6.0)])
def test_lines_stand_out(scheme, least):
    surface = luminance(SURFACES[scheme])
    for color in PALETTES[scheme]:
        high, low = sorted((luminance(color), surface), reverse=True)
        assert (high + 0.05) / (low + 0.05) > least, color
    assert len(set(PALETTES[scheme])) == len(PALETTES["light"]) == 11
