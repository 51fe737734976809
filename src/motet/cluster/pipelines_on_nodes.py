"""The nodes of a plan's pipelines.

A pipeline is one copy of the whole model: replica r of every module, or as many successive replicas as share parameters
by rows. The node is the unit of failure, so each pipeline of a training that survives failures has whole nodes of its
own.
"""

from math import lcm

from motet.errors import UserError
from motet.plan import Plan


def replicas_per_pipeline(plan: Plan) -> int:
    """Returns the number of successive replicas that hold one copy of the model together: those that share parameters
    by rows are one pipeline, else each replica is one."""
    return lcm(*(module.sharded_replicas for module in plan.modules.values()))


def nodes_of_pipelines(plan: Plan, devices_per_node: int) -> list[tuple[int, ...]]:
    """Returns the nodes of each pipeline, ascending.

    Raises `UserError` for a plan without pipelines of whole nodes: modules with unequal numbers of replicas, or
    pipelines that share a node."""
    numbers = {name: len(module.replicas) for name, module in plan.modules.items()}
    if len(set(numbers.values())) > 1:
        listed = ", ".join(f"{name} {number}" for name, number in numbers.items())
        raise UserError(
            f"plan: modules have unequal numbers of replicas ({listed}); to survive failures, each "
            "pipeline needs one replica of each module: give all modules equally many"
        )
    number = replicas_per_pipeline(plan)
    result: list[set[int]] = [set() for _ in range(next(iter(numbers.values())) // number)]
    for _, r, _, stage in plan.stages():
        result[r // number] |= {rank // devices_per_node for rank in stage.ranks}
    what, of = ("replica", "") if number == 1 else ("group", f" of {number} replicas that share parameters")
    owner: dict[int, int] = {}
    for i, nodes in enumerate(result):
        for node in nodes:
            if owner.setdefault(node, i) != i:
                raise UserError(
                    f"plan: node {node} belongs to {what}s {owner[node]} and {i}{of}; a node that fails would end "
                    f"both: give each {what} whole nodes of {devices_per_node} devices"
                )
    return [tuple(sorted(nodes)) for nodes in result]
