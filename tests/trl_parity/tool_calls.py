"""A model that calls tools, the tools, and a reward that remembers the conversations that come of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.tool_calls import make_chat_tokenizer, tool_call
from tests.trl_parity.common import chats, make_args, make_trainer
from tests.zoo import make_chain


RIGHT, FAILING = tool_call("multiply", a=3, b=4), tool_call("fail", a=1)
ADD, DOUBLE = tool_call("add", a=2), tool_call("double")
CALLS = (RIGHT, FAILING, ADD, DOUBLE)


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


def fail(a: int) -> int:
    """
    Fails.

    Args:
        a: Any number.
    """
    raise RuntimeError(f"no {a}")


TOOLS = [multiply, fail]


class Counter:
    """An environment that counts; it begins where its row says, or at 0, and says so in the prompt."""

    def reset(self, start: int = 0, **kwargs: Any) -> str:
        self.count = start
        return f" from {start}"

    def add(self, a: int) -> str:
        """
        Adds to the count.

        Args:
            a: How much.
        """
        self.count += a
        return f"now {self.count}"


def caller_maker(new_dir: Callable[[], Path]) -> Callable[..., Path]:
    """Makes models that say `x` a few times or one of some calls, at times two, and then end."""

    @cache
    def make(*calls: str) -> Path:
        odds = {"x": 0.4, **dict.fromkeys(calls, 0.6 / len(calls))}
        after = {"": odds, "x": {"x": 0.5, "<eos>": 0.5}}
        after |= {call: {"<eos>": 0.85, **dict.fromkeys(calls, 0.15 / len(calls))} for call in calls}
        return make_chain(new_dir(), make_chat_tokenizer(CALLS, tools=True), after)

    return make


class Reader:
    """A reward that remembers prompts, conversations and tokens, and differs from row to row."""

    __name__ = "reader"

    def __init__(self) -> None:
        self.batches: list[list[tuple[Any, Any, Any]]] = []

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        self.batches.append(list(zip(prompts, completions, completion_ids, strict=True)))
        return [float(len(ids) % 5) for ids in completion_ids]


def tool_trainer(model_dir: Path, tmp_path: Path, reward: Any = None, data: Any = None, **kwargs: Any) -> Any:
    """A trainer with tools or environments. Arguments of the config go into `fields`."""
    defaults = {"max_completion_length": 1500, "max_steps": 3, "learning_rate": 1e-6}  # else it unlearns to end
    args = make_args(tmp_path, **{**defaults, **kwargs.pop("fields", {})})
    data = {"train_dataset": chats(), "reward_funcs": reward or Reader(), **(data or {})}
    return make_trainer(model_dir, args, **{**data, **kwargs})


def said(message: dict[str, Any]) -> list[str]:
    """What the model wrote: content, then calls."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return [message["content"], *(tool_call(call["name"], **call["arguments"]) for call in calls)]


def tool_messages(row: tuple[Any, Any, Any]) -> list[dict[str, Any]]:
    """The answers of tools in a row of [`Reader`]."""
    return [message for message in row[1] if message["role"] == "tool"]
