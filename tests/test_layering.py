"""Rooms stand in one order: imports run downwards only, without circles, and private names stay in their package."""

import ast
from functools import cache
from pathlib import Path

import pytest
from checkout import ROOT, statements, text_of

ROOMS = (
    "errors",
    "ragged_arrays",
    "addresses",
    "named_files",
    "environment",
    "user_cache",
    "optional_packages",
    "devices",
    "timeline",
    "strict_parsing",
    "recomputation",
    "plan",
    "config",
    "cluster",
    "shapes",
    "assignment",
    "schedule",
    "attention",
    "parallel",
    "families",
    "models",
    "simulator",
    "costs",
    "balancing",
    "data",
    "planner",
    "runtime",
    "resilience",
    "report",
    "api",
    "cli",
)
"""From the lowest to the highest: a room imports from those before it and from itself."""

SOURCE = ROOT / "src" / "motet"


@cache
def imports(path: Path) -> list[tuple[int, str, tuple[str, ...]]]:
    """Line, module and names of every import of motet's in a file, those inside functions included."""
    found: list[tuple[int, str, tuple[str, ...]]] = []
    for node in statements(ast.parse(text_of(path)).body):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("motet", "papers"):
            found.append((node.lineno, node.module, tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ("motet", "papers"):
                    found.append((node.lineno, alias.name, ()))
    return found


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE or path.stem in ROOMS]


def upward_imports() -> list[str]:
    found = []
    for path in modules():
        for line, module, names in imports(path):
            parts = module.split(".")
            if parts[0] == "papers":
                found.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
            for target in [parts[1]] if len(parts) > 1 else names:
                if target in ROOMS and ROOMS.index(target) > ROOMS.index(room_of(path)):
                    found.append(f"{path.relative_to(ROOT)}:{line} imports {module} ({target} stands above)")
    return found


def module_graph() -> dict[str, set[str]]:
    names = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path for path in modules()}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        targets = set()
        for _, module, imported in imports(path):
            inner = {f"{module}.{each}" for each in imported} & names.keys()
            targets |= inner or ({module} & names.keys())
        graph[name] = targets - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_every_room_stands_in_the_order() -> None:
    there = {path.stem if path.is_file() else path.name for path in SOURCE.iterdir() if path.suffix in ("", ".py")}
    assert there - {"__pycache__", "__init__", "__main__"} == set(ROOMS)


def test_imports_run_downwards() -> None:
    assert upward_imports() == []


def test_no_module_imports_itself_in_a_circle() -> None:
    assert circles(module_graph()) == []


def test_private_names_stay_in_their_package() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}.{name}"
        for path in [*modules(), *sorted((ROOT / "papers").rglob("*.py"))]
        for line, module, names in imports(path)
        for name in [*module.split("."), *names]
        if name.startswith("_") and not name.startswith("__")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("graph", "expected"),
    [({"a": {"b"}, "b": {"c"}, "c": {"b"}}, [["b", "c"]]), ({"a": {"b"}, "b": set()}, [])],
)
def test_circles_are_found(graph: dict[str, set[str]], expected: list[list[str]]) -> None:
    assert circles(graph) == expected
