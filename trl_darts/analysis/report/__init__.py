"""
`trl-darts report`: one page from what trainings left behind.

`runs` reads, `tables` counts, `comparison` says what can be compared, `savings` what was saved and by what, `charts`
draws, `panels` lays out, `page` writes. Nothing here loads torch.
"""

from .page import write_report
from .runs import Run, read_run, read_runs


__all__ = ["Run", "read_run", "read_runs", "write_report"]
