"""Actions, the smallest units that a schedule orders. Each prints as a short text and parses back; it also names its
span.

| action | text | meaning |
|---|---|---|
| `Compute(FORWARD, cell)` | `vision[0].1F3` | forward of microbatch 3 on stage 1 of the module's replica 0 |
| `Compute(BACKWARD, cell)` | `vision[0].1B3` | its whole backward |
| `Compute(INPUT, cell)` | `vision[0].1I3` | the half of it that makes the gradient of the stage's inputs |
| `Compute(WEIGHT, cell)` | `vision[0].1W3` | the half that makes the gradient of its weights |
| `Reduce(module, first, last)` | `vision.R[4:9)` | the gradients of a run of layers are summed over all that hold it |
| `Reduce(..., tied=True)` | `llm.R[0=9)` | the gradients of one parameter that two layers share are summed |
"""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from motet.schedule.routes import Cell


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


class Compute(NamedTuple):
    kind: Kind
    cell: Cell

    def __str__(self) -> str:
        module, replica, stage, microbatch = self.cell
        return f"{module}[{replica}].{stage}{self.kind.value}{microbatch}"


class Reduce(NamedTuple):
    module: str
    first: int
    last: int
    tied: bool = False
    """Instead of the run [first, last): the one parameter that layers `first` and `last` share."""

    def __str__(self) -> str:
        return f"{self.module}.R[{self.first}{'=' if self.tied else ':'}{self.last})"


Action = Compute | Reduce

Durations = Callable[[Compute], float]
"""Seconds that a compute action takes."""


def unit_duration(action: Compute) -> float:
    """Default durations where costs are not known: a backward takes twice as long as a forward or one of its halves."""
    return 2.0 if action.kind is Kind.BACKWARD else 1.0


_COMPUTE = re.compile(r"(?P<module>.+)\[(?P<replica>\d+)\]\.(?P<stage>\d+)(?P<kind>[FBIW])(?P<microbatch>\d+)")
_REDUCE = re.compile(r"(?P<module>.+)\.R\[(?P<first>\d+)(?P<sign>[:=])(?P<last>\d+)\)")


def parse_action(text: str) -> Action:
    """The inverse of `str(action)`. Raises `ValueError` for anything else."""
    if match := _COMPUTE.fullmatch(text):
        cell = Cell(match["module"], int(match["replica"]), int(match["stage"]), int(match["microbatch"]))
        return Compute(Kind(match["kind"]), cell)
    if match := _REDUCE.fullmatch(text):
        return Reduce(match["module"], int(match["first"]), int(match["last"]), tied=match["sign"] == "=")
    raise ValueError(f"{text!r} is not an action; examples are vision[0].1F3 and vision.R[4:9)")
