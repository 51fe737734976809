"""Optimus: encoders on the language model's own ranks, under a layout of their own, in its bubbles (Feng et al. 2025).

`motet.planner.optimus.layouts` searches layouts and `motet.planner.optimus.bubbles` schedules each. This module turns
the best ones into plans, among which simulation chooses.

Stage s of the language model is on group s mod PP. An encoder has one replica for each encoder pipeline, on ranks of
the language model's groups. Kernels are not actions: an encoder stage is cut into runs of layers on the stage's ranks,
each about as long as a pass of the language model, so that the order of actions approximates that of the kernels.
"""

from itertools import accumulate
from math import ceil

from motet.errors import UserError
from motet.plan import LayerRange, Plan, Replica, Stage
from motet.planner.evaluate import evaluate
from motet.planner.layouts.degrees import most_stages
from motet.planner.layouts.layout import Placement
from motet.planner.layouts.partition import partition
from motet.planner.optimus.layouts import LlmSide, Solution, cut, solutions
from motet.planner.problem import PlanningProblem
from motet.planner.selection import rank

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
    pieces = _encoder_pieces(solution, name)
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


def _encoder_pieces(solution: Solution, name: str) -> list[list[LayerRange]]:
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
