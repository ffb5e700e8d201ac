"""
The page, its pictures, and the command that writes them.

Invariants: the page loads nothing; it is the same for the same runs; a run's log is text on it and never code; missing
parts are named; an error is one line.
"""

import re

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.browser import show
from tests.builders import letters_dataset, make_args, make_trainer
from trl_darts.analysis.report import page, panels, tables, write_report
from trl_darts.analysis.report.runs import read_run
from trl_darts.cli import app
from trl_darts.policy import LatencyCurve

from .builders import SETTINGS, make_entry, write_run


PANELS = ("reward", "time", "occupancy", "lengths", "budget", "faults", "prediction")


def run(*args):
    return CliRunner().invoke(app, ["report", *map(str, args)], env={"COLUMNS": "200"})


@pytest.fixture
def no_figures(monkeypatch):
    """Most of a report's time goes into its figures."""
    monkeypatch.setattr(page, "figure", lambda *args: b"figure")


@pytest.mark.browser
def test_two_trainings_as_a_reader_sees_them(model_dir, tmp_path):
    for schedule in ("grpo", "darts"):
        args = make_args(
            tmp_path / schedule, schedule=schedule, max_steps=3, save_rollout_trace=True, learning_rate=0.0
        )
        make_trainer(model_dir, args, train_dataset=letters_dataset(8)).train()
    LatencyCurve([1, 32], [0.001, 0.004]).save(tmp_path / "curve.json")
    directories = [tmp_path / "grpo", tmp_path / "darts"]
    path, *pictures = write_report(directories, tmp_path / "report.html", latency_curve=tmp_path / "curve.json")

    text = path.read_text()
    assert text.count("<section id=") == 2 + len(PANELS)
    assert "is left out" not in text
    assert "did different work" not in text
    assert "same prompts in" not in text  # they did see the same
    references = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)|url\(["']?([^"')]+)""", text)
    assert all((a or b).startswith(("#", "data:")) for a, b in references)
    assert "<script" not in text

    assert [picture.name for picture in pictures] == [f"report-{key}.png" for key in PANELS if key != "faults"]
    for picture in pictures:
        pixels = np.asarray(Image.open(picture).convert("RGB"))
        assert (pixels[0] == 255).all()  # on white, also on dark pages
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50

    for name, dark, behind in (("light", False, (255, 255, 255)), ("dark", True, (20, 24, 29))):
        (tmp_path / name).mkdir()
        shot = show(path, tmp_path / name, dark=dark, height=3000)
        assert shot.messages == shot.requests == []
        assert 0.3 < (shot.pixels == behind).all(axis=-1).mean() < 0.97  # neither blank nor another colour


@pytest.mark.browser
def test_what_a_page_complains_about_and_asks_for_is_seen(tmp_path):
    source = tmp_path / "page.html"
    source.write_text('<img src="http://example.invalid/a.png"><script>nothing()</script>')
    shot = show(source, tmp_path)
    assert shot.requests == ["http://example.invalid/a.png"]
    assert "nothing is not defined" in shot.messages[0]


def test_command(tmp_path):
    runs = [write_run(tmp_path / name, traces=2, log=2) for name in ("a", "b")]
    LatencyCurve([1], [1.0]).save(tmp_path / "curve.json")
    options = ["-o", tmp_path / "new" / "page.html", "--name", "A", "--name", "B", "--step", "2"]
    result = run(*runs, *options, "--latency-curve", tmp_path / "curve.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "new" / "page.html")
    assert "6 figures next to it" in result.stderr
    assert sorted(path.name for path in (tmp_path / "new").glob("*.png"))[0] == "page-budget.png"
    text = (tmp_path / "new" / "page.html").read_text()
    assert "as a multiple of A" in text
    assert "This is step 2" in text
    assert "<strong>B and A: too few steps to compare. Without step 1, which warms up, their logs have 1 in" in text
    assert text.index("<h2>In short<") < text.index("<h2>Where the time goes<") < text.index("<h2>Settings<")


def test_text_of_a_run_is_text(tmp_path, no_figures):
    settings = {**SETTINGS, "model": "<script>alert(1)</script>"}
    source = write_run(tmp_path / "a&b <i>", traces=2, log=2, settings=settings)
    text = write_report([source], tmp_path / "report.html")[0].read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "a&amp;b &lt;i&gt;" in text
    assert "<i>" not in text


@pytest.mark.parametrize(
    ("kwargs", "notes"),
    [
        ({"traces": 3}, ["No log: rewards", "the log has no <code>reward</code>", "No latency curve was given"]),
        ({"log": 3}, ["No traces: length", "no distribution", "budgets need them", "no trace of this step"]),
        ({"traces": 1, "log": 1}, ["No prompt was sampled twice in these steps"]),
        ({"log": [{"step": 1, "reward": 1.0}]}, ["no curve against time", "lacks <code>step_time</code>"]),
    ],
)
def test_what_is_missing_is_said(tmp_path, kwargs, notes):
    text = write_report([write_run(tmp_path / "run", **kwargs)], tmp_path / "report.html")[0].read_text()
    for note in notes:
        assert note in text
    for key in PANELS:
        assert f'<section id="{key}"' in text


def test_faults_and_settings_of_two_runs(tmp_path, no_figures):
    other = {**SETTINGS, "schedule": "grpo", "model": "some/Other-7B"}
    lost = [make_entry(step, **{"darts/rollout/resumed_candidates": 2.0 * (step > 1)}) for step in (1, 2, 3)]
    runs = [write_run(tmp_path / "a", log=lost), write_run(tmp_path / "b", log=2, settings=other)]
    text = write_report(runs, tmp_path / "report.html")[0].read_text()
    assert "<td>4.00 (steps 2 to 3)</td><td>–</td>" in text
    assert '<tr class="matters"><th scope="row">‼ model' in text
    assert '<tr class="differs"><th scope="row">≠ schedule' in text
    assert "The runs did different work: they differ in model." in text


def test_the_trainer_waits_and_engines_are_idle(tmp_path, no_figures):
    """Of 18 seconds a step, 10 are rollouts; the second run waits for 4 of them."""
    ahead = [make_entry(step, **{"darts/rollout/wait_seconds": 4.0}) for step in (1, 2, 3)]
    runs = [write_run(tmp_path / "a", log=3), write_run(tmp_path / "b", log=ahead)]
    text = write_report(runs, tmp_path / "report.html")[0].read_text()
    assert "<th>Step</th><th>Engines idle</th>" in text.replace(' scope="col"', "")
    assert "<td>10.0 (56 %)</td>" in text
    assert "<td>4.00 (22 %)</td>" in text
    assert text.count("<td>44 %</td>") == 2


def test_six_runs_without_traces(tmp_path):
    (tmp_path / "report-budget.png").write_bytes(b"of an earlier report")
    runs = [write_run(tmp_path / f"a run with a long name, number {i}", log=i + 1) for i in range(6)]
    _, *pictures = write_report(runs, tmp_path / "report.html")
    assert [picture.name for picture in pictures] == ["report-reward.png", "report-time.png", "report-lengths.png"]
    assert not (tmp_path / "report-budget.png").exists()


@pytest.mark.parametrize(
    ("metadata", "fits"),
    [({}, True), ({"model": "/models/tiny-1b/"}, True), ({"model": "some/Other-7B"}, False)],
)
def test_curve_must_be_of_the_runs_model(tmp_path, no_figures, metadata, fits):
    write_run(tmp_path / "run", traces=3, log=3)
    LatencyCurve([1, 8], [0.5, 1.0], metadata).save(tmp_path / "curve.json")
    result = run(tmp_path / "run", "-o", tmp_path / "r.html", "--latency-curve", tmp_path / "curve.json")
    assert result.exit_code == (0 if fits else 2)
    if fits:
        assert f"curve of {metadata.get('model', 'an unknown model')}" in (tmp_path / "r.html").read_text()
    else:
        assert re.search(r"`--latency-curve` \('.*curve.json'\).*'some/Other-7B'.*Tiny-1B", result.stderr)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a", "--step", "9"], "`--step` (9) must be a step with a trace, and there are traces of steps 1 to 1"),
        (["a", "--output", "."], "`--output` ('.') must be the name of an HTML file."),
        (
            ["a", "--output", "x" * 300 + ".html"],
            f"`--output` ('{'x' * 300}.html') must be a file that can be written",
        ),
        (
            ["a", "--output", "d/r.html"],
            "`--output` ('d/r-reward.png') must be a file that can be written: it is a dir",
        ),
        (
            ["a", "--latency-curve", "none.json"],
            "`--latency-curve` ('none.json') must name a JSON file with a latency curve",
        ),
    ],
)
def test_bad_input(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", traces=1, log=1)
    (tmp_path / "file").touch()
    (tmp_path / "d" / "r-reward.png").mkdir(parents=True)
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert not list(tmp_path.rglob("*.html"))


def test_evaluation_reward_stands_against_time_beside_the_rows_reward(tmp_path):
    entries = [make_entry(2), {"step": 1, "eval_reward": 0.3}, make_entry(4), {"step": 4, "eval_reward": 0.7}]
    evaluated = read_run(write_run(tmp_path / "evaluated", log=[*entries, {"step": 9, "eval_reward": 1.0}]))
    plain = read_run(write_run(tmp_path / "plain", log=4))
    assert tables.evaluation_curve(evaluated).to_dict() == {18.0: 0.3, 72.0: 0.7}  # step 9 has no time
    panel = panels.reward([plain, evaluated])
    assert [chart.keywords["title"] for chart in panel.charts] == [*["Reward of the rows"] * 2, "Evaluation reward"]
    assert list(panel.charts[2].keywords["curves"]) == [1]
    assert "does not compare between runs; evaluation reward against time does, within its noise. Time" in panel.lead
    assert "no log has `eval_reward`" in panels.reward([plain]).lead
    assert len(panels.reward([plain]).charts) == 2
