"""What reward functions return: a number for each row, or `None`. TRL's error does not name a function."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from trl.trainer.utils import is_async_callable

from .engines.hf_generate import replaced
from .errors import ConfigurationError


logger = get_logger(__name__)

SILENT_BATCHES = 3  # a function that is for some prompts alone may score none in one of them


def check_rewards(name: str, rewards: Iterable[Any]) -> list[float | None]:
    """What a function returned, as a list. Refuses what is no number, also text that looks like one."""
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
        "one number for each completion, or `None` where it has none. Correct what it returns."
    )


@contextmanager
def checked_rewards(trainer: Any) -> Iterator[None]:
    """Inside, TRL is given functions whose rewards are checked; reward models stay as they are."""
    named = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    functions = [own if isinstance(own, nn.Module) else _checked(own, name) for own, name in named]
    with replaced(trainer, "reward_funcs", functions):
        yield


def _checked(function: Any, name: str) -> Any:
    if is_async_callable(function):  # TRL must see that it is

        async def call(**arguments: Any) -> list[float | None]:
            return check_rewards(name, await function(**arguments))

        return call
    return lambda **arguments: check_rewards(name, function(**arguments))


class RewardWatch:
    """Finds reward functions that have scored no row of a training yet."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.silent: list[str] = []

    def observe(self, names: Sequence[str], rewards: torch.Tensor) -> None:
        """Looks at the rewards of a batch, of shape `(N·M, F)`. Warns once."""
        unscored = rewards.isnan().all(dim=0).tolist()  # (F,)
        candidates = [name for name, is_unscored in zip(names, unscored, strict=True) if is_unscored]
        self.silent = [name for name in candidates if not self.num_batches or name in self.silent]
        self.num_batches += 1
        if self.silent and self.num_batches == SILENT_BATCHES:
            logger.warning(f"{self.summary.strip()} Rows without any reward teach nothing.")

    @property
    def summary(self) -> str:
        """A sentence for the training's last line; empty where all functions have scored rows."""
        names = ", ".join(map(repr, self.silent))
        if not names:
            return ""
        return f" Reward functions that returned NaN or None for every row of {self.num_batches} batches: {names}."
