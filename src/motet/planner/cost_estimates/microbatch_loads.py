"""The loads of a problem's microbatches: the batch is cut in the order in which it comes.

With each load goes which of the modules that bring a gradient enter the microbatch: of a frozen module, the layers
behind such an entry have a backward only then (`motet.costs.layer_gradients`). Computed once for each problem.

Limits: assignments that balance microbatches are not followed; whoever needs a bound takes single samples.
"""

from collections.abc import Sequence

from motet.assignment.batch_assignment import split_evenly
from motet.costs.load import Load, microbatch_load
from motet.planner.problem import PlanningProblem

Entering = frozenset[str]
"""The modules that bring a gradient into a microbatch."""


def microbatch_loads(
    problem: PlanningProblem, name: str, dp: int = 1, *, packed: bool = False
) -> Sequence[tuple[Load, Entering]]:
    """For each microbatch of a batch that is cut in the order in which it comes, empty ones included. `packed`: samples
    share a row, as under context parallelism."""

    def compute() -> list[tuple[Load, Entering]]:
        shares = split_evenly(range(len(problem.samples)), dp)
        microbatches = [m for share in shares for m in split_evenly(share, problem.num_microbatches)]
        return _loads_of(problem, name, microbatches, packed=packed)

    return problem.remembered(("loads", name, dp, packed), compute)


def sample_loads(problem: PlanningProblem, name: str) -> Sequence[tuple[Load, Entering]]:
    """For each sample, as if it were a microbatch."""
    return problem.remembered(
        ("sample loads", name), lambda: _loads_of(problem, name, [(i,) for i in range(len(problem.samples))])
    )


def typical_load(problem: PlanningProblem, name: str, dp: int = 1, *, cp: int = 1, packed: bool = False) -> Load:
    """The mean over the microbatches, of each rank of a context-parallel group. `packed`: samples share a row also
    where there is no group, as another stage has one."""
    packed = packed or cp > 1
    loads = microbatch_loads(problem, name, dp, packed=packed)
    return problem.remembered(("mean", name, dp, cp, packed), lambda: mean_load([load for load, _ in loads]).share(cp))


def mean_load(loads: Sequence[Load]) -> Load:
    return Load(*(sum(values) / len(loads) for values in zip(*loads, strict=True)))


def _loads_of(
    problem: PlanningProblem, name: str, microbatches: Sequence[Sequence[int]], *, packed: bool = False
) -> list[tuple[Load, Entering]]:
    sources = tuple(edge.source for edge in problem.edges if edge.target == name)
    bringing = [source for source in sources if any(needs.any for needs in problem.gradients[source])]
    known: dict[tuple[int, ...], tuple[Load, Entering]] = problem.remembered(("loads of kinds", name, packed), dict)
    workload = problem.modules[name].workload.packed() if packed else problem.modules[name].workload
    loads, kinds = [], problem.sample_kinds
    for members in microbatches:
        key = tuple([kinds[i] for i in members])
        if key not in known:
            able = [problem.samples[i] for i in members if problem.samples[i].has(name)]
            entering = frozenset(source for source in bringing if any(sample.has(source) for sample in able))
            known[key] = microbatch_load(workload, name, able, sources), entering
        loads.append(known[key])
    return loads
