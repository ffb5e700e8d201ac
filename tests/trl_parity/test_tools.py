"""
Tools and environments: a conversation goes on with the row that called, whatever was sampled beside it. What tools
answer to it: `tests/launches/test_two_processes.py`; that it is trained on as by TRL: `tests/test_equivalence.py`.
"""

import itertools

import pytest

from tests.builders import record_batches
from tests.trl_parity.common import chats, make_args, step_logs, train, train_all
from tests.trl_parity.tool_calls import (
    ADD,
    DOUBLE,
    RIGHT,
    TOOLS,
    Counter,
    Reader,
    multiply,
    tool_messages,
    tool_trainer,
)
from trl_darts.checks import check_arguments
from trl_darts.errors import ConfigurationError


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")


@pytest.mark.parametrize("arguments", [{"tools": TOOLS}, {"environment_factory": Counter}])
def test_no_candidates_are_chosen_by_their_first_turn(caller, tmp_path, caplog, arguments):
    """As many as are trained on, all of them waited for, and one line that says so."""
    trainer = tool_trainer(caller(RIGHT, ADD), tmp_path, **arguments)
    model_batches, generate = [], trainer.model.generate
    trainer.model.generate = lambda *args, **kwargs: (
        model_batches.append(len(kwargs["input_ids"])) or generate(*args, **kwargs)
    )
    train_all(trainer)
    assert step_logs(trainer, "darts/budget/total") == [8, 8, 8]
    assert step_logs(trainer, "darts/rollout/aborted_candidates") == [0, 0, 0]
    assert max(model_batches) == 8
    assert len(model_batches) > 3  # later turns
    words = f"With `{next(iter(arguments))}`, candidates would be chosen by the first turn of their conversations."
    assert sum(words in message for message in caplog.messages) == 1
    assert not any("are not deferred" in message for message in caplog.messages)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_generations": 8},
        {"target_redundancy": 1.25},
        {"selection": "dual_end"},
        {"long_end_every": 2},
        {"defer_unsettled_groups": True, "use_vllm": True, "vllm_mode": "server"},
    ],
)
def test_settings_of_the_choice_are_refused_with_tools(tmp_path, fields):
    args = make_args(tmp_path, **fields)
    name = next(iter(fields))
    words = rf"`{name}` \(.*\) has no effect with `tools`, with which candidates would be chosen by the first turn"
    with pytest.raises(ConfigurationError, match=words):
        check_arguments(args, None, "tools")


def test_a_config_serves_a_trainer_without_tools_again(tmp_path):
    args, same = make_args(tmp_path, save_strategy="no"), make_args(tmp_path, save_strategy="no")
    check_arguments(args, None, "tools")
    assert not args.over_provisions
    assert args.max_num_generations == args.num_generations
    check_arguments(args, None)
    names = ("selection", "max_num_generations", "min_num_generations", "target_redundancy", "long_end_every")
    assert [getattr(args, name) for name in names] == [getattr(same, name) for name in names]


# Environments


class Doubler:
    """Has another tool."""

    def reset(self, **kwargs):
        self.count = 1

    def double(self) -> str:
        """Doubles the count."""
        self.count *= 2
        return f"now {self.count}"


def data(**columns):
    dataset = chats()
    for name, values in columns.items():
        dataset = dataset.add_column(name, values)
    return {"train_dataset": dataset}


def test_environment_belongs_to_its_row(caller, tmp_path):
    """It began as its prompt says, and is what its conversation made of it."""
    reader = Reader()

    def reward(prompts, completions, environments, start, **kwargs):
        assert len({id(environment) for environment in environments}) == len(completions) == 8
        for prompt, messages, environment, first in zip(prompts, completions, environments, start, strict=True):
            assert prompt[0]["content"] == chats()["prompt"][first // 10][0]["content"] + f" from {first}"
            answers = [message["content"] for message in messages if message["role"] == "tool"]
            assert answers == [f"now {first + 2 * turn}" for turn in range(1, len(answers) + 1)]
            assert environment.count == first + 2 * len(answers)
        return reader(prompts, completions, **kwargs)

    starts = data(start=[10 * row for row in range(8)])
    trainer = tool_trainer(caller(ADD), tmp_path, reward, starts, environment_factory=Counter)
    train_all(trainer)
    assert len(reader.batches) == 3
    assert any(tool_messages(row) for batch in reader.batches for row in batch)
    assert len(trainer._environment_pool[None]) == 8  # made once, reset often


def test_rows_choose_among_environments(caller, tmp_path):
    reader = Reader()
    trainer = tool_trainer(
        caller(ADD, DOUBLE),
        tmp_path,
        reader,
        data(environment=["adder", "doubler"] * 4),
        environment_factory={"adder": Counter, "doubler": Doubler},
    )
    batches = record_batches(trainer)
    train_all(trainer)
    for batch, rows in zip(batches, reader.batches, strict=True):
        for ids, example, (_, messages, _) in zip(batch["prompt_ids"], batch["inputs"], rows, strict=True):
            tool = {"adder": "add", "doubler": "double"}[example["environment"]]
            prompt = trainer.processing_class.decode(ids, skip_special_tokens=True)
            assert prompt.startswith(f"tool {tool}\nuser: ")
            for message in messages:
                if message["role"] == "tool":
                    assert message["content"].startswith("now" if message["name"] == tool else "{'error': 'Tool")


def test_tools_and_an_environment_that_brings_the_prompts(caller, tmp_path):
    class Prompter(Counter):
        def reset(self, **kwargs):
            super().reset()
            return "count up"

    reader = Reader()
    trainer = tool_trainer(
        caller(ADD, RIGHT), tmp_path, reader, {"train_dataset": None}, tools=[multiply], environment_factory=Prompter
    )
    assert train(trainer)
    rows = [row for batch in reader.batches for row in batch]
    assert {prompt[0]["content"] for prompt, _, _ in rows} == {"count up"}
    assert {"12", "now 2"} <= {message["content"] for row in rows for message in tool_messages(row)}


def test_prompts_that_differ_within_a_group_are_answered_row_by_row(caller, tmp_path):
    numbers = itertools.count()

    class Prompter(Counter):
        def reset(self, **kwargs):
            super().reset()
            return f" no {next(numbers)}"

    reader = Reader()
    trainer = tool_trainer(caller(ADD), tmp_path, reader, environment_factory=Prompter)
    batches = record_batches(trainer)
    trainer.train()
    assert next(numbers) == 24  # no row more was asked for
    for batch, rows in zip(batches, reader.batches, strict=True):
        for ids, (prompt, _, _) in zip(batch["prompt_ids"], rows, strict=True):
            text = trainer.processing_class.decode(ids, skip_special_tokens=True)
            assert prompt[0]["content"] in text
    assert step_logs(trainer, "darts/budget/total") == [8, 8, 8]
    assert len(trainer.length_tracker) == 0  # nothing is learned of them
