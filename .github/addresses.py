"""
Writes the repository's address where readers look for it: the package's metadata, the citation, the site, and a badge
on the notebook that runs on Colab. A fork may commit the result; releases and the site do it by themselves.

    python .github/addresses.py https://github.com/OWNER/NAME
"""

import json
import sys
from pathlib import Path


NOTEBOOK = "examples/notebooks/drop_in.ipynb"


def main(address: str) -> None:
    """Edits files of the working directory. A second time, it changes nothing."""
    if (name := address.removeprefix("https://github.com/")).count("/") != 1:
        sys.exit(f"`address` ({address!r}) must be that of a repository, such as https://github.com/OWNER/NAME.")
    urls = {
        "Repository": address,
        "Documentation": f"{address}/tree/main/docs",
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
    }
    insert("pyproject.toml", "[project.urls]\n", "".join(f'{label} = "{url}"\n' for label, url in urls.items()))
    insert("CITATION.cff", "license: Apache-2.0\n", f"repository-code: {address}\n")
    insert("mkdocs.yml", "site_name: trl_darts\n", f"repo_url: {address}\n")
    colab = "https://colab.research.google.com"
    badge = f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({colab}/github/{name}/blob/main/{NOTEBOOK})\n\n"
    insert(NOTEBOOK, '"# Two names change\\n",\n    "\\n",\n', f"    {json.dumps(badge)},\n")


def insert(path: str, anchor: str, text: str) -> None:
    """Inserts text after a line that a file has once, unless it is there."""
    file = Path(path)
    before, found, after = file.read_text(encoding="utf-8").partition(anchor)
    if not found:
        sys.exit(f"`{path}` must have {anchor!r}, after which the address is written.")
    if not after.startswith(text):
        file.write_text(before + anchor + text + after, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
