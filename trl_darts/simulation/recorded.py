"""A workload like a recorded run's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from ..scheduling import FinishReason
from .lengths import RecordedLengths
from .workload import Workload


if TYPE_CHECKING:
    import pandas as pd


def recorded_workload(
    run_dir: Path,
    prompts_per_step: int | None = None,
    max_completion_length: int | None = None,
    num_generations: int | None = None,
    more: Mapping[str, Any] | None = None,
) -> tuple[Workload, int]:
    """
    Reads the traces that `save_rollout_trace=True` left.

    Args:
        run_dir (`Path`):
            The run's `output_dir`.
        prompts_per_step (`int`, *optional*):
            Defaults to the prompts that the run trained on per rollout.
        max_completion_length (`int`, *optional*):
            Defaults to the run's, as its log says, or else to its longest candidate.
        num_generations (`int`, *optional*):
            Defaults to the run's.
        more (`Mapping[str, Any]`, *optional*):
            Further fields of [`Workload`].

    Returns:
        `tuple[Workload, int]`: The workload, and its rows per prompt.

    Raises:
        [`ConfigurationError`]: If there are no traces, they lack columns, or the log can't be read.
    """
    traces = recorded_traces(run_dir)
    traces = traces[~traces["carried_over"]]  # they come again, with all their tokens
    trained_on = traces[traces["selected"]].groupby(["step", "micro"])
    if not len(trained_on):
        raise ConfigurationError(
            f"`--trace` ({str(run_dir)!r}) must be a run with rows that were trained on, and has none. Let it train "
            "for a step."
        )
    by_prompt = traces.groupby("prompt_key", sort=False)
    lengths = RecordedLengths(
        [own.tolist() for _, own in by_prompt["length"]],
        [(own != FinishReason.STOP.value).tolist() for _, own in by_prompt["finish_reason"]],
    )
    batch = int(trained_on["group"].nunique().median())
    rows = int(trained_on["group"].value_counts().iloc[0])
    workload = Workload(
        lengths,
        min(batch, lengths.num_prompts) if prompts_per_step is None else prompts_per_step,
        _limit(run_dir, traces) if max_completion_length is None else max_completion_length,
        prompt_tokens=int(traces["num_prompt_tokens"].mean()),
        **(more or {}),
    )
    return workload, rows if num_generations is None else num_generations


def recorded_traces(run_dir: Path) -> pd.DataFrame:
    """
    The traces of a run, one row per candidate, see [`read_traces`].

    Args:
        run_dir (`Path`):
            The run's `output_dir`.

    Raises:
        [`ConfigurationError`]: If there are none, or they lack columns.
    """
    from ..telemetry.traces import read_traces  # reads Parquet with pandas, which takes a second to import

    traces, _ = read_traces(run_dir)
    if not len(traces):
        raise ConfigurationError(
            f"`--trace` ({str(run_dir)!r}) must be the `output_dir` of a run with `save_rollout_trace=True`, and has "
            "no `rollouts/rollout_*.parquet`."
        )
    return traces


def _limit(run_dir: Path, traces: pd.DataFrame) -> int:
    """`max_completion_length` of the run, as its log says, or else its longest candidate."""
    from ..telemetry.log import read_log  # as above

    settings, _, _, _ = read_log(run_dir)
    limit = settings.get("max_completion_length")
    return limit if isinstance(limit, int) else int(traces["length"].max())
