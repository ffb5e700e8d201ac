"""Updates text of benchmarks/REPORT.md between marks."""

import re
from pathlib import Path


PAGE = Path(__file__).resolve().parent / "REPORT.md"


def put(text: str, name: str, content: str) -> str:
    """Replaces the text between the marks of this name."""
    begin, end = f"<!-- {name}: written by benchmarks/report.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"The page must have one pair of the marks {begin!r} and {end!r}.")
    inner = f"{content}\n\n" if content else ""
    return pattern.sub(lambda _: f"{begin}\n\n{inner}{end}", text)
