"""The page on migration names fields that exist, and says of verl's settings what a check of a file says."""

import re
from dataclasses import fields
from pathlib import Path

from trl import GRPOConfig
from trl.experimental.async_grpo import AsyncGRPOConfig

from trl_darts.recipes.other_names import OTHER_NAMES, VERL


PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate.md"


def rows(section: str) -> dict[str, str]:
    """The table of a section: names of the first column, and the second."""
    text = PAGE.read_text().partition(f"## From {section}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return {name: other for names, other in found for name in re.findall(r"`([\w.]+)", names)}


def test_every_field_of_the_async_config_is_named():
    theirs = {own.name for own in fields(AsyncGRPOConfig)} - {own.name for own in fields(GRPOConfig)}
    named = rows("TRL's AsyncGRPOTrainer")
    assert {name for name in theirs if name not in named} == set()
    assert named.keys() <= {own.name for own in fields(AsyncGRPOConfig)} | {"AsyncGRPOConfig"}


def test_verls_settings_are_those_of_the_check():
    checked = 0
    for name, here in rows("verl").items():
        known = [path for path in VERL if path.endswith(name)]
        if known and "tensor" not in name:  # of servers, it is a flag of theirs
            checked += 1
            assert all(VERL[path] in here for path in known), name
    assert checked >= 12


def test_open_r1s_fields_are_those_of_the_check():
    named = rows("open-r1")
    assert {name for name, (owner, _) in OTHER_NAMES.items() if owner == "open-r1"} <= named.keys()
    for name, here in named.items():
        remedy = OTHER_NAMES[name][1] if name in OTHER_NAMES else ""
        assert not remedy.isidentifier() or f"`{remedy}`" in here, name
