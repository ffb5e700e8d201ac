"""
Commands that are read, not run. Each is given to the parser of its program; values that a parser takes as they are,
such as the name of a schedule, to the check that the program makes before it begins.
"""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import metadata
from importlib.util import find_spec
from itertools import groupby, product
from pathlib import Path
from string import Template
from typing import Any
from unittest.mock import DEFAULT, patch

import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from trl import TrlParser

from trl_darts.analysis.profile import ProfileOptions
from trl_darts.analysis.recipe import ARGUMENTS, WITHOUT_DEVICE
from trl_darts.analysis.simulation import parse_sweep, settings_of
from trl_darts.cli import app, serve, simulate
from trl_darts.hub import SCHEME
from trl_darts.serving import options
from trl_darts.serving.build import VLLMBuild


ROOT = Path(__file__).resolve().parents[2]
CHECKED = ("trl_darts", "trl", "transformers", "datasets", "peft", "accelerate", "examples", "tiny_reasoner")
REPOSITORY_PATH = re.compile(r"\b(?:examples|configs|benchmarks|docs|tests)/[\w./-]+")
ASSIGNMENT = re.compile(r"\w+=")
KEYWORDS = ("do", "then", "else", "if", "while", "until", "!")
ENDS = ("done", "fi")
SEPARATORS = frozenset(";&|()")
REDIRECTION = re.compile(r"[&|]*[<>][<>&|]*")
USAGE_ERROR = typer.BadParameter.__base__  # click's own, or that of the click that newer versions of Typer contain
GPUS = VLLMBuild("0.31.0", cpu=False, devices=tuple("01234567"))
sys.path.append(str(ROOT / "examples"))  # where the training script is run, its folder is on the path


def command_mistakes(code: str) -> list[str]:
    """What a shell script names that does not exist, one for each command. A syntax error is raised."""
    found = []
    for program, *arguments in commands(code):
        try:
            _check(program, arguments)
        except USAGE_ERROR as error:
            found.append(f"{program}: {error.format_message()}")
        except (ValueError, ImportError, OSError) as error:
            found.append(f"{program}: {error}")
    return found


def commands(code: str) -> Iterator[list[str]]:
    """The simple commands of a script, without assignments before them; those of a loop with each of its values."""
    subprocess.run(["bash", "-n"], input=code, text=True, check=True, capture_output=True)
    loops: dict[str, list[str]] = {}
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for is_separator, group in groupby(lexer, lambda word: word != "" and SEPARATORS.issuperset(word)):
            words = list(group)
            while words and (words[0] in KEYWORDS or ASSIGNMENT.match(words[0])):
                del words[0]
            if words[:1] == ["for"]:
                loops[words[1]] = words[3:] or [""]
            elif words and not is_separator and words[0] not in ENDS:
                yield from _expanded(words, loops)


def _expanded(words: list[str], loops: dict[str, list[str]]) -> Iterator[list[str]]:
    variables = [dict(zip(loops, values, strict=True)) for values in product(*loops.values())]
    for command in dict.fromkeys(tuple(Template(word).safe_substitute(some) for word in words) for some in variables):
        yield list(command)


def _check(program: str, arguments: list[str]) -> None:
    words = [program, *arguments]
    if any("$(" in word or "`" in word or REDIRECTION.fullmatch(word) for word in words):
        raise ValueError("redirection, and a command inside of a word, are not checked")
    for path in REPOSITORY_PATH.findall(" ".join(words)):
        if not (ROOT / path).exists():
            raise ValueError(f"{path} does not exist")
    if program not in PROGRAMS:
        raise ValueError("is no command that is known here")
    PROGRAMS[program](arguments)


def _trl_darts(words: list[str]) -> None:
    command = typer.main.get_command(app)
    for leaf in _leaves(command):
        leaf.callback = VALUES.get(leaf.name, _no_check)
    with patch("trl_darts.cli.exits.fail", _refuse):  # which would end the process
        command.main(words, prog_name="trl-darts", standalone_mode=False)


def _leaves(command: Any) -> Iterator[Any]:
    if hasattr(command, "commands"):
        for other in command.commands.values():
            yield from _leaves(other)
    else:
        yield command


def _serve(**values: Any) -> None:
    with patch.object(serve, "start") as start:
        serve.serve(**values)
    # Which ports are free and which models are cached is this machine's.
    with patch.multiple(options, check_ports=DEFAULT, check_model=DEFAULT):
        options.check_options(start.call_args.args[0], GPUS)


def _simulate(schedule: list[str], sweep: list[str] | None, num_generations: int | None, **values: Any) -> None:
    names = simulate.schedule_names(schedule, values["more_schedules"] or [])
    settings_of(names, num_generations or 8, parse_sweep(sweep or []))


def _profile(urls: list[str], **values: Any) -> None:
    ProfileOptions(tuple(urls))


def _push(file: Path, without: list[str] | None, **values: Any) -> None:
    names = yaml.safe_load((ROOT / file).read_text())
    if unknown := [name for name in without or () if name not in names]:
        raise ValueError(f"{file} has no field {', '.join(unknown)}")


def _no_check(*words: Any, **values: Any) -> None:
    """For what is foreign, or whose values are the reader's own."""


def _accelerate(words: list[str]) -> None:
    if words[:1] != ["launch"]:
        raise ValueError(f"{' '.join(words[:1])} is no command that is known here")
    launch = _parsed(launch_command_parser(), words[1:])
    _python([*(["-m"] if launch.module else []), launch.training_script, *launch.training_script_args])


def _python(words: list[str]) -> None:
    if words[:1] == ["-m"]:
        _module(words[1], words[2:])
    elif words[:1] == ["examples/train_grpo.py"]:
        _train(words[1:])
    else:
        _script(words[0], words[1:])


def _module(name: str, arguments: list[str]) -> None:
    package = name.partition(".")[0]
    if name == "trl_darts.cli":
        _trl_darts(arguments)
    elif package not in FOREIGN and (package not in CHECKED or arguments or find_spec(name) is None):
        raise ValueError(f"{name} is no module that is known here, or its arguments are not")


def _script(path: str, arguments: list[str]) -> None:
    """A script with a parser of its own, which is read as well: to run it would be to import all that it needs."""
    calls = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.Call)]
    adds = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    known = {argument.value for call in adds for argument in call.args if isinstance(argument, ast.Constant)}
    if unknown := [word for word in arguments if word.startswith("-") and word.partition("=")[0] not in known]:
        raise ValueError(f"{path} has no flag {', '.join(unknown)}")


def _train(words: list[str]) -> None:
    """As the script reads them, without the GPUs that its config may need."""
    parser = TrlParser(ARGUMENTS)
    values = {}
    if "--config" in words:
        at = words.index("--config")
        path, words = words[at + 1], [*words[:at], *words[at + 2 :]]
        values = {} if path.startswith(SCHEME) else yaml.safe_load((ROOT / path).read_text())
    parser.set_defaults_with_config(**{**values, **WITHOUT_DEVICE})
    parsed = vars(_parsed(parser, words))
    parser.parse_dict(parsed, allow_extra_keys=True)


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    parser.allow_abbrev = False  # a page writes names out
    with patch.object(parser, "error", _refuse):  # which would end the process
        return parser.parse_args(words)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _make(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    if unknown := [word for word in words if word not in targets]:
        raise ValueError(f"there is no target {', '.join(unknown)}")


def _pip(words: list[str]) -> None:
    listed = re.findall(r"(?:\.|trl-darts)\[([^\]]+)\]", " ".join(words))
    known = metadata("trl-darts").get_all("Provides-Extra") or ()
    if unknown := [extra for extras in listed for extra in extras.split(",") if extra not in known]:
        raise ValueError(f"there is no extra {', '.join(unknown)}")


FOREIGN = ("vllm", "jupyter", "git", "cd", "export", "tee")
VALUES: dict[str, Callable[..., None]] = {"serve": _serve, "simulate": _simulate, "profile": _profile, "push": _push}
PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "trl-darts": _trl_darts,
    "accelerate": _accelerate,
    "python": _python,
    "make": _make,
    "pip": _pip,
    **dict.fromkeys(FOREIGN, _no_check),
}
