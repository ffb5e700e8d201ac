"""
The notebook of `examples/notebooks`.

Invariants:

- It runs as a user runs it, ends in a picture, and none of our code warns.
- What is committed is one whole run, without noise or traces of a machine.
- The cells with the settings differ in two names.
"""

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import trl_darts
from tests.test_docs import EXTERNAL, LINK


ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "notebooks" / "drop_in.ipynb"
PACKAGE = Path(trl_darts.__file__).parent
NAMES = {"GRPOConfig": "DARTSGRPOConfig", "GRPOTrainer": "DARTSGRPOTrainer"}


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def streams(cells: list[nbformat.NotebookNode]) -> str:
    """What cells printed, on both streams."""
    return "".join(output.text for cell in cells for output in cell.outputs if output.output_type == "stream")


def pictures(cell: nbformat.NotebookNode) -> list[bytes]:
    encoded = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    return [base64.b64decode(text) for text in encoded]


def execute(output_dir: Path, cwd: Path) -> list[nbformat.NotebookNode]:
    """Runs the notebook for two steps per trainer; returns its code cells."""
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", os.path.relpath(NOTEBOOK, cwd)]
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | {"MAX_STEPS": "2"}
    done = subprocess.run(
        [*command, "--output-dir", str(output_dir)], cwd=cwd, env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return code_cells(output_dir / NOTEBOOK.name)


@pytest.mark.parametrize(
    "cwd", [ROOT, pytest.param(NOTEBOOK.parent, marks=pytest.mark.slow)], ids=["root", "own_folder"]
)
def test_it_runs(tmp_path, cwd):
    cells = execute(tmp_path, cwd)
    assert str(PACKAGE) not in streams(cells)
    assert len(pictures(cells[-1])) == 1
    (table,) = (cell for cell in cells if cell.id == "table")
    text = table.outputs[0].data["text/plain"]
    assert "DARTSGRPOTrainer" in text
    assert "tokens aborted" in text


def test_the_committed_run_is_whole_and_clean():
    cells = code_cells(NOTEBOOK)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert streams(cells) == ""
    assert all(cell.metadata == {} for cell in cells)
    assert not re.search(r"/(?:tmp|home|root|work|usr)/", NOTEBOOK.read_text())
    metadata = nbformat.read(NOTEBOOK, as_version=4).metadata
    assert metadata.kernelspec.name == "python3"
    assert set(metadata) == {"kernelspec", "language_info"}
    (picture,) = pictures(cells[-1])
    assert 10_000 < len(picture) < 100_000


def test_two_names_change():
    source = {cell.id: cell.source for cell in code_cells(NOTEBOOK)}
    ours, theirs = source["train-darts"], source["train-grpo"]
    changed = [
        pair for pair in zip(re.split(r"(\W)", theirs), re.split(r"(\W)", ours), strict=True) if len({*pair}) > 1
    ]
    assert changed == list(NAMES.items())


def test_links_lead_somewhere():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    targets = [
        target for cell in notebook.cells if cell.cell_type == "markdown" for target in LINK.findall(cell.source)
    ]
    relative = [target.split("#")[0] for target in targets if not target.startswith(EXTERNAL)]
    assert len(relative) >= 3
    assert [target for target in relative if not (NOTEBOOK.parent / target).exists()] == []
