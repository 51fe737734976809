"""Renumbers ranks: groups that fit on one node lie on one node (`on_nodes`), or replicas' equal stages lie side by side
(`replicas_side_by_side`).

Tensor parallelism across nodes is slow.

Planners number ranks in the order in which they lay out modules, so that an encoder on one device shifts every later
group across the borders of the nodes. Where this happens, larger groups are numbered first: sizes that divide each
other and the node's size then all lie within nodes. The order of groups of one size is kept, so neighbouring stages
stay neighbours.

Planners number the ranks of one replica after those of another. Where several groups have room on a node, those of
equal stages can lie there instead, one for each replica: gradients and new parameters then travel within nodes first,
and messages between stages travel between nodes.

Limits: plans whose groups overlap partly are left unchanged, as are sizes for which this does not help.
"""

from collections.abc import Iterable
from dataclasses import replace

from motet.plan import Plan, Replica

Group = tuple[int, ...]


def on_nodes(plan: Plan, devices_per_node: int) -> Plan:
    """The same plan, with ranks renumbered if fewer groups then lie on more nodes than they need."""
    stage_groups = {stage.ranks for _, _, _, stage in plan.stages()}
    units = _largest(stage_groups)
    if units is None:
        return plan
    before = _num_divided(units, devices_per_node)
    if not before:
        return plan
    in_order = sorted(units, key=lambda ranks: (-len(ranks), min(ranks)))
    number = {rank: i for i, rank in enumerate(rank for ranks in in_order for rank in sorted(ranks))}
    after = _num_divided((tuple(number[rank] for rank in ranks) for ranks in units), devices_per_node)
    return _renumbered(plan, number) if after < before else plan


def replicas_side_by_side(plan: Plan, devices_per_node: int) -> Plan:
    """The same plan, with ranks renumbered so that groups of equal stages follow one another, replica by replica; the
    plan itself if that divides more groups among nodes, or if some groups overlap partly."""
    units = _largest({stage.ranks for _, _, _, stage in plan.stages()})
    if units is None:
        return plan
    owner = {rank: unit for unit in units for rank in unit}
    place: dict[Group, tuple[int, int, int]] = {}
    for m, module in enumerate(plan.modules.values()):
        for r, replica in enumerate(module.replicas):
            for s, stage in enumerate(replica.stages):
                place.setdefault(owner[stage.ranks[0]], (m, s, r))
    in_order = sorted(units, key=lambda ranks: (-len(ranks), place[ranks]))
    number = {rank: i for i, rank in enumerate(rank for ranks in in_order for rank in sorted(ranks))}
    after = _num_divided((tuple(number[rank] for rank in ranks) for ranks in units), devices_per_node)
    return _renumbered(plan, number) if after <= _num_divided(units, devices_per_node) else plan


def _largest(groups: Iterable[Group]) -> list[Group] | None:
    """The groups that no other group contains; None if some groups overlap partly."""
    largest: list[Group] = []
    owner: dict[int, Group] = {}
    for ranks in sorted(groups, key=lambda ranks: (-len(ranks), ranks)):
        owners = {owner.get(rank) for rank in ranks}
        if owners == {None}:
            largest.append(ranks)
            owner |= dict.fromkeys(ranks, ranks)
        elif len(owners) > 1:
            return None
    return largest


def _num_divided(groups: Iterable[Group], devices_per_node: int) -> int:
    """The number of groups on more nodes than they need."""
    return sum(
        len({rank // devices_per_node for rank in ranks}) > -(-len(ranks) // devices_per_node) for ranks in groups
    )


def _renumbered(plan: Plan, number: dict[int, int]) -> Plan:
    def moved(replica: Replica) -> Replica:
        stages = (replace(stage, ranks=tuple(number[rank] for rank in stage.ranks)) for stage in replica.stages)
        return replace(replica, stages=tuple(stages))

    modules = {
        name: replace(module, replicas=tuple(map(moved, module.replicas))) for name, module in plan.modules.items()
    }
    return replace(plan, modules=modules)
