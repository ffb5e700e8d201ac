"""Tests the imports, the public names and the examples of the whole package."""

import doctest
import importlib
import pkgutil

import pytest

import trl_darts.policy


MODULES = [f"trl_darts.policy.{module.name}" for module in pkgutil.iter_modules(trl_darts.policy.__path__)]


def test_exports_what_it_lists() -> None:
    assert sorted(trl_darts.policy.__all__) == trl_darts.policy.__all__
    for name in trl_darts.policy.__all__:
        assert getattr(trl_darts.policy, name).__doc__


@pytest.mark.parametrize("module", MODULES)
def test_examples_print_what_they_say(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0
