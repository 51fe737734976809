"""Each paper's published tables, as data, beside our simulated ones. A new paper is a module here and an entry."""

from collections.abc import Mapping, Sequence
from importlib import import_module

from motet.errors import UserError
from motet.reproduce.tables import Table

PAPERS: Mapping[str, str] = {
    "cornstarch": "motet.reproduce.cornstarch",
    "disttrain": "motet.reproduce.disttrain",
    "distmm": "motet.reproduce.distmm",
    "optimus": "motet.reproduce.optimus",
    "entrain": "motet.reproduce.entrain",
    "oobleck": "motet.reproduce.oobleck",
}
"""Modules with a function `tables() -> Sequence[Table]`, imported on demand."""


def reproduce(paper: str) -> Sequence[Table]:
    """Raises `UserError` for a paper that is not known."""
    if paper not in PAPERS:
        raise UserError(f"PAPER {paper!r} is not known; give one of {', '.join(PAPERS)}, or all")
    tables: Sequence[Table] = import_module(PAPERS[paper]).tables()
    return tables
