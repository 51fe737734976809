"""The share of a layer's forward that its backward repeats, and the copies of offloaded activations.

A recomputed block repeats its whole forward. A recomputed attention repeats its linears and its products, but not the
linear of its output, whose result is not saved: its share of a forward's seconds is taken to be its share of the FLOPs,
by term, so that measured costs of whole layers have it, too.

What an offloaded block saves travels to the host while the block computes, and back while the block behind it has its
backward. Only what takes longer than the layer's own work costs time. The host's link is assumed to be alone and whole
for each device.
"""

from dataclasses import replace
from functools import lru_cache

from motet.cluster import Cluster
from motet.costs.cost_model import WHOLE, LayerCost, LayerPasses, Load, Quadratic
from motet.costs.kernels import layer_kernels, total_flops
from motet.costs.memory import MemoryOptions, saved_layer_bytes
from motet.shapes.module_shape import LayerShape


@lru_cache(maxsize=4096)
def recomputed_share(layer: LayerShape) -> Quadratic | None:
    """The share of each term of a forward that the backward repeats; None: it repeats nothing."""
    if layer.treatment == "recomputed":
        return WHOLE
    if layer.treatment != "attention":
        return None
    kernels = layer_kernels(layer)
    repeated, whole = total_flops(kernels.recomputed), total_flops(kernels.forward)
    of_tokens = repeated.per_token / whole.per_token if whole.per_token else 0.0
    return Quadratic(*(a / b if b else of_tokens for a, b in zip(repeated, whole, strict=True)))


def layer_passes(
    cost: LayerCost,
    layer: LayerShape,
    input_gradient: bool,
    weight_gradient: bool,
    *,
    tp_size: int,
    cluster: Cluster,
    memory: MemoryOptions,
    sequence_parallel: bool = False,
) -> LayerPasses:
    """The passes of a layer that computes these gradients, by its treatment. Copies of offloaded activations count
    where they take longer than its own work."""
    passes = cost.passes(input_gradient, weight_gradient, recomputed=recomputed_share(layer))
    if layer.treatment != "offloaded" or not (input_gradient or weight_gradient):
        return passes

    def num_bytes(load: Load) -> int:
        return saved_layer_bytes(
            replace(layer, treatment="kept"),
            load,
            input_gradient=input_gradient,
            weight_gradient=weight_gradient,
            tp_size=tp_size,
            options=memory,
            sequence_parallel=sequence_parallel,
        )

    # Sizes are linear in the load.
    terms = [num_bytes(Load(**{name: 1e6})) / 1e6 / cluster.device.host_bytes_per_s for name in Load._fields]
    copies, backward = Quadratic(0.0, *terms), passes.input_gradient.plus(passes.weight_gradient)
    return passes._replace(
        forward=passes.forward.plus(_beyond(copies, passes.forward)), recomputation=_beyond(copies, backward)
    )


def _beyond(copies: Quadratic, work: Quadratic) -> Quadratic:
    """What copies take beyond the work that hides them, term by term."""
    return Quadratic(*(max(0.0, a - max(0.0, b)) for a, b in zip(copies, work, strict=True)))
