"""
Environments of candidates. TRL resets an instance of its pool for each row; a spare candidate has one that no row has.

Invariant, one_owner (`tests/training/test_environments.py`): no two conversations act on an instance, not even one
that was given up and one of a later batch.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ..errors import ConfigurationError, EnvironmentLost


# Whoever loses more environments in a row is seen as the cause.
MAX_LOSSES = 3


class Instance:
    """
    An environment that one conversation acts on.

    Attributes:
        lost (`EnvironmentLost` or `None`):
            Why it can't go on.
        late (`Future` or `None`):
            The answer of a call that missed its deadline. The call goes on: threads can't be stopped.
    """

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.lost: EnvironmentLost | None = None
        self.late: Future[Any] | None = None

    def has(self, tool: Any) -> bool:
        """Whether a tool is a method of this environment."""
        return getattr(tool, "__self__", None) is self.environment

    @property
    def is_busy(self) -> bool:
        """Whether a call that nobody waits for still acts on it."""
        return self.late is not None and not self.late.done()

    @property
    def is_spent(self) -> bool:
        """Whether no other conversation may have it."""
        return self.is_busy or self.lost is not None


class Environments:
    """
    Instances for the candidates of this process's rows in a batch.

    Args:
        trainer (`DARTSGRPOTrainer`):
            The trainer, which has an environment for each row.
        examples (`Sequence[Mapping[str, Any]]`):
            Data of each row.
        messages (`Sequence`):
            The conversation that is each row's prompt, with what `reset` told.
    """

    def __init__(self, trainer: Any, examples: Sequence[Mapping[str, Any]], messages: Sequence[Any]) -> None:
        self._trainer = trainer
        self._examples = examples
        self._messages = messages
        self._num_taken = Counter(trainer._batch_environments)  # by name, the first ones of each pool
        self._lock = threading.Lock()

    def of_row(self, row: int) -> Any:
        """Returns the instance that TRL has reset for a row."""
        return self._trainer.environments[row]

    def take(self, row: int) -> Any:
        """Returns an instance that nobody has, for a spare candidate of a row."""
        name = self._trainer._batch_environments[row]
        pool = self._trainer._environment_pool[name]
        with self._lock:
            self._num_taken[name] += 1
            if self._num_taken[name] <= len(pool):
                return pool[self._num_taken[name] - 1]
        # All of the pool are taken. Others may make theirs meanwhile, because it may take long.
        try:
            instance = self._trainer.environment_factories[name]()
        except BaseException:
            with self._lock:
                self._num_taken[name] -= 1
            raise
        with self._lock:
            pool.append(instance)
        return instance

    def reset(self, row: int, instance: Any) -> None:
        """Resets an instance as TRL reset that of its row. Raises if it tells another prompt."""
        example = self._examples[row]
        observation = instance.reset(**reset_arguments(self._trainer, example))
        prompt = example.get("prompt", [{"role": "user", "content": ""}])
        if _observed(prompt[-1]["content"], observation) != self._messages[row][-1]["content"]:
            raise ConfigurationError(
                f"`reset` of {type(instance).__name__!r} told a spare candidate something else ({observation!r:.60}) "
                "than the rows of its prompt. Make what it tells depend on its arguments alone, or set "
                "`schedule='grpo'`."
            )

    def retire(self, row: int, instance: Any) -> None:
        """Takes an instance out of the pool for good: it is lost, or something that nobody waits for acts on it."""
        name = self._trainer._batch_environments[row]
        with self._lock:
            self._num_taken[name] -= retire(self._trainer, row, instance)


def reset_arguments(trainer: Any, example: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what TRL gives to `reset` of a row's data."""
    given = {key: value for key, value in example.items() if key != "environment"}
    return given if trainer._multi_environment else example


def retire(trainer: Any, row: int, instance: Any) -> bool:
    """Takes an instance out of TRL's pool. Returns whether it was in there."""
    pool = trainer._environment_pool[trainer._batch_environments[row]]
    left = [own for own in pool if own is not instance]
    is_gone = len(left) < len(pool)
    pool[:] = left
    return is_gone


def _observed(content: Any, observation: Any) -> Any:
    """Returns the content of a message with an observation, as TRL adds it."""
    if observation is None:
        return content
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return content + observation


def bound_to(tools: Mapping[str, Any], owner: Any, instance: Any) -> dict[str, Any]:
    """Returns tools with the methods of `owner` replaced by those of another instance."""
    return {
        name: tool.__func__.__get__(instance) if getattr(tool, "__self__", None) is owner else tool
        for name, tool in tools.items()
    }
