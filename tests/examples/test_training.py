"""Training runs at a GPU's pace: the pace, the task, the statistics, and all of it, shortened, on a server."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import pacing, training
from benchmarks.harness import store
from benchmarks.long_tail import (
    TOKENIZER,
    Answers,
    grade_reward,
    half_reward,
    load_model,
    make_checkpoint,
    make_dataset,
)
from benchmarks.pacing import CURVES, Pace, Pacer, scaled
from benchmarks.report import PAGE
from benchmarks.training import ARMS, BASELINE, DEFAULT
from tests.conftest import Clock
from trl_darts import DARTSGRPOConfig


ROOT = Path(__file__).resolve().parents[2]


# Pace


def run_steps(pacer: Pacer, clock: Clock, work: list[float], decoded: int, drafted: int = 0) -> float:
    """Seconds that an engine takes whose steps by themselves take so many. Then it is idle."""
    left = list(work)
    engine = SimpleNamespace(scheduler=SimpleNamespace(has_requests=lambda: bool(left)))
    rows = [SimpleNamespace(new_token_ids=[5])] * decoded + [SimpleNamespace(new_token_ids=[])]

    def step(self):
        clock.advance(left.pop(0))
        drafts = SimpleNamespace(num_draft_tokens=drafted) if drafted else None
        return {0: SimpleNamespace(outputs=rows, scheduler_stats=SimpleNamespace(spec_decoding_stats=drafts))}, True

    start = clock()
    for _ in work:
        pacer.run(step, engine)
    return clock() - start


def test_steps_take_as_long_as_the_curve_says_and_late_ones_are_made_up_for(tmp_path, clock, monkeypatch):
    """Ten steps of 19 ms, for the sequences that got a token alone; the third takes 45 ms by itself."""
    monkeypatch.setattr(pacing, "time", SimpleNamespace(perf_counter=clock, sleep=clock.advance))
    pacer = Pacer(scaled(CURVES["llama-8b"], 2.5), tmp_path / "pace.json")
    seconds = 10 * 2.5 * CURVES["llama-8b"](100)
    assert run_steps(pacer, clock, [0.0, 0.0, 0.045, *[0.0] * 7], 100) == pytest.approx(seconds)
    pace = Pace(**json.loads((tmp_path / "pace.json").read_text()))
    assert (pace.steps, pace.seconds, pace.late) == (10, pytest.approx(seconds), 2)
    clock.advance(0.1)  # idle: owed to nobody
    assert run_steps(pacer, clock, [0.0] * 5, 1) == pytest.approx(5 * 2.5 * CURVES["llama-8b"](1))
    assert "13.3% of 15 engine steps late" in str(pacer.pace)
    assert pacer.pace.since(pace).steps == 5
    drafted = run_steps(pacer, clock, [0.0] * 5, 50, drafted=100)
    assert drafted == pytest.approx(5 * 2.5 * CURVES["llama-8b"](150))


# The task


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """The task's model before any training."""
    return load_model(make_checkpoint(tmp_path_factory.mktemp("chain")))


def test_answers_are_those_of_plain_sampling(chain):
    torch.manual_seed(0)
    prompts = list(make_dataset(24)["prompt"]) * 50
    inputs = TOKENIZER(prompts, return_tensors="pt")
    rows = chain.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=40)[:, inputs["input_ids"].shape[1] :]
    lengths = (rows != TOKENIZER.pad_token_id).sum(1).numpy()
    rewards = np.array(grade_reward(TOKENIZER.batch_decode(rows, skip_special_tokens=True)))
    answers = Answers.of(chain, limit=40)
    assert rewards.mean() == pytest.approx(answers.reward, abs=0.04)
    assert lengths.mean() == pytest.approx(answers.mean, rel=0.1)
    assert (rows != TOKENIZER.eos_token_id).all(1).float().mean() == pytest.approx(answers.cut, abs=0.03)
    assert np.median(lengths) == pytest.approx(answers.p50, abs=1)
    assert lengths[rewards == 1].mean() == pytest.approx(answers.mean_right, rel=0.15)


def test_half_of_the_prompts_of_every_kind_teach_nothing():
    prompts = make_dataset(24)["prompt"]
    assert half_reward(prompts, ["+"] * 24) == [1.0] * 12 + [0.0] * 12
    assert half_reward(prompts, ["-"] * 24) == [0.0] * 24


def test_the_task_has_a_long_tail_that_its_reward_hardly_depends_on(chain, tmp_path):
    answers = Answers.of(chain)
    assert answers.p99 / answers.p50 >= 8
    assert 0.005 < answers.cut < 0.03
    assert answers.mean_right / answers.mean_wrong > 0.7
    equal = Answers.of(load_model(make_checkpoint(tmp_path, equal=True)))
    assert equal.p50 == equal.p99 == pytest.approx(equal.mean, rel=1e-3)


# Statistics


def steps_of(seconds: float, rewards: list[float]) -> dict[str, np.ndarray]:
    each = dict.fromkeys(("rollout", "late", "engine_late", *training.METRICS), 1.0) | dict.fromkeys(
        ("p99", "mean_right", "mean_wrong"), 20.0
    )
    return {name: np.full(len(rewards), value) for name, value in each.items()} | {
        "seconds": np.full(len(rewards), seconds),
        "reward": np.array(rewards),
    }


def test_time_to_equal_reward_is_that_of_grpos_end():
    """Seed by seed; an arm that needs more steps is given them, and its other figures leave them out."""
    base, own = steps_of(2.0, [0.1, 0.2, 0.3]), steps_of(1.0, [0.1, 0.15, 0.25, 0.35])
    assert training.SPEED["to GRPO's reward"][0](own, base) == pytest.approx(6.0 / 3.5)
    assert training.SPEED["steps"][0](own, base) == pytest.approx(2.0)
    assert training.LEARNED["plain sampling"][0](own, base) == 0.25
    assert training.SPENT["to it, in steps"][0](own, base) == pytest.approx(3 / 3.5)
    assert training.spent_to(own, 0.9, "tokens") == math.inf
    runs = [{"arm": BASELINE, "seed": seed, **base} for seed in (0, 1)]
    runs += [{"arm": DEFAULT, "seed": seed, **own} for seed in (0, 2)]
    lines = training.table({"tail": runs}, training.SPEED)
    assert "| tail: default (1) | 1.71 |" in lines
    assert "| tail: grpo (2) | 1 | 1 | 1 |" in lines


def test_fixed_costs_make_shorter_rows_worth_less():
    """Rollouts take 1 s of each step, and the rest is 1 s of GRPO and none of the arm."""
    base, own = steps_of(2.0, [0.1, 0.2]), steps_of(1.0, [0.1, 0.2])
    assert [training.speedup_with(fixed, own, base) for fixed in (0.0, 0.5, 1.0)] == pytest.approx([2, 4 / 3, 1])


def test_a_later_call_refuses_what_was_not_asked_for(tmp_path):
    run = {"world": "tail", "seed": 3, "arm": BASELINE, "steps": 0}
    benchmark = training.BENCHMARK
    assert benchmark.stored(tmp_path, run) is None
    found = {**run, **benchmark.facts(run), "by_step": {}}
    store(benchmark.path(tmp_path, run), found)
    assert benchmark.stored(tmp_path, run)["steps"] == 40
    store(benchmark.path(tmp_path, run), found | {"learning_rate": 1.0})
    with pytest.raises(SystemExit, match=r"^error: .* is asked for"):
        benchmark.stored(tmp_path, run)


def test_arms_are_settings():
    assert all(DARTSGRPOConfig(use_cpu=True, bf16=False, **settings) for settings in ARMS.values())


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_quick_run(tmp_path):
    """Paced rollouts, the epoch that is shared, and arms that go on from its checkpoint."""
    before = PAGE.read_text()
    command = [sys.executable, "-m", "benchmarks.training", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert PAGE.read_text() == before
    assert all(f"| tail: {arm} (1) |" in done.stdout for arm in (BASELINE, DEFAULT))
    assert "engine steps late" in done.stdout
    assert (tmp_path / training.PICTURE).stat().st_size > 20_000
