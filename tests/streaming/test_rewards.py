"""Rewards that are computed while groups still decode: the same as TRL's in one go; no function holds others up."""

import asyncio
import re
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest


# Reward functions are at the top level for the worker processes, which import this module: nothing heavy up here.

CATASTROPHE = "a" * 40 + "b"


def value_of(completion):
    text = completion if isinstance(completion, str) else completion[0]["content"]
    return float(sum(map(ord, text)) % 17)


def length(completions, completion_ids, **kwargs):
    return [value_of(completion) + len(ids) for completion, ids in zip(completions, completion_ids, strict=True)]


def of_columns(prompts, completions, target, trainer_state, log_extra, log_metric, **kwargs):
    """Uses all that TRL passes."""
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


def hangs_in_regex(completions, **kwargs):
    if "b" in completions[0]:
        re.match(r"(a+)+$", CATASTROPHE)
    return [1.0] * len(completions)


def logs_and_counts(completions, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("length", [len(completion) for completion in completions])
    log_metric("step", float(trainer_state.global_step))
    return [float(len(completion)) for completion in completions]


def fails(completions, **kwargs):
    raise ZeroDivisionError("of the reward")


class Unreadable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def fails_unreadably(completions, **kwargs):
    raise Unreadable("not", "readable")


def ends_process(completions, **kwargs):
    import os

    os._exit(7)


class Letters:
    """A tokenizer: token i is the i-th letter."""

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
def streaming(*functions, timeout_s=20.0, num_processes=0, num_rows=4, begin=True):
    """A stream with a batch of its own."""
    from trl_darts.streaming.rewards import RewardStream

    stream = RewardStream(stub_trainer(*functions), timeout_s, num_processes)
    if begin:
        stream.begin([{"prompt": f"p{row}", "target": row} for row in range(num_rows)])
    try:
        yield stream
    finally:
        stream.close()


def serve(stream, completion_ids):
    """Calls what `_calculate_rewards` would, in its way. Returns rewards by function, columns and metrics."""
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

    async def call_async(functions):
        return await asyncio.gather(*(function(**arguments) for function in functions))

    with stream.serving():
        functions = stream.trainer.reward_funcs
        rewards = {
            place: function(**arguments)
            for place, function in enumerate(functions)
            if not asyncio.iscoroutinefunction(function)
        }
        coroutines = {place: f for place, f in enumerate(functions) if asyncio.iscoroutinefunction(f)}
        rewards |= dict(zip(coroutines, asyncio.run(call_async(coroutines.values())), strict=True))
    return [rewards[place] for place in range(len(functions))], columns, metrics


IDS = [[0, 1], [2], [3, 4, 5], [6]]


# With TRL's own `_calculate_rewards`


@pytest.fixture(scope="module")
def trl_trainer(model_dir, tmp_path_factory):
    from trl import GRPOTrainer

    from tests.builders import make_args, make_trainer

    functions = [length, of_columns, later, Judge(), later]
    return make_trainer(
        model_dir, make_args(tmp_path_factory.mktemp("rewards")), cls=GRPOTrainer, reward_funcs=functions
    )


def batch_of(trainer, conversational):
    """Inputs, prompts, completions and their tokens, as TRL has them after decoding."""
    prompts = [f"{row // 4}A" for row in range(16)]
    if conversational:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = [{"prompt": prompt, "target": row, "note": "x"} for row, prompt in enumerate(prompts)]
    completion_ids = [[3 + (row * 7 + index) % 90 for index in range(1 + row % 5)] for row in range(16)]
    texts = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    completions = [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts
    return inputs, prompts, completions, completion_ids


def scored(trainer, batch):
    """Rewards, and what was logged."""
    rewards = trainer._calculate_rewards(*batch)
    logged = dict(trainer._pending_extra_logs), dict(trainer._pending_metrics)
    trainer._pending_extra_logs.clear()
    trainer._pending_metrics.clear()
    return rewards.nan_to_num(nan=-99).tolist(), *logged


@pytest.mark.parametrize("conversational", [False, True])
@pytest.mark.parametrize("groups", [(2, 0, 3, 1), (1, 3), ()], ids=["all", "some", "none"])
def test_streamed_rewards_are_those_of_one_call(trl_trainer, conversational, groups):
    from trl_darts.streaming.rewards import RewardStream

    batch = batch_of(trl_trainer, conversational)
    functions = trl_trainer.reward_funcs
    rewards, columns, metrics = scored(trl_trainer, batch)
    assert -99 in [row[1] for row in rewards]
    stream = RewardStream(trl_trainer, timeout_s=20.0)
    try:
        stream.begin(batch[0])
        for group in groups:
            rows = list(range(4 * group, 4 * group + 4))
            stream.submit(rows[::-1], [batch[3][row] for row in rows[::-1]])
        with stream.serving():
            assert [getattr(f, "__name__", None) for f in trl_trainer.reward_funcs] == [
                "length",
                "of_columns",
                "later",
                "Judge",
                "later",
            ]
            streamed = scored(trl_trainer, batch)
        assert trl_trainer.reward_funcs is functions
    finally:
        stream.close()
    assert streamed[0] == rewards
    assert streamed[1] == columns
    assert sorted(streamed[2]["target"]) == sorted(metrics["target"])
    if len(groups) != 2:  # else the rows of the last call lie among the others'
        assert streamed[2]["target"] == metrics["target"]
    assert sum(streamed[2]["later"]) == sum(metrics["later"])  # one value for each call


def test_reward_models_are_left_to_trl():
    import torch

    model = torch.nn.Linear(1, 1)
    with streaming(model, length) as stream:
        stream.submit([0, 1], IDS[:2])
        with stream.serving():
            assert stream.trainer.reward_funcs[0] is model


def test_prompts_are_given_with_their_images_as_trl_gives_them():
    from PIL import Image
    from trl.data_utils import prepare_multimodal_messages

    seen = []

    def sees(prompts, completions, image, **kwargs):
        seen.append((prompts, completions, image))
        return [0.0] * len(prompts)

    image = Image.new("RGB", (2, 2))
    prompt = [{"role": "user", "content": "what"}]
    with streaming(sees, begin=False) as stream:
        stream.begin([{"prompt": prompt, "image": image}])
        stream.submit([0], [[1]])
        serve(stream, [[1]])
    expected = prepare_multimodal_messages(prompt, images=[image])
    assert seen == [([expected], [[{"role": "assistant", "content": "b"}]], [image])]


def test_completions_are_parsed_where_the_tokenizer_has_a_template(trl_trainer, monkeypatch):
    from trl_darts.streaming.rewards import RewardStream

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
    trainer = SimpleNamespace(**{**vars(trl_trainer), "reward_funcs": [sees], "reward_func_names": ["sees"]})
    stream = RewardStream(trainer, timeout_s=20.0)
    try:
        stream.begin([{"prompt": [{"role": "user", "content": "0A"}]}])
        completion_ids = [tokenizer("why>yes@", add_special_tokens=False)["input_ids"]]
        stream.submit([0], completion_ids)
        with stream.serving():
            trainer.reward_funcs[0](completion_ids=completion_ids, log_extra=None, log_metric=None)
    finally:
        stream.close()
    assert seen == [[{"role": "assistant", "reasoning_content": "why", "content": "yes"}]]


# Which rows are computed when


def test_rows_that_were_not_submitted_or_have_changed_are_computed_at_the_end():
    seen = []

    def sees(completions, completion_ids, target, **kwargs):
        seen.append((completions, target))
        return length(completions, completion_ids)

    with streaming(sees) as stream:
        stream.submit([2, 0], [IDS[2], IDS[0]])
        stream.submit([3], [[9, 9]])
        while len(seen) < 2:
            time.sleep(0.01)
        [rewards], _, _ = serve(stream, IDS)
        assert seen == [(["ab", "def"], [0, 2]), (["jj"], [3]), (["c", "g"], [1, 3])]
        assert rewards == length(Letters().batch_decode(IDS, True), IDS)
        serve(stream, IDS)  # results are served once: TRL may ask for another batch
        assert seen[3:] == [(["ab", "c", "def", "g"], [0, 1, 2, 3])]


def test_new_batch_forgets_the_old_one_and_stops_its_calls():
    release = threading.Event()
    seen = []

    def waits(target, **kwargs):
        seen.append(target)
        if seen == [[0]]:
            release.wait(20)
        return [float(each) for each in target]

    with streaming(waits) as stream:
        stream.submit([0], IDS[:1])
        stream.submit([1], IDS[1:2])
        while not seen:
            time.sleep(0.01)
        stream.begin([{"prompt": "q", "target": 10 + row} for row in range(4)])
        stream.submit([0], [[5]])
        started = time.monotonic()
        [rewards], _, _ = serve(stream, [[5], *IDS[1:]])
        assert time.monotonic() - started < 10
        assert rewards == [10, 1, 2, 3]
        assert seen == [[0], [10], [1, 2, 3]]
        release.set()


def test_calls_of_one_function_follow_each_other_and_functions_run_beside_each_other():
    running, most, order = set(), [], []
    lock = threading.Lock()

    def named(name):
        def function(target, **kwargs):
            with lock:
                assert name not in running
                running.add(name)
                most.append(len(running))
                order.append((name, target[0]))
            time.sleep(0.05)
            with lock:
                running.remove(name)
            return [0.0] * len(target)

        function.__name__ = name
        return function

    with streaming(named("f"), named("g")) as stream:
        for row in (3, 1, 0, 2):
            stream.submit([row], [IDS[row]])
        serve(stream, IDS)
    assert max(most) == 2
    for name in "fg":
        assert [row for other, row in order if other == name] == [3, 1, 0, 2]


def test_time_before_serving_is_hidden():
    def slow(completions, **kwargs):
        time.sleep(0.05)
        return [0.0] * len(completions)

    async def slow_async(completions, **kwargs):
        await asyncio.sleep(0.05)
        return [0.0] * len(completions)

    with streaming(slow, slow_async) as stream:
        for row in range(4):
            stream.submit([row], [IDS[row]])
        time.sleep(0.6)
        serve(stream, IDS)
        metrics = stream.metrics()
    assert metrics["darts/stream/reward_hidden_seconds"] >= 8 * 0.05 - 0.01
    assert metrics["darts/stream/reward_exposed_seconds"] < 0.1
    assert metrics["darts/stream/reward_timeouts"] == 0


# Deadlines


def spins(completions, target, log_extra, **kwargs):
    log_extra("target", target)
    while target[0] == 1:
        with suppress(Exception):  # as around a parser
            pass
    return [1.0] * len(completions)


def sleeps(completions, target, log_extra, **kwargs):
    log_extra("target", target)
    time.sleep(5 if target[0] == 1 else 0)
    return [1.0] * len(completions)


async def waits_for_ever(completions, target, log_extra, **kwargs):
    log_extra("target", target)
    while target[0] == 1:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            if len(asyncio.all_tasks()) > 100:
                raise
            await asyncio.sleep(2)  # refuses to be cancelled at once
            raise
    return [1.0] * len(completions)


@pytest.mark.parametrize("function", [spins, sleeps, waits_for_ever])
def test_function_that_hangs_gives_no_reward_and_holds_nobody_up(function, caplog):
    with streaming(function, length, timeout_s=0.3, num_rows=6) as stream:
        ids = [*IDS, [7], [8]]
        for rows in ([0], [1, 2], [3], [4, 5]):
            stream.submit(rows, [ids[row] for row in rows])
        started = time.monotonic()
        [rewards, others], columns, _ = serve(stream, ids)
        assert time.monotonic() - started < 4
        assert rewards == [1.0, None, None, 1.0, 1.0, 1.0]
        assert columns == {"target": [0, None, None, 3, 4, 5]}
        assert None not in others
        assert stream.metrics()["darts/stream/reward_timeouts"] == 1
        [message] = [record.message for record in caplog.records if record.name.startswith("trl_darts")]
        for part in (f"'{function.__name__}'", "2 rows", "0.3 seconds", "`stream_reward_timeout_s`"):
            assert part in message


@pytest.mark.parametrize("function", [spins, sleeps, waits_for_ever])
def test_deadline_holds_for_calls_made_at_the_end(function):
    with streaming(function, timeout_s=0.3) as stream:
        stream.submit([0], IDS[:1])
        [rewards], columns, _ = serve(stream, IDS)
    assert rewards == [1.0, None, None, None]
    assert columns == {"target": [0, None, None, None]}


def test_thread_of_a_stopped_function_ends():
    with streaming(spins, timeout_s=0.2) as stream:
        stream.submit([1], IDS[1:2])
        serve(stream, IDS)
        stream.close()
        for _ in range(100):
            if not any("spins" in thread.name for thread in threading.enumerate()):
                break
            time.sleep(0.05)
        else:
            pytest.fail(str(threading.enumerate()))


def test_coroutine_that_blocks_its_loop_does_not_hang_the_training():
    async def blocks(completions, target, **kwargs):
        while target[0] == 1:
            pass
        return [1.0] * len(completions)

    with streaming(blocks, timeout_s=0.3) as stream:
        stream.submit([0], IDS[:1])
        stream.submit([1], IDS[1:2])
        [rewards], _, _ = serve(stream, IDS)
        assert rewards[:2] == [1.0, None]
        stream.begin([{"prompt": "p", "target": 5}])
        stream.submit([0], IDS[:1])
        [rewards], _, _ = serve(stream, IDS[:1])
        assert rewards == [1.0]


# Errors


async def fails_async(completions, **kwargs):
    raise ZeroDivisionError("of the reward")


@pytest.mark.parametrize("function", [fails, fails_async])
@pytest.mark.parametrize("early", [True, False])
def test_error_of_a_function_is_raised_where_trl_asks(function, early):
    with streaming(length, function) as stream:
        if early:
            stream.submit([1], IDS[1:2])
        with pytest.raises(ZeroDivisionError, match="of the reward") as raised:
            serve(stream, IDS)
        assert raised.traceback[-1].name == function.__name__
        assert stream.trainer.reward_funcs == [length, function]


async def too_few_async(completions, **kwargs):
    return [1.0]


def too_few(completions, **kwargs):
    return [1.0]


@pytest.mark.parametrize("function", [too_few, too_few_async])
def test_wrong_number_of_rewards_is_said_of_the_call(function):
    with streaming(function) as stream:
        stream.submit([1, 2, 3], IDS[1:])
        with pytest.raises(ValueError, match=rf"'{function.__name__}' returned 1 rewards, but 3 were expected"):
            serve(stream, IDS)


def test_columns_that_do_not_fit_the_rows_are_refused():
    def logs_one(completions, log_extra, **kwargs):
        log_extra("mean", [1.0])
        return [1.0] * len(completions)

    with streaming(logs_one) as stream:
        stream.submit([1, 2], IDS[1:3])
        with pytest.raises(ValueError, match="'logs_one' logged 1 values of `mean` for 2 completions"):
            serve(stream, IDS)


# Worker processes


def test_processes_give_the_same_and_kill_what_hangs_in_c():
    with streaming(hangs_in_regex, logs_and_counts, later, timeout_s=3, num_processes=2) as stream:
        with streaming(logs_and_counts) as threads:
            expected = serve(threads, IDS)
        stream.submit([0], IDS[:1])  # "ab"
        stream.submit([1, 2], IDS[1:3])
        started = time.monotonic()
        [hung, counted, _], columns, metrics = serve(stream, IDS)
        print(f"served after {time.monotonic() - started:.1f} s")
        assert hung == [None, 1.0, 1.0, 1.0]
        assert counted == expected[0][0]
        assert columns["length"] == expected[1]["length"]
        assert [pair for pair in metrics if pair[0] == "step"] == [("step", 3.0)] * 3
        assert stream.metrics()["darts/stream/reward_timeouts"] == 1
        stream.begin([{"prompt": "p", "target": 5}])
        stream.submit([0], [[2]])
        assert serve(stream, [[2]])[0][0] == [1.0]


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (fails, ZeroDivisionError, "of the reward"),
        (fails_unreadably, RuntimeError, "Unreadable: not readable"),
        (too_few, ValueError, "'too_few' returned 1 rewards, but 2 were expected"),
        (ends_process, RuntimeError, r"'ends_process' ended its worker process \(exit code 7\)"),
    ],
)
def test_errors_come_back_from_processes(function, error, words):
    with streaming(function, num_processes=1) as stream:
        stream.submit([0, 1], IDS[:2])
        with pytest.raises(error, match=words) as raised:
            serve(stream, IDS)
        if function is fails:
            assert "in fails" in str(raised.value.__cause__)


def test_function_that_cannot_be_pickled_is_refused():
    from trl_darts.errors import ConfigurationError
    from trl_darts.streaming.rewards import RewardStream

    async def local_async(**kwargs):
        return []

    with streaming(local_async):
        pass
    local = lambda **kwargs: []  # noqa: E731
    with pytest.raises(ConfigurationError, match=r"`stream_reward_processes` \(2\).*picklable, and '<lambda>' is not"):
        RewardStream(stub_trainer(length, local, local_async), 20.0, num_processes=2)
