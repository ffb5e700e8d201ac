"""Environments of candidates: one for each, which begins as its row's."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_darts.errors import ConfigurationError
from trl_darts.training.environments import Environments, Instance, bound_to


class Game:
    """Tells what its row says."""

    def __init__(self, name=None):
        self.name = name

    def reset(self, told=None, **kwargs):
        self.kwargs = kwargs
        return told

    def play(self):
        return self


def batch(names, told=" go", factory=Game, message=None):
    """A trainer whose rows have these environments, as TRL's has them, and what makes those of candidates."""
    kinds = dict.fromkeys(names)
    pools = {name: [Game(name) for _ in range(names.count(name))] for name in kinds}
    own = {name: iter(pool) for name, pool in pools.items()}
    trainer = SimpleNamespace(
        _batch_environments=list(names),
        _environment_pool=pools,
        _multi_environment=names[0] is not None,
        environment_factories={name: lambda name=name: factory(name) for name in kinds},
        environments=[next(own[name]) for name in names],
    )
    prompt = [{"role": "user", "content": "play"}]
    examples = [{"prompt": prompt, "told": told, "environment": name} for name in names]
    messages = [[{"role": "user", "content": "play go" if message is None else message}]] * len(names)
    return trainer, Environments(trainer, examples, messages)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=6), st.lists(st.integers(0, 5), max_size=12), st.data())
def test_one_owner(names, spare, data):
    """
    Also where instances are lost, and over batches, of which the second has no instance on which a conversation of the
    first still acts.
    """
    trainer, environments = batch(names)
    rows = [row % len(names) for row in spare]
    lost = [row for row in range(len(names)) if data.draw(st.booleans())]
    for row in lost:
        environments.retire(row, trainer.environments[row])
    rows += lost
    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(environments.take, rows))
    own = [instance for row, instance in enumerate(trainer.environments) if row not in lost]
    assert not {id(trainer.environments[row]) for row in lost} & {id(instance) for instance in taken}
    everybody = [*own, *taken]
    assert len({id(own) for own in everybody}) == len(everybody)
    assert [own.name for own in taken] == [names[row] for row in rows]
    gone = [data.draw(st.booleans()) for _ in everybody]
    kept = [row for row in range(len(names)) if row not in lost]
    for row, instance, is_gone in zip([*kept, *rows], everybody, gone, strict=True):
        if is_gone:
            environments.retire(row, instance)
    left = {id(own) for pool in trainer._environment_pool.values() for own in pool}
    assert left == {id(own) for own, is_gone in zip(everybody, gone, strict=True) if not is_gone}
    # The next batch, for whose rows TRL makes what the pool lacks.
    for name, pool in trainer._environment_pool.items():
        pool.extend(Game(name) for _ in range(names.count(name) - len(pool)))
    again = Environments(trainer, [], [])
    for row in range(len(names)):
        assert all(again.take(row) is not own for own, is_gone in zip(everybody, gone, strict=True) if is_gone)


def test_instances_are_made_once():
    made = []

    def factory(name):
        made.append(Game(name))
        return made[-1]

    trainer, environments = batch([None, None], factory=factory)
    first = [environments.take(0), environments.take(1)]
    environments = Environments(trainer, [], [])
    assert [environments.take(0), environments.take(1)] == first == made


def test_they_are_made_at_once_and_one_that_fails_is_nobodys():
    together, number = threading.Barrier(3), count()

    def factory(name):
        together.wait(60)
        if next(number) == 0:
            raise RuntimeError("no room")
        return Game(name)

    _, environments = batch([None], factory=factory)
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(environments.take, 0) for _ in range(3)]
    made = [own.result() for own in futures if own.exception() is None]
    assert len(made) == 2
    together = threading.Barrier(1)
    assert all(environments.take(0) is not own for own in made)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (None, "play"),
        (" go", "play go"),
        ([{"type": "text", "text": "go"}], [{"type": "text", "text": "play"}, {"type": "text", "text": "go"}]),
    ],
)
@pytest.mark.parametrize("name", [None, "chess"])
def test_it_begins_as_its_row(told, message, name):
    _, environments = batch([name], told=told, message=message)
    instance = environments.take(0)
    environments.reset(0, instance)
    assert ("environment" in instance.kwargs) == (name is None)  # TRL's own column, with several environments


def test_what_tells_something_else_is_refused():
    _, environments = batch([None], told=" stop")
    with pytest.raises(ConfigurationError, match=r"`reset` of 'Game' told a spare .*' stop'.*schedule='grpo'"):
        environments.reset(0, environments.take(0))


def test_tools_of_another_instance():
    own, other = Game(), Game()
    tools = bound_to({"play": own.play, "len": len}, own, other)
    assert tools["play"]() is other
    assert tools["len"] is len


def test_what_is_taken_after_a_loss():
    """The instance is not passed over that came after the lost one in the pool."""
    trainer, environments = batch([None, None])
    trainer._environment_pool[None].append(spare := Game())
    environments.retire(0, trainer.environments[0])
    environments.retire(0, trainer.environments[0])  # again, which changes nothing
    assert environments.take(0) is spare
    assert trainer._environment_pool[None] == [trainer.environments[1], spare]


def test_has_its_own_methods():
    own, other = Instance(Game()), Game()
    assert own.has(own.environment.play)
    assert not own.has(other.play)
    assert not own.has(len)


def test_threads_of_a_slow_factory():
    """Each has its own all the same."""
    barrier = threading.Barrier(3, timeout=10)

    def take(environments):
        barrier.wait()
        return environments.take(0)

    _, environments = batch([None])
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(take, [environments] * 3))
    assert len(set(map(id, found))) == 3
