"""
One harness for all benchmarks: which runs there are, in which order, which of them are missing, and where they go.

    python -m benchmarks.NAME [--quick] [--seeds 0,1] [--arms grpo,default] [--results DIR] [--minutes 60]
                              [--only-tables]

A script declares a [`Benchmark`]: its axes, such as worlds, seeds and arms, how one run is made, and its tables. Runs
are made in the order of the axes, the last axis fastest, so that the arms of a seed follow each other. Each run is
stored as soon as it ends, with the date, versions and the machine. A later call makes the runs that are missing. At
the end the tables of all stored runs are printed. `--quick` makes small runs in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.lines import RESULTS, append, origin, read, rounded


Run = dict[str, Any]
"""What one run is: a value of each axis, and the options."""


class Shared:
    """
    What several runs use, such as a server. It is opened by the first run that needs it, and closed when a run needs
    another one of the same function, or at the end.
    """

    def __init__(self, results: Path) -> None:
        self.results = results
        self._open: list[tuple[Any, tuple[Any, ...], Any, ExitStack]] = []

    def __call__(self, make: Callable[..., AbstractContextManager[Any]], *arguments: Any) -> Any:
        """Returns what `make(*arguments)` yields."""
        for place, (other, own, value, _) in enumerate(self._open):
            if other is make:
                if own == arguments:
                    return value
                self.close(place)
                break
        stack = ExitStack()
        value = stack.enter_context(make(*arguments))
        self._open.append((make, arguments, value, stack))
        return value

    def close(self, first: int = 0) -> None:
        """Closes what was opened as number `first` or later, the last one first."""
        while len(self._open) > first:
            self._open.pop()[-1].close()


@dataclass(frozen=True)
class Benchmark:
    """
    What a script measures.

    Args:
        name (`str`):
            Name of its file of results.
        doc (`str`):
            What `--help` says.
        axes (`Mapping[str, Sequence]`):
            All values of each axis, the outermost axis first. Of numbers, others can be asked for.
        run (`Callable`):
            `run(shared, **run)` makes one run and returns what is stored beside the values of the axes, as one line or
            several.
        table (`Callable`):
            Returns the tables of all stored runs, from the folder of the results.
        options (`Mapping[str, Any]`, *optional*):
            Further options with their defaults.
        usual (`Mapping[str, Sequence]`, *optional*):
            Values of axes that run unless others are asked for.
        quick (`Mapping[str, Any]`, *optional*):
            Values of axes and options with `--quick`. By default, an axis of numbers has its first value.
        file (`Callable`, *optional*):
            Name of a run's file, by default `name.jsonl`. A `.json` file holds one run.
        named (`Sequence[str]`, *optional*):
            Axes that the file's name tells, which its lines need not have.
        facts (`Callable`, *optional*):
            What else must be the same for a stored run to be the one that is asked for.
        check (`Callable`, *optional*):
            Returns what is wrong with a run. The exit status is then 1.
        baseline (`str`, *optional*):
            An arm that always runs.
        resumes (`bool`, *optional*):
            Whether runs that are stored are left out. Otherwise each call measures again, and the last one counts.
        exists (`Callable`, *optional*):
            Whether a combination of values is a run.
    """

    name: str
    doc: str
    axes: Mapping[str, Sequence[Any]]
    run: Callable[..., dict[str, Any] | list[dict[str, Any]]]
    table: Callable[[Path], str]
    options: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    file: Callable[[Run], str] | None = None
    named: Sequence[str] = ()
    facts: Callable[[Run], dict[str, Any]] = lambda run: {}
    check: Callable[[Mapping[str, Any]], str | None] = lambda line: None
    baseline: str | None = None
    resumes: bool = True
    exists: Callable[[Run], bool] = lambda run: True

    def path(self, results: Path, run: Run) -> Path:
        """Returns the file of a run."""
        return results / (self.file(run) if self.file else f"{self.name}.jsonl")

    def stored(self, results: Path, run: Run) -> dict[str, Any] | None:
        """Returns the last line of a run. Exits if it was made in another way than is asked for."""
        path, compared = self.path(results, run), [name for name in self.axes if name not in self.named]
        found = [line for line in load(path) if all(line.get(name) == run[name] for name in compared)]
        for name, asked in self.facts(run).items() if found else ():
            if (own := found[-1].get(name, asked)) != asked:
                sys.exit(
                    f"error: `--results` ({results}) holds {path.name} with {name} {own}, and {asked} is asked for. "
                    "Ask for what is there, name another folder, or remove that file."
                )
        return found[-1] if found else None

    def runs(self, options: argparse.Namespace) -> Iterator[Run]:
        """Yields the runs that are asked for, in their order."""
        further = {name: getattr(options, name) for name in self.options}
        for values in product(*(getattr(options, plural(axis)) for axis in self.axes)):
            run = {**dict(zip(self.axes, values, strict=True)), **further}
            if self.exists(run):
                yield run


def plural(axis: str) -> str:
    """Returns the name of an axis's option."""
    return axis if axis.endswith("s") else f"{axis}s"


def alternate(arms: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[Any]]:
    """Calls all arms in turn, in an order that rotates. The first round warms up, and is left out."""
    found: dict[str, list[Any]] = {name: [] for name in arms}
    names = list(arms)
    for repeat in range(repeats + 1):
        first = repeat % len(names)
        for name in [*names[first:], *names[:first]]:
            own = arms[name]()
            found[name] += [own] if repeat else []
    return found


def load(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a `.jsonl` file, or the object of a `.json` file; none if it does not exist."""
    if path.suffix == ".jsonl" or not path.exists():
        return read(path)
    return [json.loads(path.read_text())]


def store(path: Path, line: Mapping[str, Any]) -> None:
    """Appends a line to a `.jsonl` file, or writes a `.json` file as a whole."""
    line = rounded(line) | origin()
    if path.suffix == ".jsonl":
        return append(path, line)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(line))
    part.rename(path)


def parse(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line."""
    parser = argparse.ArgumentParser(
        description=benchmark.doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="small runs, which are not kept: does it run?")
    parser.add_argument("--results", type=Path, help="folder of the results (default: benchmarks/results)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins later")
    parser.add_argument("--only-tables", action="store_true", help="run nothing")
    for axis, values in benchmark.axes.items():
        words = ", ".join(map(str, values)).replace("%", "%%")
        parser.add_argument(f"--{plural(axis)}", help=f"some of these, with commas between them: {words}")
        for value in values if axis == "arm" and all(re.fullmatch("[a-z_]+", value) for value in values) else ():
            flag = f"--{value.replace('_', '-')}"
            parser.add_argument(flag, dest="arms", action="store_const", const=value, help="this arm alone")
    for name, value in benchmark.options.items():
        kind = float if value is None else type(value)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None, help=f"default: {value}")
    options = parser.parse_args(arguments)
    for axis, values in benchmark.axes.items():
        usual = benchmark.usual.get(axis, values)
        if options.quick:
            usual = benchmark.quick.get(axis, usual if isinstance(usual[0], str) else usual[:1])
        given = getattr(options, plural(axis))
        chosen = list(usual) if given is None else _chosen(parser, axis, values, given)
        if axis == "arm" and benchmark.baseline is not None and benchmark.baseline not in chosen:
            chosen.insert(0, benchmark.baseline)
        setattr(options, plural(axis), chosen)
    for name, value in benchmark.options.items():
        if getattr(options, name) is None:
            setattr(options, name, benchmark.quick.get(name, value) if options.quick else value)
    return options


def _chosen(parser: argparse.ArgumentParser, axis: str, values: Sequence[Any], text: str) -> list[Any]:
    """Returns the values that a text names. Commas inside a name are followed by a space."""
    words, known = re.split(r",(?! )", text), {str(value): value for value in values}
    if not isinstance(values[0], str):
        with_number = [word for word in words if not re.fullmatch(r"[\d.e-]+", word)]
        if not with_number:
            return [known.get(word, type(values[0])(word)) for word in words]
        parser.error(f"--{plural(axis)} ({text}) must be numbers with commas between them.")
    if unknown := set(words) - set(known):
        parser.error(f"--{plural(axis)} ({', '.join(sorted(unknown))}) must be some of {', '.join(known)}.")
    return [value for name, value in known.items() if name in words]


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> None:
    """Makes the runs that are missing, prints the tables, and exits with 1 if a run failed its check."""
    options = parse(benchmark, arguments)
    if arguments is None:  # a command, which exits normally when it is terminated, so that servers are stopped
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with quiet(), tempfile.TemporaryDirectory() as directory:
        results = options.results or (Path(directory) if options.quick else RESULTS)
        wrong = [] if options.only_tables else run_missing(benchmark, options, results)
        print(f"\n{benchmark.table(results)}".rstrip())
    for message in wrong:
        print(f"error: {message}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


@contextmanager
def quiet() -> Iterator[None]:
    """Inside this context, libraries log errors alone."""
    loggers = [logging.getLogger(name) for name in ("transformers", "trl_darts")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def run_missing(benchmark: Benchmark, options: argparse.Namespace, results: Path) -> list[str]:
    """Makes and stores the runs that have no line yet. Returns what is wrong with them."""
    wrong, shared, deadline = [], Shared(results), time.monotonic() + 60 * options.minutes
    runs = [*benchmark.runs(options)]
    missing = [run for run in runs if benchmark.stored(results, run) is None] if benchmark.resumes else runs
    try:
        for run in missing:
            if time.monotonic() > deadline:
                break
            found = benchmark.run(shared, **run)
            for own in found if isinstance(found, list) else [found]:
                line = {**{axis: run[axis] for axis in benchmark.axes}, **benchmark.facts(run), **own}
                store(benchmark.path(results, run), line)
                wrong += filter(None, [benchmark.check(line)])
                print(time.strftime("%H:%M:%S"), *(run[axis] for axis in benchmark.axes), *_scalars(own), flush=True)
    finally:
        shared.close()
    return wrong


def _scalars(found: Mapping[str, Any]) -> list[str]:
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return [f"{name}={value:.5g}" for name, value in numbers.items()]
