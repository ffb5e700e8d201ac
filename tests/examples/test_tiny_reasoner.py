"""
The tiny reasoner of `examples/`.

Invariants:

- The writer and the dataset depend on their seed alone, and no prompt is in both splits.
- A solution without a slip is rewarded with 1, the same with another answer with 0.
- The shipped checkpoint shows both patterns of long tails.
"""

import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer


EXAMPLE_DIR = Path(__file__).parents[2] / "examples" / "tiny_reasoner"
CHECKPOINT_DIR = EXAMPLE_DIR / "checkpoint"
sys.path.insert(0, str(EXAMPLE_DIR))

import measure  # noqa: E402
import pretrain  # noqa: E402
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


@pytest.mark.parametrize(
    ("family", "terms", "solution"),
    [
        ("sum", (37, 58), "7+8=15,3+5+1=9#95"),
        ("sum", (90, 20), "0+0=0,9+2=11#110"),
        ("chain", (13, 8, 5), "+8=21+5=26#26"),
    ],
)
def test_solution_is_written_out(family, terms, solution):
    assert writer.solve(task.Problem(family, terms)) == solution


@given(problem=problems, wrong=st.integers(-9, 9).filter(bool))
def test_right_answer_is_rewarded_and_wrong_one_is_not(problem, wrong):
    right = writer.solve(problem)
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
@pytest.mark.parametrize("difficulty", task.DIFFICULTIES)
def test_dataset_is_deterministic_and_distinct(family, difficulty):
    dataset = task.make_dataset(40, 3, family, difficulty)
    assert dataset.column_names == ["prompt", "answer", "family"]
    assert len(set(dataset["prompt"])) == 40
    assert set(dataset["family"]) == ({family} if family else set(task.FAMILIES))
    assert dataset.to_list() == task.make_dataset(40, 3, family, difficulty).to_list()
    assert dataset.to_list() != task.make_dataset(40, 4, family, difficulty).to_list()


def test_splits_are_disjoint():
    train, test = (set(task.make_dataset(500, 0, split=split)["prompt"]) for split in task.SPLITS)
    assert not train & test


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_prompts": 0}, "`num_prompts` \\(0\\) must be at least 1"),
        ({"num_prompts": 1100, "family": "sum", "split": "test"}, "more than there are distinct prompts"),
        ({"num_prompts": 1, "family": "product"}, "`family` \\('product'\\) must be one of"),
        ({"num_prompts": 1, "difficulty": "odd"}, "`difficulty` \\('odd'\\) must be one of"),
        ({"num_prompts": 1, "split": "dev"}, "`split` \\('dev'\\) must be one of"),
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
        (pretrain, ["--num_steps", "0"], "`num_steps` (0) must be at least 1"),
        (pretrain, ["--hidden_size", "100"], "`hidden_size` (100) must be a positive multiple of 32"),
        (pretrain, ["--batch_tokens", "8"], "`batch_tokens` (8) must be at least 1024"),
        (pretrain, ["--output_dir", __file__], "is a file"),
        (measure, ["--num_generations", "0"], "`num_generations` (0) must be at least 1"),
        (measure, ["--temperature", "0"], "`temperature` (0.0) must be positive"),
        (measure, ["--model", "nowhere"], "`model` (nowhere) holds no config.json"),
    ],
)
def test_bad_flags_are_named(module, argv, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    with pytest.raises(SystemExit, match="2"):
        module.parse_args()
    assert message in capsys.readouterr().err


def test_checkpoint_is_small_and_untied(model):
    assert sum(file.stat().st_size for file in CHECKPOINT_DIR.iterdir()) <= 4_000_000
    assert not model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model.config.vocab_size <= 64
    assert model.generation_config.eos_token_id == model.config.eos_token_id


def test_checkpoint_tokenizer_is_the_one_of_pretraining(tokenizer, model):
    assert tokenizer.is_fast
    assert tokenizer.get_vocab() == pretrain.build_tokenizer().get_vocab()
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)
    ids = tokenizer(task.ALPHABET)["input_ids"]
    assert len(ids) == len(task.ALPHABET)
    assert tokenizer.decode(ids) == task.ALPHABET


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
