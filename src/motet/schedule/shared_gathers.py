"""Decides which fully sharded stages gather their parameters block by block, and which once per step.

A gather is collective. Within a context-parallel group all ranks run the same actions, so they gather each block in
each of them. Replicas that share parameters may differ: one may have fewer microbatches, or some without images. Where
each of them runs the same sequence of actions, with gradients in the same places, their actions gather together; else
everything is gathered when the step begins, and gradients are summed when it ends.

Limits: encoders and towers of several replicas always gather once, as their blocks may run several times in a forward
(once for each size of image).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from motet.plan import ModulePlan
from motet.schedule.action import Compute
from motet.schedule.lower import Message, Program
from motet.schedule.routes import Cell, Routes

StageKey = tuple[str, int, int]
"""(module, replica, stage)."""


class _Sharing(NamedTuple):
    """The replicas of a stage that share its parameters."""

    module: str
    replicas: range
    stage: int


def gathered_by_block(program: Program) -> frozenset[StageKey]:
    """The stages that gather block by block; the same on every rank."""
    routes = program.dependencies.routes
    together = [sharing for sharing in _sharings(routes) if _run_alike(program, routes, sharing)]
    if not _can_run_together(program, together):
        together = []
    alone = [
        (name, r, s)
        for name, r, s, _ in routes.plan.stages()
        if routes.plan.modules[name].fully_sharded and not routes.plan.modules[name].shares_over_replicas
    ]
    return frozenset(alone) | {(name, r, s) for name, replicas, s in together for r in replicas}


def have_equal_cells(routes: Routes, module: str, replicas: Iterable[int], stage: int) -> bool:
    """Whether these replicas of a stage have microbatches that need the same gradients, one for one."""
    cells = routes.cells
    found = {s.replica: cells[s.first : s.last] for s in routes.stages if (s.module, s.stage) == (module, stage)}
    if routes.plan.modules[module].kind != "language_model":
        return not any(found.get(r) for r in replicas)
    forms = {tuple((cell.microbatch, _form(routes, cell)) for cell in found.get(r, ())) for r in replicas}
    return len(forms) == 1


def gathers_by_block(
    routes: Routes, module: str, stage: int, replica_of: Mapping[tuple[str, int], tuple[str, int]] | None = None
) -> bool:
    """Whether all replicas of a fully sharded stage gather block by block, as far as it depends on the routes.

    `replica_of`: where equal pipelines are simulated once, the replica that stands for each (module, replica)."""
    planned = routes.plan.modules[module]
    if not planned.shares_over_replicas:
        return True
    return all(
        have_equal_cells(routes, module, {r if replica_of is None else replica_of[module, r][1] for r in shared}, stage)
        for shared in sharing_replicas(planned)
    )


def _sharings(routes: Routes) -> Iterator[_Sharing]:
    for name, module in routes.plan.modules.items():
        if module.shares_over_replicas:
            for replicas in sharing_replicas(module):
                for s in range(len(module.replicas[0].stages)):
                    yield _Sharing(name, replicas, s)


def sharing_replicas(module: ModulePlan) -> Iterator[range]:
    """The runs of replicas that share parameters."""
    for first in range(0, len(module.replicas), module.sharded_replicas):
        yield range(first, first + module.sharded_replicas)


def _form(routes: Routes, cell: Cell) -> tuple[bool, frozenset[tuple[str, bool]]]:
    """Returns the facts that a cell's gradients depend on."""
    plan = routes.plan
    module = plan.modules[cell.module]
    # Tokens merged into a trainable embedding change nothing: gradients come through it in any case.
    merged = {
        edge.source
        for edge in plan.edges
        if edge.target == cell.module and edge.layers == (0,) and module.is_trainable((0, 1))
    }
    entering = {(route.source.module, route.carries_gradient) for route in routes.incoming[cell]}
    return cell in routes.with_backward, frozenset((source, back) for source, back in entering if source not in merged)


def _actions_of(program: Program, sharing: _Sharing, replica: int) -> list[Compute]:
    ranks = program.dependencies.routes.plan.modules[sharing.module].replicas[replica].stages[sharing.stage].ranks
    key = (sharing.module, replica, sharing.stage)
    return [step for step in program.projections[ranks[0]] if isinstance(step, Compute) and step.cell[:3] == key]


def _run_alike(program: Program, routes: Routes, sharing: _Sharing) -> bool:
    if not have_equal_cells(routes, sharing.module, sharing.replicas, sharing.stage):
        return False
    orders = {
        tuple((action.kind, action.cell.microbatch) for action in _actions_of(program, sharing, r))
        for r in sharing.replicas
    }
    return len(orders) == 1


def _can_run_together(program: Program, sharings: list[_Sharing]) -> bool:
    """Whether the ranks do not wait for each other in a circle when actions that gather together wait for each other.

    Runs the program as if every message and every such action were a rendezvous."""
    partners: dict[Compute, list[Compute]] = {}
    for sharing in sharings:
        for actions in zip(*(_actions_of(program, sharing, r) for r in sharing.replicas), strict=True):
            partners |= {action: list(actions) for action in actions}
    if not partners:
        return True
    projections, places = program.projections, [0] * len(program.projections)
    waiting = set(range(len(projections)))

    def needed(rank: int) -> set[int]:
        """The ranks that have to be at the step that is next on this one, or at a partner of it."""
        step = projections[rank][places[rank]]
        if isinstance(step, Compute):
            return {r for action in partners.get(step, [step]) for r in program.participants(action)}
        return set(program.participants(step)) if isinstance(step, Message) else {rank}

    def is_there(rank: int, step: object) -> bool:
        return places[rank] < len(projections[rank]) and projections[rank][places[rank]] in _same(step, partners)

    while waiting:
        rank = waiting.pop()
        while places[rank] < len(projections[rank]):
            step = projections[rank][places[rank]]
            ranks = needed(rank)
            if not all(is_there(other, step) for other in ranks):
                break
            for other in ranks:
                places[other] += 1
            waiting |= ranks - {rank}
    return all(place == len(steps) for place, steps in zip(places, projections, strict=True))


def _same(step: object, partners: dict[Compute, list[Compute]]) -> list[object]:
    return [*partners[step]] if isinstance(step, Compute) and step in partners else [step]
