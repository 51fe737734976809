"""GPipe (Huang et al. 2019, section 2.3): all forwards, then all backwards.

Over a DAG of modules nothing changes: each stage takes its microbatches in their order, whoever feeds it. Backwards
come in the order of the forwards here (the paper draws them reversed; the time is the same). Where stages share ranks
the order between them is not given by the paper: there the list scheduler finds it under the same rule.
"""

from motet.schedule.action import Compute, Durations, Kind
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule, schedule_of_stages
from motet.schedule.stage_graph import cells_of_stages, shares_ranks


def gpipe(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
    """A limit in bytes goes against the rule that all forwards come first and is lifted where it blocks."""
    if memory is not None or shares_ranks(routes):
        return list_schedule(routes, costs, memory=memory, all_forwards_first=True)
    order = {
        stage: [
            *(Compute(Kind.FORWARD, cell) for cell in cells),
            *(Compute(Kind.BACKWARD, cell) for cell in cells if cell in routes.with_backward),
        ]
        for stage, cells in cells_of_stages(routes).items()
    }
    return schedule_of_stages(routes, order)
