"""Sensitivity of predicted times to costs: plans simulated with somewhat faster or slower devices and links.

Costs are computed anew with changed speeds of matrix products, of attention or of links. Of measured costs only the
links can be changed, as a measured layer does not say what part of it is a matrix product.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from motet.cluster import Cluster, Link
from motet.config import RunConfig
from motet.costs.analytic import Speed, Speeds, default_speeds
from motet.costs.cost_model import LinkCost
from motet.plan import Plan
from motet.planner.evaluate import evaluate
from motet.planner.from_run_file import compute_costs
from motet.planner.problem import PlanningProblem

CHANGE = 0.1
KNOBS = ("matrix products", "attention", "links")


@dataclass(frozen=True)
class Sensitivity:
    knob: str
    change: float
    """0.1: a tenth faster."""
    iteration_times_s: tuple[float, ...]
    """Of the plans, in their order."""


def sensitivities(config: RunConfig, problem: PlanningProblem, plans: Sequence[Plan]) -> Iterator[Sensitivity]:
    """The plans' iterations if one of the assumptions is `CHANGE` faster or slower."""
    is_measured = problem.computed is not None
    for knob in KNOBS:
        for change in (CHANGE, -CHANGE):
            if knob == "links" or not is_measured:
                changed = _changed(config, problem, plans, knob, 1 + change)
                yield Sensitivity(knob, change, tuple(evaluate(changed, plan).iteration_time_s for plan in plans))


def _changed(
    config: RunConfig, problem: PlanningProblem, plans: Sequence[Plan], knob: str, factor: float
) -> PlanningProblem:
    cluster = _with_links(problem.cluster, factor) if knob == "links" else problem.cluster
    if problem.computed is not None:
        table = replace(
            problem.table,
            message=_faster(problem.table.message, factor),
            all_reduce=_faster(problem.table.all_reduce, factor),
            collectives={
                name: replace(link, bytes_per_s=link.bytes_per_s * factor)
                for name, link in problem.table.collectives.items()
            },
        )
        return replace(problem, cluster=cluster, table=table)
    given = config.cluster.speeds
    speeds = default_speeds(cluster.device, config.train.dtype) if given is None else Speeds.load(given)
    if knob == "matrix products":
        speeds = replace(speeds, gemm=_limit(speeds.gemm, factor))
    if knob == "attention":
        speeds = replace(speeds, attention=_limit(speeds.attention, factor))
    sizes = {stage.tp_size for plan in plans for *_, stage in plan.stages()} | {1}
    workloads = {name: module.workload for name, module in problem.all_modules.items()}
    return replace(problem, cluster=cluster, table=compute_costs(config, workloads, cluster, sizes, speeds=speeds))


def _limit(speed: Speed, factor: float) -> Speed:
    return replace(speed, limit=speed.limit * factor)


def _with_links(cluster: Cluster, factor: float) -> Cluster:
    def faster(link: Link) -> Link:
        return replace(link, bytes_per_s=link.bytes_per_s * factor)

    return replace(cluster, within_node=faster(cluster.within_node), between_nodes=faster(cluster.between_nodes))


def _faster(link: LinkCost | None, factor: float) -> LinkCost | None:
    return None if link is None else replace(link, bytes_per_s=link.bytes_per_s * factor)
