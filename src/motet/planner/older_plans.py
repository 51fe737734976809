"""Plans that earlier versions wrote, brought into today's form."""

from dataclasses import replace

from motet.plan import LayerRange, ModulePlan, Plan
from motet.planner.problem import PlanningProblem
from motet.shapes.diffusion import GENERATORS


def with_connectors(plan: Plan, problem: PlanningProblem) -> Plan:
    """Adds the connector, which has become their first layer, to U-Nets in plans of versions that had none."""
    return replace(
        plan,
        modules={
            name: _with_connector(module) if _lacks_connector(problem, module.data_module(name), module) else module
            for name, module in plan.modules.items()
        },
    )


def _lacks_connector(problem: PlanningProblem, name: str, module: ModulePlan) -> bool:
    workload = problem.modules[name].workload if name in problem.modules else None
    return workload is not None and workload.family in GENERATORS and module.num_layers == workload.num_layers - 1


def _with_connector(module: ModulePlan) -> ModulePlan:
    def moved(layers: LayerRange) -> LayerRange:
        return layers[0] + 1 if layers[0] else 0, layers[1] + 1

    replicas = tuple(
        replace(replica, stages=tuple(replace(stage, layers=moved(stage.layers)) for stage in replica.stages))
        for replica in module.replicas
    )
    trainable = tuple(map(moved, module.trainable)) or ((0, 1),)  # A connector is trained unless it is frozen.
    return replace(module, num_layers=module.num_layers + 1, replicas=replicas, trainable=trainable)
