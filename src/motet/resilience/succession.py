"""From a membership and what has happened to the next one: a pure function, so any agent may compute it."""

from collections.abc import Sequence
from dataclasses import replace

from motet.config import RunConfig
from motet.errors import UserError
from motet.plan import ModulePlan, Plan, Replica
from motet.resilience.membership import Change, Membership
from motet.resilience.pipelines import nodes_of_pipelines


def check_survivable(config: RunConfig, plan: Plan) -> None:
    """Raises `UserError` unless the run can go on after as many failures as it says (`train.failures`)."""
    failures, cluster = config.train.failures, config.cluster
    assert failures is not None
    if config.parallel.zero1:
        raise UserError(
            "parallel.zero1: is true, which shards the optimizer's state over the replicas, so that a lost node takes "
            "its share along; with train.failures give zero1: false"
        )
    if cluster.device != "cpu":
        raise UserError(f"train.failures: is not there yet for cluster.device: {cluster.device}; give cpu, or null")
    num_pipelines = len(nodes_of_pipelines(plan, cluster.num_devices // cluster.num_nodes))
    if num_pipelines <= failures.tolerate:
        raise UserError(
            f"train.failures.tolerate: is {failures.tolerate}, but the plan has {num_pipelines} "
            f"pipeline{'s' * (num_pipelines > 1)} on nodes of their own; give dp: {failures.tolerate + 1} and "
            f"cluster.num_nodes of at least {failures.tolerate + 1}, or tolerate fewer"
        )


def succeed(membership: Membership, changes: Sequence[Change], node_size: int) -> Membership:
    """Whoever was lost or has left is out; who is about to leave stays to hand over; who joined comes last."""
    gone = {change.node for change in changes if change.kind in ("lost", "left")}
    going = [change.node for change in changes if change.kind == "leaving" and change.node not in gone]
    joined = tuple(change.node for change in changes if change.kind == "joined")
    places = [place for place, node in enumerate(membership.nodes) if node not in gone and node not in going]
    plan = Plan.from_json(membership.plan)
    kept = drop_broken(plan, [p for p in range(len(membership.nodes)) if p not in places], node_size)
    stop = None if kept else "no pipeline is left"
    new_plan, used = kept or (plan, places)
    return Membership(
        generation=membership.generation + 1,
        nodes=tuple(membership.nodes[place] for place in used),
        leaving=tuple(node for node in (*membership.leaving, *going) if node not in gone),
        num_known=max(membership.num_known, *(node + 1 for node in joined), 0),
        plan=new_plan.to_json(),
        changes=tuple(changes),
        is_urgent=any(change.kind == "lost" for change in changes),
        stop=stop,
    )


def drop_broken(plan: Plan, lost_places: Sequence[int], node_size: int) -> tuple[Plan, list[int]] | None:
    """The plan without the pipelines that had a part on a lost node, and the places of the nodes that it uses; None if
    no pipeline is left."""
    lost = {place * node_size + i for place in lost_places for i in range(node_size)}
    whole = [
        r
        for r in range(min(len(module.replicas) for module in plan.modules.values()))
        if not any(rank in lost for m in plan.modules.values() for s in m.replicas[r].stages for rank in s.ranks)
    ]
    if not whole:
        return None
    used = sorted(
        {rank for m in plan.modules.values() for r in whole for s in m.replicas[r].stages for rank in s.ranks}
    )
    number = {rank: i for i, rank in enumerate(used)}
    modules = {name: _renumbered(module, whole, number) for name, module in plan.modules.items()}
    return replace(plan, modules=modules), [rank // node_size for rank in used[::node_size]]


def _renumbered(module: ModulePlan, whole: Sequence[int], number: dict[int, int]) -> ModulePlan:
    return replace(
        module,
        replicas=tuple(
            Replica(
                stages=tuple(
                    replace(stage, ranks=tuple(number[rank] for rank in stage.ranks))
                    for stage in module.replicas[r].stages
                )
            )
            for r in whole
        ),
    )
