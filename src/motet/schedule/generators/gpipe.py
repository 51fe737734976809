"""GPipe (Huang et al. 2019, section 2.3): all forwards, then all backwards.

Over a DAG of modules nothing changes: each stage takes its microbatches in their order, whoever feeds it. Backwards
come in the order of the forwards here (the paper draws them reversed; the time is the same). Where stages share ranks
the order between them is not given by the paper: there the list scheduler finds it under the same rule.
"""

import numpy as np

from motet.schedule.action import Durations
from motet.schedule.dependencies import NOTHING, Dependencies
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.generators.turns import backward_turns, forward_turns, num_microbatches
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule, schedule_of_groups
from motet.schedule.stage_graph import shares_ranks


def gpipe(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """A limit in bytes goes against the rule that all forwards come first and is lifted where it blocks."""
    if memory is not None or shares_ranks(routes):
        return list_schedule(routes, costs, memory=memory, all_forwards_first=True)
    order = []
    for stage in routes.stages:
        num_turns = num_microbatches(routes, stage)
        turns = np.concatenate([forward_turns(routes, stage, num_turns), backward_turns(routes, stage, num_turns)])
        order.append((stage.planned.ranks, turns[turns != NOTHING]))
    return schedule_of_groups(Dependencies(routes), order)
