"""Benchmarks that read the source as data: its size, and bugs that are planted in it."""

from pathlib import Path

import pytest

from benchmarks import planted_bugs, structure
from benchmarks.planted_bugs import Bug, Project

ROOT = Path(__file__).parents[2]
SOURCE = """
def double(x):
    return 2 * x
"""
TESTS = """
from motet.numbers import double


def test_of_two():
    assert double(2) == 4


def test_of_three():
    assert double(3) == 6
"""


@pytest.mark.parametrize("bug", planted_bugs.BUGS, ids=lambda bug: bug.name)
def test_a_bug_has_one_place_and_its_tests_are_there(bug: Bug) -> None:
    planted_bugs.place_of(bug, ROOT / "src" / "motet")
    planted_bugs.tests_of(bug, ROOT / "tests")


def test_bugs_have_names_of_their_own() -> None:
    assert len({bug.name for bug in planted_bugs.BUGS}) == len(planted_bugs.BUGS) >= 20


@pytest.fixture
def project(tmp_path: Path) -> Project:
    for path, text in {
        "src/motet/__init__.py": "",
        "src/motet/numbers.py": SOURCE,
        "tests/deep/test_double.py": TESTS,
        "tests/test_broken.py": "def test_nothing():\n    assert False\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return Project(tmp_path, timeout_s=120.0)


@pytest.mark.campaign
def test_outcomes(project: Project, tmp_path: Path) -> None:
    def state(anchor: str, replacement: str, tests: str = "test_double", keyword: str = "") -> str:
        return project.try_bug(Bug("a bug", anchor, replacement, (tests,), keyword)).state

    assert state("2  *\nx", "x + 2") == "caught"
    assert state("2 * x", "x + 2", keyword="two") == "not caught"
    assert state("2 * x", "x +") == "error"
    assert state("3 * x", "x") == "error"
    assert state("x", "y") == "error"
    assert state("2 * x", "x", tests="test_broken") == "error"
    assert (tmp_path / "src" / "motet" / "numbers.py").read_text() == SOURCE


def test_counts_of_a_tree(tmp_path: Path) -> None:
    package = tmp_path / "src" / "motet"
    for path, text in {
        "__init__.py": '"""A package."""\n',
        "planner/sizes.py": 'def layer_bytes(x):\n    """Of a layer."""\n    return x\n',
        "planner/towers.py": "def towers(x):\n    x += 1\n\n    return x\n",
        "config/model.py": "tower = 1\n",
    }.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    assert structure.size_of(package) == structure.Size(files=4, lines=9, statements=6)
    assert structure.fullest_folder(package) == ("motet/planner", 2)
    functions = {node.name: structure.has_one_statement(node) for _, node in structure.functions(package)}
    assert functions == {"layer_bytes": True, "towers": False}
    assert structure.computers_of_bytes(package) == {"planner": 1}
    assert structure.tower_lines(package) == 1


@pytest.mark.campaign
def test_the_first_product_of_a_training_is_found() -> None:
    found = structure.first_product(ROOT, timeout_s=300.0)
    assert found["stack"][0].endswith(":main")
    files, functions, calls = found["rank 0"]
    assert 10 < files < functions < calls
