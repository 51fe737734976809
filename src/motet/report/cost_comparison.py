"""How far measured costs and computed ones are apart, where a plan has both.

Compared are the layers alone, on the plan's mean microbatch, without what a measured stage costs beside its layers.
"""

from dataclasses import replace
from typing import Any

from motet.plan import Plan
from motet.planner.cost_estimates.layer_times import layer_times
from motet.planner.problem import PlanningProblem


def compare_costs(problem: PlanningProblem, plan: Plan) -> list[dict[str, Any]]:
    """For each module: seconds of one microbatch's forward and backward, and the ratios computed / measured (None where
    nothing is measured). Empty if the problem's costs are computed themselves."""
    if problem.computed is None:
        return []
    computed_problem = replace(problem, table=problem.computed)
    rows = []
    for name, module in plan.modules.items():
        if module.copy_of is not None:
            continue
        tp_size = module.replicas[0].stages[0].tp_size
        row: dict[str, Any] = {"module": name, "tp_size": tp_size}
        for part in ("forward_s", "backward_s"):
            measured, computed = (
                sum(getattr(time, part) for time in layer_times(source, name, tp_size, len(module.replicas)))
                for source in (problem, computed_problem)
            )
            row |= {f"measured_{part}": measured, f"computed_{part}": computed}
            row[f"{part.removesuffix('_s')}_ratio"] = computed / measured if measured else None
        rows.append(row)
    return rows
