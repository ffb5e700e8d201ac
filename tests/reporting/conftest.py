"""A pair of real trainings, and the rule for tests marked `browser` where Chromium is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .browser import INSTALL_CHROMIUM, Browser, find_chromium


REQUIRE_BROWSER = "TRL_DARTS_REQUIRE_BROWSER"
NUM_STEPS = 6


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `browser` skip without Chromium, or fail where `TRL_DARTS_REQUIRE_BROWSER=1` promises it."""
    if item.get_closest_marker("browser") is None or find_chromium():
        return
    reason = f"Chromium is not there. {INSTALL_CHROMIUM}"
    if os.environ.get(REQUIRE_BROWSER) == "1":
        pytest.fail(f"{REQUIRE_BROWSER}=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def real_runs(model_dir, tmp_path_factory) -> list[Path]:
    """Two trainings on the transformers engine that see the same prompts, which come back after two steps."""
    from tests.builders import letters_dataset, make_args, make_trainer

    directory = tmp_path_factory.mktemp("real")
    for schedule in ("grpo", "darts"):
        args = make_args(
            directory / schedule, schedule=schedule, max_steps=NUM_STEPS, save_rollout_trace=True, learning_rate=0.0
        )
        make_trainer(model_dir, args, train_dataset=letters_dataset(8)).train()
    return [directory / schedule for schedule in ("grpo", "darts")]


@pytest.fixture(scope="session")
def real_page(real_runs, tmp_path_factory) -> Path:
    """Their report, with predicted times."""
    from trl_darts.policy import LatencyCurve
    from trl_darts.reporting import write_report

    directory = tmp_path_factory.mktemp("page")
    LatencyCurve([1, 32], [0.001, 0.004]).save(directory / "curve.json")
    return write_report(real_runs, directory / "report.html", latency_curve=directory / "curve.json")[0]


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Browser]:
    """One Chromium for all tests."""
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser
