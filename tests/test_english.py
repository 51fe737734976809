"""Phrases and names that readers stumbled at stay out of sources and pages."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from checkout import ROOT, statements, text_of

BANNED = {
    r"\bundercuts?\b": "a lower bound",
    r"at least \{_ms|at least [\d.]+ ms": "lower bound 12.34 ms",
    r"not there yet": "is not supported on ...",
    r"input half has run": "awaiting their weight-gradient pass",
    r"[Ww]ho sends which part": "the copies that move tensor slices between ranks",
    r"[Ww]hat would make a plan fit": "suggests changes that bring a plan within memory",
    r"the words that it takes": "a standard term",
    r"\breunion\b": "store_failover",
    r"\bwhereabouts\b": "store_discovery",
    r"\btold_of\b": "resume_message",
    r"\bgo_on_from\b": "adopt_progress",
    r"\bown_masks\b": "custom_masks",
    r"\bunlike_groups\b": "mixed_tp_reduce",
    r"\bpart_values\b": "hf_config",
    r"\bshare_context\b": "enable_context_parallel",
    r"\bsimulator[./]alike\b": "replica_folding",
    r"\bmotet reproduce\b": "python -m papers",
    r"\b(?:could not|cannot) be had\b": "cannot be downloaded",
    r"\b(?:mend|mends) the YAML\b": "correct the YAML",
    r"\bholds no mapping\b": "is not a mapping",
    r": is of (?:towers|encoders)\b|: is of a (?:whole|language) model": "applies to ... only",
    r"\b(?:goes|go) with --|does not go with": "is read with ... only, cannot be combined with",
    r"\bis a slow one\b": "is a slow tokenizer",
    r"\bcaptions nothing\b": "cannot be a caption decoder",
    r"\ba loss contrasts\b|\btowers (?:that )?are contrasted\b": "contrastive towers",
    r"\bhands? on (?:its|the|a|an|what|one|features|rows|all)\b|\b(?:tokens|features|rows) handed on\b": "outputs",
    r"\bwho may ask\b": "access",
    r"\bwhat (?:kernels|one program) (?:get|may have)\b": "inputs, resources",
    r"\bwould help\"": "give, use",
    r"\bnobody derives\b": "no other code derives",
    r"\bas ever\b": "as for every other, unchanged",
    r"\bof before\b": "earlier, of 0.1.0",
    r"\bone's own\b": "your own, separate",
    r"\bhands? all of them on\b": "keeps, outputs",
    r"\bgo on (?:from them by|with train)\b": "continue from them with",
    r"\bis of (?:another|no) (?:model|format|tower)\b": "belongs to another model, has another format",
    r"\bof a whole (?:item|image)\b": "pooled output",
    r"\bno file that ends\b": "a regular file",
    r"\bhalf of a character\b": "an unpaired surrogate",
    r"\bcannot be listened at\b": "cannot be used as an address",
    r"\bmend the package\b": "repair the package",
    r"\bno two make a\b": "no ... with a ... gives",
    r"\bwhere they bring nothing\b": "has no effect",
    r"\bshown to be right\b|\bis right with\b|\bnot believed\b": "verified, correct, tested",
    r"\bis taken over:": "takes ownership of",
    r"\bWhat was weighed\b|\bWhat else was looked at\b|\bLooked at:|\bWeighed and left\b": "Alternatives, Comparison",
    r"\b[Ww]ho (?:restarts|decides) what\b": "what happens after ...",
    r"\bnobody's expert\b|\bwho skipped one\b": "an expert of another rank, a process that skipped one",
    r"\bhas the last word\b": "decides",
    r"\bTraps met\b|\bA trap\.": "pitfalls",
    r"\bsees? nothing of\b": "does not see",
    r"\bnobody (?:asked for|saves)\b": "was not requested, is not saved",
    r"\bin the places? of motet\b|\bin whose places\b": "instead of, at whose positions",
}
"""Regular expressions, and what to write instead (STYLE: plain technical English)."""

FOLDERS = ("src", "docs", "papers", "examples")


@cache
def texts() -> list[Path]:
    """Sources and pages that are kept current; dated reports and the changelog are not."""
    found = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml")
    ]
    found += [*(ROOT / "benchmarks").glob("*.py"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    return sorted(found)


@cache
def on_one_line(text: str) -> str:
    """The text without line ends, and without the ends of strings that go on in the next line."""
    return " ".join(re.sub(r"""(["'])\n\s*[rf]?\1""", "", text).split())


def uses(pattern: str, text: str) -> list[int]:
    """Numbers of the lines that use a banned phrase, or 0 if it runs over the end of a line."""
    if not re.search(pattern, on_one_line(text)):
        return []
    return [i for i, line in enumerate(text.splitlines(), 1) if re.search(pattern, line)] or [0]


@pytest.mark.parametrize("pattern", BANNED)
def test_banned_phrases_are_not_used(pattern: str) -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in texts() for line in uses(pattern, text_of(path))]
    assert found == [], f"write instead: {BANNED[pattern]}"


CLEAN = (
    *(f"src/motet/{name}" for name in ("attention", "balancing", "cli", "cluster", "models/hub", "report")),
    *(f"src/motet/planner/{name}" for name in ("distmm", "disttrain", "optimus", "reconfiguration", "templates")),
    "src/motet/runtime/checkpoint",
    "papers",
)
"""Folders whose docstrings all begin with what the thing is; the others are to join them."""


def documentation(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, also of those below fields and constants."""
    for statement in statements(ast.parse(text_of(path)).body):
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield statement.lineno, value.value.strip()


@pytest.mark.parametrize("folder", CLEAN)
def test_docstrings_begin_with_what_the_thing_is(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in documentation(path)
        if re.match(r"(?:Of|What|Who|Whose|Those) ", text)
    ]
    assert found == [], "begin with a noun or a verb: 'Bytes of ...', 'Returns ...'"


def test_docstrings_are_found() -> None:
    found = [text for _, text in documentation(Path(__file__))]
    assert any(text.startswith("Folders whose docstrings") for text in found)
    assert len(found) >= 6


def test_phrases_are_found_across_lines() -> None:
    assert uses("not there yet", "is not there\n    yet for") == [0]
    assert uses("not there yet", 'f"is not there "\n    f"yet for"') == [0]
    assert uses(r"\bundercuts?\b", "a\nno plan undercuts it") == [2]


def test_there_are_texts() -> None:
    assert len(texts()) > 200
