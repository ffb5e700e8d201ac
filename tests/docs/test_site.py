"""
The site.

Invariants:

- It builds strictly: no broken link, anchor or reference, and no page outside the navigation.
- Every field of the config is described, and docstrings are shown as text, not as their source.
- A page has content, in the light and in the dark, and loads nothing from elsewhere.
- Every picture is there twice, drawn for light pages and for dark ones, and a reader sees the one that fits.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from trl import GRPOConfig

from docs.hooks.docstrings import to_markdown
from docs.hooks.links import on_page_markdown
from tests.browser import show
from tests.docs.blocks import PAGES
from trl_darts import DARTSGRPOConfig


ROOT = Path(__file__).resolve().parents[2]


def build(config: Path, site_dir: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    return subprocess.run(
        [*command, "--site-dir", str(site_dir)],
        cwd=config.parent,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


class Text(HTMLParser):
    """The words of a page's article."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.feed(html[html.index("<article") : html.index("</article>")])

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def described(html: str) -> set[str]:
    """Arguments of a page that have words of their own, after their name and type."""
    items = re.findall(r"<strong><code>(\w+)</code></strong> \((.*?)</li>", html, re.DOTALL)
    return {name for name, item in items if re.search(r"\):\s*\w", re.sub(r"<[^>]+>", "", item))}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site."""
    directory = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", directory)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


def test_every_field_of_the_config_is_described(site):
    ours = {field.name for field in fields(DARTSGRPOConfig)} - {field.name for field in fields(GRPOConfig)}
    assert len(ours) > 30
    assert sorted(ours - described((site / "api.html").read_text())) == []


def test_a_field_without_a_description_is_found():
    html = "<li><strong><code>{}</code></strong> (<code>int</code>, defaults to <code>1</code>):\n{}</li>"
    page = html.format("a", "Of <code>b</code>.") + html.format("c", "") + html.format("d", "More.")
    assert described(page) == {"a", "d"}


@pytest.mark.parametrize("page", ["api", "api_policy", "api_scheduling", "api_tools"])
def test_docstrings_are_shown_as_text(site, page):
    text = "".join(Text((site / f"{page}.html").read_text()).words)
    assert not re.search(r"^(Args|Parameters|Returns|Raises):$", text, re.MULTILINE)
    assert not re.search(r"\[`|`\]|<autoref|\[!NOTE\]", text)
    assert len(text) > 3_000


def test_references_lead_to_what_is_documented(site):
    assert 'href="api_policy.html#trl_darts.policy.LatencyCurve"' in (site / "api.html").read_text()


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_is_seen_and_loads_nothing_from_elsewhere(site, tmp_path, dark):
    shot = show(site / "schedules.html", tmp_path, dark=dark)
    assert shot.requests == []
    brightness = shot.pixels.mean(axis=2)
    assert np.median(brightness) < 100 if dark else np.median(brightness) > 200
    assert brightness.std() > 10


def pictures_of(page: Path) -> list[Path]:
    """However they are written."""
    text = page.read_text()
    found = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text) + re.findall(r'<img [^>]*src="([^"]+)"', text)
    return [page.parent / name for name in found]


PICTURES = [(page, picture) for page in PAGES for picture in pictures_of(page)]


def test_each_picture_is_on_a_page():
    assert {picture for _, picture in PICTURES} == set((ROOT / "docs").glob("*.png"))


@pytest.mark.parametrize(("page", "picture"), PICTURES, ids=lambda path: path.name)
def test_pictures_are_drawn_on_white(page, picture):
    """Readable on light and on dark pages."""
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels.std() > 10  # something is drawn


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("![x](assets/nowhere.png)", "nowhere.png"),
        ("[x](nowhere.md)", "nowhere.md"),
        ("[x](other.md#nowhere)", "nowhere"),
        ("[x][trl_darts.Nothing]", "trl_darts.Nothing"),
        ("::: trl_darts.nothing", "trl_darts.nothing"),
    ],
)
def test_a_strict_build_finds_what_is_broken(tmp_path, broken, words):
    shutil.copytree(ROOT / "docs" / "hooks", tmp_path / "docs" / "hooks")
    shutil.copytree(ROOT / "docs" / "assets", tmp_path / "docs" / "assets")
    (tmp_path / "trl_darts").symlink_to(ROOT / "trl_darts")
    settings, _ = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")
    (tmp_path / "mkdocs.yml").write_text(settings)
    (tmp_path / "docs" / "index.md").write_text(f"# Index\n\n{broken}\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\nText.\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    assert words in done.stderr


def test_links_out_of_the_docs():
    text = "See [`a.py`](../benchmarks/a.py), [how](../b.py#L1), [c](c.md), ![d](../d.png)."
    nowhere, somewhere = SimpleNamespace(repo_url=None), SimpleNamespace(repo_url="https://example.org/r/")
    assert on_page_markdown(text, nowhere) == "See `a.py`, how: `b.py#L1`, [c](c.md), ![d](../d.png)."
    linked = on_page_markdown(text, somewhere)
    assert "[`a.py`](https://example.org/r/blob/main/benchmarks/a.py)" in linked
    assert "[how](https://example.org/r/blob/main/b.py#L1)" in linked
    assert "[c](c.md), ![d](../d.png)" in linked


def test_docstrings_become_markdown():
    source = (
        "Does it.\n\nArgs:\n    a (`int`, *optional*, defaults to `1`):\n        Of [`B`] and [`c.D`].\n\n"
        "    > More\n\n    rest:\n        Others.\n\nReturns:\n    `int`: It.\n\n"
        "Raises:\n    [`ValueError`]: If not.\n"
    )
    assert to_markdown(source, {"B": "p.B"}).splitlines() == [
        "Does it.",
        "",
        "**Arguments**",
        "",
        "- **`a`** (`int`, *optional*, defaults to `1`):",
        '    Of <autoref optional identifier="p.B">`B`</autoref> and `D`.',
        "",
        "*More*",
        "",
        "- **`rest`**:",
        "    Others.",
        "",
        "**Returns**",
        "",
        "`int`: It.",
        "",
        "**Raises**",
        "",
        "- `ValueError`: If not.",
    ]
