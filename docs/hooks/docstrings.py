"""
A griffe extension: docstrings in TRL's form become Markdown.

An entry of `Args:` or `Parameters:` reads `` name (`type`, *optional*, defaults to `1`): ``, with its text indented
below. [`Name`] is a link where the site documents the name, and code otherwise. A config's field is documented by its
help.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe


SECTION = re.compile(r"^(Args|Attributes|Parameters|Returns|Raises|Example):\n((?:(?: .*)?\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^(\w+)(?: \((.+)\))?:\n", re.MULTILINE)
REFERENCE = re.compile(r"\[`~?([\w.]+)`\](?!\()")
TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Parameters": "Fields"}


class TRLDocstrings(griffe.Extension):
    """Rewrites all docstrings of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called by griffe."""
        paths = documented_paths(pkg)
        for item in objects(pkg):
            if item.is_attribute and (text := help_of(item.value)):
                item.docstring = griffe.Docstring(text)
            if item.docstring is not None:
                item.docstring.value = to_markdown(item.docstring.value, paths)


def documented_paths(pkg: griffe.Module) -> dict[str, str]:
    """Where the site may have a name: what the package exports goes before what its parts do."""
    modules = [module for module in pkg.modules.values() if not module.is_alias]
    paths = {name: item.path for module in modules for name, item in module.classes.items() if not item.is_alias}
    for module in (*modules, pkg):
        paths |= {str(name): f"{module.path}.{name}" for name in module.exports or ()}
    return paths


def help_of(value: Any) -> str | None:
    """The help of a config's field, which is `_setting(default, help)` or `_field(default, help)`."""
    if not (isinstance(value, griffe.ExprCall) and str(value.function) in ("_setting", "_field")):
        return None
    default, text = (str(argument) for argument in value.arguments)
    shown = "" if default == "None" else f" Defaults to `{default}`."
    return ast.literal_eval(text) + shown


def objects(item: griffe.Object) -> Iterator[griffe.Object]:
    """An object and what is defined in it."""
    yield item
    for member in item.members.values():
        if not member.is_alias:
            yield from objects(member)


def to_markdown(text: str, paths: dict[str, str]) -> str:
    """
    One docstring.

    Args:
        text (`str`):
            In TRL's form.
        paths (`dict[str, str]`):
            Where the site documents a name.
    """

    def link(found: re.Match[str]) -> str:
        name = found[1].rsplit(".", 1)[-1]
        code = f"`{name}`"
        return f'<autoref optional identifier="{paths[name]}">{code}</autoref>' if name in paths else code

    return REFERENCE.sub(link, SECTION.sub(_section, text + "\n")).rstrip()


def _section(found: re.Match[str]) -> str:
    title, body = found[1], textwrap.dedent(found[2]).strip("\n")
    if title in TITLES:
        body = _entries(body)
    elif title == "Raises":
        body = re.sub(r"^(?=\[)", "- ", body, flags=re.MULTILINE)
    return f"**{TITLES.get(title, title)}**\n\n{body}\n\n"


def _entries(body: str) -> str:
    """A list of definitions; lines that begin with `>` are headings within it."""
    body = re.sub(r"^> (.+)$", r"*\1*", body, flags=re.MULTILINE)
    return ENTRY.sub(lambda entry: f"- **`{entry[1]}`**" + (f" ({entry[2]})" if entry[2] else "") + ":\n", body)
