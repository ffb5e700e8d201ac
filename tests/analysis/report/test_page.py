"""
The page, its charts, and the command that writes it.

Invariants: the page loads nothing; it is the same for the same runs; a run's log is text on it and never code; missing
parts are named; an error is one line.
"""

import re

import pytest
from typer.testing import CliRunner

from tests.browser import show
from tests.builders import letters_dataset, make_args, make_trainer
from trl_darts.analysis.report import page, panels, tables, write_report
from trl_darts.analysis.report.runs import read_run
from trl_darts.cli import app
from trl_darts.policy import LatencyCurve

from .builders import SETTINGS, make_entry, make_trace, write_run


PANELS = ("time", "occupancy", "lengths", "prediction", "reward", "budget")


def run(*args):
    return CliRunner().invoke(app, ["report", *map(str, args)], env={"COLUMNS": "200"})


@pytest.fixture
def no_figures(monkeypatch):
    """Most of a report's time goes into its charts."""
    monkeypatch.setattr(page.charts, "svg", lambda *args: "<svg></svg>")


def panels_in(text):
    return re.findall(r'<(?:section|details class=panel) id="(\w+)"', text)


@pytest.mark.browser
def test_two_trainings_as_a_reader_sees_them(model_dir, tmp_path):
    for schedule in ("grpo", "darts"):
        args = make_args(
            tmp_path / schedule, schedule=schedule, max_steps=3, save_rollout_trace=True, learning_rate=0.0
        )
        make_trainer(model_dir, args, train_dataset=letters_dataset(8)).train()
    LatencyCurve([1, 32], [0.001, 0.004]).save(tmp_path / "curve.json")
    directories = [tmp_path / "grpo", tmp_path / "darts"]
    path = write_report(directories, tmp_path / "report.html", latency_curve=tmp_path / "curve.json")

    text = path.read_text()
    assert panels_in(text) == ["summary", *PANELS, "settings"]
    assert "is left out" not in text
    assert "did different work" not in text
    assert "same prompts in" not in text  # they did see the same
    references = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)|url\(["']?([^"')]+)""", text)
    assert all((a or b).startswith(("#", "data:")) for a, b in references)
    assert "<script" not in text
    identifiers = re.findall(r' id="([^"]+)"', text)
    assert len(set(identifiers)) == len(identifiers)
    assert list(tmp_path.glob("*.png")) == []

    for name, dark, width, behind in (("light", False, 1280, (255, 255, 255)), ("dark", True, 500, (20, 24, 29))):
        (tmp_path / name).mkdir()
        shot = show(path, tmp_path / name, dark=dark, height=3000, width=width)
        assert shot.messages == shot.requests == []
        assert 0.3 < (shot.pixels == behind).all(axis=-1).mean() < 0.97  # neither blank nor another colour
        assert (shot.pixels[:, -8:] == behind).all(axis=(1, 2)).mean() > 0.97  # nothing sticks out at the right


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
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]
    text = (tmp_path / "new" / "page.html").read_text()
    assert "as a multiple of A" in text
    assert "A, step 2: 57 % idle" in text
    assert "<strong>B and A: too few steps to compare. Log entries of both in step 2: 1. At" in text
    assert text.index("<h2>In short<") < text.index("<h2>Where the time goes<") < text.index("<h2>Settings<")


def test_text_of_a_run_is_text(tmp_path, no_figures):
    settings = {**SETTINGS, "model": "<script>alert(1)</script>"}
    source = write_run(tmp_path / "a&b <i>", traces=2, log=2, settings=settings)
    text = write_report([source], tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "a&amp;b &lt;i&gt;" in text
    assert "<i>" not in text


@pytest.mark.parametrize(
    ("kwargs", "notes", "panels"),
    [
        ({"traces": 3}, ["No log: rewards"], ["occupancy", "lengths", "budget"]),
        ({"log": 3}, ["No traces: length", "no traces, so no distribution"], ["time", "lengths", "reward"]),
        ({"log": [{"step": 1, "reward": 1.0}]}, ["No traces: length"], ["reward"]),
    ],
)
def test_what_is_missing_is_said_and_empty_panels_vanish(tmp_path, no_figures, kwargs, notes, panels):
    text = write_report([write_run(tmp_path / "run", **kwargs)], tmp_path / "report.html").read_text()
    for note in notes:
        assert note in text
    assert panels_in(text) == ["summary", *panels, "settings"]


def test_faults_and_settings_of_two_runs(tmp_path, no_figures):
    other = {**SETTINGS, "schedule": "grpo", "model": "some/Other-7B"}
    lost = [make_entry(step, **{"darts/rollout/resumed_candidates": 2.0 * (step > 1)}) for step in (1, 2, 3)]
    runs = [write_run(tmp_path / "a", log=lost), write_run(tmp_path / "b", log=2, settings=other)]
    text = write_report(runs, tmp_path / "report.html").read_text()
    assert '<td data-label="a">4.00 (steps 2 to 3)</td><td data-label="b">–</td>' in text
    differing, others = text[text.index("<h2>Settings") :].split("<details>")
    assert '<tr class="matters"><th scope="row">‼ model' in differing
    assert '<th scope="row">schedule<' in differing
    assert '<th scope="row">num_generations<' in others
    assert "The runs did different work: they differ in model." in text


def test_the_trainer_waits_and_engines_are_idle(tmp_path, no_figures):
    """Of 18 seconds a step, 10 are rollouts; the second run waits for 4 of them."""
    ahead = [make_entry(step, **{"darts/rollout/wait_seconds": 4.0}) for step in (1, 2, 3)]
    runs = [write_run(tmp_path / "a", log=3), write_run(tmp_path / "b", log=ahead)]
    text = write_report(runs, tmp_path / "report.html").read_text()
    assert '<td data-label="Generate">10.0 (56 %)</td>' in text
    assert '<td data-label="Generate">4.00 (22 %)</td>' in text
    assert text.count('<td data-label="Engines idle">44 %</td>') == 2


def test_six_runs_without_traces(tmp_path):
    runs = [write_run(tmp_path / f"a run with a long name, number {i}", log=i + 1) for i in range(6)]
    text = write_report(runs, tmp_path / "report.html").read_text()
    assert panels_in(text) == ["summary", "time", "lengths", "reward", "settings"]
    assert all(f"var({name})" in text for name in re.findall(r"(--[0-9a-f]{6}):", text))  # a colour each


def test_a_long_rollout_is_drawn_beside_the_typical_one(tmp_path):
    traces = {f"rollout_{step:05d}_00.parquet": make_trace(step=step) for step in range(8)}
    traces["rollout_00005_00.parquet"] = slower = make_trace(step=5)
    slower["end_seconds"] *= 3
    text = write_report([write_run(tmp_path / "run", traces=traces)], tmp_path / "report.html").read_text()
    assert "run: in 1 of 7 steps, rollouts took more than 2 times the median, 30.0 s on average." in text
    assert ">run, step 5: 57 % idle<" in text  # of those that took 10 s, the one in the middle
    assert ">run, step 6, a long one: 56 % idle<" in text
    assert text.count(" s</text>") == 2  # where each ends


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
            "[Errno 36] File name too long",
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
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert not list(tmp_path.rglob("*.html"))


def test_evaluation_reward_comes_first_and_the_rows_reward_last(tmp_path, no_figures):
    entries = [make_entry(2), {"step": 1, "eval_reward": 0.3}, make_entry(4), {"step": 4, "eval_reward": 0.7}]
    evaluated = write_run(tmp_path / "evaluated", log=[*entries, {"step": 9, "eval_reward": 1.0}])
    assert tables.evaluation_curve(read_run(evaluated)).to_dict() == {18.0: 0.3, 72.0: 0.7}  # step 9 has no time
    panel = panels.evaluation([read_run(write_run(tmp_path / "plain", log=4)), read_run(evaluated)])
    assert list(panel.charts[0].keywords["curves"]) == [1]
    assert panel.notes == ["plain: the log has no `eval_reward`."]
    found = panels_in(write_report([evaluated], tmp_path / "report.html").read_text())
    assert (found[1], found[-2]) == ("evaluation", "reward")
