"""Updates tables of docs/evidence.md between marks."""

import re
from pathlib import Path


PAGE = Path(__file__).resolve().parents[1] / "docs" / "evidence.md"


def put(text: str, name: str, script: str, content: str) -> str:
    """Replaces the text between the marks of this name, which include the name of the script."""
    begin, end = f"<!-- {name}: written by benchmarks/{script} -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"The page must have one pair of the marks {begin!r} and {end!r}.")
    return pattern.sub(lambda _: f"{begin}\n\n{content}\n\n{end}", text)
