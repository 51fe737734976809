"""Phrases and names that readers stumbled at stay out of sources and pages."""

import re
from pathlib import Path

import pytest
from checkout import ROOT

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
}
"""Regular expressions, and what to write instead (STYLE: plain technical English)."""

FOLDERS = ("src", "docs", "papers", "examples")


def texts() -> list[Path]:
    """Sources and pages that are kept current; dated reports and the changelog are not."""
    found = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml")
    ]
    found += [*(ROOT / "benchmarks").glob("*.py"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    return sorted(found)


def uses(pattern: str, text: str) -> list[int]:
    """Numbers of the lines that use a banned phrase, which may run over the end of a line."""
    joined = re.sub(r"\s+", " ", text) if " " in pattern else text
    if not re.search(pattern, joined):
        return []
    return [i for i, line in enumerate(text.splitlines(), 1) if re.search(pattern, line)] or [0]


@pytest.mark.parametrize("pattern", BANNED)
def test_banned_phrases_are_not_used(pattern: str) -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in texts() for line in uses(pattern, path.read_text())]
    assert found == [], f"write instead: {BANNED[pattern]}"


def test_phrases_are_found_across_lines() -> None:
    assert uses("not there yet", "is not there\n    yet for") == [0]
    assert uses(r"\bundercuts?\b", "a\nno plan undercuts it") == [2]


def test_there_are_texts() -> None:
    assert len(texts()) > 200
