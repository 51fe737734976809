"""Problems for templates: whole nodes, and what their stages may share."""

from dataclasses import replace

from small_problem import small_problem

from motet.plan import ContextOptions
from motet.planner.problem import PlanningProblem
from motet.planner.templates.stage_mapping import ChainCosts
from motet.planner.templates.template_costs import mapping_problems


def on_nodes(num_nodes: int, devices_per_node: int = 1, *, failures: int = 1, **options: object) -> PlanningProblem:
    problem = small_problem(num_devices=num_nodes * devices_per_node, **options)
    return replace(
        problem,
        cluster=replace(problem.cluster, devices_per_node=devices_per_node),
        failures=failures,
        num_cores=None,
    )


def shared(
    problem: PlanningProblem, *sizes: int, name: str = "language_model", fully: bool = False, **options: object
) -> PlanningProblem:
    """Context parallelism is allowed in the module's stages; `fully`: FSDP."""
    module = problem.modules[name]
    context = ContextOptions(block_size=16)
    module = replace(module, cp_sizes=(1, *sizes), may_be_sharded=fully, context=context, **options)
    return replace(problem, modules={**problem.modules, name: module})


def with_tp(problem: PlanningProblem, *sizes: int) -> PlanningProblem:
    return replace(problem, modules={name: replace(m, tp_sizes=sizes) for name, m in problem.modules.items()})


def chains_of(
    problem: PlanningProblem, name: str = "language_model", fully: tuple[str, ...] = ()
) -> dict[int, ChainCosts]:
    """By context-parallel size."""
    *_, together = mapping_problems(problem, fully_sharded=fully)
    return {chain.cp_size: chain for chain in together.modules[name].all}
