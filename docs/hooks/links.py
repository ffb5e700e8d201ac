"""
Links from a page to the repository's other files, such as `../benchmarks/decisions.py`. On GitHub they work as they
are. The site has no such files: with a `repo_url` they become links into the repository, and text that names the file
as long as there is none.
"""

import re
from typing import Any


OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, config: Any, **kwargs: Any) -> str:
    """Called by MkDocs for each page."""

    def replace(found: re.Match[str]) -> str:
        label, path = found.groups()
        if config.repo_url:
            return f"[{label}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return label if path.rsplit("/", 1)[-1] in label else f"{label}: `{path}`"

    return OUTSIDE.sub(replace, markdown)
