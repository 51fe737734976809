"""Variants of a plan with other methods of context parallelism."""

from collections.abc import Callable, Iterator, Set
from dataclasses import replace

from motet.attention.masks.distribution import check_ulysses
from motet.errors import UserError
from motet.families.capabilities import SHOWN_EQUAL
from motet.plan import ContextOptions, ModulePlan, Plan, Stage
from motet.planner.problem import PlanningProblem
from motet.shapes.module_shape import ModuleWorkload


def context_variants(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """The plan with other ways to bring keys to queries: tokens traded for heads, in whole groups or, where heads
    divide, within the part of a group that is on a node and in a ring over such parts; and a ring over the whole group,
    whose steps are equal where attention is causal. Nothing without context parallelism, or for families that have not
    been shown equal with it."""
    seen = [plan.modules]
    for contexts_of in (_traded, _traded_in_ring, _in_ring):
        modules = {name: _changed(problem, name, module, contexts_of) for name, module in plan.modules.items()}
        if modules not in seen:
            seen.append(modules)
            yield replace(plan, modules=modules)


def _changed(
    problem: PlanningProblem,
    name: str,
    module: ModulePlan,
    contexts_of: Callable[[PlanningProblem, ModulePlan, ModuleWorkload, Stage], Iterator[ContextOptions]],
) -> ModulePlan:
    """The module with the first of these contexts that it can have, or as it is."""
    stages = [stage for replica in module.replicas for stage in replica.stages if stage.cp_size > 1]
    workload = problem.all_modules[module.data_module(name)].workload
    for context in contexts_of(problem, module, workload, stages[0]) if stages else ():
        if _is_possible(context, {(stage.tp_size, stage.cp_size) for stage in stages}, workload):
            return replace(module, context=context)
    return module


def _traded(
    problem: PlanningProblem, module: ModulePlan, workload: ModuleWorkload, stage: Stage
) -> Iterator[ContextOptions]:
    if "ulysses" in SHOWN_EQUAL.get(workload.family, ()):
        yield replace(module.context, method="ulysses")


def _traded_in_ring(
    problem: PlanningProblem, module: ModulePlan, workload: ModuleWorkload, stage: Stage
) -> Iterator[ContextOptions]:
    """As many traders as heads allow, and with each only those of one node."""
    if not {"ulysses", "context_parallel"} <= SHOWN_EQUAL.get(workload.family, frozenset()):
        return
    ranks = stage.ranks[:: stage.tp_size]
    on_first_node = sum(problem.cluster.node(rank) == problem.cluster.node(ranks[0]) for rank in ranks)
    for size in range(on_first_node, 1, -1):
        if on_first_node % size == 0:
            yield replace(module.context, method="hybrid", ulysses_size=size)


def _in_ring(
    problem: PlanningProblem, module: ModulePlan, workload: ModuleWorkload, stage: Stage
) -> Iterator[ContextOptions]:
    windows = [layer.attention.window for layer in workload.layers if layer.attention is not None]
    is_causal = module.context.media_attention == "causal" and not any(windows)
    if is_causal and workload.kind == "language_model" and "context_parallel" in SHOWN_EQUAL.get(workload.family, ()):
        yield replace(module.context, method="ring", policy="zigzag")


def _is_possible(context: ContextOptions, sizes: Set[tuple[int, int]], workload: ModuleWorkload) -> bool:
    """Whether heads divide by the traders of stages with these (tp_size, cp_size), and something goes around a ring."""
    for tp_size, cp_size in sizes:
        try:
            number = context.num_traders(cp_size)
            for layer in workload.layers:
                if layer.attention is not None:
                    heads = layer.attention.num_heads, layer.attention.num_key_value_heads
                    check_ulysses(heads[0] // tp_size, heads[1] // tp_size, number)
        except UserError:
            return False
        if context.method == "hybrid" and number == cp_size:
            return False
    return True
