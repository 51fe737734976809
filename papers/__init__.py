"""Each paper's published tables, as data, beside our simulated ones. A new paper is a module here and an entry."""

from collections.abc import Mapping, Sequence
from importlib import import_module

from motet.errors import UserError
from papers.tables import Table

PAPERS: Mapping[str, str] = {
    "cornstarch": "papers.cornstarch.tables",
    "disttrain": "papers.disttrain.tables",
    "distmm": "papers.distmm.tables",
    "optimus": "papers.optimus.tables",
    "entrain": "papers.entrain.tables",
    "oobleck": "papers.oobleck.tables",
}
"""Modules with a function `tables() -> Sequence[Table]`, imported on demand."""


def reproduce(paper: str) -> Sequence[Table]:
    """Raises `UserError` for a paper that is not known."""
    if paper not in PAPERS:
        raise UserError(f"PAPER {paper!r} is not known; give one of {', '.join(PAPERS)}, or all")
    tables: Sequence[Table] = import_module(PAPERS[paper]).tables()
    return tables
