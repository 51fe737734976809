"""What closed forms are made of: the turns of a stage, one for each microbatch, and their order in 1F1B.

Turns are numbers of actions; where a microbatch gives a stage nothing to do, its turn is empty (`NOTHING`). Empty turns
keep the places of the others, so a form that cannot deadlock with all turns cannot without some of them.
"""

from collections.abc import Sequence

import numpy as np

from motet.ragged_arrays import Ints
from motet.schedule.action import Kind
from motet.schedule.dependencies import KINDS, NOTHING
from motet.schedule.routes import Routes, StageCells


def num_microbatches(routes: Routes, stage: StageCells) -> int:
    """Empty ones included, but for those after the last that is not."""
    return 1 + int(routes.cell_microbatch[stage.last - 1])


def forward_turns(routes: Routes, stage: StageCells, num_turns: int) -> Ints:
    """The stage's forwards by microbatch."""
    turns = np.full(num_turns, NOTHING)
    turns[routes.cell_microbatch[stage.first : stage.last]] = np.arange(stage.first, stage.last)
    return turns


def backward_turns(routes: Routes, stage: StageCells, num_turns: int) -> Ints:
    """The stage's whole backwards by microbatch."""
    cells = stage.first + np.flatnonzero(routes.cell_has_backward[stage.first : stage.last])
    turns = np.full(num_turns, NOTHING)
    turns[routes.cell_microbatch[cells]] = KINDS.index(Kind.BACKWARD) * routes.num_cells + cells
    return turns


def alternate(forwards: Ints, backwards: Ints, num_warm_up: int) -> Ints:
    """`num_warm_up` forwards, then one forward and one backward in turn, then what is left of the backwards.

    Turns of several actions are rows: arrays of shape [turns, actions]."""
    shape = forwards.shape[1:] or (1,)
    pairs = np.full((num_warm_up + len(backwards), 2, *shape), NOTHING)
    pairs[: len(forwards), 0] = forwards.reshape(-1, *shape)
    pairs[num_warm_up:, 1] = backwards.reshape(-1, *shape)
    return pairs[pairs != NOTHING]


def one_group(routes: Routes, stages: Sequence[StageCells], num_warm_up: int) -> Ints:
    """What a group with these stages, in topological order, executes in 1F1B: a turn takes a microbatch through all."""
    num_turns = max(num_microbatches(routes, stage) for stage in stages)
    forwards = np.stack([forward_turns(routes, stage, num_turns) for stage in stages], axis=1)
    backwards = np.stack([backward_turns(routes, stage, num_turns) for stage in reversed(stages)], axis=1)
    return alternate(forwards, backwards, min(num_warm_up, num_turns))
