"""A DIP-like schedule as baseline: encoders first, then the language model, then encoders again.

After the description of DIP in the thesis (sections 4.2.1 and 4.7.2, Figure 4.2c): modalities are parallelized each by
itself, their stages stand on the same ranks, all encoder forwards of the iteration come before the language model's
work and all encoder backwards after it. Every encoder microbatch is held in between, which is what the thesis finds it
costs.

Assumed, as the description leaves it open: encoder microbatches go in the order in which they are needed, each through
all encoders, and come back in the same order; the language model keeps 1F1B, or interleaved 1F1B where its stages go
round their groups. DIP's cut of microbatches into smaller ones is the assignment's affair, its search for an order
within the phases is not followed.
"""

from collections.abc import Mapping

import numpy as np

from motet.ragged_arrays import Ints
from motet.schedule.action import Durations, Kind
from motet.schedule.dependencies import KINDS, Dependencies
from motet.schedule.generators.interleaved_1f1b import interleaved_1f1b, order_in_rounds
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule
from motet.schedule.stage_graph import due_by_cell


def dip(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """A limit in bytes goes against holding all encoder microbatches: with one, and where the language model has no
    closed form, this is interleaved 1F1B."""
    encoders = {name for name, module in routes.plan.modules.items() if module.kind == "encoder"}
    others = routes.plan.modules.keys() - encoders
    order = order_in_rounds(routes, others, forwards_per_place=2) if others and memory is None else None
    if order is None:
        return interleaved_1f1b(routes, costs, memory=memory)
    is_encoder = np.array([stage.module in encoders for stage in routes.stages], dtype=bool)[routes.cell_stage]
    due, back_at = (np.array(due_by_cell(routes, latest=latest), dtype=np.int64) for latest in (False, True))
    cells = np.flatnonzero(is_encoder)
    forwards = cells[np.lexsort((cells, due[cells]))]
    back = np.flatnonzero(is_encoder & routes.cell_has_backward)
    backwards = back[np.lexsort((-back, back_at[back]))] + KINDS.index(Kind.BACKWARD) * routes.num_cells
    given = {rank: numbers for ranks, numbers in order for rank in ranks}
    return Schedule.of_numbers(Dependencies(routes), _on_ranks(routes, forwards, given, backwards))


def _on_ranks(routes: Routes, before: Ints, given: Mapping[int, Ints], after: Ints) -> list[Ints]:
    """Each rank's part of what comes before and after, around what it is given; ranks alike share one array."""
    stages_of_rank: list[list[int]] = [[] for _ in range(routes.plan.num_ranks)]
    for s, stage in enumerate(routes.stages):
        for rank in stage.planned.ranks:
            stages_of_rank[rank].append(s)
    lists: dict[tuple[int, ...], Ints] = {}
    for rank, held in enumerate(map(tuple, stages_of_rank)):
        if held not in lists:
            is_held = np.zeros(len(routes.stages), dtype=bool)
            is_held[list(held)] = True
            own = (part[is_held[routes.cell_stage[part % routes.num_cells]]] for part in (before, after))
            lists[held] = np.concatenate([next(own), given.get(rank, before[:0]), next(own)])
    return [lists[tuple(held)] for held in stages_of_rank]
