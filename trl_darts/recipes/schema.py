"""Builds the JSON schema of recipes, with which editors complete fields, show their help and mark errors."""

from dataclasses import MISSING, Field, fields
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from .fields import ARGUMENTS


DRAFT = "http://json-schema.org/draft-07/schema#"  # supported by YAML editors
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", NoneType: "null"}
ENV = {"type": "object", "description": "Environment variables."}


def recipe_schema() -> dict[str, Any]:
    """Returns the schema of the YAML files of `examples/train_grpo.py --config`."""
    properties: dict[str, Any] = {"env": ENV}
    for cls in ARGUMENTS:
        hints = get_type_hints(cls, include_extras=True)  # building a parser changes `Field.type`
        properties |= {own.name: _property(own, hints[own.name]) for own in fields(cls)}
    return {
        "$schema": DRAFT,
        "title": "Recipe for examples/train_grpo.py",
        "type": "object",
        "properties": dict(sorted(properties.items())),
        "additionalProperties": False,
    }


def _property(own: Field[Any], hint: Any) -> dict[str, Any]:
    choices = own.metadata.get("choices")
    allowed: list[dict[str, Any]] = [{"enum": list(choices)}] if choices else _types(hint)
    if own.default is None and {"type": "null"} not in allowed:
        allowed.append({"type": "null"})  # the annotation is that of the computed value
    schema = _any_of(allowed) | {"description": own.metadata["help"]}
    if own.default is not MISSING:
        schema["default"] = own.default.value if isinstance(own.default, Enum) else own.default
    return schema


def _types(hint: Any) -> list[dict[str, Any]]:
    """Returns the schemas that an annotation allows. A union with an enum excludes other text."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:  # a type with a `Rule`
        kind, rule = inner
        nulls = [{"type": "null"}] if NoneType in get_args(kind) else []
        return [{"enum": list(rule.choices)}, *nulls] if rule.choices else _types(kind)
    if origin in (Union, UnionType):
        enums = [kind for kind in inner if isinstance(kind, type) and issubclass(kind, Enum)]
        kinds = [kind for kind in inner if not (enums and kind is str)]
        return [schema for kind in kinds for schema in _types(kind)]
    if origin is Literal:
        return [{"enum": list(inner)}]
    if origin in (list, tuple):
        return [{"type": "array", "items": _any_of(_types(inner[0]))}]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [{"enum": [member.value for member in hint]}]
    return [{"type": TYPES.get(origin or hint, "object")}]


def _any_of(allowed: list[dict[str, Any]]) -> dict[str, Any]:
    if len(allowed) == 1:
        return allowed[0]
    if all(schema.keys() == {"type"} for schema in allowed):
        return {"type": [schema["type"] for schema in allowed]}
    return {"anyOf": allowed}
