"""Fully sharded data parallelism (Zhao et al. 2023): each device its own samples, everything it keeps sharded.

Of the runtime's shardings one is inside a context-parallel group, one of the optimizer's state (ZeRO-1); none gathers
parameters over replicas. So the plan is plain data parallelism, which runs, and whether *it* fits is judged with whole
parameters; what sharding would cost and save is told beside it, in closed form (`fully_sharded`).

Limits: of a device's computation and its communication the longer one counts, neither ever waits for the other but for
the first layer; every microbatch gathers all parameters twice and scatters all gradients once.
"""

from dataclasses import dataclass

import numpy as np

from motet.costs.communication import all_reduce_seconds
from motet.costs.memory import gathered_bytes, usable_bytes
from motet.errors import UserError
from motet.plan import Plan
from motet.planner.degrees import best_plan, check_may_be_whole
from motet.planner.evaluate import Evaluation
from motet.planner.explicit import Placement
from motet.planner.layout import Chunk, Layout
from motet.planner.problem import PlanningProblem


def fsdp(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """A replica on each device."""
    check_may_be_whole(problem, "fsdp", problem.modules)
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
    """Of the device that needs most."""
    fits: bool


def fully_sharded(evaluation: Evaluation) -> FullySharded:
    """What the plan of `fsdp` would do if parameters, gradients and optimizer state were sharded over all devices."""
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
    return FullySharded(
        iteration_time_s=fsdp_iteration_s(problem, compute_s) + _optimizer_s(problem) + problem.program_s,
        peak_memory_bytes=peak,
        fits=peak <= int(usable_bytes(problem.cluster)),
    )


def fsdp_iteration_s(problem: PlanningProblem, compute_s: float) -> float:
    """The iteration but for the optimizer's step: `compute_s` of a device, or all gathers and scatters, whichever is
    longer, and the gather that nothing hides.

    A gather and a scatter each take half of an all-reduce (a ring passes as many bytes once)."""
    ranks = range(problem.num_devices)
    trainable, frozen = _parameters(problem)
    options = problem.memory
    gathers_s = all_reduce_seconds(problem.table, problem.cluster, ranks, (trainable + frozen) * options.computed_bytes)
    scatter_s = all_reduce_seconds(problem.table, problem.cluster, ranks, trainable * options.parameter_bytes) / 2
    num_layers = sum(module.workload.num_layers for module in problem.modules.values())
    return max(compute_s, problem.num_microbatches * (gathers_s + scatter_s)) + gathers_s / 2 / max(1, num_layers)


def _optimizer_s(problem: PlanningProblem) -> float:
    trainable, _ = _parameters(problem)
    table = problem.table
    return table.optimizer_constant_s + table.optimizer_s_per_parameter * trainable / problem.num_devices


def fsdp_memory_bytes(problem: PlanningProblem) -> float:
    """Parameters, gradients and optimizer state of one device; what is gathered and activations come on top."""
    trainable, frozen = _parameters(problem)
    options = problem.memory
    num_bytes = (2 * trainable + frozen) * options.parameter_bytes + trainable * options.state_bytes
    return num_bytes / problem.num_devices


def _parameters(problem: PlanningProblem) -> tuple[int, int]:
    """Trainable and frozen ones."""
    counts = [0, 0]
    for module in problem.modules.values():
        for index, layer in enumerate(module.workload.layers):
            counts[0 if module.is_trainable(index) else 1] += layer.num_parameters
    return counts[0], counts[1]
