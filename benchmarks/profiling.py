"""Profiles a model once, on two processes, into a file of costs that everything after it reads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.workloads import SyntheticBatch
from motet.cluster import cpu_cluster
from motet.config import RunConfig
from motet.costs.cost_model import CostTable
from motet.costs.profiling.profiler import ProfileOptions
from motet.families.configured_graph import read_graph
from motet.planner.from_run_file import planning_problem
from motet.planner.problem import Degrees, PlanningProblem
from motet.runtime.profile_worker import profile_in_processes


def measure_costs(
    config: RunConfig, batch: SyntheticBatch, options: ProfileOptions, degrees: Sequence[Degrees] = (Degrees(),)
) -> CostTable:
    """`degrees`: under which layers are measured; the number of replicas does not matter."""
    named = [(name, each) for each in degrees for name in read_graph(config).names]
    return profile_in_processes(config, batch, named, options=options, num_devices=2)


def problem_with(
    config: RunConfig, batch: SyntheticBatch, costs: Path, *, num_devices: int, num_cores: float | None
) -> PlanningProblem:
    """`num_cores`: that the processes share; None: computation is emulated and takes no core."""
    problem = planning_problem(config, batch.samples)
    return replace(problem, cluster=cpu_cluster(num_devices), table=CostTable.load(costs), num_cores=num_cores)
