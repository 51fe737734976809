"""Profiles a model once, on two processes, into a file of costs that everything after it reads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.workloads import SyntheticBatch
from motet.cluster import cpu_cluster
from motet.config import RunConfig
from motet.costs.cost_model import CostTable, Sharing
from motet.costs.profiling.profiler import ProfiledModule, ProfileOptions, profile
from motet.families.configured_graph import read_graph
from motet.plan import ContextOptions
from motet.planner.from_run_file import planning_problem
from motet.planner.problem import Degrees, PlanningProblem
from motet.runtime.launch import launch
from motet.runtime.profile_worker import profiled_stage_maker


def measure_costs(
    config: RunConfig, batch: SyntheticBatch, options: ProfileOptions, degrees: Sequence[Degrees] = (Degrees(),)
) -> CostTable:
    """`config`: with everything trainable; the profiler itself freezes what a measurement wants frozen. `degrees`:
    under which layers are measured; the number of replicas does not matter."""
    shared = {Sharing(each.tp): ContextOptions() for each in degrees}
    shared |= {Sharing.of(each.tp, each.cp, each.context, each.ep): each.context for each in degrees}
    first, *others = [
        launch(_measure, config, batch, replace(options, sharing=sharing), context, num_processes=2)
        for sharing, context in sorted(shared.items(), key=lambda item: item[0])
    ]
    return first.with_costs_of(others)


def _measure(config: RunConfig, batch: SyntheticBatch, options: ProfileOptions, context: ContextOptions) -> CostTable:
    device = torch.device("cpu")
    graph = read_graph(config)
    workloads = graph.workloads
    described = {
        name: ProfiledModule(
            workload=workload,
            sources={e.source: workloads[e.source].output_size for e in graph.edges if e.target == name},
        )
        for name, workload in workloads.items()
    }
    make_stage = profiled_stage_maker(config, options.sharing, context, device)
    return profile(described, make_stage, batch, options=options, device=device)


def problem_with(
    config: RunConfig, batch: SyntheticBatch, costs: Path, *, num_devices: int, num_cores: float | None
) -> PlanningProblem:
    """`num_cores`: that the processes share; None: computation is emulated and takes no core."""
    problem = planning_problem(config, batch.samples)
    return replace(problem, cluster=cpu_cluster(num_devices), table=CostTable.load(costs), num_cores=num_cores)
