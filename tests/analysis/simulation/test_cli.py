"""`trl-darts simulate`: its help, its options, its table, and what it refuses before anything is computed."""

import csv
import re
import shlex

import pytest
from typer.testing import CliRunner

from tests.analysis.report.builders import write_run
from trl_darts import __version__
from trl_darts.cli import app, simulate
from trl_darts.policy import DecodePoint, LatencyProfile, PrefillPoint


SMALL = ["--steps", "2", "--seeds", "1", "--prompts-per-step", "8"]
ON_TRACE = ["--steps", "2", "--seeds", "1", "--schedule", "grpo"]


def run(*args, columns=80):
    return CliRunner().invoke(app, ["simulate", *map(str, args)], env={"COLUMNS": str(columns)})


def rows(*args, output):
    """Those of the table that it writes."""
    result = run(*args, "--output", output)
    assert result.exit_code == 0, result.stderr
    return list(csv.DictReader((output / "simulation.csv").open()))


def refused(*args) -> str:
    result = run(*args)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    return result.stderr


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(simulate, "compare", lambda *args, **kwargs: pytest.fail("a training was simulated"))


@pytest.fixture
def recorded(tmp_path):
    """A run of `some/Tiny-1B`: two prompts of 2 tokens, 2 rows each."""
    return write_run(tmp_path / "run", traces=2, log=2)


def save_profile(path, model="some/Tiny-1B", **limits):
    """A token takes a second, to decode as to prefill."""
    points = [DecodePoint(1, 10, 10.0, 1.0, 0.0, (1.0,))]
    prefills = [PrefillPoint(tokens, float(tokens), 0.0) for tokens in (1, 2)]
    LatencyProfile.fit(points, prefills, {"model": model, **limits}).save(path)
    return path


def test_version():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{__version__}\n"


def test_example_of_the_help_works(tmp_path, monkeypatch):
    text = " ".join(run("--help", columns=200).stdout.replace("│", " ").split())
    (example,) = re.findall(r"trl-darts simulate (--trace .*?10,12,16)", text)
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "outputs" / "grpo", traces=2, log=2)
    names = [row["setting"] for row in rows(*shlex.split(example), "--steps", 2, "--seeds", 1, output=tmp_path)]
    assert names[0] == "grpo"
    assert len(names) == 4
    assert (tmp_path / "simulation.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "words",
    [
        ["--schedule", "grpo", "--schedule", "sorted", "--schedule", "partial_rollout"],
        ["--schedule", "grpo,sorted", "--schedule", "partial_rollout"],
    ],
)
def test_schedules_are_separated_as_one_likes(tmp_path, words):
    assert [row["setting"] for row in rows(*SMALL, *words, output=tmp_path)] == ["grpo", "sorted", "partial_rollout"]


def test_each_quantity_has_its_interval_below_it():
    names = "grpo,tail_batching,partial_rollout,sorted"
    options = ["--sweep", "sorted_mode=partial", "--steps", 3, "--seeds", 2, "--prompts-per-step", 8]
    lines = run("--schedule", names, *options).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    first = next(index for index, line in enumerate(lines) if line.startswith("partial_rollout"))
    means, intervals = (line.split() for line in lines[first : first + 2])
    assert len(means) == 10
    assert [interval[0] for interval in intervals] == ["±"] * 9
    assert "±: half of a 95 % confidence interval over seeds" in lines


def test_says_what_it_rests_on(tmp_path):
    assumed = " ".join(run(*SMALL).stdout.split())
    assert "bubble: share of idle decoding slots" in assumed
    assert "on 8 engines, assumed: Llama-3.1-8B as NVIDIA published it for NIM" in assumed
    assert "Rollouts only: training takes no time here" in assumed
    assert "WARNING: the latency curve is assumed (Llama-3.1-8B" in assumed
    measured = save_profile(tmp_path / "latency.json")
    text = run(*SMALL, "--latency-curve", measured, "--fixed-seconds", 1).stdout
    assert "Rollouts only" not in text
    assert "WARNING" not in text


def test_the_guard_of_long_answers_is_simulated_and_told(tmp_path):
    """A sweep can switch it off, which is faster, and is not what ships."""
    found = rows(*SMALL, "--steps", 8, "--sweep", "long_end_every=none,4", output=tmp_path)
    assert [row["setting"] for row in found] == ["grpo", "darts, long_end_every=None", "darts, long_end_every=4"]
    assert float(found[1]["speedup"]) > float(found[2]["speedup"])
    assert rows(*SMALL, "--steps", 8, output=tmp_path)[1]["speedup"] == found[2]["speedup"]
    text = " ".join(run(*SMALL).stdout.split())
    assert "one rollout in 4 waits for all answers. With vLLM servers it defers groups with equal rewards" in text
    assert "without a guard (--sweep long_end_every=none), 10 to 25 % below the latter" in text


def test_each_setting_has_its_fastest_split_of_the_gpus(tmp_path):
    """As if each split were simulated by itself."""
    found = rows(*SMALL, "--num-gpus", 3, "--train-seconds-per-token", 1e-2, output=tmp_path)
    alone = {
        engines: rows(
            *(*SMALL, "--num-engines", engines, "--train-seconds-per-token", 1e-2 / (3 - engines)), output=tmp_path
        )
        for engines in (1, 2)
    }
    for place, row in enumerate(found):
        seconds, engines = min((float(own[place]["step_seconds"]), engines) for engines, own in alone.items())
        assert row["setting"] == f"{alone[1][place]['setting']}, engines={engines}"
        assert float(row["step_seconds"]) == seconds
        assert float(row["speedup"]) == pytest.approx(float(found[0]["step_seconds"]) / seconds)


def test_what_a_profile_limits_waits(recorded, tmp_path):
    """Four rows of a token per second: with one slot, they come one after the other."""
    seconds = []
    for limits in ({}, {"max_num_seqs": 1}, {"kv_cache_tokens": 4}):
        profile = save_profile(tmp_path / "latency.json", **limits)
        (row,) = rows(*ON_TRACE, "--trace", recorded, "--latency-curve", profile, output=tmp_path)
        seconds.append(float(row["rollout_seconds"]))
    assert min(seconds[1:]) > 2 * seconds[0]
    text = run(*ON_TRACE, "--trace", recorded, "--latency-curve", profile).stdout
    assert "of at most 4 tokens of KV cache" in " ".join(text.split())


def test_a_curve_of_another_model_is_refused(no_training, recorded, tmp_path):
    curve = save_profile(tmp_path / "other.json", model="some/Other-7B")
    error = refused("--trace", recorded, "--latency-curve", curve)
    assert error.startswith(
        f"Error: `--latency-curve` ('{curve}') must be of the model that was trained, and is of 'some/"
    )
    assert "'some/Tiny-1B'" in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trace", "/nowhere"], "`--trace` ('/nowhere') must be the `output_dir` of a run"),
        (
            ["--latency-curve", "/nowhere.json"],
            "Error: `--latency-curve` ('/nowhere.json') must name a JSON file with a latency curve",
        ),
        (["--schedule", "best"], "`--schedule` ('best') must be one or several of 'grpo', 'darts'"),
        (["outputs/grpo"], "(outputs/grpo)"),
        (["--workload", "mine"], "`--workload` ('mine') must be one of 'llama_8b_deepscaler', 'deepseek_r1'"),
        (["--kv-tokens", "4"], "`--kv-tokens` was removed. A file of `trl-darts profile` has it."),
        (["--endless-share", "0.1"], "`--endless-share` was removed. Name a run with `--trace`, or use"),
        (["--layout", "4x2+1x8"], "`--layout` was removed. Use `trl_darts.analysis.simulation.ClusterSpec` in Python"),
        (["--num-gpus", "8"], "`--num-gpus` (8) needs `--train-seconds-per-token`"),
        (["--num-gpus", "1"], "`--num-gpus` (1) must be at least 2"),
        (["--num-gpus", "8", "--num-engines", "4"], "`--num-engines` (4) has no effect with `--num-gpus` (8)"),
        (["--steps", "0"], "`--steps` (0) must be at least 1"),
        (["--output", "file"], "File exists: 'file'"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_computed(no_training, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert words in refused("--seeds", "1", *options)


def test_a_picture_that_can_not_be_drawn_is_known_before(no_training, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_darts.import_utils.is_matplotlib_available", lambda: False)
    result = run(*SMALL, "--output", tmp_path)
    assert result.exit_code == 2
    assert "pip install 'trl-darts[report]'" in result.stderr


def test_a_trace_has_lengths_of_its_own(no_training, recorded):
    error = refused("--trace", recorded, "--workload", "deepseek_r1")
    assert error.startswith(f"Error: `--workload` (deepseek_r1) has no effect with `--trace` ('{recorded}')")


def test_tools(tmp_path):
    """Who waits for tools needs longer, and the table says what was assumed."""
    words = ["--schedule", "grpo", "--prompts-per-step", 8, "--steps", 1, "--seeds", 1]
    plain, tools = ([*words, "--tool-calls", calls] for calls in (0, 5))
    seconds = [float(rows(*own, output=tmp_path)[0]["rollout_seconds"]) for own in (plain, tools)]
    assert seconds[1] > seconds[0]
    told = run(*tools, "--schedule", "darts").stdout
    assert "about 5 calls per conversation" in told
    assert "the trainer's default with conversations" in " ".join(told.split())
    assert "`--tool-seconds` (2) has no effect without `--tool-calls`" in refused(*words, "--tool-seconds", 2)
