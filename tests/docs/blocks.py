"""
The fenced blocks of the documentation.

- A block without a language, or with `text`, is output or a drawing: data, in which no line begins with a command.
- The others are code, `python` or `bash`. They are run, page by page in their order, but for those that say why not in
  a comment, which no page shows, on the line before the fence: `<!-- not run: REASON -->`.
- Whether a block is run or not, its names, flags, values, targets and paths must exist: [`mistakes`].
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from tests.docs.names import name_mistakes
from tests.docs.shell import PROGRAMS, ROOT, command_mistakes


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
ANY_FENCE = re.compile(r"^[ \t>*+.\d-]*(?:`{3,}|~{3,})", re.MULTILINE)  # also those that `FENCE` does not take for one
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->\n *\Z")
DATA = ("", "text")
COMMANDS = ("$", *PROGRAMS)


@dataclass(frozen=True)
class Block:
    """
    One fenced block.

    Args:
        page (`str`):
            The page's name.
        line (`int`):
            Of the fence.
        language (`str`):
            What follows the fence.
        code (`str`):
            What is between the fences.
        reason (`str`, *optional*):
            Why it is not run.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it is code, and nothing says that it is not run."""
        return self.language not in DATA and self.reason is None


def blocks_of(page: str, text: str) -> list[Block]:
    """
    The blocks of a page.

    Raises:
        [`ValueError`]: If a fence is written in a way that would hide its block.
    """
    found = []
    for match in FENCE.finditer(text):
        mark = NOT_RUN.search(text[: match.start(2) - 3])
        code = re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[2], code, mark[1] if mark else None))
    if (fences := len(ANY_FENCE.findall(text))) != 2 * len(found):
        raise ValueError(f"{page}: {fences} fences, but {len(found)} blocks. Fences are ``` alone on their line.")
    return found


def mistakes(block: Block) -> list[str]:
    """What a block names that does not exist."""
    if block.language in DATA:
        lines = [line.strip() for line in block.code.splitlines() if line.split()[:1]]
        return [f"`{line}` is a command in a block of text" for line in lines if line.split()[0] in COMMANDS]
    if block.language == "python":
        return name_mistakes(ast.parse(block.code))
    if block.language == "bash":
        return command_mistakes(block.code)
    return [f"`{block.language}` is no language that is checked: python, bash, or text for output"]
