"""
Pictures of a page, such as `![words](name.png)`: the site shows `name.png` on light pages and `name_dark.png` on dark
ones. GitHub shows the first on both. A strict build fails where the second is missing.
"""

import re
from typing import Any


PICTURE = re.compile(r"!\[([^\]]*)\]\((?!\w+:)([^)\s]+)\.png\)")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Called by MkDocs for each page."""
    return PICTURE.sub(r"![\1](\2.png#only-light)![\1](\2_dark.png#only-dark)", markdown)
