"""
Candidates that are whole conversations: equal to TRL's loop where all are kept, and chosen by what the model decoded.
On servers: `tests/test_agents.py`.
"""

import copy
import random
import threading
import time
from concurrent.futures import CancelledError, Future

import pytest
from trl import GRPOTrainer

from tests.training.test_conversations import Scripted, late
from tests.trl_parity.tool_calls import CALLS, TOOLS, caller_maker, tool_trainer
from tests.waits import wait_for
from trl_darts.engines.batch import PromptBatch
from trl_darts.errors import ConfigurationError, GenerationError
from trl_darts.scheduling import GroupPlan, SchedulePolicies, Scheduler
from trl_darts.scheduling.policies import DualEnd
from trl_darts.streaming import decode_completions
from trl_darts.training.candidates import CandidateRun
from trl_darts.training.conversations import joined
from trl_darts.training.tool_players import ToolPlayers


pytestmark = pytest.mark.vllm  # TRL imports it

LOOP = GRPOTrainer._tool_call_loop
M = 4


class Turns(Scripted):
    """Decodes in threads of its own, each turn for a while."""

    def __init__(self, tokenizer, seconds=lambda conversation, turn: 0.0):
        super().__init__(tokenizer)
        self.pauses, self.cancelled, self.limits = seconds, [], []

    def start(self, conversation, turn, prompt, most):
        future = Future()
        self.limits.append(most)
        with self.lock:
            self.prompts.append((conversation, turn))

        def decode():
            time.sleep(self.pauses(conversation, turn))
            if future.set_running_or_notify_cancel():
                ids, logprobs = self.answer(prompt)
                future.set_result((ids[:most], logprobs[:most]))
            else:
                self.cancelled.append((conversation, turn))

        threading.Thread(target=decode, daemon=True).start()
        return future


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    make = caller_maker(lambda: tmp_path_factory.mktemp("caller"))
    return tool_trainer(make(*CALLS[:2]), tmp_path_factory.mktemp("out"), tools=[*TOOLS, late])


def threads_have_ended():
    wait_for(lambda: not any(t.name.startswith("trl_darts-conversation") for t in threading.enumerate()))


def prompts_of(trainer, count, **tools):
    """Different prompts of single rows, and the batch of their groups of M."""
    trainer._sync_tool_dicts = [{own.__name__: own for own in TOOLS} | tools for _ in range(count * M)]
    trainer._async_tool_dicts = [{"late": late} for _ in range(count * M)]
    messages = [[{"role": "user", "content": f"row {i // M}"}] for i in range(count * M)]
    ids = [trainer.processing_class(f"user: row {i // M}<eos>\nassistant: ")["input_ids"] for i in range(count * M)]
    return messages, PromptBatch.alone(ids, M)


def run_of(trainer, turns, messages, batch):
    def parse(*args):
        return decode_completions(trainer, *args)

    players = ToolPlayers(trainer, LOOP, parse, batch.rows, messages)
    return CandidateRun(turns, batch, players, most=trainer.args.max_concurrent_conversations), players


def play(trainer, turns, messages, batch, num_candidates=M, policies=None, drops=False):
    run, _ = run_of(trainer, turns, messages, batch)
    plans = [GroupPlan(i, num_candidates) for i in range(len(batch.rows) // M)]
    scheduler = Scheduler(policies or SchedulePolicies(), M, drops)
    return run, run.run(scheduler, plans)


@pytest.mark.parametrize("limits", [{}, {"max_completion_length": 180}, {"max_tool_calling_iterations": 1}], ids=str)
def test_as_trl(trainer, monkeypatch, limits):
    """Each conversation is what TRL's first turn, its parser and its loop make of it."""
    for name, value in limits.items():
        monkeypatch.setattr(trainer, name, value)
    turns = Turns(trainer.processing_class)
    messages, batch = prompts_of(trainer, 12)
    run, result = play(trainer, turns, messages, batch)
    assert [len(group.rows) for group in result.groups] == [M] * 12
    found = joined([run.played[row.candidate_id].outcome for group in result.groups for row in group.rows], True)

    monkeypatch.setattr(trainer, "_generate_single_turn", turns.together)
    completion_ids, logprobs = turns.together(batch.rows)
    completions = decode_completions(trainer, messages, completion_ids, None, batch.rows)
    expected = trainer._tool_call_loop(
        copy.deepcopy(messages), list(batch.rows), completion_ids, completions, logprobs, None, {}
    )
    for name, own, other in zip(("masks", "completions", "ids", "logprobs", "calls", "failures", "images"), found,
                                expected, strict=True):  # fmt: skip
        assert own == other, name
    assert found[4] > 6
    for group in result.groups:
        for row in group.rows:
            mask = found[0][row.candidate_id]
            assert sum(mask) <= row.length  # TRL cuts what is over the limit


def test_first_turns_are_what_trl_parses(trainer):
    turns = Turns(trainer.processing_class)
    messages, batch = prompts_of(trainer, 3)
    run, result = play(trainer, turns, messages, batch)
    for group in result.groups:
        for row in group.rows:
            played = run.played[row.candidate_id]
            assert played.tokens == turns.answer(batch.rows[M * row.group_id])
            assert played.outcome[2][0][: len(played.tokens[0])] == played.tokens[0]
            assert row.tokens[: len(played.tokens[0])] == played.tokens[0]


def test_what_is_beyond_the_limit_is_not_decoded(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "max_completion_length", 180)
    turns = Turns(trainer.processing_class)
    play(trainer, turns, *prompts_of(trainer, 12))
    assert 1 <= min(turns.limits) < 180 == max(turns.limits)


@pytest.mark.parametrize("most", [1, 5])
def test_open_at_once(trainer, monkeypatch, most):
    """Others begin when one has ended, and not while one waits for its tool."""
    monkeypatch.setattr(trainer.args, "max_concurrent_conversations", most)
    opened, turns = [], Turns(trainer.processing_class, lambda conversation, turn: 0.01)
    messages, batch = prompts_of(trainer, 6)
    run, players = run_of(trainer, turns, messages, batch)
    begin = players.begin

    def counted(*part):
        begin(*part)
        opened.append(len(opened) + 1 - len(run.played))

    players.begin = counted
    result = run.run(Scheduler(SchedulePolicies(), M), [GroupPlan(i, M) for i in range(6)])
    assert [len(group.rows) for group in result.groups] == [M] * 6
    assert len(opened) == 6 * M
    assert max(opened) == most


def test_a_turn_of_a_spare_conversation_is_aborted(trainer):
    def seconds(conversation, turn):
        return 10.0 if conversation % 5 == 4 else 0.0

    turns = Turns(trainer.processing_class, seconds)
    messages, batch = prompts_of(trainer, 6)
    begin = time.monotonic()
    _, result = play(trainer, turns, messages, batch, M + 1, SchedulePolicies(DualEnd(M, M + 1, num_longest=1)))
    assert time.monotonic() - begin < 10
    assert [[row.index for row in group.rows] for group in result.groups] == [list(range(M))] * 6
    threads_have_ended()
    assert max(turn for conversation, turn in turns.prompts if conversation % 5 == 4) == 0


def test_a_tool_of_a_spare_conversation_is_not_waited_for(trainer, monkeypatch):
    over, entered = threading.Event(), threading.Event()

    def multiply(a, b):
        entered.set()
        over.wait(60)
        return a * b

    class Mixed(Turns):
        """The first candidate calls, and the others end once it waits for its tool."""

        def start(self, conversation, turn, prompt, most):
            future = Future()

            def decode():
                word = "x"
                if conversation == 0 and turn == 0:
                    word = CALLS[0]
                elif conversation:
                    entered.wait(60)
                ids = self.tokenizer.convert_tokens_to_ids([word, "<eos>"])
                future.set_result((ids, [-1.0] * len(ids)))

            self.prompts.append((conversation, turn))
            threading.Thread(target=decode, daemon=True).start()
            return future

    messages, batch = prompts_of(trainer, 1, multiply=multiply)
    policies = SchedulePolicies(DualEnd(M, M + 1, num_longest=1))
    turns = Mixed(trainer.processing_class)
    _, result = play(trainer, turns, messages, batch, M + 1, policies)
    assert [row.index for row in result.groups[0].rows] == [1, 2, 3, 4]
    over.set()
    threads_have_ended()
    assert (0, 1) not in turns.prompts  # its next turn was not decoded


@pytest.mark.parametrize("drops", [False, True])
def test_a_servers_error(trainer, drops):
    turns = Turns(trainer.processing_class)

    def start(conversation, turn, prompt, most):
        if conversation == 5:
            raise GenerationError("no server is left")
        return Turns.start(turns, conversation, turn, prompt, most)

    turns_with_error = type("", (), {"start": staticmethod(start), "tend": staticmethod(turns.tend)})
    messages, batch = prompts_of(trainer, 3)
    if not drops:
        with pytest.raises(GenerationError, match="no server is left"):
            play(trainer, turns_with_error, messages, batch)
    else:
        _, result = play(trainer, turns_with_error, messages, batch, drops=True)
        assert [group.plan.group_id for group in result.groups] == [0, 2]
        assert list(result.dropped) == [1]
    threads_have_ended()


@pytest.mark.parametrize("drops", [False, True])
def test_a_prompt_that_is_too_long(trainer, drops):
    """Its group alone is dropped, where groups may be dropped."""
    turns = Turns(trainer.processing_class)

    def start(conversation, turn, prompt, most):
        if conversation // M == 1:
            raise ConfigurationError("1 prompts of this batch are longer than 8 tokens")
        return Turns.start(turns, conversation, turn, prompt, most)

    strict = type("", (), {"start": staticmethod(start), "tend": staticmethod(turns.tend)})
    messages, batch = prompts_of(trainer, 3)
    if drops:
        _, result = play(trainer, strict, messages, batch, drops=True)
        assert list(result.dropped) == [1]
    else:
        with pytest.raises(ConfigurationError, match="longer than 8 tokens"):
            play(trainer, strict, messages, batch)


def test_an_error_of_a_template_is_raised_as_it_is(trainer, monkeypatch):
    class TemplateError(Exception):
        pass

    def suffix(*args):
        raise TemplateError

    monkeypatch.setattr(type(trainer), "_get_tool_suffix_ids", suffix)
    with pytest.raises(TemplateError):
        play(trainer, Turns(trainer.processing_class), *prompts_of(trainer, 12))


def test_a_turn_that_nobody_here_has_cancelled_is_an_error(trainer):
    """Otherwise the rollout would wait for it for ever."""
    turns = Turns(trainer.processing_class)

    def start(conversation, turn, prompt, most):
        future = Turns.start(turns, conversation, turn, prompt, most)
        if conversation == 3:
            future = Future()
            future.cancel()
        return future

    cancelling = type("", (), {"start": staticmethod(start), "tend": staticmethod(turns.tend)})
    with pytest.raises(CancelledError):
        play(trainer, cancelling, *prompts_of(trainer, 3))
    threads_have_ended()


def test_an_interruption_ends_all(trainer):
    turns = Turns(trainer.processing_class, lambda conversation, turn: 0.5)

    def tend():
        raise KeyboardInterrupt

    turns.tend = tend
    with pytest.raises(KeyboardInterrupt):
        play(trainer, turns, *prompts_of(trainer, 6))
    threads_have_ended()


def test_the_kept_are_chosen_by_what_the_model_decoded(trainer):
    """Over random candidates: the shortest and the longest of all, tool answers not counted."""
    rng = random.Random(0)

    class Random(Turns):
        def answer(self, prompt):
            word = rng.choice([*CALLS[:2], "x", "x"])
            ids = self.tokenizer.convert_tokens_to_ids([*["x"] * rng.randint(1, 9), word, "<eos>"])
            return ids, [-rng.random() for _ in ids]

    messages, batch = prompts_of(trainer, 4)
    policies = SchedulePolicies(DualEnd(M, 3 * M, num_longest=1))
    run, result = play(trainer, Random(trainer.processing_class), messages, batch, 2 * M, policies)
    for group in result.groups:
        lengths = {c.index: sum(run.played[c.candidate_id].outcome[0][0]) for c in group.candidates}
        assert all(lengths[c.index] == c.length for c in group.candidates)
        ordered = sorted(lengths.values())
        kept = sorted(lengths[row.index] for row in group.rows)
        assert kept == ordered[: M - 1] + ordered[-1:]
