"""Scenarios on one engine: in this process, or in one of its own where the engine changes the process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.settings import prepare_colocated


ROOT = Path(__file__).resolve().parents[2]
Scenarios = Callable[..., dict[str, Any]]  # of engine, model, an empty folder and the server's address


def run_scenarios(
    scenarios: Scenarios, engine: str, model_dir: Path, out: Path, url: str | None = None
) -> dict[str, Any]:
    """What came of them."""
    if engine == "vllm_colocated":
        command = [sys.executable, "-m", scenarios.__module__, str(model_dir), str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
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
