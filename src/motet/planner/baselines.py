"""Cornstarch and the baselines that papers compare their systems with, over the same degrees.

* `cornstarch`: frozen-aware stages, loosely coupled modules, encoders parallel or colocated, whichever is faster. The
  exact partition of T = forward + backward under the frozen rule cuts the stages (thesis 3.3.1, 3.4.1). The number of
  stages of each module follows Algorithm 1 (Cornstarch 5.2): for each number of stages of the language model, each
  encoder gets as many as keep up with it; where all distributions of the devices can be enumerated, they are.
  Deviation: an encoder without a backward pass is charged none, where the paper assumes a fixed factor.
* `frozen_unaware` (Cornstarch 6.3), `even`: Cornstarch's search, with stages cut in simpler ways.
* `encoders_colocated` (Cornstarch 6.1, baseline 1): one chain, stage s of every encoder on the same group. Stages are
  cut and devices divided by forward time, as if every backward took twice as long.
* `encoders_replicated` (Cornstarch 6.1, baseline 2): the language model over all stages, every encoder whole in each.
* `proportional` (DistTrain 8.2's ratio-based strategy): devices in proportion to the modules' FLOPs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from motet.costs.analytic import layer_flops
from motet.errors import UserError
from motet.plan import LayerRange, Plan
from motet.planner.layouts.degrees import common_tp_sizes, dp_sizes, most_stages, uniform_degrees
from motet.planner.layouts.layout import Layout, Placement, cut_module, layout_of_degrees
from motet.planner.layouts.partition import even_partition, partition, partition_by_sizes, stage_costs
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.search import search
from motet.planner.selection import best_plan


def cornstarch(
    problem: PlanningProblem,
    *,
    placement: Placement | None = None,
    unimodal: Callable[[PlanningProblem, str, Degrees], Sequence[int]] | None = None,
) -> Plan:
    """`placement` None: parallel or colocated, whichever is faster in simulation. `unimodal`: any planner of a single
    model, which returns the number of layers of each stage for a module's name and degrees (Cornstarch 5.2)."""

    def cut(problem: PlanningProblem, name: str, degrees: Degrees) -> Sequence[LayerRange]:
        assert unimodal is not None
        return partition_by_sizes(problem.modules[name].workload.num_layers, unimodal(problem, name, degrees))

    placements: tuple[Placement, ...] = ("parallel", "colocated") if placement is None else (placement,)
    if len(problem.sources) < 2 and placement is None:
        placements = ("parallel",)
    return search(problem, cut if unimodal else cut_module, planner="cornstarch", placements=placements)


def frozen_unaware(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """The exact partition as if every layer were trainable."""
    return search(problem, _frozen_unaware_cut, planner="frozen_unaware", placements=(placement or "parallel",))


def even(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """Stages with equal numbers of layers."""
    return search(problem, _even_cut, planner="even", placements=(placement or "parallel",))


def encoders_replicated(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    _require_encoders(problem, "encoders_replicated", placement, "replicated")
    return search(problem, _frozen_unaware_cut, planner="encoders_replicated", placements=("replicated",))


def encoders_colocated(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    _require_encoders(problem, "encoders_colocated", placement, "colocated")
    return best_plan(problem, list(_colocated_chains(problem)), "encoders_colocated", None)


def proportional(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    return best_plan(problem, list(_proportional_layouts(problem)), "proportional", placement)


def _require_encoders(problem: PlanningProblem, planner: str, placement: Placement | None, own: Placement) -> None:
    if not problem.sources:
        raise UserError(f"parallel.planner: {planner} needs an encoder; the model has none")
    if placement not in (None, own):
        raise UserError(
            f"parallel.placement: is {placement}, but planner {planner} places encoders {own}; leave placement out"
        )


def _frozen_unaware_cut(problem: PlanningProblem, name: str, degrees: Degrees) -> Sequence[LayerRange]:
    return cut_module(problem, name, degrees, frozen_aware=False)


def _even_cut(problem: PlanningProblem, name: str, degrees: Degrees) -> Sequence[LayerRange]:
    return even_partition(problem.modules[name].workload.num_layers, degrees.pp)


def _colocated_chains(problem: PlanningProblem) -> Iterator[Layout]:
    """For each choice of degrees, the numbers of stages of the encoders and the rest that minimise the slowest stage's
    forward time."""
    for dp, tp, num_groups in uniform_degrees(problem):
        forward = {
            name: [time.forward_s for time in problem.estimator.layer_times(name, tp, dp)] for name in problem.modules
        }
        best: tuple[float, dict[str, int]] | None = None
        for num_encoder_stages in range(1, num_groups):
            counts = _stage_counts(problem, num_encoder_stages, num_groups - num_encoder_stages)
            if counts is None:
                continue
            stages = {name: stage_costs(f, partition(f, counts[name])) for name, f in forward.items()}
            encoders = [sum(costs) for costs in zip(*(stages[name] for name in problem.sources), strict=True)]
            slowest = max(*encoders, *(cost for name in problem.sinks for cost in stages[name]))
            if best is None or slowest < best[0]:
                best = slowest, counts
        if best is not None:
            yield layout_of_degrees(
                problem,
                {name: Degrees(tp=tp, pp=pp, dp=dp) for name, pp in best[1].items()},
                {name: partition(f, best[1][name]) for name, f in forward.items()},
                colocated=True,
                planner="encoders_colocated",
            )


def _stage_counts(problem: PlanningProblem, for_encoders: int, for_the_rest: int) -> dict[str, int] | None:
    """Returns the number of stages of each module; None if some module cannot have so many. Several sinks share the
    rest evenly."""
    num_sinks = len(problem.sinks)
    counts = dict.fromkeys(problem.sources, for_encoders)
    counts |= {name: for_the_rest // num_sinks + (i < for_the_rest % num_sinks) for i, name in enumerate(problem.sinks)}
    possible = all(1 <= counts[name] <= most_stages(problem, name) for name in problem.modules)
    return counts if possible else None


def _proportional_layouts(problem: PlanningProblem) -> Iterator[Layout]:
    """For each choice of degrees, numbers of stages in proportion to FLOPs, at least one each, rounded by largest
    remainder."""
    flops = _module_flops(problem)
    for dp in dp_sizes(problem):
        for tp in common_tp_sizes(problem, problem.modules):
            if problem.num_devices % (dp * tp):
                continue
            counts = shares(flops, problem.num_devices // (dp * tp))
            if counts is None or any(count > most_stages(problem, name) for name, count in counts.items()):
                continue
            degrees = {name: Degrees(tp=tp, pp=pp, dp=dp) for name, pp in counts.items()}
            cuts = {name: cut_module(problem, name, degrees[name]) for name in problem.modules}
            yield layout_of_degrees(problem, degrees, cuts, colocated=False, planner="proportional")


def shares(weights: Mapping[str, float], total: int) -> dict[str, int] | None:
    """Whole numbers of at least 1 that add up to `total`, in proportion to the weights by largest remainder; None if
    there are more names than `total`."""
    if len(weights) > total:
        return None
    whole = sum(weights.values())
    exact = {name: total * weight / whole for name, weight in weights.items()}
    result = {name: max(1, int(value)) for name, value in exact.items()}
    while sum(result.values()) > total:
        result[max((n for n in result if result[n] > 1), key=lambda n: result[n] - exact[n])] -= 1
    while sum(result.values()) < total:
        result[max(result, key=lambda n: exact[n] - result[n])] += 1
    return result


def _module_flops(problem: PlanningProblem) -> dict[str, float]:
    """FLOPs of a typical microbatch: forward, and the backward that the trainable layers need."""
    result = {}
    for name, module in problem.modules.items():
        load = problem.estimator.typical_load(name)
        result[name] = sum(
            flops.forward.seconds(load)
            + flops.passes(needs.input_gradient, needs.weight_gradient).backward.seconds(load)
            for flops, needs in zip(map(layer_flops, module.workload.layers), problem.gradients[name], strict=True)
        )
    return result
