"""Reward functions by name: TRL's own, and any import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import trl.rewards
from trl.import_utils import is_math_verify_available
from trl.rewards.other_rewards import get_soft_overlong_punishment

from ..errors import ConfigurationError
from .arguments import OVERLONG, ScriptArguments


# Rewards of TRL that parse formulas.
MATH_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward")
# Those that read a completion as the messages of a conversation.
CHAT_REWARDS = (*MATH_REWARDS, "think_format_reward")
# A function, or the name of a reward model.
Reward = Callable[..., Any] | str


def load_rewards(arguments: ScriptArguments, max_completion_length: int) -> list[Reward]:
    """
    The rewards that a script's arguments name.

    Args:
        arguments ([`ScriptArguments`]):
            With `reward_model_name_or_path`, and `reward_funcs`: names of `trl.rewards`, or import paths.
        max_completion_length (`int`):
            Limit of completions, which `get_soft_overlong_punishment` is relative to.

    Returns:
        `list[Callable | str]`: The reward model's name if there is one, then functions in the order of theirs. It is
            the order of `reward_weights`, as in TRL's script.

    Raises:
        [`ConfigurationError`]: If there is no such reward, or what it needs is missing.
    """
    check_rewards(arguments, max_completion_length)
    names = arguments.reward_funcs or []
    for name in names:
        if name in MATH_REWARDS and not is_math_verify_available():
            raise ConfigurationError(
                f"`reward_funcs` ({name!r}) needs math-verify. Install it: pip install 'trl-darts[math]'"
            )
    functions = [_load(name, arguments, max_completion_length) for name in names]
    return [*reward_models(arguments), *functions]


def reward_models(arguments: ScriptArguments) -> list[str]:
    """Names of reward models: none, or one."""
    return [arguments.reward_model_name_or_path] if arguments.reward_model_name_or_path else []


def check_rewards(arguments: ScriptArguments, max_completion_length: int) -> None:
    """Refuses names that lead nowhere, without importing anything but TRL's rewards."""
    if not arguments.reward_funcs and not reward_models(arguments):
        raise ConfigurationError(
            "`reward_funcs` (empty) must name at least one reward: of `trl.rewards`, such as 'accuracy_reward', or an "
            "import path. Or set `reward_model_name_or_path`."
        )
    # Functions that make a reward need arguments, which a name can't have; those of one are fields of the script.
    known = [name for name in dir(trl.rewards) if name.endswith("_reward") and not name.startswith("get_")]
    known.append(OVERLONG)
    for name in arguments.reward_funcs or []:
        is_path = "." in name and all(part.isidentifier() for part in name.split("."))
        if not is_path and name not in known:
            raise ConfigurationError(
                f"`reward_funcs` ({name!r}) must be one of {', '.join(known)} of `trl.rewards`, or the import path of "
                "a function, such as 'my_package.rewards.my_reward'."
            )
    if (cache := arguments.soft_punish_cache) is not None and cache > max_completion_length:
        raise ConfigurationError(
            f"`soft_punish_cache` ({cache}) must be at most `max_completion_length` ({max_completion_length}): the "
            "reward falls within the last tokens before the limit. Lower it."
        )


def _load(name: str, arguments: ScriptArguments, max_completion_length: int) -> Reward:
    if name == OVERLONG:
        return get_soft_overlong_punishment(max_completion_length, arguments.soft_punish_cache or 0)
    module, _, function = name.rpartition(".")
    try:
        reward: Reward = getattr(importlib.import_module(module or "trl.rewards"), function)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"`reward_funcs` ({name!r}) can't be imported: {error}. Correct the path, or install what it needs."
        ) from error
    return reward
