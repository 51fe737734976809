"""Fully sharded data parallelism (Zhao et al. 2023): each device has its own samples and shards of all state.

The runtime shards parameters within a context-parallel group and the optimizer's state (ZeRO-1); it does not gather
parameters over replicas. So the plan is plain data parallelism, which runs, and whether the plan fits is judged with
whole parameters. `fully_sharded` computes what sharding would cost and save, in closed form.

Limits: computation and communication overlap perfectly except for the first layer, so the longer one counts; every
microbatch gathers all parameters twice and scatters all gradients once.
"""

from dataclasses import dataclass

import numpy as np

from motet.costs.communication import all_reduce_seconds
from motet.costs.memory import gathered_bytes, usable_bytes
from motet.errors import UserError
from motet.plan import Plan
from motet.planner.degrees import check_allows_tp_1
from motet.planner.evaluate import Evaluation
from motet.planner.layout import Chunk, Layout, Placement
from motet.planner.problem import PlanningProblem
from motet.planner.selection import best_plan


def fsdp(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """A replica on each device."""
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
    return best_plan(problem, [layout], "fsdp", placement)


@dataclass(frozen=True)
class FullySharded:
    iteration_time_s: float
    peak_memory_bytes: int
    """Peak of the device that needs most."""
    fits: bool


def fully_sharded(evaluation: Evaluation) -> FullySharded:
    """Iteration and memory of the plan of `fsdp` with parameters, gradients and optimizer state sharded over all
    devices."""
    problem, result, costs = evaluation.problem, evaluation.result, evaluation.costs
    compute_s = float((result.busy_s - costs.fixed_s).max())
    stands_for = np.arange(result.num_ranks) if result.folding is None else result.folding.rank_of
    of_batch = max(
        peak - costs.static_bytes(int(rank)) for peak, rank in zip(result.peak_memory_bytes, stands_for, strict=True)
    )
    layers = [
        (layer, module.is_trainable(index))
        for module in problem.modules.values()
        for index, layer in enumerate(module.workload.layers)
    ]
    gathered = gathered_bytes(layers, tp_size=1, num_shares=problem.num_devices, options=problem.memory)
    peak = int(fsdp_memory_bytes(problem) + gathered + of_batch)
    table, (trainable, _) = problem.table, _num_parameters(problem)
    optimizer_s = table.optimizer_constant_s + table.optimizer_s_per_parameter * trainable / problem.num_devices
    return FullySharded(
        iteration_time_s=fsdp_iteration_s(problem, compute_s) + optimizer_s + problem.program_s,
        peak_memory_bytes=peak,
        fits=peak <= int(usable_bytes(problem.cluster)),
    )


def fsdp_iteration_s(problem: PlanningProblem, compute_s: float) -> float:
    """Seconds of the iteration without the optimizer's step: a device's `compute_s` or all gathers and scatters,
    whichever is longer, and the first gather, which does not overlap.

    A gather and a scatter each take half of an all-reduce (a ring passes as many bytes once)."""
    ranks = range(problem.num_devices)
    trainable, frozen = _num_parameters(problem)
    options = problem.memory
    gathers_s = all_reduce_seconds(problem.table, problem.cluster, ranks, (trainable + frozen) * options.computed_bytes)
    scatter_s = all_reduce_seconds(problem.table, problem.cluster, ranks, trainable * options.parameter_bytes) / 2
    num_layers = sum(module.workload.num_layers for module in problem.modules.values())
    return max(compute_s, problem.num_microbatches * (gathers_s + scatter_s)) + gathers_s / 2 / max(1, num_layers)


def fsdp_memory_bytes(problem: PlanningProblem) -> float:
    """Bytes of a device's shards of parameters, gradients and optimizer state, without activations and gathered
    parameters."""
    trainable, frozen = _num_parameters(problem)
    options = problem.memory
    num_bytes = (2 * trainable + frozen) * options.parameter_bytes + trainable * options.state_bytes
    return num_bytes / problem.num_devices


def _num_parameters(problem: PlanningProblem) -> tuple[int, int]:
    """(trainable, frozen)."""
    counts = [0, 0]
    for module in problem.modules.values():
        for index, layer in enumerate(module.workload.layers):
            trained = layer.num_trained_per_rank(1) if module.is_trainable(index) else 0
            counts[0] += trained
            counts[1] += layer.num_parameters - trained
    return counts[0], counts[1]
