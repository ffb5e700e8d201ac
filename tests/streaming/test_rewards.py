"""Rewards computed while groups still decode equal TRL's, and no function delays others."""

import asyncio
import copy
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
from trl import GRPOTrainer

from tests.builders import make_args, make_trainer
from tests.waits import wait_for
from trl_darts.engines.batch import PromptBatch
from trl_darts.scheduling import Candidate, GroupPlan
from trl_darts.scheduling.ledger import Ledger
from trl_darts.streaming.reward_stream import FinalRows, RewardStream
from trl_darts.streaming.streams import Streams


def value_of(completion):
    text = completion if isinstance(completion, str) else completion[0]["content"]
    return float(sum(map(ord, text)) % 17)


def length(completions, **kwargs):
    return [value_of(completion) + len(completion) for completion in completions]


def of_columns(prompts, completions, target, trainer_state, log_extra, log_metric, **kwargs):
    """Uses all arguments that TRL passes."""
    assert set(kwargs) == {"completion_ids", "note"}
    log_extra("target", target)
    for completion, each in zip(completions, target, strict=True):
        log_metric("target", each + value_of(completion))
    log_extra("again", [str(prompt) for prompt in prompts])
    log_extra("again", completions)
    return [each + trainer_state.global_step if each % 3 else None for each in target]


async def later(completions, target, log_extra, log_metric, **kwargs):
    await asyncio.sleep(0.01 * (target[0] % 2))
    log_extra("later", target)
    log_metric("later", float(sum(target)))
    return [value_of(completion) for completion in completions]


class Judge:
    def __call__(self, completions, **kwargs):
        return [-value_of(completion) for completion in completions]


IDS = [[0, 1], [2], [3, 4, 5], [6]]


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def batch_decode(self, completion_ids, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(chr(ord("a") + token) for token in ids) for ids in completion_ids]


def stub_trainer(*functions):
    return SimpleNamespace(
        reward_funcs=list(functions),
        reward_func_names=[getattr(function, "__name__", type(function).__name__) for function in functions],
        state=SimpleNamespace(global_step=3),
        processing_class=Letters(),
        tools=None,
    )


@contextmanager
def streaming(*functions, timeout_s=20.0, trainer=None, inputs=None):
    """Starts a stream with a batch."""
    stream = RewardStream(trainer or stub_trainer(*functions), timeout_s)
    stream.begin((inputs or [{"prompt": f"p{row}", "target": row} for row in range(len(IDS))]).__getitem__)
    try:
        yield stream
    finally:
        stream.close()


def submit(stream, rows, completion_ids):
    stream.submit(FinalRows(rows, completion_ids))


def serve(stream, completion_ids):
    """Calls the functions as `_calculate_rewards` does. Returns rewards by function, columns and metrics."""
    columns, metrics = {}, []
    arguments = {
        "prompts": [f"p{row}" for row in range(len(completion_ids))],
        "completions": Letters().batch_decode(completion_ids, True),
        "completion_ids": completion_ids,
        "target": list(range(len(completion_ids))),
        "trainer_state": stream.trainer.state,
        "log_extra": lambda column, values: columns.setdefault(column, []).extend(values),
        "log_metric": lambda name, value: metrics.append((name, value)),
    }

    with stream.serving():
        rewards = [function(**arguments) for function in stream.trainer.reward_funcs]
    return rewards, columns, metrics


# With TRL's own `_calculate_rewards`


@pytest.fixture(scope="module")
def trl_trainer(model_dir, tmp_path_factory):
    functions = [length, of_columns, later, Judge(), later]
    return make_trainer(
        model_dir, make_args(tmp_path_factory.mktemp("rewards")), cls=GRPOTrainer, reward_funcs=functions
    )


def batch_of(trainer, conversational):
    """Returns inputs, prompts, completions and their tokens, as TRL has them after decoding."""
    prompts = [f"{row // 4}A" for row in range(16)]
    if conversational:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = [{"prompt": prompt, "target": row, "note": "x"} for row, prompt in enumerate(prompts)]
    completion_ids = [[3 + (row * 7 + index) % 90 for index in range(1 + row % 5)] for row in range(16)]
    texts = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    completions = [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts
    return inputs, prompts, completions, completion_ids


def scored(trainer, batch):
    """Returns rewards and logs."""
    rewards = trainer._calculate_rewards(*batch)
    logged = dict(trainer._pending_extra_logs), dict(trainer._pending_metrics)
    trainer._pending_extra_logs.clear()
    trainer._pending_metrics.clear()
    return rewards.nan_to_num(nan=-99).tolist(), *logged


@pytest.mark.parametrize("conversational", [False, True])
@pytest.mark.parametrize("groups", [(2, 0, 3, 1), (1, 3), ()], ids=["all", "some", "none"])
def test_streamed_rewards_are_those_of_one_call(trl_trainer, conversational, groups):
    batch = batch_of(trl_trainer, conversational)
    functions = trl_trainer.reward_funcs
    rewards, columns, metrics = scored(trl_trainer, batch)
    assert -99 in [row[1] for row in rewards]
    names = ["length", "of_columns", "later", "Judge", "later"]
    with streaming(trainer=trl_trainer, inputs=batch[0]) as stream:
        for group in groups:
            rows = list(range(4 * group, 4 * group + 4))
            submit(stream, rows[::-1], [batch[3][row] for row in rows[::-1]])
        with stream.serving():
            assert [function.__name__ for function in trl_trainer.reward_funcs] == names
            streamed = scored(trl_trainer, batch)
        assert trl_trainer.reward_funcs is functions
    assert streamed[0] == rewards
    assert streamed[1] == columns
    assert sorted(streamed[2]["target"]) == sorted(metrics["target"])
    if len(groups) != 2:  # else the rows of the last call lie among the others'
        assert streamed[2]["target"] == metrics["target"]
    assert sum(streamed[2]["later"]) == sum(metrics["later"])  # one value for each call


def test_completions_are_parsed_where_the_tokenizer_has_a_template(trl_trainer, monkeypatch):
    seen = []

    def sees(completions, **kwargs):
        seen.extend(completions)
        return [0.0] * len(completions)

    tokenizer = trl_trainer.processing_class
    fields = {
        "reasoning_content": {"open": "<", "close_pattern": ">", "content": "text"},
        "content": {"close_pattern": "@", "content": "text"},
    }
    template = {"defaults": {"role": "assistant"}, "start_anchor": "!", "fields": fields}
    monkeypatch.setattr(tokenizer, "response_template", template, raising=False)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0]['content'] }}!<")  # what `prefix` is for
    trainer = copy.copy(trl_trainer)
    trainer.reward_funcs, trainer.reward_func_names = [sees], ["sees"]
    with streaming(trainer=trainer, inputs=[{"prompt": [{"role": "user", "content": "0A"}]}]) as stream:
        completion_ids = [tokenizer("why>yes@", add_special_tokens=False)["input_ids"]]
        submit(stream, [0], completion_ids)
        with stream.serving():
            trainer.reward_funcs[0](completion_ids=completion_ids, log_extra=None, log_metric=None)
    assert seen == [[{"role": "assistant", "reasoning_content": "why", "content": "yes"}]]


# Which rows are computed when


def test_groups_are_submitted_while_others_are_added():
    ledger, seen = Ledger(), []

    class Group:
        """The engine's thread adds the next group while this one is read."""

        def __init__(self, group_id):
            self.plan, self.candidates = GroupPlan(group_id, 1), [Candidate(0, group_id, 0, tokens=[1, 2])]

        @property
        def selected(self):
            ledger.groups.setdefault(self.plan.group_id + 1, Group(self.plan.group_id + 1))
            return [0]

    def sees(target, **kwargs):
        seen.extend(target)
        return [0.0] * len(target)

    ledger.groups[0] = Group(0)
    with streaming(sees) as stream:
        step = Streams(rewards=stream).watch(PromptBatch.alone([[1]] * 4, 1), lambda ledger: None)
        for _ in range(5):
            step(ledger)
        serve(stream, [[1, 2]] * 4)
    assert seen == [0, 1, 2, 3]  # each once


def test_rows_that_were_not_submitted_or_have_changed_are_computed_at_the_end():
    seen = []

    def sees(completions, target, **kwargs):
        seen.append((completions, target))
        return length(completions)

    with streaming(sees) as stream:
        submit(stream, [2, 0], [IDS[2], IDS[0]])
        submit(stream, [3], [[9, 9]])
        [rewards], _, _ = serve(stream, IDS)
        assert seen == [(["ab", "def"], [0, 2]), (["jj"], [3]), (["c", "g"], [1, 3])]
        assert rewards == length(Letters().batch_decode(IDS, True))
        serve(stream, IDS)  # results are served once: TRL may ask for another batch
        assert seen[3:] == [(["ab", "c", "def", "g"], [0, 1, 2, 3])]


def test_a_new_batch_forgets_the_old_one(released):
    seen = []

    def waits(target, **kwargs):
        seen.append(target)
        if seen == [[0]]:
            released.wait(20)
        return [float(each) for each in target]

    with streaming(waits) as stream:
        submit(stream, [0], IDS[:1])
        submit(stream, [1], IDS[1:2])
        while not seen:
            time.sleep(0.01)
        stream.begin([{"prompt": "q", "target": 10 + row} for row in range(4)].__getitem__)
        submit(stream, [0], [[5]])
        started = time.monotonic()
        assert serve(stream, [[5], *IDS[1:]])[0] == [[10, 1, 2, 3]]
        assert seen == [[0], [10], [1, 2, 3]]
        assert time.monotonic() - started < 10


def test_functions_that_are_not_async_follow_each_other_while_candidates_decode():
    busy, order, threads = threading.Lock(), [], set()

    def named(name):
        def function(target, **kwargs):
            assert busy.acquire(blocking=False)
            threads.add(threading.current_thread())
            time.sleep(0.02)
            busy.release()
            order.append((name, target[0]))
            return [0.0] * len(target)

        return function

    with streaming(named("f"), named("g")) as stream:
        for row in (3, 1, 0, 2):
            submit(stream, [row], [IDS[row]])
        while len(order) < 8:
            time.sleep(0.01)
        time.sleep(0.1)
        serve(stream, IDS)
        metrics = stream.metrics()
    assert order == [(name, row) for row in (3, 1, 0, 2) for name in "fg"]
    assert len(threads) == 1
    assert metrics["darts/stream/reward_hidden_seconds"] >= 8 * 0.02 - 0.01
    assert metrics["darts/stream/reward_exposed_seconds"] < 0.1
    assert metrics["darts/stream/reward_timeouts"] == 0


# Deadlines


@pytest.fixture
def released():
    """Releases hanging functions at the end."""
    event = threading.Event()
    yield event
    event.set()


def hangs(released):
    """Continues in its thread and catches all errors."""
    while not released.is_set():
        with suppress(Exception):
            time.sleep(0.001)


async def refuses(released):
    """Ignores its cancellation."""
    while not released.is_set():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.1)


async def blocks(released):
    """Blocks its event loop."""
    released.wait(20)


def make_late(linger, released):
    """Returns a reward function that is late for the second row."""

    def score(target, log_extra, **kwargs):
        log_extra("target", target)
        if target[0] == 1 and linger is hangs:
            hangs(released)
        return [1.0] * len(target)

    async def score_async(target, log_extra, **kwargs):
        if target[0] == 1:
            await linger(released)
        return score(target, log_extra)

    return score if linger is hangs else score_async


@pytest.mark.parametrize(("linger", "early"), [(hangs, True), (hangs, False), (refuses, False), (blocks, True)])
def test_a_late_function_gives_no_reward_and_holds_nobody_up(linger, early, released, caplog):
    function = make_late(linger, released)
    with streaming(function, length, timeout_s=0.3) as stream:
        for rows in ([0], [1, 2], [3]) if early else ([0], [3]):
            submit(stream, rows, [IDS[row] for row in rows])
        started = time.monotonic()
        [rewards, others], columns, _ = serve(stream, IDS)
        assert time.monotonic() - started < 10
        assert rewards == [1.0, None, None, 1.0]
        assert columns == {"target": [0, None, None, 3]}
        assert None not in others
        assert stream.metrics()["darts/stream/reward_timeouts"] == 1
        [message] = [text for name, _, text in caplog.record_tuples if name.startswith("trl_darts")]
        for part in (f"'{function.__name__}'", "2 rows", "0.3 s", "`stream_reward_timeout_s`", "subprocess"):
            assert part in message
        stream.begin([{"prompt": "p", "target": 5}].__getitem__)
        submit(stream, [0], IDS[:1])
        assert serve(stream, IDS[:1])[0][0] == [1.0]  # the next batch is scored as ever


def test_threads_end_with_the_stream(released):
    others = set(threading.enumerate())  # of trainers in other tests
    with streaming(make_late(hangs, released), later, timeout_s=0.2) as stream:
        submit(stream, [1], IDS[1:2])
        serve(stream, IDS)
    released.set()
    wait_for(lambda: not any(t.name.startswith("trl_darts-reward") for t in set(threading.enumerate()) - others))


# Errors


def fails(completions, **kwargs):
    raise ZeroDivisionError("of the reward")


async def fails_async(completions, **kwargs):
    raise ZeroDivisionError("of the reward")


def too_few(completions, **kwargs):
    return [1.0]


def logs_one(completions, log_extra, **kwargs):
    log_extra("mean", [1.0])
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (fails, ZeroDivisionError, "of the reward"),
        (fails_async, ZeroDivisionError, "of the reward"),
        (too_few, ValueError, "'too_few' returned 1 rewards, but 3 were expected"),
        (logs_one, ValueError, "'logs_one' logged 1 values of `mean` for 3 completions"),
    ],
)
def test_an_error_of_a_function_is_raised_where_trl_asks(function, error, words):
    with streaming(length, function) as stream:
        submit(stream, [1, 2, 3], IDS[1:])
        with pytest.raises(error, match=words) as raised:
            serve(stream, IDS)
        assert function.__name__ in [entry.name for entry in raised.traceback] + words.split("'")
        assert stream.trainer.reward_funcs == [length, function]
