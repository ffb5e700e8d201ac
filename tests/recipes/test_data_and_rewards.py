"""What the training script makes of a data set's columns and of the names of rewards."""

import sys

import pytest
from datasets import Dataset, IterableDataset
from trl.rewards import think_format_reward

from trl_darts.errors import ConfigurationError
from trl_darts.recipes import ScriptArguments, load_rewards, take_split, to_conversations


MATH_ROW = {"problem": "1 + 1?", "level": "1", "solution": r"As $1 + 1 = 2$, it is $\boxed{2}$, and $3$ is not."}
OVERLONG = "get_soft_overlong_punishment"


def test_columns_become_conversations():
    arguments = ScriptArguments(prompt_column="problem", solution_column="solution", system_prompt="Think.")
    (row,) = to_conversations(Dataset.from_list([MATH_ROW]), arguments)
    assert row["prompt"] == [{"role": "system", "content": "Think."}, {"role": "user", "content": "1 + 1?"}]
    assert row["solution"] == MATH_ROW["solution"]


def test_the_prompts_own_column_and_another_name_of_the_answer():
    rows = Dataset.from_list([{"prompt": "1 + 1?", "answer": "2"}])
    (row,) = to_conversations(rows, ScriptArguments(prompt_column="prompt", solution_column="answer"))
    assert row["prompt"] == [{"role": "user", "content": "1 + 1?"}]
    assert row["solution"] == "2"


def test_a_streamed_data_set():
    rows = IterableDataset.from_generator(lambda: iter([MATH_ROW]))
    (row,) = to_conversations(rows, ScriptArguments(prompt_column="problem"))
    assert row["prompt"] == [{"role": "user", "content": "1 + 1?"}]


def test_without_columns_nothing_changes():
    rows = Dataset.from_list([{"prompt": "a"}])
    assert to_conversations(rows, ScriptArguments()) is rows


def test_only_the_split_that_is_used_is_converted():
    splits = {"train": Dataset.from_list([MATH_ROW]), "raw": Dataset.from_list([{"other": 1}])}
    arguments = ScriptArguments(prompt_column="problem", dataset_test_split="raw")
    (row,) = take_split(splits, "dataset_train_split", arguments)
    assert row["prompt"] == [{"role": "user", "content": "1 + 1?"}]
    with pytest.raises(ConfigurationError, match=r"`prompt_column` \('problem'\) must be a column"):
        take_split(splits, "dataset_test_split", arguments)


def test_a_split_that_is_not_there():
    splits = {"train": Dataset.from_list([MATH_ROW]), "validation": Dataset.from_list([MATH_ROW])}
    with pytest.raises(
        ConfigurationError,
        match=r"`dataset_test_split` \('test'\) must be a split of the data set, which has 'train', 'validation'",
    ):
        take_split(splits, "dataset_test_split", ScriptArguments())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_column": "question"}, r"`prompt_column` \('question'\) must be a column .* has problem, level, sol"),
        ({"solution_column": "answer"}, r"`solution_column` \('answer'\) must be a column"),
    ],
)
def test_columns_that_are_not_there(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        to_conversations(Dataset.from_list([MATH_ROW]), ScriptArguments(**fields))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "solution": "1"}, r"\('accuracy_reward'\) reads conversations, and the column 'prompt' has"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "answer": "1"},
            "reads the column 'solution', .* prompt, answer",
        ),
    ],
)
def test_data_that_the_reward_could_not_read(row, message):
    with pytest.raises(ConfigurationError, match=message):
        to_conversations(Dataset.from_list([row]), ScriptArguments(reward_funcs=["accuracy_reward"]))


def test_math_reward_reads_the_boxed_answer_of_a_whole_solution():
    pytest.importorskip("math_verify")
    (reward,) = load_rewards(ScriptArguments(reward_funcs=["accuracy_reward"]), 100)
    completions = [[{"role": "assistant", "content": rf"So \boxed{{{answer}}}"}] for answer in (2, 3)]
    assert reward(completions, solution=[MATH_ROW["solution"]] * 2) == [1.0, 0.0]


def test_overlong_punishment_is_dapos():
    (reward,) = load_rewards(ScriptArguments(reward_funcs=[OVERLONG], soft_punish_cache=20), 100)
    # DAPO, Eq. 13
    assert reward(completion_ids=[[1] * length for length in (80, 85, 100, 101)]) == [0.0, -0.25, -1.0, -1.0]


def test_any_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def one(**kwargs):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    (reward,) = load_rewards(ScriptArguments(reward_funcs=["my_rewards.one"]), 100)
    assert reward() == [1.0]
    with pytest.raises(ConfigurationError, match=r"`reward_funcs` \('my_rewards.two'\) can't be imported: .*two"):
        load_rewards(ScriptArguments(reward_funcs=["my_rewards.two"]), 100)
    sys.modules.pop("my_rewards")


def test_a_reward_model_comes_before_the_functions():
    arguments = ScriptArguments(reward_model_name_or_path="some/model", reward_funcs=["think_format_reward"])
    assert load_rewards(arguments, 100) == ["some/model", think_format_reward]
    assert load_rewards(ScriptArguments(reward_model_name_or_path="some/model"), 100) == ["some/model"]


def test_math_verify_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr("trl_darts.recipes.rewards.is_math_verify_available", lambda: False)
    with pytest.raises(ConfigurationError, match=r"needs math-verify. Install it: pip install 'trl-darts\[math\]'"):
        load_rewards(ScriptArguments(reward_funcs=["accuracy_reward"]), 100)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"system_prompt": "Think."}, r"`system_prompt` \('Think.'\) only has an effect with `prompt_column`"),
        ({"reward_funcs": [OVERLONG]}, r"`reward_funcs` \('get_soft.*'\) needs `soft_punish_cache`"),
        ({"soft_punish_cache": 5}, r"`soft_punish_cache` \(5\) only has an effect with the reward"),
        ({"reward_funcs": [OVERLONG], "soft_punish_cache": 0}, r"`soft_punish_cache` \(0\) must be at least 1"),
        (
            {"reward_funcs": [OVERLONG], "soft_punish_cache": 101},
            r"\(101\) must be at most `max_completion_length` \(10",
        ),
        ({"reward_funcs": []}, r"`reward_funcs` \(empty\) must name at least one reward"),
        ({"reward_funcs": [".foo"]}, r"`reward_funcs` \('.foo'\) must be one of accuracy_reward"),
        (
            {"reward_funcs": ["think_format_reward"], "ignore_bias_buffers": True},
            r"`ignore_bias_buffers` \(True\) has",
        ),
    ],
)
def test_arguments_that_do_not_fit_together(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        load_rewards(ScriptArguments(**fields), 100)
