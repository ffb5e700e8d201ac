"""`trl-darts simulate`: its help, its options, its table, and what it refuses before anything is computed."""

import csv
import io
import re
import shlex

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.reporting.builders import write_run
from trl_darts.cli import app, simulate
from trl_darts.cli.simulation_table import show
from trl_darts.policy import DecodePoint, LatencyCurve, LatencyProfile, PrefillPoint
from trl_darts.scheduling import ScheduleSettings
from trl_darts.analysis.simulation import ClusterSpec, LogNormalLengths, Workload
from trl_darts.analysis.simulation import compare


SMALL = ["--steps", "2", "--seeds", "1", "--prompts-per-step", "8", "--median-length", "50"]
ON_TRACE = ["--steps", "2", "--seeds", "1", "--schedule", "grpo"]


def run(*args, columns=80):
    return CliRunner().invoke(app, ["simulate", *map(str, args)], env={"COLUMNS": str(columns)})


def rows(directory):
    return list(csv.DictReader((directory / "simulation.csv").open()))


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(simulate, "compare", lambda *args, **kwargs: pytest.fail("a training was simulated"))


@pytest.fixture
def recorded(tmp_path):
    """A run of `some/Tiny-1B`: two prompts of 2 tokens, 2 rows each."""
    return write_run(tmp_path / "run", traces=2, log=2)


def save_profile(path, model="some/Tiny-1B", prefill_seconds=(1.0, 2.0)):
    """A token takes a second, to decode as to prefill."""
    points = [DecodePoint(1, 10, 10.0, 1.0, 0.0, (1.0,))]
    prefills = [PrefillPoint(tokens, float(tokens), 0.0) for tokens in (1, 2)] if prefill_seconds else []
    LatencyProfile.fit(points, prefills, {"model": model}).save(path)
    return path


def test_example_of_the_help_works(tmp_path, monkeypatch):
    text = " ".join(run("--help", columns=200).stdout.replace("│", " ").split())
    (example,) = re.findall(r"trl-darts simulate (--trace .*?none,2)", text)
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "out", traces=2, log=2)
    save_profile("latency.json")
    result = run(*shlex.split(example), "--steps", "2", "--seeds", "1", "--output", "simulation")
    assert result.exit_code == 0, result.stderr
    names = [row["setting"] for row in rows(tmp_path / "simulation")]
    assert names[0] == "grpo"
    assert len(names) == 7


@pytest.mark.parametrize(
    "words",
    [
        ["--schedule", "grpo", "sorted", "partial_rollout"],
        ["--schedule", "grpo,sorted,partial_rollout"],
        ["--schedule", "grpo", "--schedule", "sorted", "--schedule", "partial_rollout"],
        ["--schedule", "grpo", "sorted,partial_rollout"],
    ],
)
def test_schedules_are_separated_as_one_likes(tmp_path, words):
    result = run(*SMALL, *words, "--output", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert [row["setting"] for row in rows(tmp_path)] == ["grpo", "sorted", "partial_rollout"]


@pytest.mark.parametrize("options", [["outputs/grpo"], ["--sweep", "num_longest=1", "max_num_generations=10"]])
def test_a_word_that_is_no_schedule_is_one_too_many(no_training, options):
    result = run(*SMALL, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: `{options[-1]}` is one argument too many: only schedules (grpo, darts,")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--prompts-per-step", "`prompts_per_step` (0) must be at least 1"),
        ("--num-generations", "`num_generations` (0) must be at least"),
        ("--max-completion-length", "`max_completion_length` (0) must be at least 1"),
    ],
)
def test_zero_is_no_default(no_training, option, words):
    result = run("--steps", "1", "--seeds", "1", option, "0")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {words}")


def test_a_curve_of_another_model_is_refused(no_training, recorded, tmp_path):
    curve = save_profile(tmp_path / "other.json", model="some/Other-7B")
    result = run("--trace", recorded, "--latency-curve", curve)
    assert result.exit_code == 2
    assert result.stderr.startswith(
        f"Error: `--latency-curve` ('{curve}') must be of the trace's model, and is of 'some/"
    )
    assert "'some/Tiny-1B'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("model", ["/models/tiny-1b/", None])
def test_a_curve_that_may_be_of_the_traces_model_is_taken(recorded, tmp_path, model):
    LatencyCurve([1], [1.0], {"model": model} if model else {}).save(tmp_path / "curve.json")
    result = run(*ON_TRACE, "--trace", recorded, "--latency-curve", tmp_path / "curve.json")
    assert result.exit_code == 0, result.stderr


def test_prefill_costs_what_the_profile_measured(recorded, tmp_path):
    """Two prompts of 2 tokens are prefilled, once each; with 4 requests of half a second beside them."""
    profile = save_profile(tmp_path / "latency.json")
    LatencyProfile.load(profile).curve.save(tmp_path / "curve.json")
    cases = {
        "measured": [profile],
        "none": [tmp_path / "curve.json"],
        "free": [profile, "--prefill-seconds-per-token", "0"],
        "own": [profile, "--prefill-seconds-per-token", "10"],
        "requests": [tmp_path / "curve.json", "--seconds-per-request", "0.5"],
    }
    seconds = {}
    for name, options in cases.items():
        result = run(*ON_TRACE, "--trace", recorded, "--output", tmp_path / name, "--latency-curve", *options)
        assert result.exit_code == 0, result.stderr
        seconds[name] = float(rows(tmp_path / name)[0]["rollout_seconds"])
    assert seconds["free"] == seconds["none"]
    extra = {name: value - seconds["none"] for name, value in seconds.items()}
    assert extra["measured"] == pytest.approx(4.0)
    assert extra["own"] == pytest.approx(40.0)
    assert extra["requests"] == pytest.approx(2.0)


def test_what_is_preempted_is_prefilled_again(recorded, tmp_path):
    profile, seconds = save_profile(tmp_path / "latency.json"), {}
    for name, kv_tokens in (("wide", 1_000), ("narrow", 14)):
        for price in (0, 1):
            options = ["--kv-tokens", kv_tokens, "--prefill-seconds-per-token", price, "--output", tmp_path / "out"]
            result = run(*ON_TRACE, "--trace", recorded, "--latency-curve", profile, *options)
            assert result.exit_code == 0, result.stderr
            seconds[name, price] = float(rows(tmp_path / "out")[0]["rollout_seconds"])
    assert seconds["narrow", 0] > seconds["wide", 0]
    assert seconds["wide", 1] - seconds["wide", 0] == pytest.approx(4.0)
    assert seconds["narrow", 1] - seconds["narrow", 0] > 4.0


@pytest.mark.parametrize("option", ["--prefill-seconds-per-token", "--seconds-per-request"])
def test_costs_are_not_negative(no_training, option):
    result = run(*SMALL, option, "-1")
    assert result.exit_code == 2
    assert "must be finite and not negative" in result.stderr


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("file", "`--output` ('file') must be a directory that can be made: File exists. Choose another."),
        ("file/below", "`--output` ('file/below') must be a directory that can be made: Not a directory."),
        ("out", "`--output` ('out/simulation.png') must be a file that can be written: it is a directory."),
    ],
)
def test_outputs_are_looked_at_before_anything_is_computed(no_training, tmp_path, monkeypatch, output, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "out" / "simulation.png").mkdir(parents=True)
    result = run(*SMALL, "--output", output)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {words}")
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["simulation.png"]


def test_a_picture_that_can_not_be_drawn_is_known_before(no_training, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_darts.import_utils.is_matplotlib_available", lambda: False)
    result = run(*SMALL, "--output", tmp_path)
    assert result.exit_code == 2
    assert "pip install 'trl-darts[plots]'" in result.stderr


def printed(num_seeds):
    """The longest names of settings, and all columns."""
    workload, cluster = Workload(LogNormalLengths(64), 8, 4096), ClusterSpec(LatencyCurve([1], [0.01]))
    settings = {
        "grpo": ScheduleSettings("grpo", num_generations=2),
        "darts, redundancy_cost_weight=None, max_num_generations=4": ScheduleSettings(
            "darts", num_generations=2, max_num_generations=4
        ),
        "partial_rollout": ScheduleSettings("partial_rollout", num_generations=2),
    }
    outcomes = compare(workload, settings, cluster, num_steps=4, num_seeds=num_seeds)
    console = Console(width=80, record=True, file=io.StringIO())
    show(console, outcomes, workload, cluster, 4, num_seeds)
    return outcomes, console.export_text()


def test_each_quantity_has_its_interval_below_it():
    outcomes, text = printed(num_seeds=3)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text
    first = next(index for index, line in enumerate(lines) if line.startswith("partial_rollout"))
    means, intervals = (line.split() for line in lines[first : first + 2])
    assert len(means) == 10
    assert [interval[0] for interval in intervals] == ["±"] * 9
    partial = outcomes[2]
    assert intervals[0] == f"±{partial.speedup.half_width:.2g}"
    assert intervals[2] == f"±{partial.wasted_share.half_width:.0%}"
    assert intervals[3] == f"±{partial.estimate('bubble_ratio').half_width:.2f}"
    assert intervals[6] == f"±{partial.off_policy_share.half_width:.0%}"
    assert "± is half of a 95 % confidence interval over seeds" in text


def test_one_seed_has_no_interval():
    _, text = printed(num_seeds=1)
    assert "±" not in text.split("partial_rollout is")[0]


def test_lengths_of_a_trace_that_are_none_are_refused(no_training, recorded):
    path = next((recorded / "rollouts").glob("*.parquet"))
    trace = pd.read_parquet(path)
    trace.assign(length=trace["length"].where(trace.index > 0).astype(float)).to_parquet(path)
    result = run("--trace", recorded)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
