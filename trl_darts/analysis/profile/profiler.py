"""
The whole measurement: each point several times, in rounds of random order, so that a disturbance of the machine
affects a few repetitions of many points and not all repetitions of one.
"""

import asyncio
import json
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
from .profiled_server import ProfiledServer, describe_server


QUANTILE = 0.1  # of a point's repetitions: a disturbance only slows down, and the very fastest would be luck
DIGITS = 5  # significant digits in the file, more than are measured

Report = Callable[[int, int, str], None]
"""Called with the number of measurements done, their total, and what comes next."""


@dataclass(frozen=True)
class ProfileResult:
    """The profile, and the points whose sequences never decoded all at once."""

    profile: LatencyProfile
    skipped: tuple[GridPoint, ...]


def profile_servers(options: ProfileOptions, report: Report = lambda done, total, what: None) -> ProfileResult:
    """
    Measures each point on one server after the other, so that they don't compete for the network and this process.

    Args:
        options ([`ProfileOptions`]):
            What to measure.
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
        described = [await describe_server(server) for server in servers]
        check_alike(described)
        first = described[0]
        if options.model not in (None, first.model):
            raise ConfigurationError(
                f"`url` must name servers of the model that `tail_of` has ({options.model!r}), and {first.url} has "
                f"{first.model!r}. Name another profile, or leave it out."
            )
        grid = make_grid(described, options)
        _check_open_files(grid)
        order, *prompts = np.random.default_rng(options.seed).spawn(len(servers) + 1)
        probes = [ServerProbe(*of_server) for of_server in zip(servers, described, prompts, strict=True)]
        measurement = Measurement(probes, grid, options.repeats, order, report)
        await measurement.run()
    return measurement.result(describe(described, options))


class Measurement:
    """Rounds over all points and servers."""

    def __init__(
        self, probes: Sequence[ServerProbe], grid: Grid, repeats: int, rng: np.random.Generator, report: Report
    ) -> None:
        self.probes, self.grid, self.repeats = probes, grid, repeats
        self._rng = rng
        self._report = report
        self._tasks: list[GridPoint | int] = [*grid.points, *grid.prefill_lengths]
        self._seconds: dict[GridPoint | int, list[list[float]]] = {task: [[] for _ in probes] for task in self._tasks}
        self._completions: dict[GridPoint, list[float]] = {point: [] for point in grid.points}
        # Each batch size once, with its longest context: the other prompts are prefixes of these, and whatever a
        # server compiles or captures for a batch size is then there.
        by_length = sorted(grid.points, key=lambda point: point.context_length)
        self._warm_up = list({point.batch_size: point for point in by_length}.values())
        self._num_done, self._total = 0, (len(self._tasks) * repeats + len(self._warm_up)) * len(probes)

    async def run(self) -> None:
        for point in self._warm_up:
            for probe in self.probes:
                self._next(f"{_words(point)} (warm-up)")
                await probe.warm_up(point)
        for _ in range(self.repeats):
            for i in self._rng.permutation(len(self._tasks)):
                for k in self._rng.permutation(len(self.probes)):
                    await self._measure(self._tasks[i], int(k))
        self._report(self._total, self._total, "done")

    async def _measure(self, task: GridPoint | int, k: int) -> None:
        probe, seconds = self.probes[k], self._seconds[task]
        self._next(f"prompt of {task:,} tokens" if isinstance(task, int) else _words(task))
        if isinstance(task, int):
            seconds[k].append(await probe.prefill(task))
        elif (decoded := await probe.decode(task)) is not None:
            seconds[k].append(decoded.seconds)
            self._completions[task].append(decoded.completion_tokens)

    def _next(self, what: str) -> None:
        self._report(self._num_done, self._total, what)
        self._num_done += 1

    def result(self, metadata: dict[str, Any]) -> ProfileResult:
        """Points and fits. Raises [`GenerationError`] if no point could be measured."""
        points, skipped = [], []
        for point in self.grid.points:
            if not all(self._seconds[point]):
                skipped.append(point)
                continue
            seconds, spread = reduce(self._seconds[point])
            tokens = point.batch_size * point.context_length + float(np.mean(self._completions[point]))
            middle = float(np.median(seconds))
            points.append(DecodePoint(point.batch_size, point.context_length, tokens, middle, spread, tuple(seconds)))
        if not points:
            raise GenerationError(
                "No point could be measured: the sequences of a batch never all decoded at once. Is the server idle?"
            )
        prefill = []
        for num_tokens in self.grid.prefill_lengths:
            seconds, spread = reduce(self._seconds[num_tokens])
            prefill.append(PrefillPoint(num_tokens, float(np.median(seconds)), spread))
        about = {**metadata, "repeats": self.repeats, "window_tokens": WINDOW_TOKENS}
        text = json.dumps(LatencyProfile.fit(points, prefill, about).to_dict())
        rounded = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.{DIGITS}g}"))
        return ProfileResult(LatencyProfile.from_dict(rounded), tuple(skipped))


def reduce(repeats: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """The low quantile of each server, and by how much its slowest repetition exceeds its fastest, at most."""
    values = [float(np.quantile(times, QUANTILE)) for times in repeats]
    return values, max(max(times) / min(times) - 1 for times in repeats)


def check_alike(servers: Sequence[ProfiledServer]) -> None:
    """Refuses servers that differ in model, precision or layout: each kind needs a profile of its own."""
    for name in ("model", "dtype", "tensor_parallel_size", "data_parallel_size"):
        values = [getattr(server, name) for server in servers]
        if len(set(values)) > 1:
            found = ", ".join(f"{server.url} has {value!r}" for server, value in zip(servers, values, strict=True))
            raise ConfigurationError(
                f"`url` must name servers with the same `{name}`, and {found}. Profile them separately."
            )


def describe(servers: Sequence[ProfiledServer], options: ProfileOptions) -> dict[str, Any]:
    """What was measured, for the file."""
    same = ("tensor_parallel_size", "data_parallel_size", "dtype", "max_model_len", "max_num_seqs", "kv_cache_tokens")
    return {
        "model": servers[0].model,
        "hardware": options.hardware or _joined(server.hardware for server in servers),
        "vllm_version": _joined(server.vllm_version for server in servers),
        **{name: getattr(servers[0], name) for name in same},
        "servers": [server.url for server in servers],
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _joined(values: Iterable[str | None]) -> str | None:
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
