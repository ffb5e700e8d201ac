"""
`trl-darts report`: one page about one or several trainings.

`runs` reads them, `tables` has the numbers, `verdict` compares them, `panels` chooses what is shown, `charts` draws,
`page` writes. Nothing here loads torch.
"""

from .page import write_report
from .runs import Run, read_run, read_runs


__all__ = ["Run", "read_run", "read_runs", "write_report"]
