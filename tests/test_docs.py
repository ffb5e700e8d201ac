"""What the documentation says exists: paths and names, metrics, links, and the order of calls in the picture."""

import ast
import re
from dataclasses import field, fields, make_dataclass
from functools import cache
from pathlib import Path

import pytest
from trl import GRPOConfig

from docs.hooks.docstrings import to_markdown
from docs.hooks.links import on_page_markdown
from docs.hooks.settings_table import PAGE, settings_page, table_row
from trl_darts import DARTSGRPOConfig
from trl_darts.policy.audit import AuditedGroup, Audits
from trl_darts.scheduling import Admission, GroupSummary, Occupancy
from trl_darts.telemetry.metrics import RolloutRecord, TailRecord, buffer_metrics, rollout_metrics
from trl_darts.training.rows import BufferedRows


ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING"))]
PAGES.append(ROOT / "benchmarks" / "REPORT.md")
REFERENCE = re.compile(r"`([\w./-]+(?:\.(?:py|yaml|md)|/))(?:::([\w.]+))?`")
FOLDERS = ("", "trl_darts", "tests")  # tests/PAPERS.md leaves the last two out
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)|<img [^>]*src=\"([^\"]+)\"")
METRIC = re.compile(r"""["'](darts/\w+/\w+)["']""")


@cache
def names(path: Path) -> frozenset[str]:
    """Functions, classes and variables of a module; members of a class as `Class.member`."""
    return frozenset(_names(ast.parse(path.read_text()).body, ""))


def _names(body: list[ast.stmt], prefix: str) -> set[str]:
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(prefix + node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {prefix + node.name} | _names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return found


def missing(text: str) -> list[str]:
    """References whose file, or whose name in the file, does not exist."""
    found = []
    for path, name in REFERENCE.findall(text):
        files = [ROOT / folder / path for folder in FOLDERS if (ROOT / folder / path).exists()]
        if not files or (name and not any(name in names(file) for file in files)):
            found.append(f"{path}::{name}" if name else path)
    return found


@pytest.mark.parametrize(
    ("page", "least"), [("tests/PAPERS.md", 100), ("CONTRIBUTING.md", 15), ("docs/how_it_works.md", 1)]
)
def test_pages_name_what_exists(page, least):
    text = (ROOT / page).read_text()
    assert len(REFERENCE.findall(text)) >= least
    assert missing(text) == []


@pytest.mark.parametrize(
    "reference", ["policy/nowhere.py", "test_docs.py::test_nothing", "config.py::DARTSGRPOConfig.nothing"]
)
def test_a_missing_reference_is_found(reference):
    known = "`test_docs.py::missing` and `trl_darts/scheduling/schedule_fields.py::ScheduleFields.num_longest`"
    assert missing(f"`{reference}` and {known}") == [reference]


# Links


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative targets, and anchors in them, that are not there. Code blocks are no links."""
    found = []
    for path, anchor, image in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        target = page.parent / (path or image) if path or image else page
        if not target.exists() or (anchor and anchor not in slugs(target)):
            found.append(f"{path or image}#{anchor}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n[a](#a-title) [b](#b) [c](c.md) ![d](d.png) [e](https://x.y/z)\n```text\n[f](f.md)\n```\n"
    )
    assert broken_links(page, page.read_text()) == ["#b", "c.md#", "d.png#"]


def test_every_picture_is_shown():
    shown = {name for page in PAGES for name in re.findall(r"[\w/]+\.png", page.read_text())}
    assert {path.name for path in (ROOT / "docs").glob("*.png")} <= {Path(name).name for name in shown}


# The table of all settings


def test_the_table_of_settings_is_current():
    """Made anew with `python -m docs.hooks.settings_table`."""
    assert settings_page() == PAGE.read_text()


def test_every_field_of_ours_is_in_the_table():
    """Also those of a class that the table does not know yet."""
    ours = {own.name for own in fields(DARTSGRPOConfig)} - {own.name for own in fields(GRPOConfig)}
    assert ours | {"num_generations"} == set(re.findall(r"^\| `(\w+)`", PAGE.read_text(), re.MULTILINE))


def test_a_row_of_the_table():
    def declare(default, help):
        return make_dataclass("Config", [("name", "int | None", field(default=default, metadata={"help": help}))])

    (computed,) = fields(declare(None, "First, see docs/schedules.md. Second. Defaults to 1.5."))
    assert table_row(computed, int | None) == (
        "| `name` | `int \\| None` | *computed* | First, see [schedules](schedules.md). Defaults to 1.5. | all |"
    )
    (plain,) = fields(declare(2, "First. Second."))
    assert table_row(plain, int | None) == "| `name` | `int \\| None` | `2` | First. | all |"


# The picture of "How it works"


def calls(path: Path, name: str) -> list[str]:
    """What a method calls, in the order in which the calls are evaluated."""
    class_name, method = name.split(".")
    tree = ast.parse(path.read_text())
    (body,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == class_name]
    (function,) = [node for node in body.body if getattr(node, "name", None) == method]
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    found.sort(key=lambda node: (node.end_lineno, node.end_col_offset))  # arguments come before their call
    return [node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func) for node in found]


def drawn() -> dict[tuple[str, str], list[str]]:
    """For each function that the picture has with its file, the functions below it. Engines are alternatives."""
    page = (ROOT / "docs" / "how_it_works.md").read_text()
    (picture,) = re.findall(r"```text\n(DARTSGRPOTrainer.*?)```", page, re.DOTALL)
    tree: dict[tuple[str, str], list[str]] = {}
    above: dict[int, list[str]] = {}
    for branch, name, path in re.findall(r"^([ │├└]*)([\w.]+) +(?:([\w/]+\.py):)?", picture, re.MULTILINE):
        siblings = above.get(len(branch), [])
        if (last := name.rpartition(".")[2]) not in siblings[-1:]:
            siblings.append(last)
        if path:
            above[len(branch) + 2] = tree[path, name] = []
    return tree


PICTURE = drawn()


@pytest.mark.parametrize("function", PICTURE, ids=lambda function: function[1])
def test_the_picture_is_the_codes_order_of_calls(function):
    path, name = function
    real = iter(calls(ROOT / "trl_darts" / path, name))
    assert PICTURE[function]
    assert [call for call in PICTURE[function] if call not in real] == []  # `in` goes on where the last one was found


# Metrics


def documented_metrics(text: str) -> set[str]:
    """Names in the first column of the tables; `_p90` and `aborted_tokens` stand for the end of the name before."""
    found = set()
    for row in re.findall(r"^\| (`darts/[^|]*)\|", text, re.MULTILINE):
        first, *ends = re.findall(r"`([^`]+)`", row)
        found.add(first)
        for end in ends:
            separator = "_" if end.startswith("_") else "/"
            found.add(first.rsplit(separator, 1)[0] + separator + end.removeprefix("_"))
    return found


def emitted_metrics() -> set[str]:
    """What a rollout that leaves nothing out logs, and every name that stands in the package's source."""
    summary = GroupSummary(
        group_id=0,
        prompt_key=1,
        lengths=[3, 9, 5, 7],
        finish_reasons=["stop", "length", "abort", "stop"],
        selected=[0, 3],
    )
    admission = Admission([4], saturated=1, rho=0.9)
    more = {"long_end_below": 9, "tail": TailRecord(1, 2, 30, 4.0, 4.0, 5.0)}
    record = RolloutRecord(
        admission, [summary], Occupancy(peak=4, area=20.0, seconds=9.0), 2, carries_over=True, **more
    )
    states = {"waiting": 1, "partial": 0, "complete": 0, "in_flight": 0}
    rows = BufferedRows([[1]], None, entry_ids=[0], left=[0], ages=[[(1, 1)]], states=states, is_long=True)
    ours = {
        **rollout_metrics(record),
        **buffer_metrics(rows, mask_stale_after=None),
        **{f"darts/audit/{name}": 0.0 for name in Audits([AuditedGroup(*[1.0] * 7)] * 2).metrics()},
    }
    sources = [path.read_text() for path in (ROOT / "trl_darts").rglob("*.py")]
    return {*ours, *(name for source in sources for name in METRIC.findall(source))}


def test_metrics_are_documented():
    emitted = emitted_metrics()
    documented = documented_metrics((ROOT / "docs" / "metrics.md").read_text())
    assert {"darts/sync/seconds", "darts/budget/rho"} <= emitted
    assert sorted(emitted - documented) == [], "not defined in docs/metrics.md"
    assert sorted(documented - emitted) == [], "defined in docs/metrics.md, but nothing logs it"


# The hooks of the site


def test_links_out_of_the_docs():
    text = "See [`a.py`](../benchmarks/a.py), [how](../b.py), [c](c.md), ![d](../d.png)."

    class Config:
        repo_url = None

    assert on_page_markdown(text, Config) == "See `a.py`, how: `b.py`, [c](c.md), ![d](../d.png)."


def test_docstrings_become_markdown():
    source = "Does it.\n\nArgs:\n    a (`int`):\n        Of [`B`].\n\nRaises:\n    [`ValueError`]: If not.\n"
    assert to_markdown(source, {"B": "p.B"}).split("\n\n") == [
        "Does it.",
        "**Arguments**",
        '- **`a`** (`int`):\n    Of <autoref optional identifier="p.B">`B`</autoref>.',
        "**Raises**",
        "- `ValueError`: If not.",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_paragraph_comes_twice(page):
    """A merge has left an older copy of two sections in the middle of a page before."""
    paragraphs = [text for text in page.read_text().split("\n\n") if len(text) > 80]
    assert [text for text in paragraphs if paragraphs.count(text) > 1] == []
