"""What the documentation says exists: paths and names of the paper index, metrics, and relative links."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from trl_darts.buffer.batches import BufferedRows
from trl_darts.rows import KeptRows
from trl_darts.scheduling import Admission, GroupSummary, Occupancy
from trl_darts.telemetry.metrics import RolloutRecord, bias_metrics, buffer_metrics, rollout_metrics


ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
]
REFERENCE = re.compile(r"`((?:trl_darts|tests|benchmarks|examples|docs|configs)/[^`\s]*?)(?:::([^`]*))?`")
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)")
METRIC = re.compile(r"""["'](darts/\w+/\w+)["']""")
EXTERNAL = ("http://", "https://", "mailto:", "#")


def references(text: str) -> set[tuple[str, str]]:
    """Backticked `path` and `path::name`, as (path, name); the name is empty where there is none."""
    return set(REFERENCE.findall(text))


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
    return sorted(
        f"{path}::{name}" if name else path
        for path, name in references(text)
        if not (ROOT / path).exists() or (name and name not in names(ROOT / path))
    )


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
    record = RolloutRecord(admission, [summary], Occupancy(peak=4, area=20.0, seconds=9.0), num_generations=2)
    rows = BufferedRows(
        KeptRows([[1]], None), [0], [0], [[(1, 1)]], {"waiting": 1, "partial": 0, "complete": 0}, {0: 0}
    )
    ours = {
        **rollout_metrics(record),
        **bias_metrics(record, torch.tensor([[0.0], [1.0]]), torch.ones(1)),
        **buffer_metrics(rows, mask_stale_after=None),
    }
    sources = [path.read_text() for path in (ROOT / "trl_darts").rglob("*.py")]
    return {*ours, *(name for source in sources for name in METRIC.findall(source))}


def broken_links(page: Path) -> list[str]:
    """Relative targets that are not there. Code blocks are no links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [target for target in LINK.findall(text) if not target.startswith(EXTERNAL)]
    return [target for target in targets if not (page.parent / target.split("#")[0]).exists()]


@pytest.mark.parametrize(
    ("page", "least"), [("docs/paper_index.md", 50), ("docs/servers.md", 1), ("CONTRIBUTING.md", 10)]
)
def test_pages_name_what_exists(page, least):
    text = (ROOT / page).read_text()
    assert len(references(text)) >= least
    assert missing(text) == []


@pytest.mark.parametrize(
    "reference",
    [
        "trl_darts/nowhere.py",
        "trl_darts/config.py:12",
        "tests/test_docs.py::test_nothing",
        "trl_darts/config.py::DARTSGRPOConfig.nothing",
    ],
)
def test_a_missing_reference_is_found(reference):
    known = "`tests/test_docs.py::missing` and `trl_darts/scheduling/settings.py::ScheduleSettings.num_longest`"
    text = f"`{reference}` and {known}"
    assert missing(text) == [reference]


def test_metrics_are_documented():
    emitted = emitted_metrics()
    documented = documented_metrics((ROOT / "docs" / "metrics.md").read_text())
    assert {"darts/sync/seconds", "darts/budget/rho"} <= emitted
    assert sorted(emitted - documented) == [], "not defined in docs/metrics.md"
    assert sorted(documented - emitted) == [], "defined in docs/metrics.md, but nothing logs it"


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists()], ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    assert broken_links(page) == []
