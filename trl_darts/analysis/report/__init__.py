"""
`trl-darts report`: one page from what trainings left behind.

`runs` reads them, `tables` counts, `estimates` has the intervals, `verdict` says what compares and what was saved,
`panels` draws, `page` writes. Nothing here loads torch.
"""

from .page import write_report
from .runs import Run, read_run, read_runs


__all__ = ["Run", "read_run", "read_runs", "write_report"]
