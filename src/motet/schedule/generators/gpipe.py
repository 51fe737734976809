"""GPipe (Huang et al. 2019, section 2.3): all forwards, then all backwards.

Over a DAG of modules nothing changes: each stage takes its microbatches in their order, wherever they come from.
Backwards come in the order of the forwards here (the paper draws them reversed; the time is the same). Where stages
share ranks the order between them is not given by the paper: there the list scheduler finds it under the same rule.

With contrastive towers, this is done for one contrastive batch after the other, with the batch-sync between its
forwards and its backwards (DistMM section 5.4 and Figure 6), so that no more of them are kept than one.
"""

import numpy as np

from motet.ragged_arrays import Ints
from motet.schedule.action import Durations
from motet.schedule.dependencies import NOTHING, Dependencies
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.generators.turns import TowerTurns, backward_turns, forward_turns, num_microbatches, tower_turns
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule, schedule_of_groups
from motet.schedule.stage_graph import shares_ranks


def gpipe(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """A limit in bytes goes against the rule that all forwards come first and is lifted where it blocks."""
    contrasted = tower_turns(routes) if memory is None else None
    if contrasted is not None:
        return schedule_of_groups(Dependencies(routes), [(group.ranks, _batch_by_batch(group)) for group in contrasted])
    if memory is not None or shares_ranks(routes):
        return list_schedule(routes, costs, memory=memory, all_forwards_first=True)
    order = []
    for stage in routes.stages:
        num_turns = num_microbatches(routes, stage)
        turns = np.concatenate([forward_turns(routes, stage, num_turns), backward_turns(routes, stage, num_turns)])
        order.append((stage.planned.ranks, turns[turns != NOTHING]))
    return schedule_of_groups(Dependencies(routes), order)


def _batch_by_batch(group: TowerTurns) -> Ints:
    """The forwards of each contrastive batch, then its backwards."""
    num_batches = len(group.forwards) // group.per_batch
    parts = [part.reshape(num_batches, -1) for part in (group.forwards, group.backwards)]
    turns = np.concatenate(parts, axis=1).ravel()
    return turns[turns != NOTHING]
