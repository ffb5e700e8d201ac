"""Names in Python code that is read, not run: modules, their members, those of classes we know, and arguments."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from trl import GRPOTrainer

from tests.docs.shell import CHECKED
from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer


# What a callable's `**kwargs` are arguments of.
HANDED_ON: dict[Any, Any] = {DARTSGRPOTrainer: GRPOTrainer, DARTSGRPOConfig.from_pretrained: DARTSGRPOConfig}


@dataclass(frozen=True)
class _Instance:
    """An object of a class, where code that was not run would have one."""

    of: type


def name_mistakes(tree: ast.Module) -> list[str]:
    """Names that don't exist. Code in which nothing can be checked is a mistake as well."""
    reader = _Reader()
    reader.visit(tree)
    if not reader.mistakes and not reader.num_checked:
        return ["names nothing that is checked: use it as an argument, or in a call"]
    return reader.mistakes


class _Reader(ast.NodeVisitor):
    """Visits nodes in their order. Each visit returns the object that an expression stands for; `None`: unknown."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []
        self.num_checked = 0
        # What pages have introduced before, where a block does not say it again.
        self.known: dict[str, Any] = {
            "DARTSGRPOConfig": DARTSGRPOConfig,
            "DARTSGRPOTrainer": DARTSGRPOTrainer,
            "args": _Instance(DARTSGRPOConfig),
            "trainer": _Instance(DARTSGRPOTrainer),
        }

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            module = self._import(name.name)
            root = sys.modules.get(name.name.partition(".")[0]) if module else None
            self.known[name.asname or name.name.partition(".")[0]] = module if name.asname else root

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self._import(node.module or "")
        for name in node.names:
            self.known[name.asname or name.name] = self._member(module, node.module or "", name.name)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.visit(node.value)
        for target in node.targets:
            self.visit(target)
            if isinstance(target, ast.Name):
                self.known[target.id] = value

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = dict(self.known)
        self.generic_visit(node)
        self.known = outside

    def visit_arg(self, node: ast.arg) -> None:
        self.known[node.arg] = None

    def visit_Name(self, node: ast.Name) -> Any:
        if isinstance(node.ctx, ast.Store):
            self.known[node.id] = None
        return self.known.get(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return self._member(self.visit(node.value), ast.unparse(node.value), node.attr)

    def visit_Call(self, node: ast.Call) -> Any:
        function = self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        if function is None or (known := _arguments(function)) is None:
            return None
        self.num_checked += 1
        given = [keyword.arg for keyword in node.keywords if keyword.arg]
        self.mistakes += [f"{ast.unparse(node.func)} has no argument {name}" for name in given if name not in known]
        return _made_by(function)

    def _import(self, name: str) -> ModuleType | None:
        if name.partition(".")[0] not in CHECKED:
            return None
        self.num_checked += 1
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            self.mistakes.append(str(error))
            return None

    def _member(self, owner: Any, words: str, name: str) -> Any:
        if owner is None:
            return None
        self.num_checked += 1
        if isinstance(owner, _Instance):
            exists, owner = name in _attributes(owner.of), owner.of
        else:
            exists = hasattr(owner, name)
        if not exists:
            self.mistakes.append(f"{words} has no {name}")
        return getattr(owner, name, None)


def _arguments(function: Any) -> set[str] | None:
    """Names of its arguments. `None` if it takes any."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or one in C
        return None
    names = set(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return names | set(inspect.signature(HANDED_ON[function]).parameters) if function in HANDED_ON else None
    return names


def _made_by(function: Any) -> _Instance | None:
    """What a call returns: an object, for a class and for our class methods, such as `from_pretrained`."""
    of = getattr(function, "__self__", None)
    if isinstance(of, type) and of.__module__.startswith("trl_darts."):
        return _Instance(of)
    return _Instance(function) if isinstance(function, type) else None


@cache
def _attributes(of: type) -> set[str]:
    """Names that an object has: its class's, and those that methods set."""
    names = set(dir(of)) | set(getattr(of, "__dataclass_fields__", ()))
    for cls in of.__mro__:
        if cls.__module__.partition(".")[0] in CHECKED:
            names |= set(re.findall(r"\bself\.(\w+)(?:, self\.\w+)*(?::[^=\n]+)? = ", inspect.getsource(cls)))
    return names
