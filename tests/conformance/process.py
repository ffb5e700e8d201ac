"""Scenarios on one engine: in this process, or in one of its own where the engine changes the process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.settings import prepare_colocated
from tests.forks import run


Scenarios = Callable[..., dict[str, Any]]  # of engine, model, an empty folder and the server's address


def run_scenarios(
    scenarios: Scenarios, engine: str, model_dir: Path, out: Path, url: str | None = None
) -> dict[str, Any]:
    """What came of them."""
    if engine == "vllm_colocated":
        error = run(scenarios.__module__, model_dir, out, log=out / "log", timeout=300)
        assert not error, error
        results = json.loads((out / "results.json").read_text())
    else:
        results = json.loads(json.dumps(scenarios(engine, model_dir, out, url)))
    return {"engine": engine, **results}


def main(scenarios: Scenarios) -> None:
    """The process of vLLM inside it: `MODULE MODEL OUT`."""
    prepare_colocated()
    out = Path(sys.argv[2])
    results = scenarios("vllm_colocated", Path(sys.argv[1]), out)
    out.joinpath("results.json").write_text(json.dumps(results))
