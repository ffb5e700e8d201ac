"""Checks that reward functions return a number or `None` for each row. TRL's error does not name the function."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn

from ..engines.in_process.hf_generate import replaced
from ..errors import ConfigurationError
from ..trl_compat import is_async_callable


logger = get_logger(__name__)

SILENT_BATCHES = 3  # more than one, because a function for some prompts only may score no row of a batch


def check_rewards(name: str, rewards: Iterable[Any]) -> list[float | None]:
    """Returns a function's rewards as a list. Raises for values that are not numbers, including numbers as text."""
    if not isinstance(rewards, Iterable) or isinstance(rewards, str):
        raise _no_rewards(name, rewards)
    rewards = list(rewards)
    for reward in rewards:
        try:
            if isinstance(reward, str | bytes):
                raise TypeError
            float(0.0 if reward is None else reward)
        except (TypeError, ValueError) as error:
            raise _no_rewards(name, reward) from error
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

        async def call(**arguments: Any) -> list[float | None]:
            return check_rewards(name, await function(**arguments))

        return call
    return lambda **arguments: check_rewards(name, function(**arguments))


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
