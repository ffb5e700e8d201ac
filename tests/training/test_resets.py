"""Environments that are reset at once, before TRL asks: what TRL hears, and what is lost."""

import threading
from types import SimpleNamespace

import pytest

from trl_darts.errors import EnvironmentLost
from trl_darts.training.resets import reset_together


class Game:
    """Counts its resets, all of which must run at once if there is a barrier."""

    barrier = None
    losses = 0  # resets that are still to be lost, of all games

    def __init__(self, name=None):
        self.name, self.seen = name, []

    def reset(self, **kwargs):
        if self.barrier is not None:
            self.barrier.wait(60)
        cls = type(self)
        if cls.losses > 0:
            cls.losses -= 1
            raise EnvironmentLost("gone")
        self.seen.append(kwargs)
        return f" from {kwargs['start']}"


def trainer_of(names, cls=Game, pooled=1):
    kinds = dict.fromkeys(names)
    return SimpleNamespace(
        args=SimpleNamespace(max_concurrent_tools=64),
        environment_factories={name: lambda name=name: cls(name) for name in kinds},
        _environment_pool={name: [cls(name) for _ in range(pooled)] for name in kinds},
        _multi_environment=None not in kinds,
    )


def rows_of(names):
    own = [{} if name is None else {"environment": name} for name in names]
    return [{"start": i, **row} for i, row in enumerate(own)]


def asked(trainer, rows):
    """Resets as TRL does, one after the other, and returns what it is told."""
    cursor, told = {}, []
    for row in rows:
        name = row.get("environment") if trainer._multi_environment else None
        environment = trainer._environment_pool[name][cursor.setdefault(name, 0)]
        cursor[name] += 1
        given = {key: value for key, value in row.items() if key != "environment"}
        told.append(environment.reset(**(given if trainer._multi_environment else row)))
    return told


@pytest.fixture
def game():
    return type("Own", (Game,), {})


@pytest.mark.parametrize("names", [[None] * 6, ["a", "b", "a", "a", "b", "c"]], ids=["one", "several"])
@pytest.mark.parametrize("pooled", [1, 8])
def test_all_at_once_and_as_trl(game, names, pooled):
    game.barrier = threading.Barrier(len(names))
    trainer, rows = trainer_of(names, game, pooled), rows_of(names)
    with reset_together(trainer, rows):
        game.barrier = None
        assert asked(trainer, rows) == [f" from {i}" for i in range(len(names))]
    used = [own for pool in trainer._environment_pool.values() for own in pool if own.seen]
    assert [len(own.seen) for own in used] == [1] * len(names)
    assert all(("environment" in own.seen[0]) is False for own in used)
    assert not any("reset" in vars(own) for own in used)


def test_later_resets_are_resets(game):
    trainer, rows = trainer_of([None], game), rows_of([None])
    (environment,) = trainer._environment_pool[None]
    with reset_together(trainer, rows):
        assert environment.reset(**rows[0]) == " from 0"
        assert environment.reset(start=7) == " from 7"  # as its own tool may do
    assert len(environment.seen) == 2
    with reset_together(trainer, rows):
        pass  # nobody asked
    assert environment.reset(start=8) == " from 8"


def test_rows_that_a_subclass_changes(game):
    trainer, rows = trainer_of([None], game), rows_of([None])
    with reset_together(trainer, rows):
        assert asked(trainer, [{"start": 5}]) == [" from 5"]


def test_what_is_lost_is_replaced(game, caplog):
    trainer, rows = trainer_of([None] * 3, game, pooled=3), rows_of([None] * 3)
    before = list(trainer._environment_pool[None])
    game.losses = 2
    with reset_together(trainer, rows):
        assert asked(trainer, rows) == [f" from {i}" for i in range(3)]
    pool = trainer._environment_pool[None]
    assert len(pool) == 3
    assert 1 <= sum(own not in before for own in pool) <= 2
    assert sum("has lost an environment" in message for message in caplog.messages) == 2
    game.losses = 9
    with pytest.raises(EnvironmentLost, match="gone"):
        reset_together(trainer, rows)


def test_what_is_lost_while_it_is_made(game, caplog):
    losses, lock = [1, 1], threading.Lock()

    class Fragile(game):
        def __init__(self, name=None):
            super().__init__(name)
            with lock:
                if losses and len(trainer._environment_pool[None]) > 0:
                    losses.pop()
                    raise EnvironmentLost("no room")

    trainer, rows = trainer_of([None] * 4, game), rows_of([None] * 4)
    trainer.environment_factories = {None: Fragile}
    with reset_together(trainer, rows):
        assert asked(trainer, rows) == [f" from {i}" for i in range(4)]
    assert not losses
    assert sum("was lost while it was made" in message for message in caplog.messages) == 2


def test_other_errors_are_raised_as_they_are(game):
    trainer, rows = trainer_of([None] * 2, game), rows_of([None] * 2)
    with pytest.raises(KeyError, match="start"):
        reset_together(trainer, [{"begin": 0} for _ in rows])


def test_what_is_left_to_trl():
    class Slotted:
        __slots__ = ("seen",)

        def __init__(self, name=None):
            self.seen = 0

        def reset(self, start):
            self.seen += 1

    trainer, rows = trainer_of([None], Slotted), rows_of([None])
    with reset_together(trainer, rows):
        asked(trainer, rows)
    assert trainer._environment_pool[None][0].seen == 1
    trainer = trainer_of(["a"])
    with reset_together(trainer, rows_of(["nobody's"])):
        assert trainer._environment_pool["a"][0].seen == []
