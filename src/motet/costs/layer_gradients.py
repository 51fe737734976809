"""Which gradients each layer computes: the frozen rule over the whole graph of modules.

An input gradient is needed if something trainable lies strictly before: an earlier layer of the module, or anything in
a module whose output has entered by then (thesis 3.3.1, eq. 3.2 and 3.3, read strictly).
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from motet.plan import Edge, Plan


@dataclass(frozen=True, slots=True)
class LayerGradients:
    """Which gradients a layer computes for a microbatch."""

    input_gradient: bool
    weight_gradient: bool

    @property
    def any(self) -> bool:
        return self.input_gradient or self.weight_gradient


def gradients_of_modules(
    trainable: Mapping[str, Sequence[bool]], edges: Sequence[Edge]
) -> dict[str, tuple[LayerGradients, ...]]:
    """When every modality is there. `trainable`: for each module its layers. The edges form no cycle."""
    result: dict[str, tuple[LayerGradients, ...]] = {}
    remaining = list(trainable)
    while remaining:
        name = next(m for m in remaining if not any(e.target == m and e.source in remaining for e in edges))
        remaining.remove(name)
        bringing = {source for source in result if any(needs.any for needs in result[source])}
        result[name] = gradients_of_layers(trainable[name], entries_of(name, bringing, edges))
    return result


def entries_of(name: str, bringing: Set[str], edges: Sequence[Edge]) -> set[int]:
    """The layers of a module at which those sources enter it that bring something that needs a gradient."""
    return {layer for edge in edges if edge.target == name and edge.source in bringing for layer in edge.layers}


def gradients_of_layers(trainable: Sequence[bool], entries: Set[int]) -> tuple[LayerGradients, ...]:
    """Of one module. `entries`: the layers at which something enters that needs a gradient."""
    layers, reached = [], False
    for layer, own in enumerate(trainable):
        reached = reached or layer in entries
        layers.append(LayerGradients(reached, own))
        reached = reached or own
    return tuple(layers)


def gradients_of_plan(plan: Plan) -> dict[str, tuple[LayerGradients, ...]]:
    """Of the modules that are no copies; what a copy feeds is fed by the original."""
    owners = {name: module for name, module in plan.modules.items() if module.copy_of is None}
    trainable = {
        name: [module.is_trainable((layer, layer + 1)) for layer in range(module.num_layers)]
        for name, module in owners.items()
    }
    edges = [
        Edge(source=plan.modules[edge.source].data_module(edge.source), target=edge.target, layers=edge.layers)
        for edge in plan.edges
        if edge.target in owners
    ]
    return gradients_of_modules(trainable, edges)
