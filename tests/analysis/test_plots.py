"""Pictures of log histories."""

import numpy as np
from PIL import Image

from trl_darts.analysis.plots import plot_comparison, series, smooth


def test_series_leaves_out_what_was_not_logged():
    log = [{"reward": 1}, {"loss": 2.0}, {"reward": None}, {"reward": 0.5}]
    assert series(log, "reward") == [1.0, 0.5]
    assert smooth([1.0, 3.0, 5.0], window=2) == [1.0, 2.0, 4.0]


def pixels(path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


NAMES = ("reward", "completions/mean_length", "darts/pool/length_p99", "darts/rollout/seconds")


def test_comparison_is_drawn_on_white(tmp_path):
    log = [{name: float(step + 1) for name in NAMES} for step in range(8)]
    plot_comparison({"GRPO": log, "DARTS": log}, tmp_path / "picture.png")
    assert 230 < pixels(tmp_path / "picture.png").mean() < 254


def test_a_run_of_one_step_is_a_point(tmp_path):
    log = [dict.fromkeys(NAMES, 1.0)]
    colored = []
    for number, second in enumerate((log, [])):
        plot_comparison({"GRPO": log, "DARTS": second}, tmp_path / f"{number}.png")
        picture = pixels(tmp_path / f"{number}.png").astype(int)
        colored.append((np.ptp(picture, axis=2) > 60).sum())
    assert colored[0] > 2 * colored[1]  # more than the legend's line
