"""Environments: each row acts in one of its own, which gives it tools, a part of its prompt, and a reward."""

import itertools

import pytest

from tests.builders import record_batches
from tests.trl_parity.common import chats, make_args, make_trainer, step_logs, train, train_all
from tests.trl_parity.tool_calls import ADD, DOUBLE, RIGHT, Reader, tool_messages, tool_trainer


pytestmark = pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")


class Counter:
    """Counts; begins where its row says, or at 0."""

    def reset(self, start=0, **kwargs):
        self.count = start

    def add(self, a: int) -> str:
        """
        Adds to the count.

        Args:
            a: How much.
        """
        self.count += a
        return f"now {self.count}"


class TalkingCounter(Counter):
    """Says where it begins."""

    def reset(self, start=0, **kwargs):
        super().reset(start)
        return f" from {start}"


class ScoringCounter(Counter):
    """Gives its own reward."""

    def get_reward(self):
        return float(self.count)


class SlowlyScoringCounter(Counter):
    """Gives its own reward, after a while."""

    async def get_reward(self):
        return float(self.count)


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


STARTS = [0, 10, 20, 30, 40, 50, 60, 70]


class CountReader(Reader):
    """Checks that a row's environment began as its prompt says, and is what its conversation made of it."""

    def __call__(self, prompts, completions, environments, start, **kwargs):
        assert len({id(environment) for environment in environments}) == len(completions) == 8
        for prompt, messages, environment, first in zip(prompts, completions, environments, start, strict=True):
            talk = f" from {first}" if isinstance(environment, TalkingCounter) else ""
            assert prompt[0]["content"] == chats()["prompt"][first // 10][0]["content"] + talk
            answers = [message["content"] for message in messages if message["role"] == "tool"]
            assert answers == [f"now {first + 2 * turn}" for turn in range(1, len(answers) + 1)]
            assert environment.count == first + 2 * len(answers)
        return super().__call__(prompts, completions, **kwargs)


@pytest.mark.parametrize("environment", [Counter, TalkingCounter])
def test_environment_belongs_to_its_row(caller, tmp_path, environment):
    reader = CountReader()
    trainer = tool_trainer(caller(ADD), tmp_path, reader, data(start=STARTS), environment_factory=environment)
    train_all(trainer)
    assert len(reader.batches) == 3
    rows = [row for batch in reader.batches for row in batch]
    assert any(tool_messages(row) for row in rows)
    assert len(trainer._environment_pool[None]) == 8  # made once, reset often


def test_environment_in_evaluation(caller, tmp_path):
    reader = CountReader()
    trainer = tool_trainer(caller(ADD), tmp_path, reader, data(start=STARTS), environment_factory=Counter)
    metrics = trainer.evaluate()
    answers = [message for batch in reader.batches for row in batch for message in tool_messages(row)]
    assert metrics["eval_tools/call_frequency"] == pytest.approx(len(answers) / 32)


@pytest.mark.parametrize("with_function", [False, True])
@pytest.mark.parametrize("environment", [ScoringCounter, SlowlyScoringCounter])
def test_environment_gives_the_reward(caller, tmp_path, environment, with_function):
    reader = Reader()
    rewards = reader if with_function else []
    trainer = tool_trainer(
        caller(ADD), tmp_path, data=data(start=STARTS), reward_funcs=rewards, environment_factory=environment
    )
    batches = record_batches(trainer)
    train_all(trainer)
    completions, given = list(trainer._logs["completion"]), list(trainer._logs["rewards"][environment.__name__])
    starts = [example["start"] for example in batches[-1]["inputs"]]
    counts = [
        start + 2 * sum(message["role"] == "tool" for message in messages)
        for start, messages in zip(starts, completions, strict=True)
    ]
    assert given == counts
    assert step_logs(trainer, f"rewards/{environment.__name__}/mean")[-1] == sum(counts) / 8
    assert len(trainer._logs["rewards"]) == 1 + with_function


def test_rows_choose_among_environments(caller, tmp_path):
    reader = Reader()
    names = ["adder", "doubler"] * 4
    trainer = tool_trainer(
        caller(ADD, DOUBLE),
        tmp_path,
        reader,
        data(environment=names),
        environment_factory={"adder": ScoringCounter, "doubler": Doubler},
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
    assert any(value is not None for value in step_logs(trainer, "rewards/ScoringCounter/mean"))


def test_environment_brings_the_prompts(caller, tmp_path):
    class Prompter(ScoringCounter):
        def reset(self, **kwargs):
            super().reset()
            return "count up"

    reader = Reader()
    trainer = tool_trainer(caller(ADD), tmp_path, reader, {"train_dataset": None}, environment_factory=Prompter)
    train_all(trainer)
    assert {prompt[0]["content"] for batch in reader.batches for prompt, _, _ in batch} == {"count up"}


def test_prompts_that_differ_within_a_group_are_answered_row_by_row(caller, tmp_path):
    numbers = itertools.count()

    class Prompter(ScoringCounter):
        def reset(self, **kwargs):
            super().reset()
            return f" no {next(numbers)}"

    reader = Reader()
    trainer = tool_trainer(caller(ADD), tmp_path, reader, environment_factory=Prompter)
    batches = record_batches(trainer)
    before = {name: param.clone() for name, param in trainer.model.named_parameters()}
    trainer.train()
    assert all((param != trainer.model.get_parameter(name)).any() for name, param in before.items())
    assert next(numbers) == 24  # no row more was asked for
    for batch, rows in zip(batches, reader.batches, strict=True):
        for ids, (prompt, _, _) in zip(batch["prompt_ids"], rows, strict=True):
            text = trainer.processing_class.decode(ids, skip_special_tokens=True)
            assert prompt[0]["content"] in text
    assert step_logs(trainer, "darts/budget/total") == [8, 8, 8]


class NoReset:
    """Not an environment."""

    def add(self, a: int) -> int:
        """
        Adds.

        Args:
            a: How much.
        """
        return a


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"environment_factory": NoReset}, "must define a callable `reset`"),
        ({"environment_factory": Counter, "reward_funcs": None}, "No reward source"),
        ({"environment_factory": {"a": Counter}, "train_dataset": None}, "requires a `train_dataset`"),
    ],
)
def test_environments_that_can_not_work(caller, tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        tool_trainer(caller(ADD), tmp_path, data=kwargs)


def test_no_data_and_no_number_of_steps(caller, tmp_path):
    with pytest.raises(ValueError, match="`max_steps` must be set"):
        make_trainer(
            caller(ADD), make_args(tmp_path, max_steps=-1), train_dataset=None, environment_factory=ScoringCounter
        )


def test_environment_of_an_unknown_name(caller, tmp_path):
    dataset = data(environment=["here", "there"] * 4)
    trainer = tool_trainer(caller(ADD), tmp_path, data=dataset, environment_factory={"here": Counter})
    with pytest.raises(ValueError, match="environment='there'"):
        trainer.train()


def test_tools_and_environment_together(caller, tmp_path):
    def multiply(a: int, b: int) -> int:
        """
        Multiplies.

        Args:
            a: One number.
            b: The other.
        """
        return a * b

    reader = Reader()
    trainer = tool_trainer(caller(ADD, RIGHT), tmp_path, reader, tools=[multiply], environment_factory=Counter)
    assert train(trainer)
    answers = {message["content"] for batch in reader.batches for row in batch for message in tool_messages(row)}
    assert {"12", "now 2"} <= answers
