"""The harness of the benchmarks: which runs there are, which of them are missing, and what is shared."""

import importlib
import json
import logging
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import peers, smollm2
from benchmarks.harness import Benchmark, Shared, alternate, main, parse, run_missing


FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "BENCHMARK = " in path.read_text())


def make(run, **fields):
    axes = {"world": ["a", "b, c"], "seed": range(2), "arm": ["grpo", "ours"]}
    options = {"options": {"steps": 3}, "quick": {"steps": 1}, "baseline": "grpo"}
    return Benchmark("name", "doc", axes, run, lambda results: "the table", **{**options, **fields})


def test_runs_are_interleaved_by_seed_and_a_later_call_makes_the_missing_ones(tmp_path):
    made = []

    def run(shared, world, seed, arm, steps):
        made.append((world, seed, arm, steps))
        if len(made) == 3:
            raise KeyboardInterrupt
        return {"seconds": 1.0}

    benchmark = make(run)
    with pytest.raises(KeyboardInterrupt):
        run_missing(benchmark, parse(benchmark, ["--worlds", "a"]), tmp_path)
    assert made == [("a", 0, "grpo", 3), ("a", 0, "ours", 3), ("a", 1, "grpo", 3)]
    run_missing(benchmark, parse(benchmark, ["--worlds", "b, c,a", "--seeds", "1", "--arms", "ours"]), tmp_path)
    assert made[3:] == [("a", 1, "grpo", 3), ("a", 1, "ours", 3), ("b, c", 1, "grpo", 3), ("b, c", 1, "ours", 3)]
    line = json.loads((tmp_path / "name.jsonl").read_text().splitlines()[0])
    assert (line["world"], line["seed"], line["arm"], line["seconds"]) == ("a", 0, "grpo", 1.0)
    assert {"date", "versions", "machine"} <= line.keys()


def test_some_benchmarks_measure_again_and_store_several_lines(tmp_path):
    benchmark = make(lambda shared, **run: [{"part": 1}, {"part": 2}], resumes=False)
    options = parse(benchmark, ["--quick"])
    assert (options.seeds, options.arms, options.steps) == ([0], ["grpo", "ours"], 1)
    for _ in range(2):
        run_missing(benchmark, options, tmp_path)
    assert len((tmp_path / "name.jsonl").read_text().splitlines()) == 2 * 2 * 4


def test_a_stored_run_that_was_made_otherwise_is_refused(tmp_path):
    benchmark = make(lambda shared, **run: {}, facts=lambda run: {"steps": run["steps"]})
    run_missing(benchmark, parse(benchmark, []), tmp_path)
    run_missing(benchmark, parse(benchmark, ["--only-tables"]), tmp_path)
    with pytest.raises(SystemExit, match=r"with steps 3, and 4 is asked for"):
        run_missing(benchmark, parse(benchmark, ["--steps", "4"]), tmp_path)


@pytest.mark.parametrize("words", [["--arms", "nope"], ["--seeds", "a"], ["--steps", "a"], ["--nope"]])
def test_unknown_words_are_refused(words):
    with pytest.raises(SystemExit, match="2"):
        parse(make(None), words)


def test_an_arm_of_one_word_is_an_option():
    assert parse(make(None, baseline=None), ["--ours"]).arms == ["ours"]


def test_the_exit_status_tells_of_a_failed_check(tmp_path, capsys):
    benchmark = make(lambda shared, **run: {"lost": 1}, check=lambda line: f"{line['arm']} lost {line['lost']}")
    with pytest.raises(SystemExit, match="1"):
        main(benchmark, ["--quick"])
    shown = capsys.readouterr()
    assert "the table" in shown.out
    assert "error: ours lost 1" in shown.err


def test_loggers_are_quiet_during_the_runs_alone():
    seen, logger = [], logging.getLogger("trl_darts")
    before = logger.level
    with pytest.raises(SystemExit, match="0"):
        main(make(lambda shared, **run: seen.append(logger.level) or {}), ["--quick"])
    assert set(seen) == {logging.ERROR}
    assert logger.level == before != logging.ERROR


def test_what_is_shared_is_closed_when_another_one_is_needed(tmp_path):
    events = []

    @contextmanager
    def server(world):
        events.append(f"start {world}")
        yield world
        events.append(f"stop {world}")

    @contextmanager
    def epoch(world, seed):
        yield f"{world}{seed}"
        events.append(f"end {world}{seed}")

    shared = Shared(tmp_path)
    assert [shared(server, "a"), shared(epoch, "a", 0), shared(server, "a"), shared(epoch, "a", 1)] == [
        *("a", "a0", "a", "a1")
    ]
    assert events == ["start a", "end a0"]
    shared(server, "b")
    shared.close()
    assert events[2:] == ["end a1", "stop a", "start b", "stop b"]


def test_sides_take_turns_after_a_warm_up():
    order = []
    found = alternate({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, 2)
    assert "".join(order) == "abbaab"
    assert found == {"a": [4, 5], "b": [3, 6]}


def test_parts_of_a_peers_step_add_up_to_its_seconds():
    steps = [
        {"seconds": 5.0, "now": 5.0, "pace": 1.0, "trained": 2560.0, "reward": 0.4, "mean": 20.0},
        {"seconds": 4.0, "now": 9.0, "pace": 1.0, "trained": 2560.0, "reward": 0.5, "mean": 10.0},
    ]
    ours = {"darts/rollout/seconds": 9.0, "darts/rollout/wait_seconds": 0.5, "darts/score/seconds": 1.0}
    theirs = {"perf/rollout_wait_s": 2.0, "perf/fwd_bwd_s": 0.5, "sample/dropped_stale_total": 4.0}
    found = peers.summary(steps, {1: ours, 2: theirs})
    assert found["parts"] == {"wait": 1.25, "scoring": 0.5, "sync": 0.0, "passes": 0.25, "pace": 1.0, "rest": 1.5}
    assert (found["seconds"], found["seconds_to_target"], found["trained_tokens"]) == (9.0, 9.0, 5120.0)
    assert found["kept_over_plain"] == pytest.approx(10 / 15)
    assert found["thrown_groups"] == 0.5
    assert peers.summary(steps[:1], {1: ours})["seconds_to_target"] is None


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_has_runs_and_names_its_command(name):
    try:
        benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    except ModuleNotFoundError as error:  # Ray, or what the example of SmolLM2 needs
        pytest.skip(str(error))
    assert f"python -m benchmarks.{name} " in f"{benchmark.doc} "
    for words in ([], ["--quick"]):
        assert next(benchmark.runs(parse(benchmark, words)))


def test_a_step_of_ours_beside_one_of_trls(tmp_path):
    """Parts are what was logged, and the rest is the rest. Steps that only one of them has do not count."""
    own = {"step_seconds": 10.0, "darts/step/seconds": 9.5, "darts/step/rollout": 4.0, "darts/step/passes": 5.0}
    ours, theirs = [own, own | {"step_seconds": 99.0}], [own | {"step_seconds": 40.0, "darts/step/passes": 30.0}]
    assert smollm2.exact_tables(tmp_path) == ""
    for arm, steps in (("grpo", ours), ("trl", theirs)):
        run = {"machine": "exact", "arm": arm, "seed": 0}
        (tmp_path / smollm2.file_of(run)).write_text(json.dumps({**run, "steps": steps}))
    parts = {arm: smollm2.parts_of(runs) for arm, runs in smollm2.against_trl(tmp_path).items()}
    assert parts["GRPO"] == {"rollout": 4.0, "passes": 5.0, "rest": 1.0}
    assert parts["TRL"] == {"rollout": 4.0, "passes": 30.0, "rest": 6.0}
    assert "| GRPO | 4.00 | 5.00 | 1.00 |" in smollm2.exact_tables(tmp_path)
