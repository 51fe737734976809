"""tests/slow.txt names functions that exist, and is made from a report of pytest."""

import ast
from functools import cache
from pathlib import Path

import pytest
import slow_tests
from checkout import ROOT, text_of


@cache
def functions_of(file: Path) -> frozenset[str]:
    """Test functions of a file, those of a class as `Class::function`."""
    found = set()
    for node in ast.parse(text_of(file)).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(found)


def test_every_line_names_a_test() -> None:
    functions = list(slow_tests.read())
    assert functions == sorted(set(functions))
    missing = []
    for function in functions:
        file, _, name = function.partition("::")
        if not (ROOT / file).is_file() or name not in functions_of(ROOT / file):
            missing.append(function)
    assert missing == [], "not tests; change or remove their lines in tests/slow.txt, or run: make slow-tests"


def test_no_test_is_marked_by_hand() -> None:
    marker = "mark." + "slow"
    marked = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("*.py") if marker in text_of(file)]
    assert marked == ["tests/conftest.py"], "tests/slow.txt lists slow tests"


def test_made_from_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = [
        ("tests.a.test_b", "test_cases[1]", 0.75),
        ("tests.a.test_b", "test_cases[2]", 0.5),
        ("tests.a.test_b", "test_quick", 0.2),
        ("tests.a.test_b.TestInput", "test_c[x.y]", 2.0),
    ]
    lines = [
        f'''<testcase classname="{module}" name="{name}" time="9.0"><properties>
        <property name="{slow_tests.PROPERTY}" value="{seconds}" /></properties></testcase>'''
        for module, name, seconds in cases
    ]
    report.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    slow_tests.write(slow_tests.seconds_of_functions(report), tmp_path / "slow.txt")
    assert slow_tests.read(tmp_path / "slow.txt") == {
        "tests/a/test_b.py::TestInput::test_c": 2.0,
        "tests/a/test_b.py::test_cases": pytest.approx(1.25, abs=0.06),
    }
