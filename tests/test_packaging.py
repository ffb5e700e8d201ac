"""What is around the code: addresses that a release fills in, and an image for servers and trainer."""

import json
import re
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.test_docs import documented_metrics


ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "https://github.com/owner/name"
NOTEBOOK = "examples/notebooks/drop_in.ipynb"
WITH_ADDRESS = ("pyproject.toml", "CITATION.cff", "mkdocs.yml", NOTEBOOK)
addresses = runpy.run_path(str(ROOT / ".github" / "addresses.py"))


def test_a_release_fills_in_the_repositorys_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in WITH_ADDRESS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, name)
    addresses["main"](ADDRESS)
    texts = {name: (tmp_path / name).read_text() for name in WITH_ADDRESS}
    urls = tomllib.loads(texts["pyproject.toml"])["project"]["urls"]
    assert urls["Repository"] == ADDRESS
    assert urls["Issues"] == f"{ADDRESS}/issues"
    assert "Paper" in urls
    assert yaml.safe_load(texts["CITATION.cff"])["repository-code"] == ADDRESS
    assert f"\nrepo_url: {ADDRESS}\n" in texts["mkdocs.yml"]
    title, _, badge = json.loads(texts[NOTEBOOK])["cells"][0]["source"][:3]
    assert title == "# Two names change\n"
    assert badge.endswith(f"(https://colab.research.google.com/github/owner/name/blob/main/{NOTEBOOK})\n\n")
    addresses["main"](ADDRESS)
    assert texts == {name: (tmp_path / name).read_text() for name in WITH_ADDRESS}


@pytest.mark.parametrize("address", ["https://example.com/a/b", "https://github.com/a", ""])
def test_an_address_that_is_no_repositorys(address):
    with pytest.raises(SystemExit, match="must be that of a repository"):
        addresses["main"](address)


@pytest.mark.parametrize(("workflow", "target"), [("release", "make wheel"), ("docs", "make docs")])
def test_workflows_fill_it_in_before_they_build(workflow, target):
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text())["jobs"]
    steps = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    fills = steps.index('python .github/addresses.py "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY"')
    assert fills < steps.index(target)


def test_the_image_has_a_vllm_of_the_supported_versions_and_files_that_exist():
    text = (ROOT / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (version,) = re.findall(r"^FROM vllm/vllm-openai:v(\S+) AS base$", text, re.MULTILINE)
    assert Requirement(extras["vllm"][0]).specifier.contains(version)
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert {"trl_darts", "configs", "examples", "pyproject.toml"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert set(re.findall(r"\.\[([\w,]+)\]", text)[0].split(",")) <= extras.keys()


def test_the_dashboards_charts_are_metrics():
    charts = runpy.run_path(str(ROOT / "examples" / "dashboards.py"))
    known = {f"train/{name}" for name in documented_metrics((ROOT / "docs" / "metrics.md").read_text())}
    assert set(charts["CHARTS"].values()) - known == {"eval/reward"}  # TRL's
    address = charts["trackio_address"]("a b", "http://127.0.0.1:7860/")
    assert address.startswith("http://127.0.0.1:7860/?project=a+b&metrics=train/darts/rollout/bubble_ratio,train/")
