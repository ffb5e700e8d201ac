"""
The notebooks of `examples/notebooks`.

Invariants:

- Each runs as a user runs it, with fewer steps, prompts and tokens, and none of our code warns.
- What is committed is one whole run, without noise or traces of a machine.
- In `drop_in`, the cells with the settings differ in two names.
"""

import base64
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat
import pytest

import trl_darts
from tests.test_docs import broken_links


ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "notebooks"
DROP_IN, READ_RUN = FOLDER / "drop_in.ipynb", FOLDER / "read_my_own_run.ipynb"
SMOLLM2 = FOLDER / "smollm2.ipynb"
PACKAGE = Path(trl_darts.__file__).parent


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def streams(cells: list[nbformat.NotebookNode]) -> str:
    """What cells printed, on both streams."""
    return "".join(output.text for cell in cells for output in cell.outputs if output.output_type == "stream")


def pictures(cell: nbformat.NotebookNode) -> list[bytes]:
    encoded = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    return [base64.b64decode(text) for text in encoded]


SHORT = {"max_completion_length=256": "max_completion_length=64"}


def execute(
    notebook: Path, folder: Path, max_steps: int, changes: Mapping[str, str], timeout_s: float = 400
) -> dict[str, nbformat.NotebookNode]:
    """Runs a notebook in an empty folder, in other sizes; returns its code cells by their names."""
    text = notebook.read_text()
    for given, small in changes.items():
        assert given in text
        text = text.replace(given, small)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / notebook.name).write_text(text)
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--inplace", "--execute", notebook.name]
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | {"MAX_STEPS": str(max_steps)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = code_cells(folder / notebook.name)
    assert str(PACKAGE) not in streams(cells)
    return {cell.id: cell for cell in cells}


def test_drop_in_runs(tmp_path):
    cells = execute(DROP_IN, tmp_path, 1, SHORT | {"make_dataset(64,": "make_dataset(32,"})
    assert len(pictures(cells["plot"])) == 1
    text = cells["table"].outputs[0].data["text/plain"]
    assert "DARTSGRPOTrainer" in text
    assert "tokens aborted" in text


def test_read_my_own_run_runs(tmp_path):
    few = {"NUM_PROMPTS = 32": "NUM_PROMPTS = 16"}  # they come back after two steps
    cells = execute(READ_RUN, tmp_path, 4, SHORT | few)
    assert [len(pictures(cells[name])) for name in ("lengths", "occupancy")] == [1, 1]
    shown = {name: cells[name].outputs[-1].data["text/plain"] for name in ("outcomes", "budget", "report", "what-if")}
    assert "kept" in shown["outcomes"]
    assert "new" in shown["budget"]
    assert "report.html" in shown["report"]
    assert "long_end_patience=2.0" in shown["what-if"]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_smollm2_runs(tmp_path):
    """With the checkpoint that `make smollm2` makes, as `make test_slow` does."""
    if not (ROOT / "examples" / "smollm2" / "checkpoint" / "config.json").exists():
        pytest.skip("Needs the checkpoint: run `make smollm2`.")
    small = {"max_completion_length=256": "max_completion_length=32"}
    cells = execute(SMOLLM2, tmp_path, 1, small, timeout_s=1500)
    assert len(pictures(cells["plot"])) == 1
    assert "seconds of the rollout" in cells["table"].outputs[0].data["text/plain"]


@pytest.mark.parametrize("notebook", [DROP_IN, READ_RUN], ids=lambda notebook: notebook.stem)
def test_the_committed_run_is_whole_and_clean(notebook):
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert streams(cells) == ""
    assert all(cell.metadata == {} for cell in cells)
    assert not re.search(r"/(?:tmp|home|root|work|usr)/", notebook.read_text())
    metadata = nbformat.read(notebook, as_version=4).metadata
    assert metadata.kernelspec.name == "python3"
    assert set(metadata) == {"kernelspec", "language_info"}
    shown = [picture for cell in cells for picture in pictures(cell)]
    assert shown
    assert all(10_000 < len(picture) < 100_000 for picture in shown)


def test_two_names_change():
    source = {cell.id: cell.source for cell in code_cells(DROP_IN)}
    theirs, ours = (re.split(r"(\W)", source[name]) for name in ("train-grpo", "train-darts"))
    changed = {pair for pair in zip(theirs, ours, strict=True) if len({*pair}) > 1}
    assert changed == {("GRPOConfig", "DARTSGRPOConfig"), ("GRPOTrainer", "DARTSGRPOTrainer")}


@pytest.mark.parametrize("notebook", [DROP_IN, READ_RUN, SMOLLM2], ids=lambda notebook: notebook.stem)
def test_links_lead_somewhere(notebook):
    cells = nbformat.read(notebook, as_version=4).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert text.count("](") >= 3
    assert broken_links(notebook, text) == []
