"""Cells that replicas compute together because they share experts, in one order on all ranks.

Each of these cells exchanges tokens with the same microbatch of the other replicas that share its experts. A generator
is shown these replicas as one, on the ranks of all, so that what it orders is one action; each rank then runs its own
replica's part of it. In the total order the parts stand side by side: no rank waits for another one that waits for it.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from motet.assignment.batch_assignment import BatchAssignment
from motet.errors import UserError
from motet.plan import ModulePlan, Plan, Replica, Stage
from motet.ragged_arrays import Ints
from motet.schedule.action import Compute, Durations
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.routes import Cell, Routes, StageCells, replicas_together
from motet.schedule.schedule import Schedule

Generate = Callable[[Routes, Durations | None, MemoryLimit | None], Schedule]


def has_joint_cells(plan: Plan) -> bool:
    return any(replicas_together(module) for module in plan.modules.values())


def joint_schedule(
    routes: Routes, duration_s: Durations | None, memory: MemoryLimit | None, generate: Generate
) -> Schedule:
    """The schedule that `generate` makes if replicas that share experts are one."""
    if not has_joint_cells(routes.plan):
        return generate(routes, duration_s, memory)
    together = _Together(routes)

    def longest(action: Compute) -> float:
        assert duration_s is not None
        return max(duration_s(action._replace(cell=cell)) for cell in together.members[action.cell])

    limit = memory
    if memory is not None:
        half = memory.half_saved_bytes
        limit = MemoryLimit(
            saved_bytes=lambda cell: max(map(memory.saved_bytes, together.members[cell])),
            limit_bytes=memory.limit_bytes,
            half_saved_bytes=None if half is None else lambda cell: max(map(half, together.members[cell])),
        )
    schedule = generate(together.routes, None if duration_s is None else longest, limit)
    return Schedule(
        [action._replace(cell=together.own_cell(action.cell, rank)) for action in actions]
        for rank, actions in enumerate(schedule.ranks)
    )


class _Together:
    """Routes in which replicas that share experts are one replica on all of their ranks."""

    def __init__(self, routes: Routes) -> None:
        plan = routes.plan
        self._plan = plan
        merged = {name: _merged(module) for name, module in plan.modules.items()}
        self._place = {
            (name, r): r // module.replicas_sharing_experts
            for name, module in plan.modules.items()
            for r in range(len(module.replicas))
        }
        stages: list[StageCells] = []
        number: Ints = np.zeros(routes.num_cells, dtype=np.int64)
        first_of: dict[tuple[str, int, int], int] = {}
        kept: list[Ints] = []
        """Cells that stand for themselves and those that they meet."""
        for stage in routes.stages:
            key = stage.module, self._place[stage.module, stage.replica], stage.stage
            size = stage.last - stage.first
            if key not in first_of:
                first = first_of[key] = stages[-1].last if stages else 0
                planned = merged[stage.module].replicas[key[1]].stages[stage.stage]
                stages.append(StageCells(*key, planned, first, first + size))
                kept.append(np.arange(stage.first, stage.last))
            number[stage.first : stage.last] = first_of[key] + np.arange(size)
        cells = np.concatenate(kept)
        ends = np.stack([number[routes.route_source], number[routes.route_target]], axis=1).reshape(-1, 2)
        _, of_routes = np.unique(ends, axis=0, return_index=True)
        of_routes.sort()
        has_gradient = np.array(
            [routes.route_has_gradient[(ends == ends[i]).all(1)].any() for i in of_routes.tolist()], dtype=bool
        )
        self.routes = Routes(
            plan=replace(plan, modules=merged, replica_microbatches=()),
            assignment=self._assignment(routes.assignment),
            stages=tuple(stages),
            cell_stage=np.repeat(np.arange(len(stages)), [stage.last - stage.first for stage in stages]),
            cell_microbatch=routes.cell_microbatch[cells],
            route_source=ends[of_routes, 0],
            route_target=ends[of_routes, 1],
            route_has_gradient=has_gradient,
            route_samples=lambda i: routes.route_samples(int(of_routes[i])),
            cell_has_backward=routes.cell_has_backward[cells],
            cell_has_weight_gradient=routes.cell_has_weight_gradient[cells],
            cell_is_ahead=routes.cell_is_ahead[cells],
            cell_ran_before=routes.cell_ran_before[cells],
            num_microbatches=routes.num_microbatches,
            forward_only=routes.forward_only,
        )
        self.members: dict[Cell, list[Cell]] = defaultdict(list)
        """The cells that each cell of `routes` stands for."""
        for cell, i in zip(routes.cells, number.tolist(), strict=True):
            self.members[self.routes.cells[i]].append(cell)

    def own_cell(self, cell: Cell, rank: int) -> Cell:
        """The rank's part of a cell of `routes`."""
        for member in self.members[cell]:
            if rank in self._plan.modules[member.module].replicas[member.replica].stages[member.stage].ranks:
                return member
        raise AssertionError(f"rank {rank} has no part in {cell}")

    def _assignment(self, assignment: BatchAssignment) -> BatchAssignment:
        cut = {}
        for name, replicas in assignment.microbatches.items():
            number = self._plan.modules[name].replicas_sharing_experts
            longest = max(map(len, replicas))
            cut[name] = tuple(
                tuple(
                    tuple(i for r in range(first, first + number) for i in assignment.samples_of(name, r, m))
                    for m in range(longest if number > 1 else len(replicas[first]))
                )
                for first in range(0, len(replicas), number)
            )
        return BatchAssignment(cut)


def _merged(module: ModulePlan) -> ModulePlan:
    if not replicas_together(module):
        return module
    replicas = []
    for together in replicas_together(module):
        alike = [module.replicas[r].stages for r in together]
        ranks = [tuple(rank for stage in stages for rank in stage.ranks) for stages in zip(*alike, strict=True)]
        stages = [
            Stage(layers=stage.layers, ranks=members, tp_size=len(members))
            for stage, members in zip(alike[0], ranks, strict=True)
        ]
        replicas.append(Replica(stages=tuple(stages)))
    return replace(module, replicas=tuple(replicas), ep=1)


def put_together(actions: Ints, lanes: Sequence[Ints], dependencies: Dependencies) -> Ints:
    """The actions in an order in which the parts of joint cells stand side by side. `lanes`: each rank's actions.

    Raises `UserError` if actions would wait for each other."""
    plan = dependencies.routes.plan
    if not has_joint_cells(plan):
        return actions
    place = {action: i for i, action in enumerate(actions.tolist())}
    meets = _first_parts(dependencies, actions)
    members: dict[int, list[int]] = defaultdict(list)
    for number in actions.tolist():
        members[meets[number]].append(number)
    after: dict[int, set[int]] = defaultdict(set)
    for lane in lanes:
        own = list(dict.fromkeys(meets[number] for number in lane.tolist()))
        for before, behind in pairwise(own):
            after[before].add(behind)
    objects = dict(zip(actions.tolist(), dependencies.actions(actions), strict=True))
    writer = {value: number for number, action in objects.items() for value in dependencies.writes(action)}
    for number, action in objects.items():
        for value in dependencies.reads(action):
            if meets[writer[value]] != meets[number]:
                after[meets[writer[value]]].add(meets[number])
    waits = dict.fromkeys(members, 0)
    for followers in after.values():
        for number in followers:
            waits[number] += 1
    # Each stands where the last of its parts stood, as far as the others allow it.
    last = {number: max(place[part] for part in parts) for number, parts in members.items()}
    ready = [(last[number], number) for number, count in waits.items() if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, number = heapq.heappop(ready)
        order += members[number]
        for follower in after[number]:
            waits[follower] -= 1
            if waits[follower] == 0:
                heapq.heappush(ready, (last[follower], follower))
    if len(order) < len(actions):
        raise UserError(
            f"parallel: replicas share experts, but schedule {plan.schedule} runs their microbatches in orders that "
            "wait for each other; give schedule 1f1b, or ep of at most tp"
        )
    return np.array(order, dtype=np.int64)


def _first_parts(dependencies: Dependencies, actions: Ints) -> Mapping[int, int]:
    """By action, the number of the first part of what it is a part of: its own, if it meets none."""
    modules = dependencies.routes.plan.modules
    first: dict[object, int] = {}
    meets = {}
    for number, action in zip(actions.tolist(), dependencies.actions(actions), strict=True):
        cell = action.cell
        number_together = modules[cell.module].replicas_sharing_experts
        block = cell.replica // number_together
        meets[number] = first.setdefault(action._replace(cell=cell._replace(replica=block)), number)
    return meets
