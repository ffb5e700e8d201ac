"""The command: its errors, its output and its exit codes. The probes have a known latency."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trl_darts.analysis import profile as analysis
from trl_darts.analysis.output_files import check_writable
from trl_darts.analysis.profile import profiler
from trl_darts.cli import app
from trl_darts.cli import profile as command
from trl_darts.errors import ConfigurationError, GenerationError
from trl_darts.policy import LatencyCurve, LatencyProfile

from .builders import GRID, FakeProbe, rng


URL = "http://localhost:8000"


def run(*args: str):
    return CliRunner().invoke(app, ["profile", *args])


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list:
    """Records the options, and measures a fake server. The working directory is a temporary one."""
    seen = []

    def profile_servers(options, report):
        seen.append(options)
        measured = asyncio.run(profiler.measure([FakeProbe([])], GRID, options.repeats, rng(), report))
        about = {"model": "tiny", "servers": list(options.urls), "tensor_parallel_size": 1}
        return profiler.fit(measured, {**about, "repeats": options.repeats})

    monkeypatch.setattr(analysis, "profile_servers", profile_servers)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    return seen


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["localhost:8000"], "`url` ('localhost:8000') must be an address with a scheme and a host. Write it like"),
        ([URL, URL + "/"], f"`url` ('{URL}') must be named once"),
        ([URL, "--repeats", "0"], "`repeats` (0) must be at least 1"),
        ([URL, "--batch-sizes", "1,b"], "`batch_sizes` ('1,b') must be whole numbers and commas"),
        ([URL, "--output", "no/latency.json"], "`output` ('no/latency.json') must be a file that can be written: No"),
        ([URL, "--plot", "latency.docx"], "`plot` ('latency.docx') must end in .png, .svg, .pdf. Rename it."),
        ([URL, "--output", "latency.png"], "`plot` and `output` ('latency.png') must be two files"),
        ([URL, "--tail-of", "none.json"], "`tail_of` ('none.json') must name a JSON file with a latency profile"),
    ],
)
def test_bad_input_is_one_line(measured, args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {message}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert measured == []


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (ConfigurationError("`max_batch_size` (9)"), 2, "Error: `max_batch_size` (9)"),
        (GenerationError("engine is dead"), 1, "nothing was written: engine is dead"),
    ],
)
def test_errors_of_the_measurement(measured, monkeypatch, error, exit_code, message):
    def fail(options, report):
        raise error

    monkeypatch.setattr(analysis, "profile_servers", fail)
    result = run(URL)
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert not Path("latency.json").exists()


def test_writes_prints_and_names_the_trainers_argument(measured):
    Path("latency.json").write_text("an old one")
    result = run(URL)
    assert result.exit_code == 0, result.stderr
    assert json.loads(Path("latency.json").read_text())["kind"] == "latency_profile"
    assert LatencyProfile.load("latency.json").metadata["model"] == "tiny"
    assert LatencyCurve.load("latency.json")(4) == pytest.approx(0.0056, rel=0.02)
    assert Path("latency.png").read_bytes().startswith(b"\x89PNG")
    assert "Per token, 2,048 tokens of context: 4.41 ms at 1" in result.stdout
    assert 'DARTSGRPOConfig(latency_curve="latency.json")' in result.stdout
    assert "Warning" not in result.stderr


def test_tail_servers_are_added_to_a_profile(measured):
    assert run(URL).exit_code == 0
    result = run("http://tail:1", "--tail-of", "latency.json")
    assert result.exit_code == 0, result.stderr
    assert [options.model for options in measured] == [None, "tiny"]
    profile = LatencyProfile.load("latency.json")
    assert profile.metadata["servers"] == [URL]
    assert profile.tail.metadata["servers"] == ["http://tail:1"]
    assert LatencyCurve.load("latency.json") == profile.curve
    assert Path("latency.tail.png").exists()


def test_progress_is_told_where_it_is_piped(measured, monkeypatch):
    monkeypatch.setattr(command, "LINE_INTERVAL_S", 0.01)
    monkeypatch.setattr(FakeProbe, "warm_up", lambda probe, point: asyncio.sleep(0.02))
    lines = run(URL, "--repeats", "1").stderr.splitlines()
    assert re.match(r"\d+ of 27 measurements, \d+ s(, about \d+ s left)?: ", lines[len(lines) // 2])


def test_options_arrive(measured, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    args = ["--batch-sizes", "1, 8", "--context-lengths=64", "--repeats", "2", "--hardware", "a box", "--seed", "3"]
    result = run(URL + "/", "https://other:1", *args, "--max-batch-size", "8", "--max-context-tokens", "900")
    (options,) = measured
    expected = analysis.ProfileOptions((URL, "https://other:1"), (1, 8), 8, (64,), 900, 2, "a box", "s3cret", 3)
    assert options == expected
    assert "s3cret" not in result.output + repr(options) + Path("latency.json").read_text()


def test_without_matplotlib(measured, monkeypatch):
    monkeypatch.setattr(command, "is_matplotlib_available", lambda: False)
    result = run(URL)
    assert result.exit_code == 0
    assert "No picture, which needs matplotlib: `pip install 'trl-darts[report]'`." in result.stdout
    assert not Path("latency.png").exists()
    refused = run(URL, "--plot", "picture.png")
    assert refused.exit_code == 2
    assert "`plot` ('picture.png') needs matplotlib" in refused.stderr


def test_help_shows_an_example():
    assert f"trl-darts profile {URL} --output latency.json" in run("--help").stdout


def test_a_broken_link_is_left_as_it_was(tmp_path):
    link = tmp_path / "latency.json"
    link.symlink_to(tmp_path / "gone.json")
    check_writable("output", link)
    assert link.is_symlink()
    assert not link.exists()
