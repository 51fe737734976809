"""Fitting finds the costs from which measurements were made, and says how well it fits."""

import numpy as np
import pytest
from tiny_configs import EVERY_MODEL

from motet.costs.cost_model import LayerCost, Load, Quadratic
from motet.costs.profiling.profiler import Measurement, fit_module
from motet.families.shape_reading.module_shapes import module_workload
from motet.shapes.module_shape import with_projector

LOADS = [
    Load(tokens=t * s, pairs=t * t * s, sequences=s, outputs=t * s / 2, tokens_squared=(t * s) ** 2)
    for t, s in [(16, 1), (64, 1), (32, 4), (128, 2), (256, 1), (100, 3)]
]
STAGE_FORWARD, STAGE_BACKWARD = Quadratic(constant=1e-4), Quadratic(constant=3e-4)


def layer(scale):
    block = Quadratic(constant=1e-5, per_token=2e-6, per_pair=1e-8).times(scale)
    return LayerCost(
        forward=block,
        forward_without_graph=block.times(0.9),
        input_gradient=block.times(1.1),
        weight_gradient=block.times(0.8),
        weight_gradient_alone=block.times(1.7),
    )


PROJECTOR = LayerCost(**{part: Quadratic(constant=1e-5, per_output=1e-6) for part in LayerCost.__dataclass_fields__})
EMBED = LayerCost(**{part: Quadratic(constant=2e-5, per_token=3e-6) for part in LayerCost.__dataclass_fields__})
HEAD = EMBED
WORKLOAD = with_projector(module_workload(EVERY_MODEL["siglip"][0]), "mlp", 32)
COSTS = (EMBED, layer(1), layer(1), HEAD, PROJECTOR)


def measure(layers, load, weight_gradient, input_gradient, noise):
    first, last = layers
    with_graph = weight_gradient or input_gradient
    forward = STAGE_FORWARD.seconds(load) + sum(
        (c.forward if with_graph else c.forward_without_graph).seconds(load) for c in COSTS[first:last]
    )
    backward = STAGE_BACKWARD.seconds(load) + sum(
        c.passes(input_gradient=input_gradient or i > 0, weight_gradient=weight_gradient).backward.seconds(load)
        for i, c in enumerate(COSTS[first:last])
    )
    return Measurement(
        layers=layers,
        load=load,
        weight_gradient=weight_gradient,
        input_gradient=input_gradient,
        forward_s=forward * noise(),
        backward_s=backward * noise() if with_graph else 0.0,
    )


def measurements(noise=lambda: 1.0):
    result = []
    for layers in [(0, 1), (1, 2), (3, 4), (4, 5), (1, 3), (0, 5)]:
        for weight, inputs in [(False, False), (False, True), (True, True), (True, False)]:
            if layers[0] or not inputs:
                result += [measure(layers, load, weight, inputs, noise) for load in LOADS]
    return result


def predicted(costs, layers, load, weight, inputs):
    first, last = layers
    return costs.stage_backward.seconds(load) + sum(
        c.passes(input_gradient=inputs or i > 0, weight_gradient=weight).backward.seconds(load)
        for i, c in enumerate(costs.layers[first:last])
    )


def test_exact_measurements_are_reproduced():
    fit = fit_module(WORKLOAD, measurements())
    assert fit.worst_error < 1e-6
    new = Load(tokens=200, pairs=200 * 200, sequences=1, outputs=100, tokens_squared=200 * 200)
    truth = measure((1, 4), new, True, True, lambda: 1.0)
    assert predicted(fit.costs, (1, 4), new, True, True) == pytest.approx(truth.backward_s, rel=1e-3)
    # The same layers cut otherwise, which was not measured.
    truth = measure((0, 2), new, True, False, lambda: 1.0)
    assert predicted(fit.costs, (0, 2), new, True, False) == pytest.approx(truth.backward_s, rel=1e-3)


def test_noise_is_averaged_and_reported():
    rng = np.random.default_rng(0)
    fit = fit_module(WORKLOAD, measurements(lambda: rng.uniform(0.95, 1.05)))
    assert 0.005 < fit.median_error < 0.05
    new = Load(tokens=200, pairs=200 * 200, sequences=1, outputs=100, tokens_squared=200 * 200)
    truth = measure((1, 3), new, True, True, lambda: 1.0)
    assert predicted(fit.costs, (1, 3), new, True, True) == pytest.approx(truth.backward_s, rel=0.05)


def test_no_cost_is_negative():
    rng = np.random.default_rng(1)
    fit = fit_module(WORKLOAD, measurements(lambda: rng.uniform(0.5, 1.5)))
    for cost in fit.costs.layers:
        for part in LayerCost.__dataclass_fields__:
            assert min(getattr(cost, part)) >= 0


def test_equal_layers_share_their_costs():
    fit = fit_module(WORKLOAD, measurements())
    assert fit.costs.layers[1] is fit.costs.layers[2]


def test_every_class_of_layers_must_be_measured():
    with pytest.raises(ValueError, match=r"layers \[4\] were not measured"):
        fit_module(WORKLOAD, [m for m in measurements() if m.layers[1] < 5])
