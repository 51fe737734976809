"""Memory of a module's layers on each rank of a tensor parallel group, one number a layer, for planners to add up."""

from motet.costs.load import Load
from motet.costs.memory import cast_weight_bytes, saved_layer_bytes, static_layer_bytes
from motet.planner.problem import PlanningProblem


def static_bytes_of_layers(
    problem: PlanningProblem, name: str, *, tp_size: int, num_holders: int, num_shares: int = 1
) -> list[int]:
    """Parameters, gradients, optimizer states and autocast's copies; `num_holders` replicas share the states under
    ZeRO-1, and `num_shares` ranks of a fully sharded stage share all but the copies, which each microbatch has."""
    module = problem.modules[name]
    return problem.remembered(
        ("static bytes", name, tp_size, num_holders, num_shares),
        lambda: [
            static_layer_bytes(
                layer,
                trainable=module.is_trainable(index),
                tp_size=tp_size,
                num_holders=num_holders,
                options=problem.memory,
                num_shares=num_shares,
            )
            + (
                cast_weight_bytes(layer, tp_size=tp_size, options=problem.memory)
                if problem.gradients[name][index].any and num_shares == 1
                else 0
            )
            for index, layer in enumerate(module.workload.layers)
        ],
    )


def copied_bytes_of_layers(problem: PlanningProblem, name: str) -> list[int]:
    """What a rank that takes over a whole layer gets from another (`motet.resilience`): parameters and optimizer
    states. Nothing of frozen layers: a stage is built with them."""
    module, memory = problem.modules[name], problem.memory
    return [
        layer.num_parameters_per_rank(1) * (memory.parameter_bytes + memory.state_bytes) * module.is_trainable(index)
        for index, layer in enumerate(module.workload.layers)
    ]


def state_bytes_of_parameters(problem: PlanningProblem, name: str) -> list[list[int]]:
    """What of that are optimizer states: of each layer's linears and words, and of the rest. Words that are tied to the
    head count as the embedding's."""
    module, memory = problem.modules[name], problem.memory
    tied = {head: module.workload.layers[words].vocabulary for words, head in module.workload.tied}
    result = []
    for index, layer in enumerate(module.workload.layers):
        linears = [linear for linear in layer.linears if linear.out_features != tied.get(index)]
        sizes = [linear.num_parameters for linear in linears]
        sizes += [layer.vocabulary * layer.hidden_size, layer.other_parameters]
        result.append([size * memory.state_bytes for size in sizes if size and module.is_trainable(index)])
    return result


def gradient_bytes_of_layers(problem: PlanningProblem, name: str, *, tp_size: int) -> list[int]:
    """What replicas sum."""
    module = problem.modules[name]
    return [
        layer.num_parameters_per_rank(tp_size) * problem.memory.parameter_bytes if module.is_trainable(index) else 0
        for index, layer in enumerate(module.workload.layers)
    ]


def saved_bytes_of_layers(
    problem: PlanningProblem,
    name: str,
    load: Load,
    *,
    tp_size: int,
    fully_sharded: bool = False,
    sequence_parallel: bool = False,
) -> list[int]:
    """What a microbatch of this load leaves for its backward."""
    layers = problem.modules[name].workload.layers

    def compute() -> list[int]:
        kinds = [(id(layer), needs) for layer, needs in zip(layers, problem.gradients[name], strict=True)]
        known = {
            (number, needs): saved_layer_bytes(
                layer,
                load,
                input_gradient=needs.input_gradient,
                weight_gradient=needs.weight_gradient,
                recompute=name in problem.recompute,
                tp_size=tp_size,
                options=problem.memory,
                fully_sharded=fully_sharded,
                sequence_parallel=sequence_parallel,
            )
            for (number, needs), layer in dict(zip(kinds, layers, strict=True)).items()  # Most layers are alike.
        }
        return [known[kind] for kind in kinds]

    return problem.remembered(("saved bytes", name, load, tp_size, fully_sharded, sequence_parallel), compute)
