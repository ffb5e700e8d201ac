"""Tests that errors name reward functions with invalid results, wherever they are called."""

import functools
import inspect
import math
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from trl.trainer.utils import shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from tests.builders import length_reward, make_args, make_trainer
from trl_darts.errors import ConfigurationError
from trl_darts.streaming.reward_calls import RewardCall
from trl_darts.training import reward_checks as module
from trl_darts.training.reward_checks import RewardWatch, check_functions, check_rewards


@pytest.mark.parametrize(
    "returned", [[1, True, 0.5, None], (1.0, math.nan), torch.tensor([0.5, 1.0]), iter([0.5]), [torch.tensor(2)]]
)
def test_what_trl_takes(returned):
    assert isinstance(check_rewards("own", returned), list)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (["0.5"], r"'0\.5' \(str\)"),
        ([{}], r"{} \(dict\)"),
        ([[1.0]], r"\[1\.0\] \(list\)"),
        (0.5, r"0\.5 \(float\)"),
        ({0: 0.5}, r"{0: 0\.5} \(dict\)"),  # the rewards would be its keys
    ],
)
def test_what_is_no_reward(returned, named):
    words = rf"The reward function 'own' returned {named}, and must return a list with one number or `None` for each"
    with pytest.raises(ConfigurationError, match=words):
        check_rewards("own", returned)
    call = RewardCall(lambda **arguments: returned, "own", [0], {})  # with streaming
    call.run()
    assert isinstance(call.future.result(), ConfigurationError)


def test_an_infinite_reward_is_named():
    with pytest.raises(ConfigurationError, match=r"The reward function 'own' returned -inf, with which"):
        check_rewards("own", [1.0, torch.tensor(-math.inf)])


def takes_completions(completions):
    return [0.0 for _ in completions]


def needs_prompt(completions, prompt, **kwargs):  # TRL passes `prompts`
    return [0.0 for _ in completions]


def needs_answer(completions, answer, trainer_state, log_metric, weight=1.0, *, completion_ids, **kwargs):
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("functions", "columns", "words"),
    [
        (5, None, r"`reward_funcs` \(5\) must be a function, or the name of a reward model"),
        ([needs_answer, None], ["answer"], r"`reward_funcs` \(None\) must be a function"),
        ("think_format_reward", None, r"\('think_format_reward'\) must be the function itself: `from trl.rewards imp"),
        (
            takes_completions,
            None,
            r"'takes_completions' can't be called .* keyword argument 'prompts'.* add `\*\*kwargs`",
        ),
        (
            needs_prompt,
            ["prompt"],
            r"'needs_prompt' can't .* missing a required argument: 'prompt'. TRL passes prompts,",
        ),
        (
            needs_answer,
            ["prompt", "solution"],
            r"'needs_answer' can't .* required argument: 'answer'. .*, solution by name",
        ),
    ],
)
def test_functions_that_trl_can_not_call(functions, columns, words):
    with pytest.raises(ConfigurationError, match=words):
        check_functions(functions, columns)


def test_functions_that_trl_can_call():
    check_functions(None, ["prompt"])
    check_functions([needs_answer, partial(needs_prompt, prompt="A"), max, "org/model"], ["prompt", "answer"])
    check_functions([needs_answer, needs_prompt], None)  # the columns of a stream may not be known


def timed(function):
    """The usual decorator: it shows the signature of the function, and takes whatever comes."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def by_completions(function):
    """Passes on what the function takes, and nothing else."""

    @functools.wraps(function)
    def call(prompts, completions, **kwargs):
        return function(completions)

    return call


def only_prompts(function):
    @functools.wraps(function)
    def call(prompts):
        return function(prompts)

    return call


class Judge:
    def __call__(self, completions, answer, **kwargs):
        return [0.0 for _ in completions]

    def score(self, completions, weight, **kwargs):
        return [weight for _ in completions]

    half = functools.partialmethod(score, weight=0.5)

    @timed
    def wrapped(self, completions, **kwargs):
        return [0.0 for _ in completions]

    @staticmethod
    def own(completions, **kwargs):
        return [0.0 for _ in completions]

    async def later(self, completions, **kwargs):
        return [0.0 for _ in completions]


class Decorator:
    """A decorator that is a class."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, completions, **kwargs):
        return [0.0 for _ in completions]


def renamed(function):
    """Some decorators set the signature that they show."""

    def call(**kwargs):
        return function(kwargs["completions"])

    call.__signature__ = inspect.signature(function)
    return call


def weighted(weight, completions, **kwargs):
    return [weight for _ in completions]


CALLABLE = {
    "wraps": timed(needs_answer),
    "wraps_another": by_completions(takes_completions),
    "decorator": Decorator(takes_completions),
    "shown": renamed(takes_completions),
    "partial": partial(needs_prompt, prompt="A"),
    "partial_of_partial": partial(partial(weighted, 0.5), other=1),
    "updated_partial": functools.update_wrapper(partial(weighted, 0.5), takes_completions),
    "lambda": lambda completions, **kwargs: [0.0 for _ in completions],
    "instance": Judge(),
    "method": Judge().wrapped,
    "static": Judge.own,
    "partialmethod": Judge().half,
    "async": Judge().later,
    "async_partial": partial(Judge().later, other=1),
    "all_by_name": lambda prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer: (
        [0.0] * 4
    ),
}


@pytest.fixture(scope="module")
def trainer(model_dir, tmp_path_factory):
    return make_trainer(model_dir, make_args(tmp_path_factory.mktemp("rewards")))


@pytest.mark.parametrize("name", CALLABLE)
def test_whatever_trl_can_call_is_called(trainer, name, monkeypatch):
    monkeypatch.setattr(trainer, "reward_funcs", [CALLABLE[name]])
    with start_event_loop(trainer):
        check_functions(CALLABLE[name], ["prompt", "answer"])
        inputs = [{"prompt": "A", "answer": "B"}] * 4
        rewards = trainer._score_rows(None, inputs, ["A"] * 4, ["B"] * 4, [[1]] * 4)
    assert rewards.tolist() in ([[0.0]] * 4, [[0.5]] * 4)


@contextmanager
def start_event_loop(trainer):
    """TRL starts one if it finds an async function while the trainer is built."""
    thread, trainer.async_loop, ready = start_event_loop_in_daemon("rewards")
    ready.wait()
    try:
        yield
    finally:
        shutdown_event_loop_in_daemon(thread, trainer.async_loop)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (only_prompts(needs_answer), r"'needs_answer' can't be called .* keyword argument 'completions'"),
        (timed(takes_completions), None),  # found when it is called
        (
            functools.update_wrapper(partial(needs_prompt), weighted),
            r"'needs_prompt' can't .* required argument: 'prompt'",
        ),
        (lambda completions, answer, /, **kwargs: [], r"'<lambda>' can't be called as TRL calls it: 'completions'"),
        (Judge, r"'Judge' is a class, and must be an instance of it, or a function. Use `Judge\(…\)`"),
        (Judge().score, r"'score' can't .* required argument: 'weight'"),
        (lambda prompts, completions, completion_ids, trainer_state, log_extra, log_metric: [], "argument 'answer'"),
        (len, r"'len' can't .* required argument: 'obj'"),
    ],
)
def test_what_trl_can_not_call_is_found_before(function, words):
    if words is None:
        check_functions(function, ["prompt", "answer"])
        return
    with pytest.raises(ConfigurationError, match=words):
        check_functions(function, ["prompt", "answer"])


def text_reward(completions, **kwargs):
    return ["1.0"] * len(completions)


async def async_text_reward(completions, **kwargs):
    return ["1.0"] * len(completions)


@pytest.mark.parametrize("reward", [text_reward, async_text_reward])
def test_a_training_names_the_function(model_dir, tmp_path, reward):
    trainer = make_trainer(model_dir, make_args(tmp_path, max_steps=1), reward_funcs=[length_reward, reward])
    with pytest.raises(ConfigurationError, match=rf"^The reward function '{reward.__name__}' returned '1\.0' \(str\)"):
        trainer.train()
    assert trainer.reward_funcs == [length_reward, reward]  # unchanged


def nan_reward(completions, **kwargs):
    return [math.nan] * len(completions)


def test_a_function_that_never_scores_a_row_is_named(model_dir, tmp_path, caplog, capsys):
    args = make_args(tmp_path, max_steps=module.SILENT_BATCHES)
    make_trainer(model_dir, args, reward_funcs=[length_reward, nan_reward]).train()
    words = "Reward functions that returned NaN or None for every row of 3 batches: 'nan_reward'."
    assert sum(words in message for message in caplog.messages) == 1
    assert capsys.readouterr().out.rstrip().endswith(words)


def test_a_function_that_scores_rows_now_and_then_is_not():
    watch = RewardWatch()
    none, some = torch.tensor([[math.nan], [math.nan]]), torch.tensor([[math.nan], [0.0]])
    for rewards in (none, some, none, none):
        watch.observe(["own"], rewards)
    assert watch.summary == ""
