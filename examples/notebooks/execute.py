"""
Executes this folder's notebooks in place and leaves what is committed: outputs, without what libraries print, without
times and machine.

    python examples/notebooks/execute.py
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient


FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}).execute()
        notebook.metadata = nbformat.from_dict(METADATA)
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
            for output in cell.outputs:
                if output.output_type == "stream":
                    print(f"{path.name}, cell {cell.id}, left out: {output.text}", end="")
            cell.outputs = [output for output in cell.outputs if output.output_type != "stream"]
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
