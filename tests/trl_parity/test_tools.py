"""Tools and environments: a conversation goes on with the row that called, whatever was sampled beside it."""

import itertools

import pytest

from tests.builders import record_batches
from tests.trl_parity.common import chats, step_logs, train, train_all
from tests.trl_parity.tool_calls import (
    ADD,
    ANSWERS,
    DOUBLE,
    FAILING,
    LATER,
    RIGHT,
    TOOLS,
    UNKNOWN,
    WRONG,
    Counter,
    Reader,
    multiply,
    said,
    tool_messages,
    tool_trainer,
)


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")


def check_row(tokenizer, prompt, messages, ids, mask):
    """The tokens of a row are its conversation; those that the model did not write are masked; answers fit calls."""
    whole = tokenizer.apply_chat_template(prompt + messages, tokenize=False).removesuffix("\n")
    start = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert start + tokenizer.decode(ids) == whole
    turns = [["".join(said(message)) + "<eos>"] for message in messages if message["role"] == "assistant"]
    own = tokenizer.decode([token for token, kept in zip(ids, mask, strict=True) if kept])
    assert own == "".join(text for turn in turns for text in turn)
    asked = []
    for message in [*messages, {"role": "assistant", "content": ""}]:
        if message["role"] == "tool":
            asked.remove(message["content"])
        else:
            assert asked == []  # all calls of the turn before were answered
            asked = [ANSWERS[call] for call in said(message)[1:]]


def test_tools_answer_the_row_that_called_them(caller, tmp_path):
    reader, calls = Reader(), [RIGHT, LATER, WRONG, UNKNOWN, FAILING]
    trainer = tool_trainer(caller(*calls), tmp_path, reader, tools=TOOLS)
    batches = record_batches(trainer)
    train_all(trainer)
    answers = []
    for batch, rows, entry in zip(batches, reader.batches, trainer.state.log_history, strict=False):
        for row, mask in zip(rows, batch["tool_mask"], strict=True):
            check_row(trainer.processing_class, *row, mask[: len(row[2])].tolist())
        contents = [message["content"] for row in rows for message in tool_messages(row)]
        own_lengths = (batch["completion_mask"] * batch["tool_mask"]).sum(1).float()
        assert entry["tools/call_frequency"] == pytest.approx(len(contents) / 8)
        assert entry["completions/mean_length"] == pytest.approx(own_lengths.mean().item())
        answers += contents
    assert set(answers) == {ANSWERS[call] for call in calls}


def test_only_the_first_turn_has_more_candidates_than_rows(caller, tmp_path):
    trainer = tool_trainer(caller(RIGHT), tmp_path, tools=TOOLS)
    model_batches, generate = [], trainer.model.generate
    trainer.model.generate = lambda *args, **kwargs: (
        model_batches.append(len(kwargs["input_ids"])) or generate(*args, **kwargs)
    )
    train_all(trainer)
    sizes = step_logs(trainer, "darts/budget/total")
    starts = [index for index, size in enumerate(model_batches) if size in sizes and size > 8]
    assert [model_batches[index] for index in starts] == sizes
    assert starts[0] == 0
    later = [size for index, size in enumerate(model_batches) if index not in starts]
    assert later
    assert max(later) <= 8


def test_evaluation(caller, tmp_path):
    reader = Reader()
    trainer = tool_trainer(caller(RIGHT), tmp_path, reader, tools=[multiply])
    metrics = trainer.evaluate()
    contents = [message["content"] for rows in reader.batches for row in rows for message in tool_messages(row)]
    assert [len(rows) for rows in reader.batches] == [8]
    assert metrics["eval_tools/call_frequency"] == pytest.approx(len(contents) / 8)
    assert "12" in contents


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
    return {"train_dataset": dataset, "eval_dataset": dataset}


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
