"""The published tables of six papers, and 203 published throughputs, as data beside the numbers that motet simulates.

Each paper is a folder with a module `tables` and an entry in `PAPERS`. The modules use public names of motet only.
"""

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
    """Computes the tables of one paper. Raises `UserError` for a paper that is not known."""
    if paper not in PAPERS:
        raise UserError(f"NAME {paper!r} is not known; give one of {', '.join(PAPERS)}, or all")
    tables: Sequence[Table] = import_module(PAPERS[paper]).tables()
    return tables
