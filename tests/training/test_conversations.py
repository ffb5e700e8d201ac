"""
Conversations that run each by itself come to what TRL's loop makes of them: messages, tokens, masks, counts. What
servers decode of them: `tests/launches/test_two_processes.py`.
"""

import asyncio
import copy
import random
import threading
import time

import pytest
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from benchmarks.tool_calls import tool_call
from tests.trl_parity.tool_calls import ADD, CALLS, FAILING, RIGHT, TOOLS, caller_maker, tool_trainer
from trl_darts.errors import GenerationError
from trl_darts.training.conversations import Conversations


pytestmark = pytest.mark.vllm  # TRL imports it

LOOP = GRPOTrainer._tool_call_loop
LATE = tool_call("late", a=2)
UNKNOWN = ADD  # a call of a tool that no row has


async def late(a: int) -> str:
    """
    Answers late.

    Args:
        a: Any number.
    """
    await asyncio.sleep(0.01)
    if a > 2:
        raise RuntimeError("too late")
    return f"at last {a}"


class Scripted:
    """Decodes what only depends on the tokens before: one or two calls, or an answer, which ends."""

    def __init__(self, tokenizer, seconds=0.0):
        self.tokenizer, self.seconds = tokenizer, seconds
        self.lock, self.prompts, self.num_tended = threading.Lock(), [], 0

    def answer(self, prompt):
        rng = random.Random(repr(prompt))
        if rng.random() < 0.6:
            words = rng.choices([RIGHT, FAILING, UNKNOWN, "x"], k=rng.randint(1, 2))
        else:
            words = ["x"] * rng.randint(1, 3)
        ids = self.tokenizer.convert_tokens_to_ids([*words, "<eos>"])
        return ids, [-rng.random() for _ in ids]

    def decode(self, conversation, turn, prompt):
        time.sleep(self.seconds)
        with self.lock:
            self.prompts.append((conversation, turn))
        return self.answer(prompt)

    def tend(self):
        self.num_tended += 1

    def together(self, prompt_ids, *args, **kwargs):
        """As TRL asks for all rows at once."""
        ids, logprobs = zip(*map(self.answer, prompt_ids), strict=True)
        return list(ids), list(logprobs)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    make = caller_maker(lambda: tmp_path_factory.mktemp("caller"))
    return tool_trainer(make(*CALLS[:2]), tmp_path_factory.mktemp("out"), tools=[*TOOLS, late])


def first_turns(trainer, script, count, **tools):
    """Rows as TRL has them after the first turn, and the tools of each."""
    trainer._sync_tool_dicts = [{own.__name__: own for own in TOOLS} | tools for _ in range(count)]
    trainer._async_tool_dicts = [{"late": late} for _ in range(count)]
    tokenizer = trainer.processing_class
    prompts = [[{"role": "user", "content": f"row {i}"}] for i in range(count)]
    prompt_ids = [tokenizer(f"user: row {i}<eos>\nassistant: ")["input_ids"] for i in range(count)]
    completion_ids, logprobs = script.together(prompt_ids)
    completions = [
        [parse_response(tokenizer, ids, prefix=prompt, tools=trainer.tools)]
        for ids, prompt in zip(completion_ids, prompt_ids, strict=True)
    ]
    return prompts, prompt_ids, completion_ids, completions, logprobs


@pytest.mark.parametrize("limits", [{}, {"max_completion_length": 180}, {"max_tool_calling_iterations": 1}], ids=str)
def test_as_trls_loop(trainer, monkeypatch, limits):
    for name, value in limits.items():
        monkeypatch.setattr(trainer, name, value)
    script = Scripted(trainer.processing_class)
    rows = first_turns(trainer, script, 24)
    monkeypatch.setattr(trainer, "_generate_single_turn", script.together)
    mine, theirs = copy.deepcopy(rows), copy.deepcopy(rows)
    expected = trainer._tool_call_loop(*theirs, None, {})
    conversations = Conversations(trainer, LOOP, script)
    found = conversations.run(*mine)
    assert mine[0] == theirs[0]  # TRL adds to prompts in place
    for name, own, other in zip(("masks", "completions", "ids", "logprobs", "calls", "failures"), found, expected,
                                strict=False):  # fmt: skip
        assert own == other, name
    assert found[4] > 12
    assert found[5] > 3
    assert found[6] == expected[6] == [[]] * 24
    assert sum(turns.count for turns in conversations.turns) == len(script.prompts)
    for conversation in range(24):
        turns = [turn for own, turn in script.prompts if own == conversation]
        assert turns == list(range(len(turns)))


def test_no_row_calls(trainer):
    script = Scripted(trainer.processing_class)
    rows = first_turns(trainer, script, 40)
    quiet = [i for i in range(40) if not rows[3][i][0].get("tool_calls")]
    own = [[part[i] for i in quiet] for part in rows]
    masks, _, ids, logprobs, *rest = Conversations(trainer, LOOP, script).run(*own)
    assert masks == [[1] * len(tokens) for tokens in ids]
    assert logprobs == own[4]
    assert rest[:2] == [0, 0]
    assert not script.prompts


@pytest.mark.parametrize("most", [1, 64])
def test_tools_run_at_the_same_time(trainer, monkeypatch, most):
    monkeypatch.setattr(trainer.args, "max_concurrent_tools", most)
    monkeypatch.setattr(trainer, "max_tool_calling_iterations", 1)
    running, peak, lock = 0, 0, threading.Lock()

    def multiply(a, b):
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return a * b

    script = Scripted(trainer.processing_class)
    rows = first_turns(trainer, script, 24, multiply=multiply)
    Conversations(trainer, LOOP, script).run(*rows)
    assert peak == 1 if most == 1 else peak > 3


def test_an_error_of_a_server_ends_all(trainer):
    script = Scripted(trainer.processing_class, seconds=0.02)
    rows = first_turns(trainer, script, 24)
    before = threading.active_count()

    def decode(conversation, turn, prompt):
        if turn == 1:
            raise GenerationError("no server is left")
        return Scripted.decode(script, conversation, turn, prompt)

    script_with_error = type("", (), {"decode": staticmethod(decode), "tend": staticmethod(script.tend)})
    with pytest.raises(GenerationError, match="no server is left"):
        Conversations(trainer, LOOP, script_with_error).run(*rows)
    assert threading.active_count() <= before
    assert max(turn for _, turn in script.prompts) <= 2


def test_an_error_of_the_main_thread_ends_all(trainer):
    """As of Ctrl-C, which arrives there."""
    script = Scripted(trainer.processing_class, seconds=0.3)
    rows = first_turns(trainer, script, 24)

    def tend():
        raise KeyboardInterrupt

    script.tend = tend
    with pytest.raises(KeyboardInterrupt):
        Conversations(trainer, LOOP, script).run(*rows)
    assert not any(thread.name.startswith("trl_darts-conversation") for thread in threading.enumerate())


async def never(a: int) -> str:
    await asyncio.sleep(60)


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_a_tool_that_hangs_has_answered_with_an_error(trainer, monkeypatch, kind):
    monkeypatch.setattr(trainer.args, "tool_timeout_s", 0.1)
    monkeypatch.setattr(trainer, "max_tool_calling_iterations", 1)
    over = threading.Event()
    script = Scripted(trainer.processing_class)
    rows = first_turns(trainer, script, 24, multiply=lambda **arguments: over.wait(60))
    if kind == "coroutine":
        for sync, asynchronous in zip(trainer._sync_tool_dicts, trainer._async_tool_dicts, strict=True):
            del sync["multiply"]
            asynchronous["multiply"] = lambda a, b: never(a)
    begin = time.monotonic()
    _, completions, *_, failures, _ = Conversations(trainer, LOOP, script).run(*rows)
    over.set()
    assert time.monotonic() - begin < 10
    answers = [m["content"] for own in completions for m in own if m["role"] == "tool" and m["name"] == "multiply"]
    assert answers == ["{'error': 'no answer within `tool_timeout_s` (0.1 s)'}"] * len(answers)
    assert failures >= len(answers) > 3


def test_a_stop_tool_ends_conversations_with_its_call(trainer, monkeypatch):
    """As where its answer does not fit: the model's last turn is the end, which has all of the loss."""
    monkeypatch.setattr(trainer.args, "stop_tools", ["multiply"])
    script = Scripted(trainer.processing_class)
    rows = first_turns(trainer, script, 24)
    first = copy.deepcopy(rows)
    masks, completions, ids, logprobs, *_ = Conversations(trainer, LOOP, script).run(*rows)
    num_stopped = 0
    for i, messages in enumerate(completions):
        said = [[call["function"]["name"] for call in message.get("tool_calls") or []] for message in messages]
        stops = ["multiply" in names for names in said]
        if any(stops) and not any(message.get("content", "").startswith("{'error'") for message in messages):
            num_stopped += 1
            assert stops.index(True) == len(messages) - 1
            assert masks[i][-1] == 1
        if stops[0] and len(messages) == 1:
            assert ids[i] == first[2][i]
            assert logprobs[i] == first[4][i]
    assert num_stopped > 3


def test_the_deadline_of_conversations(trainer, monkeypatch):
    monkeypatch.setattr(trainer.args, "conversation_timeout_s", 0.2)
    over = threading.Event()
    script = Scripted(trainer.processing_class)
    rows = first_turns(trainer, script, 24, multiply=lambda **arguments: over.wait(60))
    begin = time.monotonic()
    _, completions, *_ = Conversations(trainer, LOOP, script).run(*rows)
    over.set()
    assert time.monotonic() - begin < 10
    assert not any(m["role"] == "tool" and m["name"] == "multiply" for own in completions for m in own)
