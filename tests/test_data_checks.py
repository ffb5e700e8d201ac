"""Tests that data is taken as TRL takes it: rows that a transform makes, formats, and streams that are read once."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from trl import GRPOTrainer

from benchmarks.models import EOS_ID
from tests.builders import make_args, make_trainer, record_batches
from trl_darts import DARTSGRPOTrainer
from trl_darts.data_checks import NUM_MADE
from trl_darts.errors import ConfigurationError
from trl_darts.testing import stub_servers


SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}
QUESTIONS = Dataset.from_list([{"question": f"{i}A", "known": i} for i in range(40)])


def write(prompt_ids: list[int], index: int) -> list[int]:
    return [5] * (3 + 20 * (index == 1) + index) + [EOS_ID]


def answered(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """Needs a column that only the rows have which a transform makes."""
    assert all(str(own).endswith("!") for own in answer)
    return [float(i % 2) for i in range(len(completions))]


def made(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"prompt": list(batch["question"]), "answer": [f"{question}!" for question in batch["question"]]}


def one(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["question"], "answer": row["question"] + "!"}


def once(rows: list[dict[str, Any]]) -> IterableDataset:
    """A stream that can be read once, such as one of a queue."""
    left = iter(rows)
    return IterableDataset.from_generator(lambda: left)


STORED = QUESTIONS.map(one, remove_columns=["question", "known"])
CHATS = STORED.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
DATA = {
    "with_transform": lambda: QUESTIONS.with_transform(made),
    "set_transform": lambda: _set(QUESTIONS.select(range(40))),
    "torch": lambda: STORED.add_column("known", range(40)).with_format("torch"),
    "numpy": lambda: STORED.add_column("known", range(40)).with_format("numpy"),
    "some_columns": lambda: STORED.add_column("other", range(40)).with_format(None, columns=["prompt", "answer"]),
    "chats": lambda: CHATS.with_transform(lambda batch: dict(batch)),
    "torch_chats": lambda: CHATS.with_format("torch"),
    "mapped": lambda: QUESTIONS.to_iterable_dataset().map(one),
    "generator": lambda: IterableDataset.from_generator(lambda: ({**one(row), **row} for row in QUESTIONS)),
    "formatted_stream": lambda: STORED.to_iterable_dataset().with_format("torch"),
    "once": lambda: once(list(STORED)),
}


def _set(dataset: Dataset) -> Dataset:
    dataset.set_transform(made)
    return dataset


@pytest.fixture
def chat_tokenizer(tokenizer, monkeypatch):
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    return tokenizer


def prompts(batches: list[dict[str, Any]]) -> list[str]:
    found = [row["prompt"] for batch in batches for row in batch["inputs"]]
    return [prompt if isinstance(prompt, str) else prompt[0]["content"] for prompt in found]


@pytest.mark.parametrize("name", DATA)
def test_data_that_trl_takes_is_trained_on(model_dir, tmp_path, chat_tokenizer, name):
    """The same prompts in the same order as TRL's class has them, the first ones included."""
    fields = {"max_steps": 2, "max_completion_length": 8, "shuffle_dataset": name != "once"}
    arguments = {"reward_funcs": answered, "processing_class": chat_tokenizer}
    own = make_args(tmp_path, defer_unsettled_groups=False, **SERVER, **fields)
    with stub_servers(write):
        trainer = make_trainer(model_dir, own, train_dataset=DATA[name](), **arguments)
    batches = record_batches(trainer)
    trainer.train()
    trl = make_trainer(model_dir, make_args(tmp_path, **fields), GRPOTrainer, train_dataset=DATA[name](), **arguments)
    seen: list[str] = []
    score = trl._generate_and_score_completions

    def scored(inputs: Any) -> Any:
        seen.extend(prompts([{"inputs": inputs}]))
        return score(inputs)

    trl._generate_and_score_completions = scored
    trl.train()
    assert prompts(batches) == seen
    assert len({*seen}) == 8
    if name == "once":
        assert seen[::4] == [f"{i}A" for i in range(8)]


@pytest.mark.parametrize("name", DATA)
def test_the_default_trains_on_it_too(model_dir, tmp_path, chat_tokenizer, name):
    """With deferral, rows enter the buffer, which a checkpoint can hold."""
    args = make_args(tmp_path, max_steps=2, max_completion_length=32, save_strategy="steps", save_steps=1, **SERVER)
    arguments = {"reward_funcs": answered, "processing_class": chat_tokenizer}
    with stub_servers(write):
        trainer = make_trainer(model_dir, args, train_dataset=DATA[name](), **arguments)
    assert trainer.args.scores_early
    batches = record_batches(trainer)
    trainer.train()
    assert len({*prompts(batches)}) == 8


def test_a_transform_makes_a_few_rows_only(model_dir, tmp_path):
    rows: list[str] = []

    def costly(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows.extend(batch["question"])
        return made(batch)

    data = QUESTIONS.with_transform(costly)
    with stub_servers(write):
        make_trainer(model_dir, make_args(tmp_path, **SERVER), reward_funcs=answered, train_dataset=data)
    assert {*rows} == {f"{i}A" for i in range(NUM_MADE)}
    assert len(rows) <= 8 * NUM_MADE


def refused(words: str, dataset: Any, tmp_path: Any, reward: Any = answered, evaluation: Any = None) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DARTSGRPOTrainer("no-model", reward, make_args(tmp_path), dataset, evaluation)


def test_made_rows_without_what_is_needed_are_named(tmp_path):
    """Names what the rows have, not what is stored."""
    data = QUESTIONS.with_transform(lambda batch: {"text": batch["question"]})
    refused("`train_dataset` must have a column 'prompt', and has 'text'", data, tmp_path)
    data = STORED.with_transform(lambda batch: {"prompt": batch["prompt"]})
    refused("'answered' can't be called .* required argument: 'answer'.* log_metric by name", data, tmp_path)
    refused("missing a required argument: 'answer'", STORED.with_format(None, columns=["prompt"]), tmp_path)
    data = QUESTIONS.with_transform(lambda batch: {"prompt": [7] * len(batch["question"])})
    refused("must have text or a list of messages .* row 0 has 7", data, tmp_path)
    refused(
        "`eval_dataset` must have a column 'prompt', and has 'question'", STORED, tmp_path, evaluation=[*QUESTIONS]
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"question": "A", "answer": "!"}] * 8, "`train_dataset` must have a column 'prompt', and has 'question'"),
        ([{"prompt": None, "answer": "!"}] * 8, "must have text or a list of messages .* row 0 has None"),
        ([{"prompt": "A"}] * 8, "'answered' can't be called as TRL calls it: missing a required argument: 'answer'"),
        ([{"prompt": "A", "answer": "!", "at": b"7"}] * 8, r"the column 'at' \(bytes\) .*`save_strategy='no'`"),
    ],
)
def test_the_first_batch_of_a_stream_is_checked(model_dir, tmp_path, rows, words):
    args = make_args(tmp_path, max_steps=2, save_strategy="steps", **SERVER)
    with stub_servers(write):
        trainer = make_trainer(model_dir, args, reward_funcs=answered, train_dataset=once(rows))
    with pytest.raises(ConfigurationError, match=words):
        trainer.train()


def test_a_list_is_evaluated_on(model_dir, tmp_path):
    """As by TRL, which samples by index."""
    args = make_args(tmp_path, per_device_eval_batch_size=4, **SERVER)
    with stub_servers(write):
        trainer = make_trainer(
            model_dir, args, reward_funcs=answered, train_dataset=STORED, eval_dataset=[*STORED][:2]
        )
    assert trainer.evaluate()["eval_reward"] == 0.5
