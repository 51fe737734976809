"""One rank's part of a program, with what follows from the program alone.

It says nothing of samples: iterations whose cells and routes are alike share it, whichever samples they hold.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from motet.schedule.action import Compute, Kind
from motet.schedule.dependencies import Activation, Gradient
from motet.schedule.lower import Message, Program, Step
from motet.schedule.routes import Cell

Carried = Activation | Gradient
"""What goes between stages."""


@dataclass(frozen=True)
class LocalProgram:
    rank: int
    steps: tuple[Step, ...]
    """What this rank runs, in order."""
    tags: Mapping[Message, int]
    """Of this rank's messages; different for each message of the whole program."""
    uses: Mapping[Carried, int]
    """How often a value that is made here is needed here: once for each send, once if it is read here."""
    final_backwards: Mapping[tuple[str, int, int], Compute]
    """By (module, replica, stage): the last backward, or half of one, in which weights of the stage get a gradient."""
    split: frozenset[Cell]
    """Cells whose backward runs in two halves."""


def local_program(program: Program, rank: int) -> LocalProgram:
    """Alike for all who ask: tags are places in the whole program."""
    steps = program.projections[rank]
    routes = program.dependencies.routes
    messages = [step for step in steps if isinstance(step, Message)]
    received = {message.value for message in messages if message.receiver == rank}
    uses: Counter[Carried] = Counter(message.value for message in messages if message.sender == rank)
    final_backwards = {}
    split = set()
    for step in steps:
        if not isinstance(step, Compute):
            continue
        for value in program.dependencies.reads_on(step, rank):
            if isinstance(value, Carried) and value not in received:
                uses[value] += 1
        if step.kind is not Kind.FORWARD and step.cell in routes.with_weight_gradient:
            final_backwards[step.cell[:3]] = step
        if step.kind is Kind.INPUT:
            split.add(step.cell)
    mine = set(messages)
    tags = {step: tag for tag, step in enumerate(program.steps) if isinstance(step, Message) and step in mine}
    return LocalProgram(rank, steps, tags, uses, final_backwards, frozenset(split))
