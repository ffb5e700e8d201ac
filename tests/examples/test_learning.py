"""The benchmark of learning where length matters: its worlds are exact, its engine samples from the model."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.chain_clock import sample
from benchmarks.learning import WORLDS
from benchmarks.long_tail import KINDS, LIMIT, TOKENIZER, load_model, probabilities


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["needs_80", "turns", "longer", "endless"])
def test_exact_rewards_and_lengths_are_those_of_samples(tmp_path, name):
    world = WORLDS[name]
    table = probabilities(load_model(world.checkpoint(tmp_path)))
    rewards, mean, cut = world.exact(table)
    letters = TOKENIZER.convert_tokens_to_ids([*KINDS])
    answers = sample(table, np.repeat(letters, 1500), np.random.default_rng(0))
    lengths = np.array([min(len(ids), LIMIT) for ids in answers])
    assert lengths.mean() == pytest.approx(mean, rel=0.05)
    assert np.mean([len(ids) > LIMIT for ids in answers]) == pytest.approx(cut, abs=0.01)
    ids = [answer[:LIMIT] for answer in answers]
    prompts = [f"000{kind}" for kind in KINDS for _ in range(1500)]
    graded = world.reward(prompts=prompts, completion_ids=ids, completions=TOKENIZER.batch_decode(ids, True))
    assert np.reshape(graded, (len(KINDS), -1)).mean(1) == pytest.approx(rewards, abs=0.05)


def test_the_script_runs(tmp_path):
    command = [sys.executable, "-m", "benchmarks.learning", "--quick", "--worlds", "needs_120_small"]
    command += ["--arms", "audited", "--learning-rate", "0", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = [json.loads(line) for line in (tmp_path / "learning.needs_120_small.2.lr0.jsonl").read_text().splitlines()]
    assert [run["arm"] for run in runs] == ["grpo", "audited"]
    assert "| needs_120_small.2.lr0: audited (1) |" in done.stdout
    assert runs[1]["by_step"]["hard"][0] == runs[1]["by_step"]["hard"][1]
    assert "Speed over unguarded" in done.stdout
