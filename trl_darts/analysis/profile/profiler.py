"""
The whole measurement: each point several times, in rounds of random order, so that a disturbance of the machine
affects a few repetitions of many points and not all repetitions of one.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from ...engines.vllm_api import VLLMServer, new_session
from ...engines.vllm_server import max_open_files
from ...errors import ConfigurationError, GenerationError
from ...policy import DecodePoint, LatencyProfile, PrefillPoint
from .grid import Grid, GridPoint, ProfileOptions, make_grid
from .probe import REQUEST_TIMEOUT_S, WINDOW_TOKENS, Decoded, ServerProbe
from .profiled_server import check_alike, describe_server, metadata_of


QUANTILE = 0.1  # of a point's repetitions: a disturbance only slows down, and the very fastest would be luck
DIGITS = 5  # significant digits in the file, more than are measured

Task = GridPoint | int  # a batch that decodes, or the length of a prompt
Measured = Mapping[Task, Sequence[Sequence[Decoded]]]  # repetitions on each server
OnProgress = Callable[[int, int, str], None]
"""Called with the number of measurements done, their total, and what comes next."""


@dataclass(frozen=True)
class ProfileResult:
    """The profile, and the points whose sequences never decoded all at once."""

    profile: LatencyProfile
    skipped: tuple[GridPoint, ...]


def profile_servers(
    options: ProfileOptions, on_progress: OnProgress = lambda done, total, what: None
) -> ProfileResult:
    """
    Measures each point on one server after the other, so that they don't compete for the network and this process.

    Args:
        options ([`ProfileOptions`]):
            What to measure.
        on_progress (`Callable`, *optional*):
            Called before each measurement.

    Returns:
        [`ProfileResult`]: The profile.

    Raises:
        [`ConfigurationError`]: If a server can't be measured this way. Names the setting.
        [`GenerationError`]: If a server fails during the measurement.
    """
    try:
        return asyncio.run(_profile(options, on_progress))
    except TimeoutError as error:
        raise GenerationError(
            f"A server took more than {REQUEST_TIMEOUT_S:g} s for a batch. Is it stuck? If it is only slow, lower "
            "`--max-context-tokens` or `--max-batch-size`."
        ) from error
    except aiohttp.ClientError as error:
        raise GenerationError(f"A server was lost: {type(error).__name__} {error}. See its log.") from error


async def _profile(options: ProfileOptions, on_progress: OnProgress) -> ProfileResult:
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
        measured = await measure(probes, grid, options.repeats, order, on_progress)
    return fit(measured, {**metadata_of(described, options.hardware), "repeats": options.repeats})


async def measure(
    probes: Sequence[ServerProbe], grid: Grid, repeats: int, rng: np.random.Generator, on_progress: OnProgress
) -> Measured:
    """Warms up, then measures every task on every server, in `repeats` rounds of random order."""
    tasks: list[Task] = [*grid.points, *grid.prefill_lengths]
    # Each batch size once, with its longest context: the other prompts are prefixes of these, and whatever a server
    # compiles or captures for a batch size is then there.
    by_length = sorted(grid.points, key=lambda point: point.context_length)
    warm_up = {point.batch_size: point for point in by_length}.values()
    cold = [(point, k) for point in warm_up for k in range(len(probes))]
    timed = [
        (tasks[i], int(k))
        for _ in range(repeats)
        for i in rng.permutation(len(tasks))
        for k in rng.permutation(len(probes))
    ]
    total = len(cold) + len(timed)
    for done, (point, k) in enumerate(cold):
        on_progress(done, total, f"{_label(point)} (warm-up)")
        await probes[k].warm_up(point)
    measured: dict[Task, list[list[Decoded]]] = {task: [[] for _ in probes] for task in tasks}
    for done, (task, k) in enumerate(timed, start=len(cold)):
        on_progress(done, total, _label(task))
        if isinstance(task, int):
            measured[task][k].append(Decoded(await probes[k].prefill(task), 0))
        elif (decoded := await probes[k].decode(task)) is not None:
            measured[task][k].append(decoded)
    on_progress(total, total, "done")
    return measured


def fit(measured: Measured, metadata: Mapping[str, Any]) -> ProfileResult:
    """Reduces repetitions to points and fits the models. Raises [`GenerationError`] if no point could be measured."""
    points: list[DecodePoint] = []
    prefill: list[PrefillPoint] = []
    skipped: list[GridPoint] = []
    for task, servers in measured.items():
        if isinstance(task, GridPoint) and not all(servers):
            skipped.append(task)
            continue
        times = [[decoded.seconds for decoded in own] for own in servers]
        seconds = tuple(float(np.quantile(own, QUANTILE)) for own in times)
        middle, spread = float(np.median(seconds)), max(max(own) / min(own) - 1 for own in times)
        if isinstance(task, int):
            prefill.append(PrefillPoint(task, middle, spread))
            continue
        tokens = float(np.mean([decoded.completion_tokens for own in servers for decoded in own]))
        tokens += task.batch_size * task.context_length
        points.append(DecodePoint(task.batch_size, task.context_length, tokens, middle, spread, seconds))
    if not points:
        raise GenerationError(
            "No point could be measured: the sequences of a batch never all decoded at once. Is the server idle?"
        )
    text = json.dumps(LatencyProfile.fit(points, prefill, {**metadata, "window_tokens": WINDOW_TOKENS}).to_dict())
    rounded = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.{DIGITS}g}"))
    return ProfileResult(LatencyProfile.from_dict(rounded), tuple(skipped))


def _label(task: Task) -> str:
    if isinstance(task, int):
        return f"prompt of {task:,} tokens"
    return f"{task.batch_size:,} x {task.context_length:,} tokens"


def _check_open_files(grid: Grid) -> None:
    largest, possible = max(point.batch_size for point in grid.points), max_open_files()
    if largest > possible:
        raise ConfigurationError(
            f"`max_batch_size` ({largest}) must be at most {possible}: each sequence is a connection, and open files "
            "are limited. Raise the limit with `ulimit -n`, or lower it."
        )
