"""Variants of a plan in which replicas share their parameters (fully sharded over data parallelism), or gradients and
optimizer state alone."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from motet.cluster import Cluster
from motet.cluster.pipelines_on_nodes import nodes_of_pipelines
from motet.errors import UserError
from motet.plan import ModulePlan, Plan
from motet.planner.problem import PlanningProblem


def sharing_plans(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """The plan with the parameters of every module shared by all of its replicas; and, if they are on several nodes, by
    the replicas of each node (hybrid). Each also with parameters that are whole during a step (ZeRO-2). Nothing if no
    module can share, or if the run does not allow it. Where nodes may fail, as many groups of replicas share as may be
    lost and one more, each on nodes of its own."""
    if not problem.may_share_parameters:
        return
    seen = [plan.modules]
    for within_nodes in (False, True):
        cluster = problem.cluster if within_nodes else None
        modules = _all_shared(problem, plan, cluster)
        if modules not in seen:
            seen.append(modules)
            yield replace(plan, modules=modules)
            whole = {
                name: replace(module, whole_parameters=module.shares_over_replicas) for name, module in modules.items()
            }
            yield replace(plan, modules=whole)


def _all_shared(problem: PlanningProblem, plan: Plan, within_nodes_of: Cluster | None) -> Mapping[str, ModulePlan]:
    """The modules with as many replicas sharing as possible; as they are where no group could be lost."""
    if not problem.survives_losses:
        return {name: _shared(plan, name, 1, within_nodes_of) for name in plan.modules}
    totals = {len(module.replicas) for module in plan.modules.values()}
    for num_groups in range(problem.failures + 1, max(totals)):
        if all(total % num_groups for total in totals):
            continue
        modules = {name: _shared(plan, name, num_groups, within_nodes_of) for name in plan.modules}
        if _survives(replace(plan, modules=modules), problem):
            return modules
    return plan.modules


def _survives(plan: Plan, problem: PlanningProblem) -> bool:
    """Whether the plan keeps a copy of everything after as many failures of nodes as the run tolerates."""
    try:
        return len(nodes_of_pipelines(plan, problem.cluster.devices_per_node)) > problem.failures
    except UserError:
        return False


def _shared(plan: Plan, name: str, num_groups: int, within_nodes_of: Cluster | None) -> ModulePlan:
    """The module with as many replicas sharing as possible, in at least so many groups."""
    module = plan.modules[name]
    copies = {other.copy_of for other in plan.modules.values()}
    if module.kind == "loss" or module.copy_of is not None or name in copies or module.fully_sharded:
        return module
    for number in range(len(module.replicas) // num_groups, 1, -1):
        if len(module.replicas) % number or not _fit_together(module, number, within_nodes_of):
            continue
        changed = replace(module, fully_sharded=True, sharded_replicas=number)
        try:
            replace(plan, modules={**plan.modules, name: changed})
        except ValueError:  # Replicas are not alike, or are on the same ranks.
            continue
        return changed
    return module


def _fit_together(module: ModulePlan, number: int, cluster: Cluster | None) -> bool:
    """Whether the ranks that would share are on one node each."""
    if cluster is None:
        return True
    changed = replace(module, sharded_replicas=number)
    return all(
        len({cluster.node(rank) for rank in ranks}) == 1
        for r in range(0, len(module.replicas), number)
        for s in range(min(len(replica.stages) for replica in module.replicas))
        for ranks in changed.sharing_groups(r, s)
    )
