"""
Resets of a batch's environments. TRL resets one after the other, so that 64 containers that take two seconds each take
two minutes. Here all are reset at once before TRL asks for it, and its calls return what was told.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from ..errors import EnvironmentLost
from .environments import MAX_LOSSES, reset_arguments


logger = logging.getLogger(__name__)


def reset_together(trainer: Any, examples: Sequence[Mapping[str, Any]]) -> ExitStack:
    """
    Resets the environments of a batch, at most `max_concurrent_tools` at once. Inside the returned context, the next
    `reset` of each returns what it told. One that raises [`EnvironmentLost`] is replaced, and the third one's error is
    raised. Only where conversations run each by itself, because elsewhere environments stay in the main thread.
    """
    told = ExitStack()
    factories: Any = trainer.environment_factories
    names = [example.get("environment") if trainer._multi_environment else None for example in examples]
    if not set(names) <= factories.keys():  # TRL says which name is unknown
        return told
    with ThreadPoolExecutor(trainer.args.max_concurrent_tools, thread_name_prefix="trl_darts-reset") as threads:
        counts: Counter[Any] = Counter()
        places = []
        for name in names:
            places.append(counts[name])  # in TRL's order
            counts[name] += 1
        for name, count in counts.items():
            pool, make = trainer._environment_pool[name], factories[name]
            pool.extend(threads.map(_made, [make] * (count - len(pool))))
        arguments = [reset_arguments(trainer, example) for example in examples]
        pools = [trainer._environment_pool[name] for name in names]
        makes = [factories[name] for name in names]
        found = list(threads.map(_reset, pools, places, makes, arguments))
    for own in filter(None, found):
        attributes = vars(own.environment)
        attributes["reset"] = own
        told.callback(attributes.pop, "reset", None)
    return told


class _Told:
    """Stands for the `reset` of an environment, once."""

    def __init__(self, environment: Any, arguments: Mapping[str, Any]) -> None:
        self.environment = environment
        self._arguments = arguments
        self._observation = environment.reset(**arguments)

    def __call__(self, **kwargs: Any) -> Any:
        del self.environment.reset  # a later call is another reset
        before = self._arguments
        if kwargs.keys() == before.keys() and all(kwargs[name] is before[name] for name in kwargs):
            return self._observation
        return self.environment.reset(**kwargs)  # a subclass has changed the row


def _reset(pool: list[Any], place: int, make: Callable[[], Any], arguments: Mapping[str, Any]) -> _Told | None:
    """Resets the environment at a place of a pool, or another one in its place. `None` leaves it to TRL."""
    for number in range(MAX_LOSSES):
        if not hasattr(pool[place], "__dict__"):
            break
        try:
            return _Told(pool[place], arguments)
        except EnvironmentLost as error:
            if number + 1 == MAX_LOSSES:
                raise
            logger.warning(f"`reset` has lost an environment, and another one takes its place: {error}")
            pool[place] = _made(make)
    return None


def _made(make: Callable[[], Any]) -> Any:
    """Makes an environment. If it is lost meanwhile, another one is tried."""
    for number in range(1, MAX_LOSSES):
        try:
            return make()
        except EnvironmentLost as error:
            logger.warning(f"An environment was lost while it was made, at the {number}. time: {error}")
    return make()
