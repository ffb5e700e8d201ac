"""Tools: the model calls them, they answer or fail, and the conversation goes on."""

import asyncio

import pytest

from tests.builders import record_batches
from tests.trl_parity.common import make_args, make_trainer, step_logs, train_all
from tests.trl_parity.tool_calls import (
    BROKEN,
    FAILING,
    FAILING_LATER,
    LATER,
    RIGHT,
    UNKNOWN,
    WRONG,
    Reader,
    said,
    tool_messages,
    tool_trainer,
)


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: One number.
        b: The other.

    Returns:
        Their product.
    """
    return a * b


async def multiply_later(a: int, b: int) -> int:
    """
    Multiplies two numbers, after a while.

    Args:
        a: One number.
        b: The other.

    Returns:
        Their product.
    """
    await asyncio.sleep(0)
    return a * b


def fail(a: int) -> int:
    """
    Fails.

    Args:
        a: Any number.
    """
    raise RuntimeError(f"no {a}")


async def fail_later(a: int) -> int:
    """
    Fails, after a while.

    Args:
        a: Any number.
    """
    fail(a)


ANSWERS = {
    RIGHT: "12",
    LATER: "30",
    WRONG: str({"error": "multiply() got an unexpected keyword argument 'c'"}),
    UNKNOWN: str({"error": "Tool divide not found."}),
    FAILING: str({"error": "no 1"}),
    FAILING_LATER: str({"error": "no 2"}),
}
TOOLS = [multiply, multiply_later, fail, fail_later]


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


@pytest.mark.parametrize(
    "calls",
    [
        [RIGHT],
        [LATER],
        [RIGHT, WRONG],
        [RIGHT, UNKNOWN],
        [LATER, FAILING, FAILING_LATER],
        [RIGHT, LATER, WRONG, UNKNOWN, FAILING, FAILING_LATER],
    ],
)
def test_tools_answer_the_row_that_called_them(caller, tmp_path, calls):
    reader = Reader()
    trainer = tool_trainer(caller(*calls), tmp_path, reader, tools=TOOLS)
    batches = record_batches(trainer)
    train_all(trainer)
    answers = []
    for batch, rows, entry in zip(batches, reader.batches, trainer.state.log_history, strict=False):
        for row, mask in zip(rows, batch["tool_mask"], strict=True):
            check_row(trainer.processing_class, *row, mask[: len(row[2])].tolist())
        contents = [message["content"] for row in rows for message in tool_messages(row)]
        failures = [content for content in contents if "error" in content]
        assert entry["tools/call_frequency"] == pytest.approx(len(contents) / 8)
        assert entry["tools/failure_frequency"] == pytest.approx(len(failures) / max(len(contents), 1))
        assert entry["completions/mean_length"] == pytest.approx(batch_lengths(batch).mean().item())
        answers += contents
    assert set(answers) == {ANSWERS[call] for call in calls}


def batch_lengths(batch):
    """Tokens of each row that the model wrote."""
    return (batch["completion_mask"] * batch["tool_mask"]).sum(1).float()


def test_call_that_can_not_be_read_is_text(caller, tmp_path):
    reader = Reader()
    trainer = tool_trainer(caller(BROKEN), tmp_path, reader, tools=TOOLS)
    train_all(trainer)
    assert all(len(messages) == 1 and not messages[0].get("tool_calls") for _, messages, _ in reader.batches[0])
    assert BROKEN in "".join(messages[0]["content"] for _, messages, _ in reader.batches[0])
    assert step_logs(trainer, "tools/call_frequency") == [0, 0, 0]


@pytest.mark.parametrize("limit", [1, 2])
def test_tool_turns_are_limited(caller, tmp_path, limit):
    reader = Reader()
    fields = {"max_tool_calling_iterations": limit, "max_steps": 1}
    trainer = tool_trainer(caller(RIGHT, share=0.9), tmp_path, reader, tools=TOOLS, fields=fields)
    trainer.train()
    turns = [sum(message["role"] == "assistant" for message in messages) for _, messages, _ in reader.batches[0]]
    assert max(turns) == limit + 1


def test_answers_beyond_the_limit_are_left_out(caller, tmp_path):
    reader = Reader()
    trainer = tool_trainer(
        caller(RIGHT, share=0.9), tmp_path, reader, tools=TOOLS, fields={"max_completion_length": 60}
    )
    batches = record_batches(trainer)
    train_all(trainer)
    rows = [row for batch in reader.batches for row in batch]
    assert max(len(ids) for _, _, ids in rows) <= 60
    unanswered = [messages for _, messages, _ in rows if messages[-1].get("tool_calls")]
    assert unanswered
    assert all(batch["completion_ids"].shape == batch["tool_mask"].shape for batch in batches)


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


def test_tools_in_evaluation(caller, tmp_path):
    reader = Reader()
    trainer = tool_trainer(caller(RIGHT, WRONG), tmp_path, reader, tools=TOOLS)
    metrics = trainer.evaluate()
    contents = [message["content"] for rows in reader.batches for row in rows for message in tool_messages(row)]
    assert metrics["eval_tools/call_frequency"] == pytest.approx(len(contents) / 8)
    assert {ANSWERS[RIGHT], ANSWERS[WRONG]} == set(contents)


def test_prompts_name_the_tools(caller, tmp_path):
    trainer = tool_trainer(caller(RIGHT), tmp_path, tools=[multiply, fail])
    batches = record_batches(trainer)
    train_all(trainer)
    for ids, mask in zip(batches[0]["prompt_ids"], batches[0]["prompt_mask"].bool(), strict=True):
        assert trainer.processing_class.decode(ids[mask]).startswith("tool multiply\ntool fail\nuser: ")


def test_template_must_know_tools(lm, lm_tokenizer, tmp_path):
    lm_tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="does not support tool calling"):
        make_trainer(lm, make_args(tmp_path), tools=[multiply], processing_class=lm_tokenizer)
