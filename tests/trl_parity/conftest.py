"""Models of this directory's tests, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.trl_parity.tool_calls import caller_maker
from tests.trl_parity.vlms import make_vlm
from tests.zoo import make_lm


@pytest.fixture(scope="session")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 that ends after about six tokens."""
    return make_lm(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="session")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes vision-language models: `vlm("llava")`."""
    return cache(lambda kind, **options: make_vlm(tmp_path_factory.mktemp(kind), kind, **options))


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes models that call tools: `caller(RIGHT, ADD)`."""
    return caller_maker(lambda: tmp_path_factory.mktemp("caller"))
