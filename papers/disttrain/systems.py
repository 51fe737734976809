"""The systems of DistTrain's evaluation: its orchestration, Megatron-LM's rigid one, devices by FLOPs.

All three are times of the closed form that the planner itself minimizes (`motet.planner.disttrain.orchestration`).
Megatron-LM is the paper's (8.1): tensor parallelism of 8, the language model in 1, 2 and 10 stages, one more stage for
the encoder and one for the generator, both replicated inside the tensor-parallel group to process different images,
the same data parallelism for all. Memory is held against DistTrain alone: what the others recompute is not said.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf

from motet.errors import UserError
from motet.planner.disttrain.orchestration import (
    Orchestration,
    OrchestrationProblem,
    UnitDegrees,
    evaluate_degrees,
    orchestrate,
)
from motet.planner.entrain.profiling_size import proportional_allocation
from papers.disttrain.models import ASSUMED, PEAK_FLOPS, TRAINED, Assumed, Passes, mllm, sample_flops

LARGE = (1296, {"9B": 1920, "15B": 1920, "72B": 1920})
SMALL = (98, {"9B": 128, "15B": 64, "72B": 40})
"""Devices, and the global batch by model: sections 8.1 and 8.2."""
MEGATRON_STAGES: Mapping[str, int] = {"9B": 1, "15B": 2, "72B": 10}


@dataclass(frozen=True)
class Outcome:
    num_devices: int
    iteration_s: float
    mfu: float

    @staticmethod
    def of(
        size: str,
        found: Orchestration,
        global_batch_size: int,
        passes: Passes,
        assumed: Assumed,
        *,
        allocated: int | None = None,
    ) -> "Outcome":
        """`allocated`: devices that count even if they stay idle."""
        flops = sample_flops(size, assumed)
        work = global_batch_size * sum(count * each for count, each in zip(passes, flops, strict=True))
        num_devices = allocated or found.num_devices
        return Outcome(num_devices, found.iteration_s, work / (found.iteration_s * num_devices * PEAK_FLOPS))


@cache
def disttrain(size: str, num_devices: int, batch: int, passes: Passes = TRAINED, assumed: Assumed = ASSUMED) -> Outcome:
    found = _fewest_devices(mllm(size, num_devices, batch, passes=passes, assumed=assumed), assumed.spared)
    return Outcome.of(size, found, batch, passes, assumed)


@cache
def megatron(
    size: str,
    num_devices: int,
    batch: int,
    passes: Passes = TRAINED,
    assumed: Assumed = ASSUMED,
    *,
    overlapped: bool = False,
) -> Outcome:
    stages, dp = MEGATRON_STAGES[size], megatron_replicas(size, num_devices, batch)
    problem = mllm(size, num_devices, batch, passes=passes, assumed=assumed, overlapped=overlapped)
    alone = UnitDegrees(tp=1, pp=1, dp=8 * dp)
    degrees = {"encoder": alone, "language_model": UnitDegrees(tp=8, pp=stages, dp=dp), "generator": alone}
    found = evaluate_degrees(replace(problem, device_bytes=inf), degrees)
    return Outcome.of(size, found, batch, passes, assumed)


def megatron_replicas(size: str, num_devices: int, batch: int) -> int:
    """Number of replicas of the rigid layout: the largest data parallelism that divides the batch."""
    return max(dp for dp in range(1, num_devices // (8 * (MEGATRON_STAGES[size] + 2)) + 1) if batch % dp == 0)


@cache
def proportional(size: str, num_devices: int, batch: int, *, by_time: bool = False) -> Outcome:
    """The paper's ratio-based strategy: devices by FLOPs, and within them the best degrees. `by_time`: by the seconds
    that the FLOPs take, as if it knew how fast each module's kernels are."""
    problem = replace(mllm(size, num_devices, batch), device_bytes=inf)
    work = [unit.seconds[1] for unit in problem.units.values()] if by_time else sample_flops(size)
    shares = proportional_allocation(num_devices, work)
    units = {
        name: replace(unit, max_devices=share)
        for (name, unit), share in zip(problem.units.items(), shares, strict=True)
    }
    found = orchestrate(replace(problem, units=units))
    return Outcome.of(size, found, batch, TRAINED, ASSUMED, allocated=num_devices)


def _fewest_devices(problem: OrchestrationProblem, spared: float) -> Orchestration:
    """The orchestration with the fewest devices among those that take at most a share of `spared` longer than the
    fastest. More devices never make the best slower, so that their number can be bisected."""
    best = found = orchestrate(problem)
    work = sum(min(tp * seconds for tp, seconds in unit.seconds.items()) for unit in problem.units.values())
    low = ceil(problem.global_batch_size * work / (best.iteration_s * (1 + spared)))
    high = best.num_devices
    while low < high:
        middle = (low + high) // 2
        try:
            tried = orchestrate(replace(problem, num_devices=middle))
        except UserError:
            low = middle + 1
            continue
        if tried.iteration_s <= best.iteration_s * (1 + spared):
            found, high = tried, tried.num_devices
        else:
            low = middle + 1
    return found
