"""From measurements of runs of layers to the costs of each layer, by regression (thesis 4.4.1).

A run's time is what a stage costs beside its layers, what comes on top if it has transformer blocks, and the sum over
its layers; each is a `Quadratic`. Runs of one layer and of many tell them apart. All are fitted at once, by least
squares of the *relative* error with no coefficient below zero, so that small and large microbatches count alike and no
prediction can be negative; longer runs, which are what stages are made of, weigh more.

The thesis fits a x^2 + b x + c to each layer, tensor-parallel and context-parallel size, x being a number of tokens.
Deviations: x^2 is the sum over a microbatch's sequences (`pairs`), beside which `tokens_squared` stands for all of them
together; microbatches are the user's own, not synthetic sequences of 64 to 16k tokens; tensor-parallel sizes are
measured, a context-parallel rank's share is computed (`Load.share`, `IterationCosts`). Limit: far outside the measured
sizes a fit says little.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from motet.costs.cost_model import ZERO, LayerCost, ModuleCosts, Quadratic
from motet.costs.load import Load
from motet.plan import LayerRange
from motet.shapes.module_shape import ModuleWorkload


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of layers of one module, all of them trainable or all frozen, on one microbatch."""

    layers: LayerRange
    load: Load
    weight_gradient: bool
    """Its weights have a gradient."""
    input_gradient: bool
    """A gradient leaves it for what lies before it."""
    forward_s: float
    backward_s: float = 0.0

    @property
    def with_graph(self) -> bool:
        return self.weight_gradient or self.input_gradient


STAGE, BLOCKS = -1, -2
"""In place of a layer's class: what every stage costs, and what stages with blocks cost on top."""


class _Unknown(NamedTuple):
    """A quadratic to be fitted: of the layers of this class, or of the stage."""

    layer: int
    part: str


@dataclass(frozen=True)
class Fit:
    costs: ModuleCosts
    median_error: float
    """Of the relative errors of what was measured."""
    worst_error: float


def fit_module(workload: ModuleWorkload, measurements: Sequence[Measurement]) -> Fit:
    """The costs of every layer; layers of equal shape share one measurement.

    Raises `ValueError` if some layer's class was never measured."""
    classes = workload.layer_classes()
    measured = {classes[i] for m in measurements for i in range(*m.layers)}
    missing = sorted({c for i, c in enumerate(classes) if workload.layers[i].runs} - measured)
    if missing:
        raise ValueError(f"layers {missing} were not measured")
    trained = [m for m in measurements if m.with_graph]
    forward, forward_errors = _fit(
        workload, [(_forward_terms(m, workload, classes), m, m.forward_s) for m in measurements]
    )
    backward, backward_errors = _fit(
        workload, [(_backward_terms(m, workload, classes), m, m.backward_s) for m in trained]
    )
    fitted = {**forward, **backward}

    def layer_cost(index: int) -> LayerCost:
        def of(part: str, otherwise: Quadratic = ZERO) -> Quadratic:
            return fitted.get(_Unknown(index, part), otherwise)

        without_graph = of("forward_without_graph")
        with_graph = of("forward", without_graph)
        return LayerCost(
            forward=with_graph,
            forward_without_graph=of("forward_without_graph", with_graph),
            input_gradient=of("input_gradient"),
            weight_gradient=of("weight_gradient"),
            weight_gradient_alone=of("weight_gradient_alone", of("input_gradient").plus(of("weight_gradient"))),
        )

    by_class = {c: layer_cost(c) for c in set(classes)}
    errors = np.abs(np.concatenate([forward_errors, backward_errors]))
    return Fit(
        ModuleCosts(
            layers=tuple(by_class[c] for c in classes),
            stage_forward=fitted.get(_Unknown(STAGE, "forward"), ZERO),
            stage_backward=fitted.get(_Unknown(STAGE, "backward"), ZERO),
            blocks_forward=fitted.get(_Unknown(BLOCKS, "forward"), ZERO),
            blocks_backward=fitted.get(_Unknown(BLOCKS, "backward"), ZERO),
        ),
        median_error=float(np.median(errors)),
        worst_error=float(np.max(errors)),
    )


def _stage_terms(m: Measurement, workload: ModuleWorkload, part: str) -> list[_Unknown]:
    return [_Unknown(STAGE, part), *([_Unknown(BLOCKS, part)] if workload.has_block(m.layers) else [])]


def _forward_terms(m: Measurement, workload: ModuleWorkload, classes: Sequence[int]) -> list[_Unknown]:
    part = "forward" if m.with_graph else "forward_without_graph"
    layers = [_Unknown(classes[i], part) for i in range(*m.layers) if workload.layers[i].runs]
    return [*_stage_terms(m, workload, "forward"), *layers]


def _backward_terms(m: Measurement, workload: ModuleWorkload, classes: Sequence[int]) -> list[_Unknown]:
    terms = _stage_terms(m, workload, "backward")
    reached = m.input_gradient
    for i in range(*m.layers):
        if not workload.layers[i].runs:
            continue
        if reached:
            terms.append(_Unknown(classes[i], "input_gradient"))
            if m.weight_gradient:
                terms.append(_Unknown(classes[i], "weight_gradient"))
        else:
            terms.append(_Unknown(classes[i], "weight_gradient_alone"))
        reached = True
    return terms


def _fit(
    workload: ModuleWorkload, rows: Sequence[tuple[list[_Unknown], Measurement, float]]
) -> tuple[dict[_Unknown, Quadratic], np.ndarray]:
    """Every unknown's quadratic, and the relative error of every row."""
    from scipy.optimize import nnls

    if not rows:
        return {}, np.zeros(0)
    columns: dict[tuple[_Unknown, str], int] = {}
    for unknowns, _, _ in rows:
        for unknown in unknowns:
            for term in _terms_of(workload, unknown):
                columns.setdefault((unknown, term), len(columns))
    matrix = np.zeros((len(rows), len(columns)))
    for r, (unknowns, m, seconds) in enumerate(rows):
        sums = dict(zip(Quadratic._fields, (1.0, *m.load), strict=True))
        for unknown in unknowns:
            for term in _terms_of(workload, unknown):
                matrix[r, columns[unknown, term]] += sums[term] / seconds
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
    weights = np.sqrt([m.layers[1] - m.layers[0] for _, m, _ in rows])
    solution, _ = nnls(matrix / scale * weights[:, None], weights, maxiter=100 * len(columns))
    values = solution / scale
    fitted: dict[_Unknown, dict[str, float]] = {}
    for (unknown, term), column in columns.items():
        fitted.setdefault(unknown, {})[term] = float(values[column])
    return {unknown: Quadratic(**terms) for unknown, terms in fitted.items()}, matrix @ values - 1.0


def _terms_of(workload: ModuleWorkload, unknown: _Unknown) -> tuple[str, ...]:
    """The sums of a load on which a quadratic may depend: no more than the layer's kind gives reason for."""
    if unknown.layer == STAGE:
        return ("constant", "per_token", "per_sequence")
    if unknown.layer == BLOCKS:
        return ("constant", "per_token", "per_pair")
    layer = workload.layers[unknown.layer]
    if layer.part == "embed":
        return ("constant", "per_token", "per_sequence", "per_incoming")
    if layer.part == "projector":
        return ("constant", "per_output")
    if layer.attention is None:
        # A language model's head computes the logits of the tokens with loss only.
        return ("constant", "per_token", "per_output") if not workload.encodes_items else ("constant", "per_token")
    if layer.crossing is not None:
        return ("constant", "per_token", "per_token_squared", "per_pair", "per_incoming", "per_incoming_pair")
    if layer.attention.reads_encoder:
        return ("constant", "per_token", "per_token_squared", "per_incoming", "per_incoming_pair")
    if layer.attention.window is not None:
        return ("constant", "per_token", "per_token_squared", "per_sequence")
    return ("constant", "per_token", "per_token_squared", "per_pair")
