"""Shared fixtures, and the handling of tests marked `vllm` or `ray` without the package."""

from __future__ import annotations

import atexit
import gc
import os
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import numpy as np
import pytest


# No deadlines, because a busy machine would exceed them.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

# Models are tiny, so that a second thread only competes with the server.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the Hub; read when transformers is imported
STARTUP = Path(__file__).parent / "startup"
os.environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])])
runpy.run_path(str(STARTUP / "sitecustomize.py"))
REQUIRE_VLLM = "TRL_DARTS_REQUIRE_VLLM"

# With `--dist loadgroup`, tests that share a server run in one process, so that none is started twice. Keys are
# fixtures that are servers or request one at run time.
SERVER_OF = {
    "server": "letters",
    "second_server": "letters",
    "vllm_server": "markov",
    "servers": "markov",
    "pair": "markov",
}
# Last of their group, because they kill the second server.
LAST = "tests/test_faults.py"
# Tests that take a minute or more start first, so that no process works alone at the end.
LONGEST_FIRST = (
    "letters",
    "launches",
    "markov",
    "tests/conformance/test_images.py",
    "tests/examples/test_notebook.py",
    "tests/test_equivalence.py",
    "tests/analysis/report/test_page.py",
    "tests/engines/test_hostile_server.py",
    "tests/examples/test_scripts.py",
    "tests/examples/test_learning.py",
    "tests/training/test_padding.py",
)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Assigns tests to the group of their mark, of their server, or of their file."""
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
            groups[item] not in heavy,  # timing-sensitive tests come after servers and launches, which slow them down
            order.get(groups[item], len(order)),
            item.nodeid.startswith(LAST),
        )
    )


def pytest_collection_finish() -> None:
    """Takes the imported modules out of what each training's garbage collection goes through."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extensions say at the end that they leak


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `vllm` or `ray` without the package, or fails them with `TRL_DARTS_REQUIRE_VLLM=1`."""
    from benchmarks.vllm_server import INSTALL_VLLM

    commands = {"vllm": INSTALL_VLLM, "ray": "pip install 'trl-darts[ray]'"}
    missing = [name for name in commands if item.get_closest_marker(name) and find_spec(name) is None]
    if not missing:
        return
    reason = f"{missing[0]} can't be imported. {commands[missing[0]]}"
    if os.environ.get(REQUIRE_VLLM) == "1":
        pytest.fail(f"{REQUIRE_VLLM}=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@dataclass
class Clock:
    """A manual clock: `clock()` returns the time in seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Advances the clock and returns the new time."""
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
    """A tokenizer with one token per printable character; `eos` 1, `pad` 0, 128 tokens."""
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
    """A Markov chain with heavy-tailed lengths (p50 8, p90 67, p99 394 tokens)."""
    from benchmarks.models import SHORT_HEAVY_TAIL, make_markov_model

    return make_markov_model(tmp_path_factory.mktemp("models") / "markov", tokenizer, classes=SHORT_HEAVY_TAIL)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, tokenizer) -> Path:
    """A Markov chain that answers each prompt with tokens of the prompt's letter, see `make_letter_model`."""
    from tests.builders import make_letter_model

    return make_letter_model(tmp_path_factory.mktemp("models") / "letters", tokenizer)


@pytest.fixture(scope="session")
def log_of(tmp_path_factory) -> Callable[[str], Path]:
    """Returns the log path of a session-wide server. Fails if two processes start it, see `SERVER_OF`."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def log_of(name: str) -> Path:
        path = base / f"{name}.log"
        path.touch(exist_ok=False)
        return path

    return log_of


@pytest.fixture(scope="session")
def server(model_dir, log_of) -> Iterator[object]:
    """A real server of that model. Each run begins with a sync of its weights."""
    from benchmarks.vllm_server import start_vllm_server

    with start_vllm_server(model_dir, log_path=log_of("letters"), max_model_len=512) as server:
        yield server


@pytest.fixture(scope="session")
def second_server(model_dir, log_of) -> Iterator[object]:
    """Another server of that model, with more slots and the key `secret`."""
    from benchmarks.vllm_server import start_vllm_server

    options = {"max_model_len": 600, "env": {"VLLM_API_KEY": "secret"}}
    with start_vllm_server(model_dir, log_path=log_of("letters-second"), **options) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_server(markov_model_dir, log_of) -> Iterator[object]:
    """
    A session-wide real server of the Markov model, for tests marked `vllm`. A test that changes its weights or pauses
    it must restore both.
    """
    from benchmarks.vllm_server import start_vllm_server

    with start_vllm_server(markov_model_dir, log_path=log_of("markov")) as server:
        yield server
