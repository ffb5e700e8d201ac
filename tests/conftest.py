"""Fixtures that every test directory shares, and the rule for tests marked `vllm` where vLLM is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import numpy as np
import pytest


# A busy machine takes longer than a deadline for one example.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

# Models here are tiny: a second thread gains nothing, and waits for the server beside it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the hub; read at import time, so before transformers
REQUIRE_VLLM = "TRL_DARTS_REQUIRE_VLLM"

# With `--dist loadgroup`, tests that share a server run in one process, so that none is started twice. The key is the
# fixture, or one that asks for it while it runs.
SERVER_OF = {
    "server": "letters",
    "second_server": "letters",
    "vllm_server": "markov",
    "servers": "markov",
    "pair": "markov",
}
# The last of their group: they kill the second server.
LAST = "tests/test_faults.py"
# What takes a minute and more begins first, so that no process is left alone with it at the end.
LONGEST_FIRST = (
    "letters",
    "launches",
    "markov",
    "tests/conformance/test_images.py",
    "tests/examples/test_notebook.py",
    "tests/test_equivalence.py",
    "tests/analysis/report/test_page.py",
    "tests/engines/test_hostile_server.py",
)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test belongs to the group of its server, else to that of its file; its own mark comes first."""
    groups = {}
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        if mark is None:
            servers = [SERVER_OF[name] for name in getattr(item, "fixturenames", ()) if name in SERVER_OF]
            mark = pytest.mark.xdist_group(servers[0] if servers else item.nodeid.split("::")[0])
            item.add_marker(mark)
        groups[item] = mark.args[0]
    heavy = {groups[item] for item in items if any(map(item.get_closest_marker, ("vllm", "distributed")))}
    order = {group: place for place, group in enumerate(LONGEST_FIRST)}
    items.sort(
        key=lambda item: (
            groups[item] not in heavy,  # servers and launches slow down what watches the clock, which comes after them
            order.get(groups[item], len(order)),
            item.nodeid.startswith(LAST),
        )
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `vllm` skip without vLLM, or fail where `TRL_DARTS_REQUIRE_VLLM=1` promises it."""
    if item.get_closest_marker("vllm") is None:
        return
    from benchmarks.vllm_server import INSTALL_VLLM, vllm_available

    if vllm_available():
        return
    reason = f"vLLM can't be imported. {INSTALL_VLLM}"
    if os.environ.get(REQUIRE_VLLM) == "1":
        pytest.fail(f"{REQUIRE_VLLM}=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@dataclass
class Clock:
    """A clock that only moves when told to: `clock()` is the time in seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on, and return the new time."""
        if seconds < 0:
            raise ValueError(f"`seconds` ({seconds}) must not be negative: time does not run backwards.")
        self.now += seconds
        return self.now


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(0)


@pytest.fixture
def clock() -> Clock:
    """A manual clock at 0 seconds."""
    return Clock()


@pytest.fixture(scope="session")
def tokenizer():
    """One token per printable character; `eos` 1, `pad` 0, 128 tokens."""
    from benchmarks.models import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory, tokenizer) -> Path:
    """A random Qwen2 with separate embeddings and LM head."""
    from benchmarks.models import make_random_model

    return make_random_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer)


@pytest.fixture(scope="session")
def tied_model_dir(tmp_path_factory, tokenizer) -> Path:
    """A random Qwen2 whose LM head is its embedding."""
    from benchmarks.models import make_random_model

    return make_random_model(tmp_path_factory.mktemp("models") / "tied", tokenizer, tied=True)


@pytest.fixture(scope="session")
def markov_model_dir(tmp_path_factory, tokenizer) -> Path:
    """An exact Markov chain: heavy-tailed lengths (p50 8, p90 67, p99 394 tokens) that end by themselves."""
    from benchmarks.models import SHORT_HEAVY_TAIL, make_markov_model

    return make_markov_model(tmp_path_factory.mktemp("models") / "markov", tokenizer, classes=SHORT_HEAVY_TAIL)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, tokenizer) -> Path:
    """A Markov chain that answers each prompt with the tokens of the prompt's own letter, see `make_letter_model`."""
    from tests.builders import make_letter_model

    return make_letter_model(tmp_path_factory.mktemp("models") / "letters", tokenizer)


@pytest.fixture(scope="session")
def log_of(tmp_path_factory) -> Callable[[str], Path]:
    """Where a server of the whole session writes its log. Refuses to start one in two processes, see `SERVER_OF`."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def log_of(name: str) -> Path:
        path = base / f"{name}.log"
        path.touch(exist_ok=False)
        return path

    return log_of


@pytest.fixture(scope="session")
def server(model_dir, log_of) -> Iterator[object]:
    """A real server of that model. Its weights follow the trainings that use it: each begins with a sync."""
    from benchmarks.vllm_server import start_vllm_server

    with start_vllm_server(model_dir, log_path=log_of("letters"), max_model_len=512) as server:
        yield server


@pytest.fixture(scope="session")
def second_server(model_dir, log_of) -> Iterator[object]:
    """Another one of that model, with more room, that wants the key `secret`."""
    from benchmarks.vllm_server import start_vllm_server

    options = {"max_model_len": 600, "env": {"VLLM_API_KEY": "secret"}}
    with start_vllm_server(model_dir, log_path=log_of("letters-second"), **options) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_server(markov_model_dir, log_of) -> Iterator[object]:
    """
    A real server of the Markov model, one for the whole session: mark its tests `vllm`.

    A test that changes its weights or pauses it must put both back.
    """
    from benchmarks.vllm_server import start_vllm_server

    with start_vllm_server(markov_model_dir, log_path=log_of("markov")) as server:
        yield server
