"""Seconds of a module's layers: for a typical microbatch, which planners balance, and at least, which they bound.

A layer's time is T_l = F_l + B_l of thesis 3.3.1, summed over the kinds of microbatches: those that lack a modality may
have no backward in a frozen module. Computed once for each problem.

Limits: what context-parallel groups exchange is not in it. Where a table has no costs at a tensor-parallel size, the
functions that take a problem raise `ValueError`.
"""

from collections.abc import Sequence, Set
from dataclasses import astuple, dataclass
from typing import NamedTuple

from motet.costs.cost_model import ZERO, LayerCost
from motet.costs.layer_gradients import LayerGradients, entries_of, gradients_of_layers
from motet.costs.load import Load
from motet.planner.cost_estimates.microbatch_loads import Entering, mean_load, microbatch_loads, sample_loads
from motet.planner.problem import PlanningProblem


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    """The part of the backward that nothing waits for."""

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


class Work(NamedTuple):
    """What a module's layers do for microbatches of one kind."""

    gradients: Sequence[LayerGradients]
    """Of each layer."""
    load: Load
    """Of all ranks of a context-parallel group."""
    num_actions: float
    """How many actions pay the constants of a cost; an empty microbatch is none."""


def layer_times(
    problem: PlanningProblem,
    name: str,
    tp: int = 1,
    dp: int = 1,
    *,
    cp: int = 1,
    packed: bool = False,
    frozen_aware: bool = True,
    lightest: bool = False,
    sequence_parallel: bool = False,
) -> list[LayerTime]:
    """For each layer, the mean over the microbatches. Unaware of what is frozen, every layer pays its whole backward
    for each of them. `packed`: as `typical_load` has it. `lightest`: no microbatch takes less."""
    packed = packed or cp > 1

    def compute() -> list[LayerTime]:
        kinds = _kinds(problem, name, microbatch_loads(problem, name, dp, packed=packed), frozen_aware)
        works = [(_lightest if lightest else _mean)(gradients, members) for gradients, members in kinds]
        return _times(problem, name, tp, cp, works, sequence_parallel=sequence_parallel)

    return problem.remembered(("times", name, tp, dp, cp, packed, frozen_aware, lightest, sequence_parallel), compute)


def bounding_times(
    problem: PlanningProblem,
    name: str,
    tp: int = 1,
    num_replicas: int = 1,
    *,
    cp: int = 1,
    alone: bool = True,
    lightest: bool = False,
    sequence_parallel: bool = False,
) -> list[LayerTime]:
    """For each layer, the mean over the microbatches, or less where it is not known how the batch is cut into them:
    then what no cut undercuts. `alone`: each replica has a share of the batch to itself. `lightest`: no microbatch
    takes less."""
    if alone and problem.cuts_evenly:
        return layer_times(
            problem, name, tp, num_replicas, cp=cp, lightest=lightest, sequence_parallel=sequence_parallel
        )
    if lightest:
        return least_times(problem, name, tp, cp=cp, sequence_parallel=sequence_parallel)
    num_microbatches = num_replicas * problem.num_microbatches
    total = least_total_times(problem, name, tp, num_replicas, cp=cp, alone=alone, sequence_parallel=sequence_parallel)
    return [LayerTime(*(seconds / num_microbatches for seconds in astuple(time))) for time in total]


def least_total_times(
    problem: PlanningProblem,
    name: str,
    tp: int = 1,
    num_replicas: int = 1,
    *,
    cp: int = 1,
    alone: bool = False,
    sequence_parallel: bool = False,
) -> list[LayerTime]:
    """For each layer: at least what all microbatches together take, however the batch is cut into them.

    That holds because no sum of a load is less for several samples than the sum of theirs (padding and packing only add
    to it), and because there are at least as many actions as it takes to hold the samples. `alone`: each replica has a
    share of the batch to itself; where that is cut evenly, the microbatches are known, and so is what they take."""
    is_known = alone and problem.cuts_evenly
    num_samples = len(problem.samples)
    largest = -(-num_samples // (problem.num_microbatches * num_replicas)) if problem.cuts_evenly else num_samples

    def compute() -> list[LayerTime]:
        loads = (
            microbatch_loads(problem, name, num_replicas, packed=cp > 1) if is_known else sample_loads(problem, name)
        )
        total = [
            Work(
                gradients,
                Load(*map(sum, zip(*members, strict=True))),
                float(sum(map(any, members)) // (1 if is_known else largest)),
            )
            for gradients, members in _kinds(problem, name, loads)
        ]
        return _times(problem, name, tp, cp, total, sequence_parallel=sequence_parallel)

    return problem.remembered(("least total", name, tp, num_replicas, cp, is_known, sequence_parallel), compute)


def least_times(
    problem: PlanningProblem,
    name: str,
    tp: int = 1,
    num_samples: int = 1,
    *,
    cp: int = 1,
    sequence_parallel: bool = False,
) -> list[LayerTime]:
    """For each layer: at least what a microbatch of so many samples takes."""

    def compute() -> list[LayerTime]:
        lightest = [_lightest(*kind) for kind in _kinds(problem, name, sample_loads(problem, name))]
        several = [work._replace(load=Load(*(num_samples * x for x in work.load))) for work in lightest]
        return _times(problem, name, tp, cp, several, sequence_parallel=sequence_parallel)

    return problem.remembered(("least", name, tp, num_samples, cp, sequence_parallel), compute)


def _kinds(
    problem: PlanningProblem, name: str, loads: Sequence[tuple[Load, Entering]], frozen_aware: bool = True
) -> list[tuple[Sequence[LayerGradients], list[Load]]]:
    """The layers' gradients in microbatches of each kind, and their loads, with nothing in the place of the others'."""
    everything = (LayerGradients(True, True),) * problem.modules[name].workload.num_layers
    return [
        (
            _gradients_with(problem, name, kind) if frozen_aware else everything,
            [load if entering == kind else Load() for load, entering in loads],
        )
        for kind in sorted({entering for _, entering in loads}, key=sorted)
    ]


def _gradients_with(problem: PlanningProblem, name: str, sources: Set[str]) -> tuple[LayerGradients, ...]:
    """For a microbatch to which these modules bring something that needs a gradient."""
    return gradients_of_layers(problem.modules[name].trainable_layers, entries_of(name, sources, problem.edges))


def _mean(gradients: Sequence[LayerGradients], members: Sequence[Load]) -> Work:
    return Work(gradients, mean_load(members), sum(map(any, members)) / len(members))


def _lightest(gradients: Sequence[LayerGradients], members: Sequence[Load]) -> Work:
    lightest = Load(*(min(values) for values in zip(*members, strict=True)))
    return Work(gradients, lightest, float(all(map(any, members))))


def _times(
    problem: PlanningProblem, name: str, tp: int, cp: int, works: Sequence[Work], *, sequence_parallel: bool = False
) -> list[LayerTime]:
    """The sum over the kinds of microbatches of what each layer takes."""
    workload = problem.modules[name].workload
    costs = problem.table.of(name, tp, sequence_parallel=sequence_parallel).layers
    assert len(costs) == workload.num_layers, f"{name}: {len(costs)} layers in the table, {workload.num_layers} here"
    works = [work._replace(load=work.load.share(cp)) for work in works]
    times: list[LayerTime] = []
    known: dict[object, LayerTime] = {}
    for i, cost in enumerate(costs):
        recompute = name in problem.recompute and workload.has_block((i, i + 1))
        # Most layers are alike.
        key = (id(cost), recompute, *(work.gradients[i] for work in works))
        if key not in known:
            parts = [_layer_time(cost, work.gradients[i], work.load, work.num_actions, recompute) for work in works]
            known[key] = LayerTime(*(sum(values) for values in zip(*parts, strict=True)))
        times.append(known[key])
    return times


def _layer_time(
    cost: LayerCost, needs: LayerGradients, load: Load, num_actions: float, recompute: bool
) -> tuple[float, float, float]:
    """Seconds of forward, backward and the backward's weight half. The load's sums, and so many times the constants."""
    recomputed = needs.any and recompute
    forward = cost.forward if needs.any and not recomputed else cost.forward_without_graph
    backward = cost.backward(input_gradient=needs.input_gradient, weight_gradient=needs.weight_gradient)
    weight = ZERO if not needs.weight_gradient else cost.weight_gradient if needs.input_gradient else backward
    if recomputed:
        backward = backward.plus(cost.forward)
    seconds = [q.seconds(load) + (num_actions - 1) * q.constant for q in (forward, backward, weight)]
    return seconds[0], seconds[1], seconds[2]
