"""Generated pages are current, and what the map says about the code is true."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from checkout import ROOT, text_of

from docs.generate import PAGES, api, map

MAP = (ROOT / "docs" / "map.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| `(\S+?)` \| `(\w+)` \|$", MAP.partition(map.MARKER)[0], re.M)


@cache
def names_in(path: Path) -> set[str]:
    """What a file defines at its top level."""
    if path.suffix == ".yaml":
        return set(yaml.safe_load(path.read_text()))
    found: set[str] = set()
    for node in ast.parse(text_of(path)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_current(name: str) -> None:
    page = (ROOT / "docs" / name).read_text()
    assert PAGES[name](page) == page, "run: make docs"


def test_the_map_lists_every_file_once() -> None:
    listed, folder = list[str](), ""
    for line in MAP.partition(map.MARKER)[2].splitlines():
        if found := re.match(r"### `(.+)/`$", line):
            folder = found[1]
        elif found := re.match(r"\| `(\w+\.py)` \|", line):
            listed.append(f"{folder}/{found[1]}")
    files = [*(ROOT / "src" / "motet").rglob("*.py"), *(ROOT / "papers").rglob("*.py")]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in files if path.name != "__init__.py")


@pytest.mark.parametrize(("what", "path", "name"), ROWS)
def test_the_named_definition_is_there(what: str, path: str, name: str) -> None:
    assert name in names_in(ROOT / path), what


def test_the_map_has_many_changes() -> None:
    assert len(ROWS) >= 25
    assert len({what for what, _, _ in ROWS}) == len(ROWS)
    assert MAP.partition(map.MARKER)[0].count("\n| ") == len(ROWS) + 1  # Each row was understood.


def test_papers_use_no_private_names() -> None:
    used = [f"{module}.{name}" for module, names in api.interfaces().items() for name in names]
    assert len(used) >= 50
    assert [name for name in used if any(part.startswith("_") for part in name.split("."))] == []
