"""
The whole measurement: each point several times, in rounds of random order, so that whatever disturbs a machine for a
while disturbs a few repetitions of many points and not all of one.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
import numpy as np

from ...engines.vllm_api import VLLMServer, new_session
from ...engines.vllm_server import max_open_files
from ...errors import ConfigurationError, GenerationError
from ...policy import DecodePoint, LatencyProfile, PrefillPoint
from .grid import Grid, GridPoint, ProfileOptions, make_grid
from .measure import REQUEST_TIMEOUT_S, WINDOW_TOKENS, ServerProbe
from .servers import ServerFacts, learn


QUANTILE = 0.1
"""
Of a point's repetitions. Whatever disturbs a measurement makes it slower; of many, the very fastest would be luck.
"""

MAX_FAILURES = 2
"""After which a point that was never measured is not tried again: each time costs a thousand tokens."""

DIGITS = 5  # significant ones, of the numbers of the file: more than are measured

Report = Callable[[int, int, str], None]
"""Called with the measurements done, their number, and what comes next."""


@dataclass(frozen=True)
class ProfileResult:
    """The profile, and the points at which the sequences never all decoded at once."""

    profile: LatencyProfile
    skipped: tuple[GridPoint, ...]


def profile_servers(options: ProfileOptions, report: Report = lambda done, total, what: None) -> ProfileResult:
    """
    Measures servers one after the other at each point, so that they don't compete for the network and this process.

    Args:
        options ([`ProfileOptions`]):
            What is to be measured.
        report (`Callable`, *optional*):
            Called before each measurement.

    Returns:
        [`ProfileResult`]: The profile.

    Raises:
        [`ConfigurationError`]: If a server can't be measured this way. Names the setting.
        [`GenerationError`]: If a server breaks meanwhile.
    """
    try:
        return asyncio.run(_profile(options, report))
    except TimeoutError as error:
        raise GenerationError(
            f"A server took more than {REQUEST_TIMEOUT_S:g} s for a batch. Is it stuck? If it is only slow, lower "
            "`--max-context-tokens` or `--max-batch-size`."
        ) from error
    except aiohttp.ClientError as error:
        raise GenerationError(f"A server was lost: {type(error).__name__} {error}. See its log.") from error


async def _profile(options: ProfileOptions, report: Report) -> ProfileResult:
    async with new_session(options.api_key) as session:
        servers = [VLLMServer(url, session) for url in options.urls]
        facts = [await learn(server) for server in servers]
        check_alike(facts)
        if options.model not in (None, facts[0].model):
            raise ConfigurationError(
                f"`url` must name servers of the model that `tail_of` has ({options.model!r}), and {facts[0].url} has "
                f"{facts[0].model!r}. Name another profile, or leave it out."
            )
        grid = make_grid(facts, options)
        _check_open_files(grid)
        order, *prompts = np.random.default_rng(options.seed).spawn(len(servers) + 1)
        probes = [ServerProbe(*of_server) for of_server in zip(servers, facts, prompts, strict=True)]
        measurement = Measurement(probes, grid, options.repeats, order, report)
        await measurement.run()
    return measurement.result(describe(facts, options))


class Measurement:
    """Rounds over all points and servers. `report` is called before each measurement."""

    def __init__(
        self, probes: Sequence[ServerProbe], grid: Grid, repeats: int, rng: np.random.Generator, report: Report
    ) -> None:
        self.probes, self.grid, self.repeats = probes, grid, repeats
        self._rng = rng
        self._report = report
        self._latencies: dict[GridPoint, list[list[float]]] = {point: [[] for _ in probes] for point in grid.points}
        self._completions: dict[GridPoint, list[float]] = {point: [] for point in grid.points}
        self._prefill: dict[int, list[list[float]]] = {n: [[] for _ in probes] for n in grid.prefill_lengths}
        self._failures: Counter[GridPoint] = Counter()
        # Each batch size once, with its longest context: the prompts of the others are prefixes of these, and whatever
        # a server compiles or captures for a batch size is there afterwards.
        by_length = sorted(grid.points, key=lambda point: point.context_length)
        self._warm_up = list({point.batch_size: point for point in by_length}.values())
        num_points = len(grid.points) + len(grid.prefill_lengths)
        self._num_done, self._total = 0, (num_points * repeats + len(self._warm_up)) * len(probes)

    async def run(self) -> None:
        for point in self._warm_up:
            for probe in self.probes:
                self._next(f"{_words(point)} (warm-up)")
                await probe.warm_up(point)
        for _ in range(self.repeats):
            tasks: list[GridPoint | int] = [*self.grid.points, *self.grid.prefill_lengths]
            for i in self._rng.permutation(len(tasks)):
                for k in self._rng.permutation(len(self.probes)):
                    await self._measure(tasks[i], int(k))
        self._report(self._total, self._total, "done")

    async def _measure(self, task: GridPoint | int, k: int) -> None:
        self._next(f"prompt of {task:,} tokens" if isinstance(task, int) else _words(task))
        if isinstance(task, int):
            self._prefill[task][k].append(await self.probes[k].prefill(task))
        elif self._failures[task] >= MAX_FAILURES and not any(self._latencies[task]):
            return
        elif (decoded := await self.probes[k].decode(task)) is None:
            self._failures[task] += 1
        else:
            self._latencies[task][k].append(decoded.seconds)
            self._completions[task].append(decoded.completion_tokens)
        await self.probes[k].check_weights()

    def _next(self, what: str) -> None:
        self._report(self._num_done, self._total, what)
        self._num_done += 1

    def result(self, metadata: dict[str, Any]) -> ProfileResult:
        """Points and fits. Raises [`GenerationError`] if no point could be measured."""
        measured = [point for point in self.grid.points if all(self._latencies[point])]
        if not measured:
            raise GenerationError(
                "No point could be measured: the sequences of a batch never all decoded at once. Is the server idle?"
            )
        points = []
        for point in measured:
            seconds, spread = reduce(self._latencies[point])
            tokens = point.batch_size * point.context_length + float(np.mean(self._completions[point]))
            middle = float(np.median(seconds))
            points.append(DecodePoint(point.batch_size, point.context_length, tokens, middle, spread, tuple(seconds)))
        prefill = []
        for num_tokens, repeats in self._prefill.items():
            seconds, spread = reduce(repeats)
            prefill.append(PrefillPoint(num_tokens, float(np.median(seconds)), spread))
        about = {**metadata, "repeats": self.repeats, "window_tokens": WINDOW_TOKENS}
        skipped = tuple(point for point in self.grid.points if point not in measured)
        text = json.dumps(LatencyProfile.fit(points, prefill, about).to_dict())
        rounded = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.{DIGITS}g}"))
        return ProfileResult(LatencyProfile.from_dict(rounded), skipped)


def reduce(repeats: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """The low quantile of each server, and the largest distance of a slowest repetition from the fastest one."""
    values = [float(np.quantile(times, QUANTILE)) for times in repeats]
    return values, max(max(times) / min(times) - 1 for times in repeats)


def check_alike(facts: Sequence[ServerFacts]) -> None:
    """Refuses servers that differ in the model, its precision, or how it is divided: they need a profile each."""
    for name in ("model", "dtype", "tensor_parallel_size", "data_parallel_size"):
        values = [getattr(fact, name) for fact in facts]
        if len(set(values)) > 1:
            found = ", ".join(f"{fact.url} has {value!r}" for fact, value in zip(facts, values, strict=True))
            raise ConfigurationError(
                f"`url` must name servers with the same `{name}`, and {found}. Profile them separately."
            )


def describe(facts: Sequence[ServerFacts], options: ProfileOptions) -> dict[str, Any]:
    """What was measured, for the file."""
    first = facts[0]
    same = ("tensor_parallel_size", "data_parallel_size", "dtype", "max_model_len", "max_num_seqs", "kv_cache_tokens")
    return {
        "model": first.model,
        "hardware": options.hardware or _alike(fact.hardware for fact in facts),
        "vllm_version": _alike(fact.vllm_version for fact in facts),
        **{name: getattr(first, name) for name in same},
        "servers": [fact.url for fact in facts],
        "weight_versions": [fact.weight_version for fact in facts],
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _alike(values: Iterable[str | None]) -> str | None:
    return "; ".join(dict.fromkeys(value for value in values if value)) or None


def _words(point: GridPoint) -> str:
    return f"{point.batch_size:,} x {point.context_length:,} tokens"


def _check_open_files(grid: Grid) -> None:
    largest, possible = max(point.batch_size for point in grid.points), max_open_files()
    if largest > possible:
        raise ConfigurationError(
            f"`max_batch_size` ({largest}) must be at most {possible}: each sequence is a connection, and open files "
            "are limited. Raise the limit with `ulimit -n`, or lower it."
        )
