"""Tests that errors name reward functions with invalid results, wherever they are called."""

import math
from functools import partial

import pytest
import torch

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
        (takes_completions, None, r"'takes_completions' must take the argument `prompts`, .* Add `\*\*kwargs`"),
        (needs_prompt, ["prompt"], r"'needs_prompt' needs the argument `prompt`, .* passes: prompts, completions"),
        (needs_answer, ["prompt", "solution"], r"'needs_answer' needs the argument `answer`, .* solution\."),
    ],
)
def test_functions_that_trl_can_not_call(functions, columns, words):
    with pytest.raises(ConfigurationError, match=words):
        check_functions(functions, columns)


def test_functions_that_trl_can_call():
    check_functions(None, ["prompt"])
    check_functions([needs_answer, partial(needs_prompt, prompt="A"), max, "org/model"], ["prompt", "answer"])
    check_functions([needs_answer, needs_prompt], None)  # the columns of a stream may not be known


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
