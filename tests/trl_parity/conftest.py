"""Models of this directory's tests, each made once, and a latency curve that frees budgets from the clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.trl_parity.tool_calls import caller_maker
from tests.zoo import make_lm, make_reward_model
from trl_darts.policy import LatencyCurve


class Zoo:
    """Makes models on first use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: dict[tuple[Any, ...], Path] = {}

    def lm(self, kind: str = "qwen3", **options: Any) -> Path:
        """A language model of `tests.zoo.make_lm`."""
        return self._get(make_lm, kind, **options)

    def reward(self, kind: str = "qwen3", **options: Any) -> Path:
        """A reward model of `tests.zoo.make_reward_model`."""
        return self._get(make_reward_model, kind, **options)

    def vlm(self, kind: str = "llava", **options: Any) -> Path:
        """A vision-language model."""
        from tests.trl_parity.vlms import make_vlm

        return self._get(make_vlm, kind, **options)

    def _get(self, make: Callable[..., Path], kind: str, **options: Any) -> Path:
        key = (make.__name__, kind, *sorted(options.items()))
        if key not in self.made:
            self.made[key] = make(self.root / f"{kind}-{len(self.made)}", kind, **options)
        return self.made[key]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Models by kind."""
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def lm(zoo: Zoo) -> Path:
    """A Qwen3 that ends after about six tokens."""
    return zoo.lm()


@pytest.fixture
def lm_tokenizer(lm: Path) -> Any:
    """Its tokenizer, a new one for each test."""
    return AutoTokenizer.from_pretrained(lm)


@pytest.fixture(scope="session")
def curve(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a latency curve: with it, two trainings of one seed are the same."""
    path = tmp_path_factory.mktemp("curve") / "latency.json"
    LatencyCurve.fit([1, 2, 4, 8, 16, 32, 64], [1.0, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0]).save(path)
    return str(path)


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes models that call tools: `caller(RIGHT, WRONG, share=0.9)`."""
    return caller_maker(lambda: tmp_path_factory.mktemp("caller"))
