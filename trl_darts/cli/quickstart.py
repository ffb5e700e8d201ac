"""`trl-darts quickstart`: runs an example that needs neither a server nor a download."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


SCRIPT = Path(__file__).parents[1] / "tiny_reasoner" / "quickstart.py"


def quickstart(
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.", min=1)] = 12,
    output_dir: Annotated[Path, typer.Option(help="Directory of the runs and the picture.")] = Path(
        "outputs/quickstart"
    ),
) -> None:
    """
    Train a tiny model on the CPU with GRPO and with DARTS, and compare them: a table and a picture in a few minutes.

    Example:

        trl-darts quickstart --steps 12
    """
    words = [sys.executable, str(SCRIPT), "--steps", str(steps), "--output-dir", str(output_dir)]
    os.execv(sys.executable, words)
