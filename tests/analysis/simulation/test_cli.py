"""`trl-darts simulate`: its help, its options, its table, and what it refuses before anything is computed."""

import csv
import re
import shlex
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tests.analysis.report.builders import write_run
from trl_darts import __version__
from trl_darts.cli import app, simulate
from trl_darts.policy import DecodePoint, LatencyProfile, PrefillPoint


SMALL = ["--steps", "2", "--seeds", "1", "--prompts-per-step", "8", "--median-length", "50"]
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
        ["--schedule", "grpo", "sorted", "partial_rollout"],
        ["--schedule", "grpo", "--schedule", "sorted", "--schedule", "partial_rollout"],
        ["--schedule", "grpo", "sorted,partial_rollout"],
    ],
)
def test_schedules_are_separated_as_one_likes(tmp_path, words):
    assert [row["setting"] for row in rows(*SMALL, *words, output=tmp_path)] == ["grpo", "sorted", "partial_rollout"]


def test_uniform_groups_are_counted_by_lessons():
    done = run("--uniform-share", "0.5", "--sweep", "drop_uniform_groups=false,true", "--schedule", "grpo", *SMALL)
    assert done.exit_code == 0, done.stderr
    assert "infor-" in done.stdout
    assert "The speed-up is of seconds per such group" in " ".join(done.stdout.split())


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


def test_each_endless_share_has_a_baseline_of_its_own(tmp_path):
    found = rows(*SMALL, "--endless-share", "0,0.05", output=tmp_path)
    names = [
        "grpo, endless_share=0",
        "darts, long_end_every=4, endless_share=0",
        "grpo, endless_share=0.05",
        "darts, long_end_every=4, endless_share=0.05",
    ]
    assert [row["setting"] for row in found] == names
    assert [float(found[index]["speedup"]) for index in (0, 2)] == [1.0, 1.0]
    assert [float(found[index]["truncated_ratio"]) > 0 for index in (0, 2)] == [False, True]


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


@pytest.mark.parametrize(
    ("limits", "options", "expected"),
    [
        ({}, [], (None, None, 1.0)),
        ({"max_num_seqs": 64, "kv_cache_tokens": 9_000}, [], (64, 9_000, 1.0)),
        ({"max_num_seqs": 64, "kv_cache_tokens": 9_000}, ["--max-num-seqs", 128], (128, 9_000, 1.0)),
        ({"max_num_seqs": 64, "kv_cache_tokens": 9_000}, ["--kv-tokens", 500], (64, 500, 1.0)),
        ({"max_num_seqs": 64, "kv_cache_tokens": 9_000}, ["--prefill-seconds-per-token", 0], (64, 9_000, 0.0)),
    ],
)
def test_an_engine_is_as_it_was_profiled_unless_it_is_said_otherwise(tmp_path, monkeypatch, limits, options, expected):
    clusters = []
    monkeypatch.setattr(simulate, "show", lambda console, outcomes, workload, cluster, *size: clusters.append(cluster))
    profile = save_profile(tmp_path / "latency.json", **limits)
    assert run(*SMALL, "--schedule", "grpo", "--latency-curve", profile, *options).exit_code == 0
    (cluster,) = clusters
    assert (cluster.max_num_seqs, cluster.kv_tokens, cluster.prefill_seconds_per_token) == pytest.approx(expected)


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
    "option",
    ["--workload", "--num-prompts", "--median-length", "--inter-prompt-std", "--intra-prompt-std", "--endless-share"],
)
def test_a_trace_has_lengths_of_its_own(no_training, recorded, option):
    value = "64" if option == "--num-prompts" else "0.5"
    error = refused("--trace", recorded, option, value)
    assert error.startswith(f"Error: `{option}` ({value}) has no effect with `--trace` ('{recorded}')")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trace", "/nowhere"], "`--trace` ('/nowhere') must be the `output_dir` of a run"),
        (
            ["--latency-curve", "/nowhere.json"],
            "Error: `--latency-curve` ('/nowhere.json') must name a JSON file with a latency curve",
        ),
        (["--schedule", "best"], "`--schedule` ('best') must be one or several of 'grpo', 'darts'"),
        (["outputs/grpo"], "`outputs/grpo` is one argument too many: only schedules (grpo, darts,"),
        (["--workload", "mine"], "`--workload` ('mine') must be one of 'llama_8b_deepscaler', 'deepseek_r1'"),
        (["--endless-share", "0,few"], "`--endless-share` ('0,few') must be numbers from 0 to 0.1 and commas"),
        (["--uniform-share", "1"], "`uniform_share` (1.0) must be between 0 and 0.9"),
        (["--num-gpus", "8"], "`--num-gpus` (8) needs `--train-seconds-per-token`"),
        (["--num-gpus", "1"], "`--num-gpus` (1) must be at least 2"),
        (["--num-gpus", "8", "--num-engines", "4"], "`--num-engines` (4) has no effect with `--num-gpus` (8)"),
        (["--steps", "0"], "`--steps` (0) must be at least 1"),
        (["--output", "out"], "`--output` ('out/simulation.png') must be a file that can be written: it is a direct"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_computed(no_training, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "out" / "simulation.png").mkdir(parents=True)
    assert words in refused("--seeds", "1", *options)


def test_a_picture_that_can_not_be_drawn_is_known_before(no_training, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_darts.import_utils.is_matplotlib_available", lambda: False)
    result = run(*SMALL, "--output", tmp_path)
    assert result.exit_code == 2
    assert "pip install 'trl-darts[report]'" in result.stderr


def test_engines_of_two_layouts(tmp_path):
    small = ["--layout", "4x2+1x8", *SMALL, "--schedule", "grpo"]
    with_tail = rows(*small, "--median-length", 2000, "--sweep", "tail_switch_at=0,8,none", output=tmp_path)
    assert [row["setting"] for row in with_tail] == [f"grpo, tail_switch_at={n}" for n in (0, 8, None)]
    assert float(with_tail[2]["speedup"]) > 1.0
    path = save_profile(tmp_path / "latency.json")
    profile = LatencyProfile.load(path)
    replace(profile, tail=profile).save(tmp_path / "both.json")
    own = [*SMALL, "--schedule", "grpo", "--layout", "2x1+1x4", "--switch-seconds", 0]
    assert len(rows(*own, "--latency-curve", tmp_path / "both.json", output=tmp_path)) == 1
    assert "has none of the tail's. Add it with `trl-darts profile URL --tail-of" in refused(
        *own, "--latency-curve", path
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout", "4x2"], "`--layout` ('4x2') must be main and tail engines that differ"),
        (["--layout", "1x2+1x2"], "must be main and tail engines that differ"),
        (["--layout", "8x1+1x8"], "needs `--latency-curve`, a profile of both kinds of engines"),
        (["--layout", "4x2+1x8", "--num-engines", "4"], "`--num-engines` (4) does not work with `--layout`"),
        (
            ["--layout", "4x2+1x8", "--sweep", "tail_share=0.1"],
            "`--sweep tail_share` needs tail engines",
        ),
        (["--sweep", "tail_switch_at=4"], "`--sweep tail_switch_at` needs tail engines. Give `--layout`"),
    ],
)
def test_refused_layouts(words, message, no_training):
    assert message in refused(*words)
