"""What the pages show: commands that motet understands, programs that are Python, run files and links that exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.cli.main import build_parser
from motet.config import load_run_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `motet ...` that stands on lines of its own, with `ROOT/` before files of the project."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(
        r"^(?: {4}|)(?:\S+ )*?motet ((?:plan|simulate|profile|train|verify|reproduce|demo|data-stats|serve-data) .*)",
        text,
        re.M,
    ):
        yield [
            str(ROOT / word) if word.startswith("examples/") else word
            for word in shlex.split(line.partition(";")[0], comments=True)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_are_python(page: Path) -> None:
    for program in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        compile(program, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
