"""
`trl-darts report`: one page from what trainings left behind.

`runs` reads (with `logs` and `traces` of the package), `panels`, `timing` and `summary` count, `compare` says over
which steps, `sections`, `costs` and `prediction` lay out, `charts` and `drawing` draw, `page` writes. Nothing here
loads torch.
"""

from .page import write_report
from .runs import Run, read_run, read_runs


__all__ = ["Run", "read_run", "read_runs", "write_report"]
