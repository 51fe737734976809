"""Variants of a plan with other methods of context parallelism."""

from collections.abc import Iterator
from dataclasses import replace

from motet.attention.masks.distribution import check_ulysses
from motet.errors import UserError
from motet.families.capabilities import SHOWN_EQUAL
from motet.plan import ContextOptions, ModulePlan, Plan
from motet.planner.problem import PlanningProblem


def context_variants(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """The plan with tokens traded for heads, in whole groups or within the part of a group that is on a node and in a
    ring over nodes, where heads divide. Nothing without context parallelism, or for families that have not been shown
    equal with it."""
    seen = [plan.modules]
    for within_nodes in (False, True):
        modules = {name: _traded(problem, name, module, within_nodes) for name, module in plan.modules.items()}
        if modules not in seen:
            seen.append(modules)
            yield replace(plan, modules=modules)


def _traded(problem: PlanningProblem, name: str, module: ModulePlan, within_nodes: bool) -> ModulePlan:
    stages = [stage for replica in module.replicas for stage in replica.stages if stage.cp_size > 1]
    if not stages or "ulysses" not in SHOWN_EQUAL.get(problem.all_modules[name].workload.family, ()):
        return module
    if not within_nodes:
        contexts = [replace(module.context, method="ulysses")]
    else:
        ranks = stages[0].ranks[:: stages[0].tp_size]
        on_first_node = sum(problem.cluster.node(rank) == problem.cluster.node(ranks[0]) for rank in ranks)
        # As many traders as heads allow, and with each only those of one node.
        sizes = [size for size in range(on_first_node, 1, -1) if on_first_node % size == 0]
        contexts = [replace(module.context, method="hybrid", ulysses_size=size) for size in sizes]
    for context in contexts:
        changed = replace(module, context=context)
        if _num_traders(context, changed, problem, name) > 1:
            return changed
    return module


def _num_traders(context: ContextOptions, module: ModulePlan, problem: PlanningProblem, name: str) -> int:
    """The fewest ranks that trade; 1 where heads do not divide, or where nothing goes around the ring."""
    numbers = {1} if context.method == "hybrid" and context.ulysses_size == 1 else set()
    for stage in (stage for replica in module.replicas for stage in replica.stages if stage.cp_size > 1):
        try:
            number = context.num_traders(stage.cp_size)
            for layer in problem.all_modules[name].workload.layers:
                if layer.attention is not None:
                    heads = layer.attention.num_heads, layer.attention.num_key_value_heads
                    check_ulysses(heads[0] // stage.tp_size, heads[1] // stage.tp_size, number)
        except UserError:
            return 1
        numbers.add(1 if context.method == "hybrid" and number == stage.cp_size else number)
    return min(numbers, default=1)
