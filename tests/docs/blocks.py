"""
The fenced blocks of the documentation.

- A block without a language, or with `text`, is output or a drawing: data.
- The others are code. They are run, page by page in their order, but for those that say why not in a comment, which no
  page shows, on the line before the fence: `<!-- not run: REASON -->`.
- Whether a block is run or not, its names, flags, targets and paths must exist: [`mistakes`].
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import typer
import yaml
from trl import GRPOTrainer, ModelConfig, TrlParser

from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
from trl_darts.cli import app


ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->\n *\Z")
DATA = ("", "text")
CHECKED = ("trl_darts", "trl", "transformers", "datasets", "peft", "examples")
ASSIGNMENT = re.compile(r"\w+=")
LOOP = re.compile(r"^\s*(?:for\b.*\bdo|done|do)\s*$", re.MULTILINE)
REPOSITORY_PATH = re.compile(r"(?:examples|configs|benchmarks|docs|tests)/\S+\.\w+")
FOREIGN = ("vllm", "jupyter", "git", "cd", "export")
sys.path.append(str(ROOT / "examples"))  # where the script below is run, its folder is on the path


@dataclass(frozen=True)
class Block:
    """
    One fenced block.

    Args:
        page (`str`):
            The page's name.
        line (`int`):
            Of the fence.
        language (`str`):
            What follows the fence.
        code (`str`):
            What is between the fences.
        reason (`str`, *optional*):
            Why it is not run.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of a page that are code."""
    found = []
    for match in FENCE.finditer(text):
        mark = NOT_RUN.search(text[: match.start(2) - 3])
        code = re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        if match[2] not in DATA:
            found.append(Block(page, line, match[2], code, mark[1] if mark else None))
    return found


def mistakes(block: Block) -> list[str]:
    """What a block names that does not exist."""
    if block.language == "python":
        return [*_python_mistakes(ast.parse(block.code))]
    if block.language == "bash":
        return [words for command in commands(block.code) for words in _command_mistakes(command)]
    if block.language == "yaml":
        yaml.safe_load(block.code)
        return []
    return [f"`{block.language}` is no language that is checked: python, bash, yaml, or text for output"]


def commands(code: str) -> Iterator[list[str]]:
    """The simple commands of a shell script, without assignments before them. A syntax error is raised."""
    subprocess.run(["bash", "-n"], input=code, text=True, check=True, capture_output=True)
    for line in LOOP.sub("", code.replace("\\\n", " ")).splitlines():
        words = shlex.split(line, comments=True)
        while words and ASSIGNMENT.match(words[0]):
            words = words[1:]
        if words:
            yield words


def _python_mistakes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in CHECKED:
            module = importlib.import_module(node.module or "")
            yield from (f"{node.module} has no {name.name}" for name in node.names if not hasattr(module, name.name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _keywords():
            known = _keywords()[node.func.id]
            given = [keyword.arg for keyword in node.keywords if keyword.arg]
            yield from (f"{node.func.id} has no argument {name}" for name in given if name not in known)


@cache
def _keywords() -> dict[str, set[str]]:
    """Arguments of what pages call by name."""
    trainer = {*inspect.signature(DARTSGRPOTrainer).parameters, *inspect.signature(GRPOTrainer).parameters}
    return {"DARTSGRPOConfig": {field.name for field in fields(DARTSGRPOConfig)}, "DARTSGRPOTrainer": trainer}


def _command_mistakes(words: list[str]) -> Iterator[str]:
    program, *arguments = words
    for path in REPOSITORY_PATH.findall(" ".join(arguments)):
        if not (ROOT / path).exists():
            yield f"{path} does not exist"
    if program == "trl-darts":
        yield from _subcommand_mistakes(arguments)
    elif program in ("accelerate", "python") and "examples/train_grpo.py" in arguments:
        options = arguments[arguments.index("examples/train_grpo.py") + 1 :]
        yield from _unknown("examples/train_grpo.py", options, _script_flags())
    elif program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        yield from (f"make has no target {target}" for target in arguments if target not in targets)
    elif program == "pip":
        yield from (f"there is no extra {extra}" for extra in _extras(arguments) if extra not in _known_extras())
    elif program not in (*FOREIGN, "accelerate", "python"):
        yield f"{program} is no command that is known here"


def _unknown(program: str, arguments: list[str], flags: set[str]) -> Iterator[str]:
    given = [word.split("=")[0] for word in arguments if word.startswith("-")]
    yield from (f"{program} has no flag {flag}" for flag in given if flag not in flags)


def _subcommand_mistakes(arguments: list[str]) -> Iterator[str]:
    """Goes down through groups of commands; what follows `--` belongs to vLLM."""
    command: Any = typer.main.get_command(app)
    name = "trl-darts"
    words = arguments[: arguments.index("--")] if "--" in arguments else list(arguments)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        word = words.pop(0)
        if word not in command.commands:
            yield f"{name} has no command {word}"
            return
        command, name = command.commands[word], f"{name} {word}"
    flags = {flag for parameter in command.params for flag in parameter.opts + parameter.secondary_opts}
    yield from _unknown(name, words, flags | {"--help"})


@cache
def _script_flags() -> set[str]:
    script = runpy.run_path(str(ROOT / "examples" / "train_grpo.py"))
    parser = TrlParser((script["ScriptArguments"], DARTSGRPOConfig, ModelConfig))
    return {*parser._option_string_actions, "--config"}


def _extras(arguments: list[str]) -> list[str]:
    listed = re.findall(r"(?:\.|trl-darts)\[([^\]]+)\]", " ".join(arguments))
    return [extra for extras in listed for extra in extras.split(",")]


@cache
def _known_extras() -> set[str]:
    return set(metadata("trl-darts").get_all("Provides-Extra") or ())
