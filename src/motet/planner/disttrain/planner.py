"""DistTrain: devices and degrees of parallelism for each module separately (DistTrain sections 4.1 and 5).

Turns the result of `motet.planner.disttrain.orchestration` into a plan. Every module is a parallelism unit on ranks of
its own, with its own tensor, pipeline and data parallelism; numbers of replicas may differ. Modules before the language
model are encoders, modules after it are generators; several of each run side by side.

The closed form ignores latencies, messages between units, padding and the variance of samples; on several nodes, all
messages and reductions pass the network. Therefore the best orchestration for each data-parallel and tensor-parallel
size of the language model is simulated, and the best simulation that fits wins.

Deviations: the number of microbatches is the problem's (the paper fixes their size instead); units with large
tensor-parallel groups get the first ranks, so that groups stay within nodes.
Limits: only the language model's stages are interleaved, and only by an interleaved schedule; the closed form's memory
is a few percent off, so layouts that fit by less than that may be missed.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np

from motet.costs.memory import usable_bytes
from motet.errors import UserError
from motet.plan import ModulePlan, Plan, Replica, Stage
from motet.planner.disttrain.orchestration import (
    Orchestration,
    OrchestrationProblem,
    Role,
    Unit,
    UnitDegrees,
    orchestrate,
)
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.degrees import no_layout, tp_sizes
from motet.planner.layouts.layout import Placement, cut_module
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.selection import rank

NUM_SIMULATED = 6
MAX_TIGHTENED = 4
INTERLEAVED = ("interleaved_1f1b", "interleaved_1f1b_adjusted")
VPP_SIZES = (1, 2, 4)


def disttrain(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """The plan with the shortest simulated iteration; one that does not fit into memory only if none does.

    Raises `ValueError` if there are fewer devices than modules, and for a placement other than `parallel`."""
    if placement not in (None, "parallel"):
        raise UserError(
            f"parallel.placement: disttrain gives every module its own ranks, but is {placement}; leave it out"
        )
    orchestration = orchestration_problem(problem)
    evaluations: list[Evaluation] = []
    for _ in range(MAX_TIGHTENED):
        found = _candidates(orchestration)
        if not found:
            break
        evaluations += [evaluate(problem, orchestrated_plan(problem, each)) for each in found]
        if any(evaluation.fits for evaluation in evaluations):
            break
        # The closed form spreads a module's memory evenly over its layers, so it must leave more free.
        orchestration = replace(orchestration, device_bytes=orchestration.device_bytes * _share_that_fits(evaluations))
    if not evaluations:
        found = _candidates(replace(orchestration, device_bytes=inf))
        evaluations = [evaluate(problem, orchestrated_plan(problem, each)) for each in found]
    if not evaluations:
        if len(problem.modules) <= problem.num_devices:
            raise no_layout(problem, "disttrain")
        names = " and ".join(problem.modules)
        raise UserError(f"cluster.num_devices: is {problem.num_devices}, but {names} need ranks of their own")
    return min(evaluations, key=rank).plan


def _share_that_fits(evaluations: list[Evaluation]) -> float:
    """Share of its memory within which the fullest rank of the best evaluation would fit."""
    return max(each.overflows[0].limit_bytes / each.overflows[0].needed_bytes for each in evaluations)


def _candidates(orchestration: OrchestrationProblem) -> list[Orchestration]:
    """The best orchestrations, one for each choice for the language model."""
    found = list(_best_by_choice(orchestration))
    return sorted(found, key=lambda each: (each.iteration_s, each.num_devices))[:NUM_SIMULATED]


def _best_by_choice(orchestration: OrchestrationProblem) -> Iterator[Orchestration]:
    (name, unit) = next((n, u) for n, u in orchestration.units.items() if u.role == "language_model")
    for tp, dp, vpp in product(unit.seconds, unit.dp_sizes or (), unit.vpp_sizes):
        restricted = replace(unit, seconds={tp: unit.seconds[tp]}, dp_sizes=(dp,), vpp_sizes=(vpp,))
        try:
            yield orchestrate(replace(orchestration, units={**orchestration.units, name: restricted}))
        except UserError:
            continue


def orchestration_problem(problem: PlanningProblem) -> OrchestrationProblem:
    """The problem in the closed form's terms. Raises `UserError` without exactly one language model."""
    return OrchestrationProblem(
        units={name: _unit(problem, name, role) for name, role in _roles(problem).items()},
        num_devices=problem.num_devices,
        global_batch_size=len(problem.samples),
        num_microbatches=problem.num_microbatches,
        device_bytes=usable_bytes(problem.cluster),
        zero1=problem.memory.zero1,
        state_copies=problem.memory.state_copies,
    )


def _roles(problem: PlanningProblem) -> dict[str, Role]:
    backbone = [name for name, module in problem.modules.items() if module.workload.kind == "language_model"]
    if len(backbone) != 1:
        raise UserError(f"parallel.planner: disttrain needs exactly one language model; the model has {len(backbone)}")
    behind, grown = set(backbone), True
    while grown:
        reached = {edge.target for edge in problem.edges if edge.source in behind} - behind
        behind, grown = behind | reached, bool(reached)
    return {
        name: "language_model" if name == backbone[0] else "generator" if name in behind else "encoder"
        for name in problem.modules
    }


def _unit(problem: PlanningProblem, name: str, role: Role) -> Unit:
    module = problem.modules[name]
    dp_sizes = tuple(dp for dp in problem.dp_sizes if len(problem.samples) % dp == 0)
    if not dp_sizes:
        allowed = " or ".join(map(str, problem.dp_sizes))
        raise UserError(
            f"parallel.limits: dp is {allowed}, but disttrain divides the global batch of {len(problem.samples)} "
            "evenly; allow a number that divides it"
        )
    estimator = problem.estimator
    fits = {size: _linear_fit(problem, name, size, dp_sizes) for size in tp_sizes(problem, name)}
    num_samples = _samples_per_microbatch(problem, dp_sizes[0])
    optimizer_bytes = problem.memory.state_bytes * sum(estimator.num_trainable(name, tp=1))
    return Unit(
        role=role,
        layer_costs=tuple(problem.estimator.layer_seconds(name, min(fits), dp_sizes[0])),
        seconds={size: per_sample for size, (per_sample, _) in fits.items()},
        microbatch_s={size: constant for size, (_, constant) in fits.items()},
        state_bytes=sum(estimator.static_bytes(name)) - optimizer_bytes,
        optimizer_bytes=optimizer_bytes,
        activation_bytes={size: sum(estimator.saved_bytes(name, size, dp_sizes[0])) / num_samples for size in fits},
        boundary_s={size: _boundary_s(problem, name, size, dp_sizes[0]) for size in fits},
        reduce_s=_reduce_s(problem, name),
        dp_sizes=dp_sizes,
        max_stages=module.max_stages,
        vpp_sizes=VPP_SIZES if role == "language_model" and problem.schedule in INTERLEAVED else (1,),
    )


def _boundary_s(problem: PlanningProblem, name: str, tp: int, dp: int) -> float:
    """Each rank's share of a sample's message to the next stage, and of its gradient's message back."""
    estimator = problem.estimator
    num_bytes = estimator.boundary_bytes(name, 1, estimator.typical_load(name, dp), num_row_shares=tp)
    num_bytes /= _samples_per_microbatch(problem, dp)
    returns = any(needs.any for needs in problem.gradients[name])
    return num_bytes / estimator.link(0, problem.num_devices - 1).bytes_per_s * (2 if returns else 1)


def _reduce_s(problem: PlanningProblem, name: str) -> float:
    """The bytes of all gradients over the bandwidth of one device."""
    num_bytes = sum(problem.estimator.gradient_bytes(name, tp=1))
    measured = problem.table.all_reduce
    if measured is not None:
        return num_bytes / measured.bytes_per_s
    cluster = problem.cluster
    return num_bytes / (cluster.within_node.bytes_per_s if cluster.num_nodes == 1 else cluster.network_bytes_per_s)


def _samples_per_microbatch(problem: PlanningProblem, dp: int) -> float:
    return len(problem.samples) / (dp * problem.num_microbatches)


def _linear_fit(problem: PlanningProblem, name: str, tp_size: int, dp_sizes: tuple[int, ...]) -> tuple[float, float]:
    """Seconds per sample and constant seconds per microbatch, from the typical microbatches of the largest and the
    smallest size (the paper interpolates between trials)."""
    sizes = [_samples_per_microbatch(problem, dp) for dp in (min(dp_sizes), max(dp_sizes))]
    large, small = (sum(problem.estimator.layer_seconds(name, tp_size, dp)) for dp in (min(dp_sizes), max(dp_sizes)))
    if sizes[0] == sizes[1]:
        return large / sizes[0], 0.0
    per_sample = min((large - small) / (sizes[0] - sizes[1]), large / sizes[0])
    return per_sample, large - per_sample * sizes[0]


def orchestrated_plan(problem: PlanningProblem, orchestration: Orchestration) -> Plan:
    """The plan with these degrees. Units of larger groups get the first ranks."""
    first_rank, offsets = 0, {}
    by_group_size = sorted(orchestration.degrees.items(), key=lambda item: -item[1].tp)
    for name, degrees in by_group_size:
        offsets[name] = first_rank
        first_rank += degrees.num_devices
    return problem.plan(
        {name: _module_plan(problem, name, orchestration.degrees[name], offsets[name]) for name in problem.modules},
        planner="disttrain",
    )


def _module_plan(problem: PlanningProblem, name: str, degrees: UnitDegrees, first_rank: int) -> ModulePlan:
    cut = cut_module(problem, name, Degrees(tp=degrees.tp, pp=degrees.pp * degrees.vpp, dp=degrees.dp))
    groups = np.arange(first_rank, first_rank + degrees.num_devices).reshape(degrees.dp, degrees.pp, degrees.tp)
    replicas = [
        Replica(
            stages=tuple(
                Stage(layers=layers, ranks=tuple(ranks), tp_size=degrees.tp)
                for layers, ranks in zip(cut, stages * degrees.vpp, strict=True)
            )
        )
        for stages in groups.tolist()
    ]
    return problem.modules[name].planned(replicas)
