"""The commands in the first lines of a recipe, and the one that checks it."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer
from typer.testing import CliRunner

from trl_darts.cli.config.check import check


ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))


def commands(path: Path) -> list[list[str]]:
    """Indented comment lines, with those that a backslash continues, as words of a command line."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#"))
    joined = "\n".join(lines).replace("\\\n", " ")
    return [shlex.split(line) for line in joined.splitlines() if line.startswith("   ")]


def command(path: Path, start: str) -> list[str] | None:
    """The one command of a recipe that has these words, without what stands before them."""
    words = start.split()
    found = []
    for line in commands(path):
        places = [i for i in range(len(line)) if line[i : i + len(words)] == words]
        found += [line[places[0] :]] if places else []
    assert len(found) <= 1, f"{path.name} has `{start}` {len(found)} times"
    return found[0] if found else None


def option(line: list[str], name: str) -> str | None:
    """The value of an option."""
    return line[line.index(name) + 1] if name in line else None


def run(*args):
    """`trl-darts config check` with these words."""
    app = typer.Typer()
    app.command()(check)
    return CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "200"})
