"""What holds for the package as a whole: its import rule, its public names, its examples."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import trl_darts.policy


MODULES = [f"trl_darts.policy.{module.name}" for module in pkgutil.iter_modules(trl_darts.policy.__path__)]
FORBIDDEN = [
    "torch",
    "scipy",
    "accelerate",
    "transformers",
    "trl",
    "datasets",
    "aiohttp",
    "httpx",
    "requests",
    "urllib3",
]


def test_loads_numpy_and_the_standard_library_only() -> None:
    code = f"import sys, {', '.join(MODULES)}; print([name for name in {FORBIDDEN} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_exports_what_it_lists() -> None:
    assert sorted(trl_darts.policy.__all__) == trl_darts.policy.__all__
    for name in trl_darts.policy.__all__:
        assert getattr(trl_darts.policy, name).__doc__


@pytest.mark.parametrize("module", MODULES)
def test_examples_print_what_they_say(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0
