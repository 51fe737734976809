"""What is installed and declared: version, package data, versions that are pinned."""

import re
import tomllib
from fnmatch import fnmatch

from checkout import ROOT

import motet

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
)


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_one_version() -> None:
    assert motet.__version__ == PROJECT["project"]["version"]
    assert f"\n## {motet.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_files_beside_the_modules_are_package_data() -> None:
    package = ROOT / "src" / "motet"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["motet"]
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    names = {str(path.relative_to(package)) for path in files}
    assert {"py.typed", "cli/demo.yaml", "cluster/catalogue.yaml"} <= names
    assert [name for name in names if not any(fnmatch(f"./{name}", f"*/{pattern}") for pattern in patterns)] == []


def test_every_dependency_is_pinned() -> None:
    project = PROJECT["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {normalized(re.split(r"[<>=\[;]", line)[0]) for line in declared}
    assert names - {normalized(name) for name in PINNED} == set()
    assert PINNED["torch"] == "2.13.0"
