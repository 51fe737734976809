"""Makes plans from the layouts of towers: each tower on its own ranks, or several on the same, and the loss on all that
hold features. A caption decoder has ranks of its own, after the towers'.

Ranks are numbered tower by tower, then by replica, by stage, and tensor parallelism fastest, so tensor-parallel groups
lie within nodes and a tower's ranks together (DistMM section 5.3). Towers come in an order in which few groups and
towers are spread over nodes without need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from motet.errors import UserError
from motet.plan import ModulePlan, Plan, Replica, Stage
from motet.planner.layouts.degrees import check_degrees
from motet.planner.layouts.layout import cut_module
from motet.planner.problem import Degrees, PlanningProblem


@dataclass(frozen=True, kw_only=True)
class TowerLayout:
    degrees: Degrees
    per_batch: int = 1
    """Microbatches of a replica in one contrastive batch."""


def tower_plan(
    problem: PlanningProblem,
    layouts: Mapping[str, TowerLayout],
    *,
    together: Sequence[Sequence[str]] = (),
    schedule: str | None = None,
    planner: str = "explicit",
    recompute_features: Sequence[str] = (),
) -> Plan:
    """`together`: towers that stand on the same ranks, which need equal degrees. `schedule`: None for the problem's.

    Raises `UserError` for a problem without towers and a loss, and for layouts that no plan can have."""
    loss = _check(problem, layouts, together)
    blocks = [tuple(block) for block in together]
    blocks += [(name,) for name in problem.towers if not any(name in block for block in blocks)]
    modules: dict[str, ModulePlan] = {}
    first = 0
    for block in _in_order(problem, blocks, layouts):
        for name in block:
            modules[name] = _module(problem, name, layouts[name], first)
        first += _num_ranks(layouts[block[0]].degrees)
    members = sorted(
        {r for module in modules.values() for replica in module.replicas for r in replica.stages[-1].ranks}
    )
    modules[loss] = _loss(problem, loss, members)
    for name in decoders(problem):
        modules[name] = _module(problem, name, layouts[name], first)
        first += _num_ranks(layouts[name].degrees)
    of_batches = replace(problem, num_microbatches=problem.num_contrastive_batches)
    plan = of_batches.plan({name: modules[name] for name in problem.modules}, planner=planner, schedule=schedule)
    return replace(plan, recompute_features=tuple(recompute_features))


def _num_ranks(degrees: Degrees) -> int:
    return degrees.ranks_per_stage * degrees.pp * degrees.dp


def decoders(problem: PlanningProblem) -> list[str]:
    """Language models that read only towers, beside the loss."""
    kinds = {name: problem.modules[name].workload.kind for name in problem.modules}
    return [
        name
        for name, kind in kinds.items()
        if kind == "language_model" and all(kinds[e.source] == "tower" for e in problem.edges if e.target == name)
    ]


def _in_order(
    problem: PlanningProblem, blocks: Sequence[tuple[str, ...]], layouts: Mapping[str, TowerLayout]
) -> Sequence[tuple[str, ...]]:
    """So that as few groups and towers as possible lie on several nodes that could lie on one."""

    def crossings(order: Sequence[tuple[str, ...]]) -> tuple[int, int]:
        groups = towers = first = 0
        for block in order:
            degrees = layouts[block[0]].degrees
            size = degrees.ranks_per_stage
            last = first + _num_ranks(degrees)
            node = problem.cluster.node
            groups += sum(node(rank) != node(rank + size - 1) for rank in range(first, last, size))
            towers += node(last - 1) - node(first)
            towers += node(first) != node(last - 1)
            first = last
        return groups, towers

    return min(permutations(blocks), key=crossings)


def _check(problem: PlanningProblem, layouts: Mapping[str, TowerLayout], together: Sequence[Sequence[str]]) -> str:
    """The loss's name."""
    loss = problem.loss_module
    placed = (*problem.towers, *decoders(problem))
    others = [name for name in problem.modules if name not in placed and name != loss]
    if loss is None or not problem.towers:
        raise UserError("parallel: the model has no contrastive towers; use another planner")
    if others:
        raise UserError(f"parallel: {', '.join(others)} is not supported beside towers in this layout; leave it out")
    for name in placed:
        if name not in layouts:
            raise UserError(f"parallel: {name} has no degrees; give its tp, pp and dp")
        check_degrees(problem, name, layouts[name].degrees)
        if layouts[name].per_batch < 1:
            raise UserError(f"parallel: {name}.num_microbatches is {layouts[name].per_batch}; give at least 1")
    for block in together:
        shapes = {(d.tp, d.cp, d.pp, d.dp): name for name in block for d in (layouts[name].degrees,)}
        if len(shapes) > 1:
            raise UserError(
                f"parallel: {' and '.join(shapes.values())} are on the same ranks; give them the same degrees"
            )
    return loss


def _module(problem: PlanningProblem, name: str, layout: TowerLayout, first: int) -> ModulePlan:
    module, degrees = problem.modules[name], layout.degrees
    size = degrees.ranks_per_stage
    cut = cut_module(problem, name, replace(degrees, dp=1))
    replicas = []
    for r in range(degrees.dp):
        starts = [first + (r * degrees.pp + s) * size for s in range(degrees.pp)]
        replicas.append(
            Replica(
                stages=tuple(
                    Stage(layers=layers, ranks=tuple(range(a, a + size)), tp_size=degrees.tp, cp_size=degrees.cp)
                    for layers, a in zip(cut, starts, strict=True)
                )
            )
        )
    return module.planned(
        replicas,
        sequence_parallel=degrees.sequence_parallel,
        context=degrees.context,
        num_microbatches=layout.per_batch * problem.num_contrastive_batches,
    )


def _loss(problem: PlanningProblem, name: str, members: Sequence[int]) -> ModulePlan:
    module = problem.modules[name]
    together = Stage(layers=(0, 1), ranks=tuple(members), cp_size=len(members))
    return ModulePlan(
        kind="loss",
        num_layers=1,
        replicas=(Replica(stages=(together,)),),
        trainable=module.trainable,
        loss_weight=module.loss_weight,
        num_microbatches=problem.num_contrastive_batches,
    )
