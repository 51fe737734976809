"""Fully sharded data parallelism (Zhao et al. 2023): each device has its own samples and a share of all state.

A replica of every module is on each device, and all replicas share parameters, gradients and optimizer state by rows.
Where nodes may fail, groups of replicas share them, so many that each share has a living holder after the failures.
Blocks of the language model are gathered when they are computed; encoders are gathered once in a step.
"""

from motet.errors import UserError
from motet.plan import Plan
from motet.planner.layouts.degrees import check_allows_tp_1
from motet.planner.layouts.layout import Chunk, Layout, Placement
from motet.planner.layouts.sharing import sharing_plans
from motet.planner.problem import PlanningProblem
from motet.planner.selection import best_plan


def fsdp(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """A replica on each device, all sharing their parameters."""
    if not problem.may_share_parameters:
        raise UserError(
            "parallel.planner: with fsdp, replicas share all state, which leaves nothing for parallel.zero1 to shard; "
            "leave zero1 out, or give another planner"
        )
    check_allows_tp_1(problem, "fsdp", problem.modules)
    if problem.num_devices not in problem.dp_sizes:
        raise UserError(
            f"parallel.planner: fsdp needs a replica on each of {problem.num_devices} devices, which the limits on dp "
            f"({', '.join(map(str, problem.dp_sizes))}) do not allow; allow {problem.num_devices}"
        )
    if problem.num_devices > len(problem.samples):
        raise UserError(
            f"parallel.planner: fsdp needs a sample for each of {problem.num_devices} devices, the batch has "
            f"{len(problem.samples)}; raise train.global_batch_size"
        )
    chunks = tuple(Chunk(name, (0, module.workload.num_layers), 0) for name, module in problem.modules.items())
    layout = Layout(planner="fsdp", chunks=chunks, group_sizes=(1,), dp=problem.num_devices)
    plan = best_plan(problem, [layout], "fsdp", placement)
    shared = next(sharing_plans(problem, plan), None)
    if shared is None and problem.survives_losses and problem.failures > 0:
        raise UserError(
            f"parallel.planner: fsdp cannot make {problem.failures + 1} groups of two or more devices on nodes of "
            f"their own, so that {problem.failures} may be lost (train.failures.tolerate); give more nodes, tolerate "
            "fewer, or give another planner"
        )
    return plan if shared is None else shared
