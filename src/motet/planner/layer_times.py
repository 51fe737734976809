"""Seconds of a module's layers for a typical microbatch: what planners balance and bound."""

from collections.abc import Sequence
from dataclasses import dataclass

from motet.costs.cost_model import ZERO, LayerCost
from motet.costs.layer_gradients import LayerGradients
from motet.costs.load import Load


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for a typical microbatch."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    """The part of the backward that nothing waits for."""

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def times_of_layers(
    costs: Sequence[LayerCost],
    kinds: Sequence[tuple[Sequence[LayerGradients], Load, float]],
    recomputed: Sequence[bool],
) -> list[LayerTime]:
    """The sum over the kinds of microbatches of what each layer takes.

    `kinds`: the gradients of each layer, the microbatches' load, and how many actions it stands for. `recomputed`: the
    layers that are run again in the backward."""
    times: list[LayerTime] = []
    known: dict[object, LayerTime] = {}
    for i, cost in enumerate(costs):
        # Most layers are alike.
        key = (id(cost), recomputed[i], *(gradients[i] for gradients, _, _ in kinds))
        if key not in known:
            parts = [
                _layer_time(cost, gradients[i], load, num_actions, recompute=recomputed[i])
                for gradients, load, num_actions in kinds
            ]
            known[key] = LayerTime(*(sum(values) for values in zip(*parts, strict=True)))
        times.append(known[key])
    return times


def mean_load(loads: Sequence[Load]) -> Load:
    return Load(*(sum(values) / len(loads) for values in zip(*loads, strict=True)))


def lightest_load(
    gradients: Sequence[LayerGradients], members: Sequence[Load]
) -> tuple[Sequence[LayerGradients], Load, float]:
    return gradients, Load(*(min(values) for values in zip(*members, strict=True))), float(all(map(any, members)))


def _layer_time(
    cost: LayerCost, needs: LayerGradients, load: Load, num_actions: float, *, recompute: bool
) -> tuple[float, float, float]:
    """Seconds of forward, backward and the backward's weight half. The load's sums, and so many times the constants."""
    recomputed = needs.any and recompute
    forward = cost.forward if needs.any and not recomputed else cost.forward_without_graph
    backward = cost.backward(input_gradient=needs.input_gradient, weight_gradient=needs.weight_gradient)
    weight = ZERO if not needs.weight_gradient else cost.weight_gradient if needs.input_gradient else backward
    if recomputed:
        backward = backward.plus(cost.forward)
    seconds = [q.seconds(load) + (num_actions - 1) * q.constant for q in (forward, backward, weight)]
    return seconds[0], seconds[1], seconds[2]
