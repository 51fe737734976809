"""The best schedule of a tiny problem, by trying all."""

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from motet.schedule.action import Compute
from motet.schedule.dependencies import Dependencies
from motet.schedule.lower import lower
from motet.schedule.order import CyclicScheduleError
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule
from motet.simulator.costs import Costs
from motet.simulator.simulate import simulate


def best_time_s(routes: Routes, costs: Costs, actions: Sequence[Compute]) -> float:
    """The least simulated iteration time over all orders of the actions on all ranks."""
    dependencies = Dependencies(routes)
    best = float("inf")
    for schedule in all_schedules(dependencies, actions):
        try:
            program = lower(schedule, dependencies, costs.compute_s)
        except CyclicScheduleError:
            continue
        best = min(best, simulate(program, costs).iteration_time_s)
    return best


def all_schedules(dependencies: Dependencies, actions: Sequence[Compute]) -> Iterator[Schedule]:
    before = _ancestors(dependencies, actions)
    orders = []
    for rank in range(dependencies.routes.plan.num_ranks):
        mine = [action for action in actions if rank in dependencies.ranks(action)]
        orders.append([order for order in permutations(mine) if _respects(order, before)])
    for ranks in product(*orders):
        yield Schedule(tuple(ranks))


def _ancestors(dependencies: Dependencies, actions: Sequence[Compute]) -> dict[Compute, set[Compute]]:
    before: dict[Compute, set[Compute]] = {action: set() for action in actions}
    for _ in actions:
        for action in actions:
            for other in actions:
                if set(dependencies.writes(other)) & set(dependencies.reads(action)):
                    before[action] |= {other} | before[other]
    return before


def _respects(order: Sequence[Compute], before: dict[Compute, set[Compute]]) -> bool:
    return not any(later in before[earlier] for i, earlier in enumerate(order) for later in order[i + 1 :])
