"""On how many of its devices a problem is best planned: an odd number often leaves worse degrees than a device less.

Nine devices cannot be shared among two replicas, nor seven cut into groups of two. So planners are asked for fewer
devices too: for each product of degrees that may be chosen, the most that it divides. Of powers of two there is none
but all of them; elsewhere there are about as many as the number has digits in base 2.

Limits: other numbers are not looked at, though stages of unlike modules may fit onto them better.
"""

from collections.abc import Callable
from itertools import product

from motet.errors import UserError
from motet.plan import Plan
from motet.planner.bound_and_simulate import rank
from motet.planner.degrees import cp_sizes, tp_sizes
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.explicit import Placement
from motet.planner.problem import PlanningProblem, TooSlowError


def device_counts(problem: PlanningProblem) -> list[int]:
    """All of the devices, then the fewer ones that degrees divide better, most first."""
    tp = {size for name in problem.modules for size in tp_sizes(problem, name)}
    cp = {size for name in problem.modules for size in cp_sizes(problem, name)}
    dp = {size for size in problem.dp_sizes if size <= len(problem.samples)}
    products = {d * t * c for d, t, c in product(dp, tp, cp)}
    counts = {problem.num_devices // p * p for p in products if p <= problem.num_devices}
    return sorted(counts | {problem.num_devices}, reverse=True)


def on_best_count(
    planner: Callable[..., Plan], problem: PlanningProblem, *, placement: Placement | None = None
) -> Plan:
    """The planner's best plan on any of these numbers of devices.

    Raises what the planner raises for all devices, if it finds nothing on fewer either."""
    counts = device_counts(problem)
    if len(counts) == 1:
        return planner(problem, placement=placement)
    best: Evaluation | None = None
    too_slow: list[TooSlowError] = []
    refused: UserError | None = None
    for num_devices in counts:
        cutoff_s = best.iteration_time_s if best is not None and best.fits else problem.cutoff_s
        at_least_s = _share_s(problem) / num_devices
        if at_least_s >= cutoff_s:
            too_slow.append(TooSlowError(at_least_s))
            continue
        try:
            plan = planner(problem.with_num_devices(num_devices).with_cutoff(cutoff_s), placement=placement)
        except TooSlowError as error:
            too_slow.append(error)
            continue
        except UserError as error:
            refused = refused or error
            continue
        best = min((each for each in (best, evaluate(problem, plan)) if each is not None), key=rank)
    if too_slow and (best is None or not best.fits):
        raise TooSlowError(min(error.at_least_s for error in too_slow))
    if best is not None:
        return best.plan
    assert refused is not None, "on all devices a planner finds a plan or says why not"
    raise refused


def _share_s(problem: PlanningProblem) -> float:
    """Device-seconds of an iteration, each layer at the tensor-parallel size that wastes least: no plan gets by with
    less."""

    def compute() -> float:
        return sum(
            min(tp * time.total_s for tp, time in zip(sizes, times, strict=True))
            for name in problem.modules
            for sizes in [tp_sizes(problem, name)]
            for times in zip(*(problem.estimator.lower_bound_batch_times(name, tp) for tp in sizes), strict=True)
        )

    return problem.remembered("device-seconds", compute)
