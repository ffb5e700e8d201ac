"""
The fenced blocks of the documentation, and what they name that does not exist.

- A block with `text` is output or a drawing. The others are code, `python` or `bash`.
- Code is run, page by page in its order, unless the line before its fence says why not: `<!-- not run: REASON -->`.
- Code that is not run is read: modules, names, arguments, commands, flags and paths must exist.
"""

import argparse
import ast
import inspect
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from accelerate.commands.launch import launch_command_parser
from trl import GRPOTrainer, TrlParser

from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
from trl_darts.cli import app
from trl_darts.cli.grpo import split_words
from trl_darts.recipes.fields import ARGUMENTS


ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"(<!-- not run: \S[^\n]* -->\n)?^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"\b(?:examples|configs|benchmarks|docs|tests)/[\w./-]+")
CALLS: dict[str, tuple[Callable[..., Any], ...]] = {
    "DARTSGRPOConfig": (DARTSGRPOConfig,),
    "DARTSGRPOConfig.from_pretrained": (DARTSGRPOConfig.from_pretrained, DARTSGRPOConfig),
    "DARTSGRPOTrainer": (DARTSGRPOTrainer, GRPOTrainer),
}


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    code: str
    runs: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of a page. A fence of another form would hide its block, and is an error."""
    found = [
        Block(page, text.count("\n", 0, match.start(2)) + 1, match[2], match[3], match[1] is None)
        for match in FENCE.finditer(text)
    ]
    if text.count("```") + text.count("~~~") != 2 * len(found):
        raise ValueError(f"{page} has a fence that is not ``` and a language on a line of their own.")
    return found


def check(block: Block) -> None:
    """Raises an error if the block names something that does not exist."""
    try:
        if block.language == "python":
            check_python(block.code)
        elif block.language == "bash":
            for line in block.code.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    check_command(words)
        else:
            raise ValueError(f"the language {block.language!r} must be python or bash")
    except (Exception, SystemExit) as error:  # of many parsers, some of which exit
        raise ValueError(f"{block}: {error!r}") from error


def check_python(code: str) -> None:
    """Imports of ours and TRL's, and the arguments of our classes."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in ("trl", "trl_darts"):
            module = import_module(node.module)
            for name in node.names:
                getattr(module, name.name)
        elif isinstance(node, ast.Call) and (functions := CALLS.get(ast.unparse(node.func))):
            known = {name for function in functions for name in inspect.signature(function).parameters}
            if unknown := {word.arg for word in node.keywords} - known:
                raise ValueError(f"{ast.unparse(node.func)} has no argument {unknown}")


def check_command(words: list[str]) -> None:
    """One command, by the parser of its program."""
    while re.match(r"[A-Z0-9_]+=", words[0]):
        del words[0]
    if missing := [path for path in PATH.findall(" ".join(words)) if not (ROOT / path).exists()]:
        raise ValueError(f"{missing} do not exist")
    program, *arguments = words
    if program == "accelerate":
        launch = _parsed(launch_command_parser(), arguments[1:])
        _script([launch.training_script, *launch.training_script_args])
    elif program not in ("python", "vllm"):
        {"trl-darts": _trl_darts, "make": _make, "pip": _pip}[program](arguments)
    elif program == "python" and arguments[0] != "-m":
        _script(arguments)


def _trl_darts(words: list[str]) -> Any:
    if words[0] == "grpo":
        launch, _ = split_words(words[1:])
        return _parsed(launch_command_parser(), [*launch, "script"])
    command: Any = typer.main.get_command(app)
    context = command.make_context("trl-darts", list(words))
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, words)
        context = command.make_context(name, list(words), parent=context)


def _script(words: list[str]) -> None:
    path, arguments = words[0], words[1:]
    if path == "examples/train_grpo.py":
        at = arguments.index("--config")
        _parsed(TrlParser(ARGUMENTS), arguments[:at] + arguments[at + 2 :])
    elif unknown := [word for word in arguments if word[0] == "-" and f'"{word}"' not in (ROOT / path).read_text()]:
        raise ValueError(f"{path} has no {unknown}")


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    parser.allow_abbrev = False  # a page writes names out
    return parser.parse_args(words)


def _make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if not set(words) <= set(targets):
        raise ValueError(f"the Makefile has no {words}")


def _pip(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"\.\[(\w+)\]", " ".join(words)):
        known[extra]
