"""What the pages show: commands that motet understands, programs that are Python, run files and links that exist."""

import importlib
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from checkout import ROOT

from motet.balancing.policies import ASSIGNMENTS
from motet.cli.main import build_parser
from motet.config import load_run_config
from motet.data.formats.registry import FILE_FORMATS
from motet.planner.registry import PLANNERS
from motet.schedule.generators import GENERATORS

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
FOLDERS = "src|docs|tests|benchmarks|examples|papers"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `motet ...` in blocks of code, with `ROOT/` before files of the project."""
    text = page.read_text().replace("\\\n", " ")
    fenced = [code for language, code in FENCED.findall(text) if language in ("", "bash", "sh")]
    indented = re.findall(r"^ {4}.*", text, re.M)
    for line in "\n".join([*fenced, *indented]).splitlines():
        if found := re.match(r" *(?:\S+ )*?motet (.*)", line.partition("#")[0]):
            yield [
                str(ROOT / word) if word.startswith("examples/") else word
                for word in shlex.split(found[1].partition(";")[0])
            ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    for arguments in commands(page):
        parsed = build_parser().parse_args(arguments)
        run_file = Path(getattr(parsed, "run_file", None) or "")
        if run_file.is_relative_to(ROOT):
            load_run_config(run_file, parsed.overrides)


def test_commands_are_found() -> None:
    found = [arguments for page in PAGES for arguments in commands(page)]
    assert len(found) >= 25
    assert {"plan", "simulate", "train", "verify", "profile", "serve-data"} <= {arguments[0] for arguments in found}


def test_programs_are_python() -> None:
    blocks = [(page, *found) for page in PAGES for found in FENCED.findall(page.read_text())]
    programs = [(page, code) for page, language, code in blocks if language == "python"]
    assert len(programs) >= 4
    for page, program in programs:
        compile(program, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def exists(name: str) -> bool:
    """Whether a dotted name of motet or papers is a module, a definition or an attribute of a class."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        module = ".".join(parts[:size])
        try:
            target = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not module.startswith(str(error.name)):
                raise  # The module is there, and imports one that is not.
            continue
        for part in parts[size:]:
            if not hasattr(target, part) and part not in getattr(target, "__annotations__", {}):
                return False
            target = getattr(target, part, None)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_code_exist(page: Path) -> None:
    text = page.read_text()
    names = set(re.findall(r"`((?:motet|papers)(?:\.\w+)+)[`(]", text)) | set(re.findall(r"-m (motet(?:\.\w+)+)", text))
    missing = [name for name in sorted(names) if not name.endswith((".py", ".yaml", ".json")) and not exists(name)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    paths = set(re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", page.read_text()))
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_python_files_exist(page: Path) -> None:
    """A page may leave out the first folders of a path."""
    files = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.py")]
    names = set(re.findall(r"`([^\W_][\w./{},-]+\.py)`", page.read_text()))
    assert [name for name in sorted(names) if not any(file.endswith(f"/{name}") for file in files)] == []


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("data.md", ASSIGNMENTS),
        ("data.md", FILE_FORMATS),
        ("run-file.md", ASSIGNMENTS),
        ("run-file.md", GENERATORS),
        ("schedules.md", GENERATORS),
        ("layout.md", PLANNERS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pages_name_what_a_run_file_can_name(page: str, names: Iterable[str]) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert [name for name in names if f"`{name}`" not in text] == []
