"""
Checks that reward functions can be called, and that they return a number or `None` for each row. TRL's error does not
name the function, and comes after the first rollout.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import update_wrapper
from inspect import signature
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from trl import rewards as trl_rewards

from ..errors import ConfigurationError
from ..trl_compat import get_callable_name, is_async_callable, replaced


logger = get_logger(__name__)

SILENT_BATCHES = 3  # more than one, because a function for some prompts only may score no row of a batch

# TRL's arguments beside the data set's columns, and one for some trainings.
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
MAYBE_GIVEN = ("environments",)


def check_functions(functions: Any, columns: Sequence[str] | None) -> None:
    """
    Raises for reward functions that TRL can't call with the data set's `columns`, before the model is loaded. Names of
    reward models and modules are left to TRL, and unknown columns are not checked.
    """
    if functions is None:
        return
    for function in functions if isinstance(functions, list) else [functions]:
        if isinstance(function, str) and function in dir(trl_rewards):
            raise ConfigurationError(
                f"`reward_funcs` ({function!r}) must be the function itself: `from trl.rewards import {function}`. A "
                "string is the name of a reward model."
            )
        if isinstance(function, str | nn.Module):
            continue
        if not callable(function):
            raise ConfigurationError(
                f"`reward_funcs` ({function!r:.60}) must be a function, or the name of a reward model, or a list of "
                "them. Correct it."
            )
        _check_parameters(function, columns)


def _check_parameters(function: Any, columns: Sequence[str] | None) -> None:
    name = get_callable_name(function)
    if isinstance(function, type) and not issubclass(function, Iterable):
        raise ConfigurationError(
            f"The reward function '{name}' is a class, and must be an instance of it, or a function. Use `{name}(…)`."
        )
    try:
        # A decorator shows the signature of what it wraps, and may take other arguments itself.
        called = signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # of a builtin
        return
    if hasattr(function, "__signature__"):  # which may show other arguments too
        return
    passed = [*GIVEN, *(column for column in columns or () if column not in (*GIVEN, "prompt", "completion"))]
    passed += [given for given in MAYBE_GIVEN if given in called.parameters]
    try:
        (called.bind_partial if columns is None else called.bind)(**dict.fromkeys(passed))
    except TypeError as error:
        raise ConfigurationError(
            f"The reward function '{name}' can't be called as TRL calls it: {error}. TRL passes {', '.join(passed)} "
            "by name: the last are the data set's columns. Correct its parameters, and add `**kwargs` to them."
        ) from None


def check_rewards(name: str, rewards: Iterable[Any]) -> list[float | None]:
    """Returns a function's rewards as a list. Raises for values that are not numbers, including numbers as text."""
    if not isinstance(rewards, Iterable) or isinstance(rewards, str | Mapping | Set):
        raise _no_rewards(name, rewards)
    rewards = list(rewards)
    for reward in rewards:
        try:
            if isinstance(reward, str | bytes):
                raise TypeError
            is_infinite = math.isinf(0.0 if reward is None else reward)
        except (TypeError, ValueError) as error:
            raise _no_rewards(name, reward) from error
        if is_infinite:
            raise ConfigurationError(
                f"The reward function '{name}' returned {float(reward)}, with which its group's advantages, and then "
                "the model's weights, would be NaN. Return a finite number, or `None` for a row without a reward."
            )
    return rewards


def _no_rewards(name: str, value: Any) -> ConfigurationError:
    return ConfigurationError(
        f"The reward function '{name}' returned {value!r:.60} ({type(value).__name__}), and must return a list with "
        "one number or `None` for each completion. Correct its return value."
    )


@contextmanager
def checked_rewards(trainer: Any) -> Iterator[None]:
    """Inside this context, TRL's reward functions check their rewards. Reward models are unchanged."""
    named = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    functions = [function if isinstance(function, nn.Module) else _checked(function, name) for function, name in named]
    with replaced(trainer, "reward_funcs", functions):
        yield


def _checked(function: Any, name: str) -> Any:
    if is_async_callable(function):  # must stay async, because TRL checks it

        async def call_async(*args: Any, **kwargs: Any) -> list[float | None]:
            return check_rewards(name, await function(*args, **kwargs))

        return update_wrapper(call_async, function)

    def call(*args: Any, **kwargs: Any) -> list[float | None]:
        return check_rewards(name, function(*args, **kwargs))

    return update_wrapper(call, function)  # a subclass may call them in its own way, or by name


class RewardWatch:
    """Finds reward functions that have not scored any row of the run."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.silent: list[str] = []

    def observe(self, names: Sequence[str], rewards: torch.Tensor) -> None:
        """Adds the rewards of a batch, of shape `(N·M, F)`. Warns once about functions without rewards."""
        unscored = rewards.isnan().all(dim=0).tolist()  # (F,)
        candidates = [name for name, is_unscored in zip(names, unscored, strict=True) if is_unscored]
        self.silent = [name for name in candidates if not self.num_batches or name in self.silent]
        self.num_batches += 1
        if self.silent and self.num_batches == SILENT_BATCHES:
            logger.warning(f"{self.summary.strip()} Rows without any reward do not contribute to training.")

    @property
    def summary(self) -> str:
        """Sentence for the run's last line, empty if all functions have scored rows."""
        names = ", ".join(map(repr, self.silent))
        if not names:
            return ""
        return f" Reward functions that returned NaN or None for every row of {self.num_batches} batches: {names}."
