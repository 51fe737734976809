"""Generates docs/run-file.md from the schema of the run file."""

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from motet.config import RunConfig

INTRODUCTION = """\
# The run file

A YAML file. Unknown keys, duplicate keys and values of another type are errors. Paths are relative to the current
directory. `--set a.b.c=value` on the command line replaces a value, or adds one; the value is YAML too.
This page is generated from `motet.config` by `make docs`.
"""

SIMPLE_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "anything"}


def describe(page: str = "") -> str:
    """The whole page, whatever is in it now."""
    lines = [INTRODUCTION]
    for key, section in _sections():
        lines.append(f"## `{key}`\n")
        if section.__doc__:
            lines.append(f"{_one_line(section.__doc__)}\n")
        lines.append("| key | values | default | |\n|---|---|---|---|")
        described = descriptions(section)
        lines += [_row(name, field, described.get(name, "")) for name, field in section.model_fields.items()]
        lines.append("")
    return "\n".join(lines)


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with its place in the file, outer ones first."""
    waiting: list[tuple[str, type[BaseModel]]] = [("", RunConfig)]
    while waiting:
        key, section = waiting.pop(0)
        if key:
            yield key, section
        for name, field in section.model_fields.items():
            inner = f"{key}.{name}".removeprefix(".")
            for kind, path in _models(field.annotation, inner):
                waiting.append((path, kind))


def _models(annotation: Any, key: str) -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        kind = annotation.model_fields.get("kind")
        yield annotation, f"{key} (kind: {get_args(kind.annotation)[0]})" if kind else key
    elif get_origin(annotation) is dict:
        yield from _models(get_args(annotation)[1], f"{key}.<name>")
    else:
        for argument in get_args(annotation):
            yield from _models(argument, key)


def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """The docstrings of a section's fields, its base classes' included. They are read here and not by pydantic, which
    would read them from the sources whenever motet starts."""
    found = {}
    for base in reversed(section.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(parsed, ast.ClassDef)
            for statement, text in pairwise(parsed.body):
                if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[ast.unparse(statement.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    return found


def _row(name: str, field: FieldInfo, description: str) -> str:
    default = "required" if field.is_required() else f"`{_default(field.default)}`"
    return f"| `{name}` | {_values(field.annotation)} | {default} | {_one_line(description)} |"


def _default(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, BaseModel):
        return "{}"
    if isinstance(value, tuple):
        return f"[{', '.join(_default(entry) for entry in value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in SIMPLE_TYPES:
        return SIMPLE_TYPES[annotation]
    if origin is Annotated:
        return _values(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _values(a) for a in arguments)
    if origin is tuple:
        return f"list of: {_values(arguments[0])}"
    if origin is dict:
        return f"mapping of names to: {_values(arguments[1])}"
    return "see below"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
