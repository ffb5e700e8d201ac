"""`trl-darts report`: parses the options, calls `trl_darts.analysis.report`, and prints."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...",
            help="`output_dir` of a training, or a folder with several. The first run is the baseline.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    name: Annotated[
        list[str] | None,
        typer.Option(help="Name of a run, once per run in their order. By default its directory's name."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(help="Step whose first rollout is shown, from 1. By default one that took the median time."),
    ] = None,
    latency_curve: Annotated[
        Path | None,
        typer.Option(help="File of a latency curve, to show predicted against real times.", metavar="FILE"),
    ] = None,
) -> None:
    """
    Write one HTML page about one or several runs: times, rollouts, lengths, rewards and faults.

    Train with `save_rollout_trace=True`. The page contains its figures, so that one file can be mailed or printed.
    Runs of TRL's own GRPOTrainer are read from their last checkpoint.

    Example:

        trl-darts report outputs/grpo outputs/darts --output report.html
    """
    # Loads pandas, which takes a second. `--help` and wrong options should be fast.
    from ..analysis.report import write_report

    typer.echo(write_report(run_dir, output, names=name or (), step=step, latency_curve=latency_curve))
