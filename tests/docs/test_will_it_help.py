"""The two speed-ups on docs/will_it_help.md are those that its commands print."""

import re
import shlex

from typer.testing import CliRunner

from tests.docs.blocks import ROOT, blocks_of
from trl_darts.cli import app


def test_speed_ups_of_the_page():
    page = (ROOT / "docs" / "will_it_help.md").read_text()
    (block,) = [block for block in blocks_of("page", page) if "--num-engines 1\n" in block.code]
    shown = []
    for line in block.code.splitlines():
        table = CliRunner().invoke(app, shlex.split(line)[1:]).stdout
        shown.append(float(re.search(r"^darts +([\d.]+) ", table, re.MULTILINE)[1]))
    assert f"{shown[0]:.2f} times as fast as GRPO's on eight engines, and {shown[1]:.2f} times on one" in page
