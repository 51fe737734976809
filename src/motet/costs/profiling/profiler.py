"""Profiles layers on this machine with the stage modules that training uses, and fits a `CostTable`.

Each class of equal layers is measured alone as a stage of one layer, and so are runs of several layers, which separate
a layer's cost from a stage's. Each is measured with: a forward without a graph; forward and backward with an input
gradient only (a frozen layer with something trainable before it), with both gradients, and with a weight gradient only.
Each result is the median of several repetitions after a warm-up, on microbatches drawn from the user's own samples. All
ranks measure at the same time, as they compute at the same time in training, so that costs include what processes take
from each other (caches, memory bandwidth). What ranks that share a stage exchange is measured with its layers: by
tensor parallelism, context parallelism, and experts over ranks.

The regression (thesis 4.4.1): a run's time is the cost of a stage, an additional cost if the stage has transformer
blocks, and the sum over its layers; each is a `Quadratic`. All are fitted at once by least squares of the *relative*
error with non-negative coefficients, so that small and large microbatches count alike and no prediction is negative.
Longer runs, which stages consist of, weigh more. Deviations from the thesis, which fits a x^2 + b x + c in the number
of tokens x to each layer, tensor-parallel and context-parallel size: x^2 is the sum over a microbatch's sequences
(`pairs`), beside which `tokens_squared` stands for all of them together; microbatches are the user's own instead of
synthetic sequences of 64 to 16k tokens.

Limits: one device type; threads are as the caller set them (the runtime uses 1 on CPUs); far outside of the measured
sizes a fit says little.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from motet.assignment.sample import Sample
from motet.costs.cells import LayerGradients
from motet.costs.cost_model import (
    ZERO,
    CostTable,
    LayerCost,
    Load,
    ModuleCosts,
    Quadratic,
    Sharing,
    microbatch_load,
)
from motet.costs.profiling.links import (
    any_rank,
    hardware,
    mean_over_ranks,
    measure_end_of_step,
    measure_links,
    measure_optimizer,
    start_together,
    world_size,
)
from motet.devices import synchronize
from motet.errors import UserError
from motet.models.stages.stage import Batch, StageInput, StageModule
from motet.parallel.saved_tensors import save_less
from motet.plan import LayerRange
from motet.shapes.module_shape import ModuleWorkload


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of layers of one module, all of them trainable or all frozen, on one microbatch."""

    layers: LayerRange
    load: Load
    """One rank's."""
    num_shares: int = 1
    """Number of ranks that share the microbatch's tokens."""
    weight_gradient: bool
    """Whether its weights have a gradient."""
    input_gradient: bool
    """Whether the gradient of its input is computed, for the layers before it."""
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
    """Median of the relative errors of the measurements."""
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
        is_trained = m.weight_gradient and not workload.is_frozen_beside_adapters(workload.layers[i])
        if reached:
            terms.append(_Unknown(classes[i], "input_gradient"))
            if is_trained:
                terms.append(_Unknown(classes[i], "weight_gradient"))
        elif is_trained:
            terms.append(_Unknown(classes[i], "weight_gradient_alone"))
        reached = reached or is_trained
    return terms


def _fit(
    workload: ModuleWorkload, rows: Sequence[tuple[list[_Unknown], Measurement, float]]
) -> tuple[dict[_Unknown, Quadratic], np.ndarray]:
    """Every unknown's quadratic, and the relative error of every row."""
    from scipy.optimize import nnls

    if not rows:
        return {}, np.zeros(0)
    # Where each microbatch is one sequence, nothing tells the two apart. A context-parallel rank has a share of pairs.
    one_sequence = all(m.load.pairs == m.num_shares * m.load.tokens_squared for _, m, _ in rows)
    columns: dict[tuple[_Unknown, str], int] = {}
    for unknowns, _, _ in rows:
        for unknown in unknowns:
            terms = _terms_of(workload, unknown)
            for term in terms:
                if not (one_sequence and term == "per_token_squared" and "per_pair" in terms):
                    columns.setdefault((unknown, term), len(columns))
    matrix = np.zeros((len(rows), len(columns)))
    for r, (unknowns, m, seconds) in enumerate(rows):
        sums = dict(zip(Quadratic._fields, (1.0, *m.load), strict=True))
        for unknown in unknowns:
            for term in _terms_of(workload, unknown):
                if (unknown, term) in columns:
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
        # A generator's connector reads what enters, an encoder's projector what leaves it.
        return ("constant", "per_incoming") if workload.kind == "generator" else ("constant", "per_output")
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


ProfiledStageMaker = Callable[[str, LayerRange], StageModule]
"""(module, layers) -> the stage, already cut for the ranks that share it, and nothing frozen."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    microbatch_sizes: tuple[int, ...] = (1, 2, 4)
    num_microbatches: int = 6
    """Number of different microbatches, which have these sizes in turn."""
    warm_up: int = 1
    repetitions: int = 7
    max_seconds: float = 1.0
    """Time after which the repetitions of a run of layers under a pattern of gradients end, if there are at least 3."""
    sharing: Sharing = field(default_factory=Sharing)
    """How ranks share the measured stages."""
    parameter_dtype: torch.dtype = torch.float32
    """Dtype of the parameters and of the tensors between stages."""


@dataclass(frozen=True, kw_only=True)
class ProfiledModule:
    workload: ModuleWorkload
    sources: Mapping[str, int] = field(default_factory=dict)
    """The modules whose outputs enter it, and the outputs' width."""
    entry_layers: tuple[int, ...] = (0,)
    """The layers at which they enter."""


@dataclass(frozen=True)
class _Microbatch:
    indices: tuple[int, ...]
    features: list[dict[str, Tensor]]


def profile(
    modules: Mapping[str, ProfiledModule],
    make_stage: ProfiledStageMaker,
    batch: Batch,
    *,
    options: ProfileOptions = ProfileOptions(),
    device: torch.device,
    on_progress: Callable[[str], None] = lambda text: None,
) -> CostTable:
    """The costs of all modules. Collective if torch.distributed is initialized: every rank calls it alike.

    `batch`: where microbatches are drawn from. Links are measured if there is more than one rank.
    """
    costs: dict[str, ModuleCosts] = {}
    sharing = options.sharing
    notes: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "ranks": world_size()}
    for name, module in modules.items():
        microbatches = _choose_microbatches(name, batch, options)
        on_progress(f"{name}, {sharing.name}")
        fit = _profile_module(name, module, make_stage, batch, microbatches, options, device)
        costs[name] = fit.costs
        notes[f"{name}, {sharing.name}"] = {
            "median_error": round(fit.median_error, 4),
            "worst_error": round(fit.worst_error, 4),
        }
    links = measure_links(device) if world_size() > 1 else None
    constant_s, per_parameter_s = measure_optimizer(device, dtype=options.parameter_dtype)
    is_group = sharing != Sharing(sharing.tp_size)
    return CostTable(
        modules={} if is_group else {name: {sharing.tp_size: each} for name, each in costs.items()},
        groups={name: {sharing: each} for name, each in costs.items()} if is_group else {},
        source="profiled",
        hardware=hardware(device),
        date=date.today().isoformat(),
        message=None if links is None else links.message,
        all_reduce=None if links is None else links.all_reduce,
        collectives={} if links is None else links.collectives,
        optimizer_constant_s=constant_s + measure_end_of_step(device),
        optimizer_s_per_parameter=per_parameter_s,
        notes=notes,
    )


def _choose_microbatches(name: str, batch: Batch, options: ProfileOptions) -> list[_Microbatch]:
    """From small to large: at each size, samples spread over the distribution of lengths."""
    able = [i for i, sample in enumerate(batch.samples) if sample.has(name)]
    if not able:
        raise UserError(f"profile: no sample of the first global batch has an item for {name}; give other data")
    by_length = sorted(able, key=lambda i: batch.samples[i].num_tokens(name))
    chosen = []
    for n in range(options.num_microbatches):
        size = min(options.microbatch_sizes[n % len(options.microbatch_sizes)], len(by_length))
        turn = n // len(options.microbatch_sizes)
        num_turns = -(-options.num_microbatches // len(options.microbatch_sizes))
        # Of each size, one microbatch from the short end, one from the long end, others between.
        first = round((len(by_length) - size) * (turn / max(1, num_turns - 1) if num_turns > 1 else 0.5))
        indices = tuple(by_length[first : first + size])
        chosen.append(_Microbatch(indices, [batch.features(name, i) for i in indices]))
    return chosen


def _profile_module(
    name: str,
    module: ProfiledModule,
    make_stage: ProfiledStageMaker,
    batch: Batch,
    microbatches: Sequence[_Microbatch],
    options: ProfileOptions,
    device: torch.device,
) -> Fit:
    measurements = []
    cp_size = options.sharing.cp_size
    arranged = module.workload.packed() if cp_size > 1 else module.workload
    for layers in runs_to_measure(module.workload):
        stage = make_stage(name, layers)
        # Tables that the family itself never trains (Whisper's sinusoids) stay as they are.
        trainable = [parameter for _, parameter in stage.named_parameters() if parameter.requires_grad]
        for gradients in _gradients_to_measure(module, layers, is_trainable=bool(trainable)):
            for parameter in trainable:
                parameter.requires_grad_(gradients.weight_gradient)
            runs = []
            for microbatch in microbatches:
                samples = [batch.samples[i] for i in microbatch.indices]
                run = _Run(stage, name, module, microbatch, samples, layers, gradients, options, device)
                # Without a token from outside there is no input to have a gradient.
                if run.has_input or gradients.weight_gradient or not gradients.any:
                    runs.append(run)
            for run, (forward_s, backward_s) in zip(runs, _measure(runs, options), strict=True):
                measurements.append(
                    Measurement(
                        layers=layers,
                        load=microbatch_load(arranged, name, run.samples, tuple(module.sources)).share(cp_size),
                        num_shares=cp_size,
                        weight_gradient=gradients.weight_gradient,
                        input_gradient=gradients.input_gradient and run.has_input,
                        forward_s=forward_s,
                        backward_s=backward_s,
                    )
                )
    return fit_module(module.workload, measurements)


def _gradients_to_measure(module: ProfiledModule, layers: LayerRange, *, is_trainable: bool) -> list[LayerGradients]:
    """Returns the gradient patterns to measure: all for single layers, and for longer runs those that tell layers from
    stages."""
    both, alone = LayerGradients(True, True), LayerGradients(False, True)
    wanted = [LayerGradients(False, False), LayerGradients(True, False), both]
    # A first stage has no input but what other modules send into it.
    has_input = layers[0] > 0 or (bool(module.sources) and 0 in module.entry_layers)
    if layers[1] - layers[0] == 1 or not has_input:
        wanted.append(alone)
    return [g for g in wanted if (has_input or not g.input_gradient) and (is_trainable or not g.weight_gradient)]


def runs_to_measure(workload: ModuleWorkload) -> list[LayerRange]:
    """One layer of each class, all blocks together, and the whole module; of one that is a single stage, that alone."""
    if workload.max_stages == 1:
        return [(0, workload.num_layers)]
    runs = [(index, index + 1) for index in sorted(set(workload.layer_classes())) if workload.layers[index].runs]
    blocks = [i for i in range(workload.num_layers) if workload.has_block((i, i + 1))]
    if len(blocks) > 1:
        runs.append((blocks[0], blocks[-1] + 1))
    if workload.num_layers > 1:
        runs.append((0, workload.num_layers))
    return list(dict.fromkeys(runs))


class _Run:
    """One repetition after another of a stage on one microbatch."""

    def __init__(
        self,
        stage: StageModule,
        name: str,
        module: ProfiledModule,
        microbatch: _Microbatch,
        samples: list[Sample],
        layers: LayerRange,
        gradients: LayerGradients,
        options: ProfileOptions,
        device: torch.device,
    ) -> None:
        self.stage, self.samples, self.gradients = stage, samples, gradients
        self.device = device
        # One thread's own time leaves out what other processes on the same cores take; the simulator adds it.
        is_alone = device.type == "cpu" and torch.get_num_threads() == 1 and options.sharing.num_ranks == 1
        self.clock = time.thread_time if is_alone else time.perf_counter
        self.features: list[dict[str, Tensor]] = [{} for _ in samples]
        if stage.needs_features:
            self.features = [
                {k: v.to(device, options.parameter_dtype if v.is_floating_point() else v.dtype) for k, v in f.items()}
                for f in microbatch.features
            ]
        self.parameter_dtype = dtype = options.parameter_dtype
        self.hidden = torch.randn(stage.input_shape(samples), device=device, dtype=dtype) if layers[0] else None
        # Held, as the engine does.
        self.attention = stage.prepare(samples)
        enters = any(layers[0] <= layer < layers[1] for layer in module.entry_layers)
        self.incoming = {
            source: torch.randn(stage.num_entering(samples, source), width, device=device, dtype=dtype)
            for source, width in module.sources.items()
            if enters and any(sample.has(source) for sample in samples)
        }
        self.output_gradient: Tensor | None = None

    @property
    def has_input(self) -> bool:
        return self.hidden is not None or bool(self.incoming)

    def seconds(self) -> tuple[float, float]:
        """Seconds of forward and backward."""
        started = self.clock()
        output = self._forward()
        synchronize(self.device)
        between = self.clock()
        if self.gradients.any:
            if self.output_gradient is None:
                self.output_gradient = torch.ones_like(output) if output.dim() == 0 else torch.randn_like(output)
                between = self.clock()
            torch.autograd.backward([output], [self.output_gradient])
            synchronize(self.device)
        return between - started, self.clock() - between

    def _forward(self) -> Tensor:
        needs_gradient = self.gradients.input_gradient
        hidden = None if self.hidden is None else self.hidden.detach().requires_grad_(needs_gradient)
        incoming = {s: t.detach().requires_grad_(needs_gradient) for s, t in self.incoming.items()}
        with torch.set_grad_enabled(self.gradients.any), save_less(self.parameter_dtype):
            output = self.stage(StageInput(self.samples, self.features, hidden, incoming))
        result = output.hidden if output.loss is None else output.loss
        assert result is not None
        return result


def _measure(runs: Sequence[_Run], options: ProfileOptions) -> list[tuple[float, float]]:
    """Median seconds of forward and backward of each, alike on all ranks. The runs take turns, so that what disturbs
    the machine for a while does not fall on one of them."""
    times: list[list[tuple[float, float]]] = [[] for _ in runs]
    spent = 0.0
    if runs:
        start_together(runs[0].device)
    for turn in range(options.warm_up + options.repetitions):
        for run, of_run in zip(runs, times, strict=True):
            seconds = run.seconds()
            if turn >= options.warm_up:
                of_run.append(seconds)
                spent += sum(seconds)
        if any_rank(turn >= options.warm_up + 2 and spent > options.max_seconds):
            break
    return [
        (
            mean_over_ranks(statistics.median(forward for forward, _ in of_run)),
            mean_over_ranks(statistics.median(backward for _, backward in of_run)),
        )
        for of_run in times
    ]
