"""`trl-darts report`: exit codes, one line per error, and an example in `--help` that works."""

import re
import shlex

import pytest
from typer.testing import CliRunner

from tests.test_imports import loaded
from trl_darts.cli import app
from trl_darts.policy import LatencyCurve

from .builders import write_run


def run(*args):
    return CliRunner().invoke(app, ["report", *map(str, args)], env={"COLUMNS": "200"})


def test_page_and_pictures(tmp_path):
    runs = [write_run(tmp_path / name, traces=2, log=2) for name in ("a", "b")]
    LatencyCurve([1], [1.0]).save(tmp_path / "curve.json")
    options = ["-o", tmp_path / "new" / "page.html", "--name", "A", "--name", "B", "--step", "2"]
    result = run(*runs, *options, "--latency-curve", tmp_path / "curve.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "new" / "page.html")
    assert "8 pictures beside it" in result.stderr
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names[0] == "page-budget.png"
    assert len(names) == 9
    assert "B against A" in (tmp_path / "new" / "page.html").read_text()


def test_example_of_the_help_works(tmp_path, monkeypatch):
    text = run("--help").stdout
    (example,) = re.findall(r"trl-darts (report .*?--output \S+)", " ".join(text.replace("│", " ").split()))
    _, *args = shlex.split(example)
    monkeypatch.chdir(tmp_path)
    for directory in args[: args.index("--output")]:
        write_run(tmp_path / directory, traces=1, log=1)
    assert run(*args).exit_code == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "`run_dir` ('nowhere') must be a training's `output_dir`, and does not exist."),
        (["a", "--name", "x", "--name", "y"], "`name` (2 given) must be given once per run (1)"),
        (["a", "--step", "9"], "`step` (9) must be a step with a trace"),
        (["a", "--output", "."], "`output` ('.') must be the name of an HTML file."),
        (["a", "--output", "a.pdf"], "`output` ('a.pdf') must be the name of an HTML file."),
        (["a", "--output", "file/report.html"], "`output` ('file/report.html') must be in a directory"),
        (["a", "--output", "x" * 300 + ".html"], f"`output` ('{'x' * 300}.html') must be a file that can be written"),
        (["a", "--output", "/proc/report.html"], "`output` ('/proc/report.html') must be a file that can be written"),
        (
            ["a", "--output", "d/r.html"],
            "`output` ('d/r-reward.png') must be a file that can be written: it is a directory. Choose another.",
        ),
        (["a", "--latency-curve", "none.json"], "`path` ('none.json') must name a JSON file with a latency curve"),
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


def test_without_arguments():
    assert run().exit_code == 2


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_darts.import_utils.is_matplotlib_available", lambda: False)
    result = run(write_run(tmp_path / "a", log=1))
    assert result.exit_code == 2
    assert "pip install 'trl-darts[plots]'" in result.stderr


def test_a_report_does_not_wait_for_torch():
    assert loaded("import trl_darts.reporting") == set()
