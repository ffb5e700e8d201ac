"""
The tiny reasoner of `examples/`.

Invariants:

- The writer and the dataset only depend on their seed, and no prompt is in both splits.
- A solution without a mistake has reward 1, and the same with another answer 0.
- The included checkpoint shows both patterns of long tails.
"""

import io
import random
import sys
from functools import partial
from pathlib import Path

import pytest
import rich.console
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerState


EXAMPLE_DIR = Path(__file__).parents[2] / "examples" / "tiny_reasoner"
CHECKPOINT_DIR = EXAMPLE_DIR / "checkpoint"
sys.path.insert(0, str(EXAMPLE_DIR))

import measure  # noqa: E402
import pretrain  # noqa: E402
import quickstart  # noqa: E402
import task  # noqa: E402
import writer  # noqa: E402


problems = st.builds(
    lambda seed, family, difficulty: task.draw_problem(random.Random(seed), family, difficulty),
    st.integers(0, 2**32),
    st.sampled_from(task.FAMILIES),
    st.sampled_from(task.DIFFICULTIES),
)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT_DIR)


@given(problem=problems, wrong=st.integers(-9, 9).filter(bool))
def test_right_answer_is_rewarded_and_wrong_one_is_not(problem, wrong):
    right = writer.solve(problem)  # such as "7+8=15,3+5+1=9#95"
    steps, _, answer = right.rpartition("#")
    texts = [right, f"{steps}#{int(answer) + wrong}", steps, "", f"{answer}"]
    rewards = task.accuracy_reward([problem.prompt] * 5, texts, answer=[problem.answer] * 5, family=["x"] * 5)
    assert rewards == [1.0, 0.0, 0.0, 0.0, 0.0]


@given(problem=problems, seed=st.integers(0, 2**32))
def test_writer_is_deterministic_and_stays_in_the_alphabet(problem, seed):
    text, finished = writer.write_solution(problem, random.Random(seed))
    assert (text, finished) == writer.write_solution(problem, random.Random(seed))
    assert set(problem.prompt + text) <= set(task.ALPHABET)
    assert finished == (text.count("#") == 1)
    assert finished or len(text) == writer.MAX_TEXT_CHARS


@pytest.mark.parametrize("family", [None, *task.FAMILIES])
def test_dataset_is_deterministic_and_distinct(family):
    dataset = task.make_dataset(40, 3, family)
    assert len(set(dataset["prompt"])) == 40
    assert set(dataset["family"]) == ({family} if family else set(task.FAMILIES))
    assert (
        dataset.to_list() == task.make_dataset(40, 3, family).to_list() != task.make_dataset(40, 4, family).to_list()
    )


def test_splits_are_disjoint():
    train, test = (set(task.make_dataset(500, 0, split=split)["prompt"]) for split in task.SPLITS)
    assert not train & test


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_prompts": 1100, "family": "sum", "split": "test"}, "more than there are distinct prompts"),
        ({"num_prompts": 1, "family": "product"}, "`family` \\('product'\\) must be one of"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        task.make_dataset(seed=0, **kwargs)


def test_pretraining_texts_hold_no_test_prompt():
    tokenizer = pretrain.build_tokenizer()
    test = set(task.make_dataset(500, 0, split="test")["prompt"])
    for input_ids, labels in pretrain.draw_examples(tokenizer, 200, random.Random(0)):
        prompt_length = labels.count(pretrain.IGNORED)
        assert tokenizer.decode(input_ids[:prompt_length]) not in test
        assert labels[prompt_length:] == input_ids[prompt_length:]


def test_pretrain_saves_what_measure_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda num_threads: None)  # would last beyond this test
    argv = ["pretrain.py", "--output_dir", str(tmp_path), "--num_steps", "2", "--batch_tokens", "1024"]
    monkeypatch.setattr(sys, "argv", argv)
    pretrain.main()
    argv = ["measure.py", "--model", str(tmp_path), "--num_prompts", "2", "--num_generations", "2"]
    monkeypatch.setattr(sys, "argv", [*argv, "--max_new_tokens", "4"])
    with pytest.raises(SystemExit, match="`sum`: expected"):  # two steps teach nothing
        measure.main()
    assert "E[l | right]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "argv", "message"),
    [
        (pretrain, ["--hidden_size", "100"], "`hidden_size` (100) must be a positive multiple of 32"),
        (measure, ["--model", "nowhere"], "`model` (nowhere) has no config.json"),
    ],
)
def test_bad_flags_are_named(module, argv, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    with pytest.raises(SystemExit, match="2"):
        module.parse_args()
    assert message in capsys.readouterr().err


def test_checkpoint_is_small_and_has_the_tokenizer_of_pretraining(model, tokenizer):
    assert sum(file.stat().st_size for file in CHECKPOINT_DIR.iterdir()) <= 4_000_000
    assert tokenizer.get_vocab() == pretrain.build_tokenizer().get_vocab()
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)
    assert tokenizer.decode(tokenizer(task.ALPHABET)["input_ids"]) == task.ALPHABET


def test_checkpoint_shows_both_patterns_and_a_heavy_tail(model, tokenizer):
    torch.manual_seed(0)
    stats = {}
    for family in task.FAMILIES:
        dataset = task.make_dataset(24, 0, family)
        stats[family] = measure.sample(model, tokenizer, dataset, num_generations=16, max_new_tokens=256).stats()
        assert 0.2 < stats[family]["accuracy"] < 0.9
        assert stats[family]["max"] > 4 * stats[family]["p50"]
    assert measure.missing_patterns(stats) == []
    swapped = {"sum": stats["chain"], "chain": stats["sum"]}
    assert len(measure.missing_patterns(swapped)) == 2


@pytest.mark.parametrize("terminal", [False, True])
def test_the_quickstart_shows_step_reward_and_candidates(monkeypatch, terminal):
    """Shows a bar on a terminal, and a line every few steps elsewhere."""
    shown = io.StringIO()
    console = partial(rich.console.Console, file=shown, force_terminal=terminal, width=200)
    monkeypatch.setattr(quickstart, "Console", lambda stderr: console())
    progress, state = quickstart.ShowProgress("GRPO", 6), TrainerState(max_steps=6)
    logs = {"reward": 0.25, "darts/budget/total": 96.0, "darts/rollout/aborted_candidates": 13.0}
    progress.on_train_begin(None, state, None)
    for state.global_step in range(1, 7):
        progress.on_log(None, state, None, logs=logs)
    progress.on_log(None, state, None, logs={"train_loss": 0.0})  # the last one
    progress.on_train_end(None, state, None)
    text = shown.getvalue()
    assert "reward 0.25, 96 candidates, 13 aborted" in text
    if terminal:
        assert "6/6" in text
    else:
        assert [line.split(",")[0] for line in text.split("\n")] == ["GRPO: step 1 of 6", "GRPO: step 5 of 6", ""]


def test_the_quickstart_trains_with_it(tmp_path, capsys):
    log_history, seconds = quickstart.train("DARTS", 1, tmp_path)
    assert "3/3 DARTS: step 1 of 1, reward 0." in capsys.readouterr().err
    assert quickstart.summarize(log_history, seconds)["tokens kept"] != "0"
