"""Where this checkout lies, and its sources, which are read and parsed once for all tests that look at them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def text_of(path: Path) -> str:
    return path.read_text()


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements and those inside of them: far fewer nodes than `ast.walk` visits."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, name, []))
        for inner in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from statements(inner.body)
