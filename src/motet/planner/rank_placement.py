"""Numbers ranks so that groups which could lie on one node do: tensor parallelism across nodes is slow.

Planners number ranks in the order in which they lay modules out. An encoder on one device then pushes every group after
it across the nodes' borders. Where that happens, larger groups go first: sizes that divide each other, and the node,
then all lie within nodes. Order among groups of one size stays, so neighbouring stages stay neighbours.

Limits: plans whose groups overlap in part stay as they are; so do sizes for which it does not help.
"""

from collections.abc import Iterable
from dataclasses import replace

from motet.plan import Plan

Group = tuple[int, ...]


def on_nodes(plan: Plan, devices_per_node: int) -> Plan:
    """The same plan, with ranks renumbered if that has fewer groups lie on several nodes without need."""
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


def _largest(groups: Iterable[Group]) -> list[Group] | None:
    """Those that lie in no other; None if some share a part only."""
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
    """How many lie on more nodes than they need."""
    return sum(
        len({rank // devices_per_node for rank in ranks}) > -(-len(ranks) // devices_per_node) for ranks in groups
    )


def _renumbered(plan: Plan, number: dict[int, int]) -> Plan:
    modules = {
        name: replace(
            module,
            replicas=tuple(
                replace(
                    replica,
                    stages=tuple(
                        replace(stage, ranks=tuple(number[rank] for rank in stage.ranks)) for stage in replica.stages
                    ),
                )
                for replica in module.replicas
            ),
        )
        for name, module in plan.modules.items()
    }
    return replace(plan, modules=modules)
