"""Profiles a model once, on two processes, into a file of costs that everything after it reads."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.workloads import SyntheticBatch
from motet.cluster import cpu_cluster
from motet.config import RunConfig
from motet.costs.cost_model import CostTable
from motet.costs.profiling.profiler import ProfiledModule, ProfileOptions, profile
from motet.families.configured_graph import read_graph
from motet.models.stages.stage import StageModule
from motet.parallel.tensor.tensor_parallel import TensorParallel
from motet.plan import LayerRange
from motet.planner.from_run_file import planning_problem
from motet.planner.problem import PlanningProblem
from motet.runtime.assembly import build_stage
from motet.runtime.launch import launch


def measure_costs(config: RunConfig, batch: SyntheticBatch, options: ProfileOptions) -> CostTable:
    """`config`: with everything trainable; the profiler itself freezes what a measurement wants frozen."""
    tables = {
        tp: launch(_measure, config, batch, replace(options, tp_sizes=(tp,)), num_processes=2)
        for tp in options.tp_sizes
    }
    first = tables[options.tp_sizes[0]]
    modules = {name: {tp: table.of(name, tp) for tp, table in tables.items()} for name in first.modules}
    return replace(first, modules=modules, notes={k: note for t in tables.values() for k, note in t.notes.items()})


def _measure(config: RunConfig, batch: SyntheticBatch, options: ProfileOptions) -> CostTable:
    device = torch.device("cpu")
    (tp_size,) = options.tp_sizes
    tp = TensorParallel(group=dist.group.WORLD if tp_size > 1 else None, rank=dist.get_rank() % tp_size, size=tp_size)
    graph = read_graph(config)
    workloads = graph.workloads

    def make_stage(name: str, layers: LayerRange, tp_size: int) -> StageModule:
        return build_stage(config, name, layers, tp, device, recompute=None)

    described = {
        name: ProfiledModule(
            workload=workload,
            sources={e.source: workloads[e.source].output_size for e in graph.edges if e.target == name},
        )
        for name, workload in workloads.items()
    }
    return profile(described, make_stage, batch, options=options, device=device)


def problem_with(
    config: RunConfig, batch: SyntheticBatch, costs: Path, *, num_devices: int, num_cores: float | None
) -> PlanningProblem:
    """`num_cores`: that the processes share; None: computation is emulated and takes no core."""
    problem = planning_problem(config, batch.samples)
    return replace(problem, cluster=cpu_cluster(num_devices), table=CostTable.load(costs), num_cores=num_cores)
