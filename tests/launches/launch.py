"""
`accelerate launch` whose two processes are forks of this one: `launch.py LOG --config_file FILE … -m MODULE …`.

Accelerate reads its configuration and sets the environment itself; only torch's agent, which would start two fresh
interpreters, is replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.forks import become


NUM_PROCESSES = 2


def log_of(log: Path, rank: int) -> Path:
    """What that process says."""
    return log.with_name(f"{log.name}.rank{rank}")


def run_forks(log: Path, args: Any) -> None:
    """As torch's agent: all get their ranks, and where one fails the other is ended."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(log, rank, args)) for rank in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    while running := [process for process in processes if process.exitcode is None]:
        wait([process.sentinel for process in running])
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
    if any(process.exitcode for process in processes):
        sys.exit(1)


def _rank(log: Path, rank: int, args: Any) -> None:
    size = str(NUM_PROCESSES)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.master_port))
    become([args.training_script, *args.training_script_args], log_of(log, rank))


if __name__ == "__main__":
    import torch.distributed.run
    from accelerate.commands.launch import launch_command, launch_command_parser

    torch.distributed.run.run = partial(run_forks, Path(sys.argv[1]))
    launch_command(launch_command_parser().parse_args(sys.argv[2:]))
