"""Tests that imports follow the rules of the rooms, have no circles, and don't load heavy packages."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "accelerate", "transformers", "trl", "vllm", "aiohttp", "requests", "httpx", "matplotlib")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, modules: set[str]) -> set[str]:
    """Returns the package's modules that a file imports, also inside functions and for type checkers."""
    package = name_of(path).split(".")[: None if path.name == "__init__.py" else -1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            found |= {
                f"{source}.{alias.name}" if f"{source}.{alias.name}" in modules else source for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def import_graph() -> dict[str, set[str]]:
    paths = {name_of(path): path for path in (ROOT / "trl_darts").rglob("*.py")}
    graph = {name: imports(path, set(paths)) - {name} for name, path in paths.items()}
    del graph["trl_darts"]  # its names are loaded lazily; imports for type checkers don't count
    return {name: needs - {"trl_darts"} for name, needs in graph.items()}


def test_no_import_circle():
    """Includes imports inside functions, which would hide a circle."""
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_rooms_keep_to_the_import_rule():
    graph = import_graph()
    for name, needs in graph.items():
        room = name.split(".")[1]
        needed = {need.split(".")[1] for need in needs} - {room}
        assert "trainer" not in needed or room in ("cli", "testing"), (name, needed)
        if room in ("policy", "scheduling"):
            assert needed <= {"policy", "errors"}, (name, needed)


def loaded(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_decisions_and_commands_load_neither_torch_nor_http():
    """Help, invalid arguments and reports then need no waiting. All modules share one interpreter."""
    modules = ("policy", "scheduling", "analysis.simulation", "analysis.report", "cli", "cli.profile")
    assert loaded("".join(f"import trl_darts.{module}\n" for module in modules)) == set()


def test_public_names():
    import trl_darts

    assert set(trl_darts.__all__) <= set(dir(trl_darts))
    assert trl_darts.DARTSGRPOTrainer.__module__ == "trl_darts.trainer"
    with pytest.raises(AttributeError, match="DARTSGRPOTrainr"):
        trl_darts.DARTSGRPOTrainr  # noqa: B018
