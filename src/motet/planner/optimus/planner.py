"""Optimus: encoders on the language model's own ranks, under a layout of their own, in its bubbles (Feng et al. 2025).

`motet.planner.optimus.layouts` searches layouts and `motet.planner.optimus.bubbles` schedules each. This module turns
the best ones into plans, among which simulation chooses, and a solution into an assignment and an order of actions.

Stage s of the language model is on group s mod PP. An encoder has one replica for each encoder pipeline, on ranks of
the language model's groups. Kernels are not actions: an encoder stage is cut into runs of layers on the stage's ranks,
each about as long as a pass of the language model, so that the order of actions approximates that of the kernels. An
action takes the place of its last kernel.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import ceil

from motet.assignment.batch_assignment import BatchAssignment, split_evenly
from motet.errors import UserError
from motet.plan import LayerRange, Plan, Replica, Stage
from motet.planner.evaluate import evaluate
from motet.planner.layouts.degrees import most_stages
from motet.planner.layouts.layout import Placement
from motet.planner.layouts.partition import partition
from motet.planner.optimus.layouts import LlmSide, Solution, cut, solutions
from motet.planner.problem import PlanningProblem
from motet.planner.selection import rank
from motet.schedule.action import Compute, Kind
from motet.schedule.routes import Cell, Routes
from motet.schedule.schedule import Schedule

SCHEDULE = "bubble_filling"
"""Schedule of the plans, unless the user asks for another one."""
MAX_SIMULATED = 4
"""Number of layouts, the best ones by the bubble scheduler's estimate, that are simulated as plans."""
MAX_SIMULATED_CELLS = 2_500
"""Limit of microbatches times stages in all simulations, above which the bubble scheduler's estimate alone decides."""


def optimus(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    """The best plan. Raises `UserError` if Optimus does not apply: no encoder, or no layout within the limits."""
    if placement is not None:
        raise UserError("parallel.placement: planner optimus places encoders in its own way; leave placement out")
    plans = [plan_of(solution) for solution in solutions(problem)[:MAX_SIMULATED]]
    num_cells = accumulate(problem.num_microbatches * sum(1 for _ in plan.stages()) for plan in plans)
    affordable = plans[: max(1, sum(total <= MAX_SIMULATED_CELLS for total in num_cells))]
    if len(affordable) == 1:
        return affordable[0]
    return min((evaluate(problem, plan) for plan in affordable), key=rank).plan


def plan_of(solution: Solution) -> Plan:
    """The plan, with encoders on the ranks of the language model in replicas and stages of their own."""
    problem = solution.problem
    sink = problem.sinks[0]
    modules = {}
    for name in problem.modules:
        module = problem.modules[name]
        replicas = _llm_replicas(solution) if name == sink else _encoder_replicas(solution, name)
        modules[name] = module.planned(replicas)
    schedule = SCHEDULE if problem.schedules is None or SCHEDULE in problem.schedules else problem.schedules[0]
    return problem.plan(modules, planner="optimus", schedule=schedule)


def _llm_replicas(solution: Solution) -> tuple[Replica, ...]:
    llm = solution.llm
    stages = LlmSide(solution.problem, llm).stages
    return tuple(
        Replica(
            stages=tuple(
                Stage(layers=layers, ranks=_group(solution, d, s % llm.pp), tp_size=llm.tp)
                for s, layers in enumerate(stages)
            )
        )
        for d in range(llm.dp)
    )


def _group(solution: Solution, replica: int, place: int) -> tuple[int, ...]:
    """Ranks of one place of one language model pipeline."""
    llm = solution.llm
    first = (replica * llm.pp + place) * llm.tp
    return tuple(range(first, first + llm.tp))


def _encoder_replicas(solution: Solution, name: str) -> tuple[Replica, ...]:
    """Replica d * m + p is pipeline p on the language model's replica d."""
    pipelines, tp = solution.pipelines, solution.encoder.tp
    pieces = encoder_pieces(solution, name)
    replicas = []
    for d in range(solution.llm.dp):
        for p in range(pipelines.num_pipelines):
            copy, chain = divmod(p, len(pipelines.places))
            stages = []
            for place, of_stage in zip(pipelines.places[chain], pieces, strict=True):
                ranks = _group(solution, d, place)[copy * tp : (copy + 1) * tp]
                stages += [Stage(layers=layers, ranks=ranks, tp_size=tp) for layers in of_stage]
            replicas.append(Replica(stages=tuple(stages)))
    return tuple(replicas)


def encoder_pieces(solution: Solution, name: str) -> list[list[LayerRange]]:
    """The runs of layers of each stage of the encoder's pipeline, at most as many as it may have stages."""
    problem, tp, dp = solution.problem, solution.encoder.tp, solution.llm.dp
    times = problem.estimator.layer_seconds(name, tp, dp)
    side = LlmSide(problem, solution.llm)
    of_llm = problem.estimator.layer_times(side.name, solution.llm.tp, dp)
    pass_s = max(sum(of_llm[i].total_s for i in range(*stage)) for stage in side.stages)
    most = most_stages(problem, name) // solution.encoder.pp
    result = []
    for first, last in cut(problem, name, tp, dp, solution.encoder.pp):
        wanted = ceil(sum(times[first:last]) / pass_s) if pass_s else 1
        runs = partition(times[first:last], max(1, min(last - first, most, wanted)))
        result.append([(first + a, first + b) for a, b in runs])
    return result


def assignment_of(solution: Solution) -> BatchAssignment:
    """The assignment of the language model's microbatches to encoder pipelines by the bubble scheduler."""
    problem, llm = solution.problem, solution.llm
    shares = [
        split_evenly(share, problem.num_microbatches) for share in split_evenly(range(len(problem.samples)), llm.dp)
    ]
    result: dict[str, tuple[tuple[tuple[int, ...], ...], ...]] = {}
    for name in problem.modules:
        has = [sample.has(name) for sample in problem.samples]
        owner: Sequence[int] = [0] * problem.num_microbatches
        num_replicas = 1
        if name != problem.sinks[0]:
            owner, num_replicas = solution.schedule.owner, solution.pipelines.num_pipelines
        result[name] = tuple(
            tuple(tuple(i for i in microbatch if has[i] and owner[m] == pipeline) for m, microbatch in enumerate(share))
            for share in shares
            for pipeline in range(num_replicas)
        )
    return BatchAssignment(result)


def schedule_of(solution: Solution, routes: Routes) -> Schedule:
    """The order of actions. `routes`: of this solution's plan and assignment.

    Actions are ordered by time: those of the language model by their begin, those of an encoder by their end. Every
    value is written before it is read, so ranks in this order cannot deadlock."""
    times = _Times(solution)
    place = {cell: i for i, cell in enumerate(routes.cells)}
    lists: list[list[tuple[float, int, int, Compute]]] = [[] for _ in range(routes.plan.num_ranks)]
    for cell in routes.cells:
        kinds = [Kind.FORWARD, Kind.BACKWARD] if cell in routes.with_backward else [Kind.FORWARD]
        for kind in kinds:
            order = place[cell] if kind is Kind.FORWARD else -place[cell]
            key = (times.of(kind, cell), int(kind is Kind.BACKWARD), order)
            for member in routes.stage(cell).ranks:
                lists[member].append((*key, Compute(kind, cell)))
    return Schedule(tuple(tuple(action for *_, action in sorted(actions)) for actions in lists))


class _Times:
    def __init__(self, solution: Solution) -> None:
        self.solution = solution
        self.sink = solution.problem.sinks[0]
        self.starts = {this: start for passes in solution.timeline.passes for start, this in passes}
        self.pieces: dict[str, list[tuple[int, float, float]]] = {}
        """For each stage of an encoder's plan: the pipeline's stage, and the shares of its forward and of its backward
        that are complete at the end of this piece."""
        for kind in (0, 1):
            self._find_shares(kind)

    def _find_shares(self, kind: int) -> None:
        """Fills `pieces`. Kernels of the first encoder come first in the forward and last in the backward."""
        solution = self.solution
        problem, tp, dp = solution.problem, solution.encoder.tp, solution.llm.dp
        pieces = {name: encoder_pieces(solution, name) for name in problem.sources}
        for s in range(solution.encoder.pp):
            seconds = {
                (name, k): sum(
                    (time.backward_s if kind else time.forward_s)
                    for time in problem.estimator.layer_times(name, tp, dp)[slice(*layers)]
                )
                for name in problem.sources
                for k, layers in enumerate(pieces[name][s])
            }
            total, done = sum(seconds.values()), 0.0
            for name, k in reversed(seconds) if kind else seconds:
                done += seconds[name, k]
                share = done / total if total else 1.0
                index = sum(len(runs) for runs in pieces[name][:s]) + k
                of_module = self.pieces.setdefault(name, [])
                if kind:
                    of_module[index] = (s, of_module[index][1], share)
                else:
                    assert len(of_module) == index
                    of_module.append((s, share, 0.0))

    def of(self, kind: Kind, cell: Cell) -> float:
        if cell.module == self.sink:
            return self.starts[cell.stage, cell.microbatch, int(kind is Kind.BACKWARD)]
        stage, forward_share, backward_share = self.pieces[cell.module][cell.stage]
        schedule = self.solution.schedule
        if kind is Kind.FORWARD:
            placement, share = schedule.forwards[cell.microbatch][stage], forward_share
        else:
            placement, share = schedule.backwards[cell.microbatch][stage], backward_share
        return placement.start_s + share * (placement.end_s - placement.start_s)
