"""Measures what layers cost on this machine, on the very stage modules that will run, and fits a `CostTable` to it.

Each class of equal layers is measured alone as a stage of one layer, and so are runs of several, which tell a layer's
cost from a stage's. For each: forward without a graph; forward and backward with an input gradient only (a frozen
layer with something trainable before it), with both gradients, and with a weight gradient only. Each measurement is the
median of several repetitions after a warm-up, on microbatches drawn from the user's own samples.

Every rank measures at the same time, as every rank computes at the same time in training: what processes take from each
other (caches, memory bandwidth) is part of the cost. Gradients accumulate from one repetition to the next, as over
microbatches. With `tp_size` > 1 the stages' own collectives are measured with the layers.

Limits: one device type; threads are as the caller set them (1 is what the runtime uses on CPUs). Under autocast each
forward casts the weights, which a training step does once for all its microbatches (`motet.parallel.split_backward`).
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import torch
from torch import Tensor

from motet.assignment.sample import Sample
from motet.costs.cost_model import CostTable, ModuleCosts
from motet.costs.layer_gradients import LayerGradients
from motet.costs.load import microbatch_load
from motet.costs.profiling.links import (
    any_rank,
    hardware,
    mean_over_ranks,
    measure_links,
    measure_optimizer,
    start_together,
    synchronize,
    world_size,
)
from motet.costs.profiling.regression import Fit, Measurement, fit_module
from motet.errors import UserError
from motet.models.stages.stage import Batch, StageInput, StageModule
from motet.plan import LayerRange
from motet.shapes.module_shape import ModuleWorkload

ProfiledStageMaker = Callable[[str, LayerRange, int], StageModule]
"""(module, layers, tp_size) -> the stage, already cut for this rank's tensor-parallel group, and nothing frozen."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    microbatch_sizes: tuple[int, ...] = (1, 2, 4)
    num_microbatches: int = 6
    """Different microbatches, of these sizes in turn."""
    warm_up: int = 1
    repetitions: int = 7
    max_seconds: float = 1.0
    """After which one run of layers under one pattern of gradients has enough repetitions, if it has 3."""
    tp_sizes: tuple[int, ...] = (1,)
    parameter_dtype: torch.dtype = torch.float32
    """Also of what travels between stages."""


@dataclass(frozen=True, kw_only=True)
class ProfiledModule:
    workload: ModuleWorkload
    sources: Mapping[str, int] = field(default_factory=dict)
    """The modules whose outputs enter it, and the outputs' width."""
    entry_layers: tuple[int, ...] = (0,)
    """Where they enter."""


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
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    on_progress: Callable[[str], None] = lambda text: None,
) -> CostTable:
    """The costs of all modules. Collective if torch.distributed is initialized: every rank calls it alike.

    `batch`: where microbatches are drawn from. Links are measured if there is more than one rank.
    """
    costs: dict[str, dict[int, ModuleCosts]] = {}
    notes: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "ranks": world_size()}
    for name, module in modules.items():
        costs[name] = {}
        microbatches = _choose_microbatches(name, batch, options)
        for tp_size in options.tp_sizes:
            on_progress(f"{name}, tp_size {tp_size}")
            fit = _profile_module(name, module, make_stage, batch, microbatches, tp_size, options, device, autocast)
            costs[name][tp_size] = fit.costs
            notes[f"{name}, tp_size {tp_size}"] = {
                "median_error": round(fit.median_error, 4),
                "worst_error": round(fit.worst_error, 4),
            }
    message, all_reduce = measure_links(device) if world_size() > 1 else (None, None)
    constant_s, per_parameter_s = measure_optimizer(device, dtype=options.parameter_dtype)
    return CostTable(
        modules=costs,
        source="profiled",
        hardware=hardware(device),
        date=date.today().isoformat(),
        message=message,
        all_reduce=all_reduce,
        optimizer_constant_s=constant_s,
        optimizer_s_per_parameter=per_parameter_s,
        notes=notes,
    )


def _choose_microbatches(name: str, batch: Batch, options: ProfileOptions) -> list[_Microbatch]:
    """From small to large: at each size, samples spread over the distribution of lengths."""
    able = [i for i, sample in enumerate(batch.samples) if sample.has(name)]
    if not able:
        raise UserError(f"profile: no sample of the first global batch has anything for {name}; give data that have")
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
    tp_size: int,
    options: ProfileOptions,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]],
) -> Fit:
    measurements = []
    for layers in runs_to_measure(module.workload):
        stage = make_stage(name, layers, tp_size)
        # Tables that the family itself never trains (Whisper's sinusoids) stay as they are.
        trainable = [parameter for _, parameter in stage.named_parameters() if parameter.requires_grad]
        for gradients in _gradients_to_measure(module, layers, is_trainable=bool(trainable)):
            for parameter in trainable:
                parameter.requires_grad_(gradients.weight_gradient)
            runs = []
            for microbatch in microbatches:
                samples = [batch.samples[i] for i in microbatch.indices]
                run = _Run(stage, module, microbatch, samples, layers, gradients, tp_size, options, device, autocast)
                # Without a token from outside there is no input to have a gradient.
                if run.has_input or gradients.weight_gradient or not gradients.any:
                    runs.append(run)
            for run, (forward_s, backward_s) in zip(runs, _measure(runs, options), strict=True):
                measurements.append(
                    Measurement(
                        layers=layers,
                        load=microbatch_load(module.workload, name, run.samples, tuple(module.sources)),
                        weight_gradient=gradients.weight_gradient,
                        input_gradient=gradients.input_gradient and run.has_input,
                        forward_s=forward_s,
                        backward_s=backward_s,
                    )
                )
    return fit_module(module.workload, measurements)


def _gradients_to_measure(module: ProfiledModule, layers: LayerRange, *, is_trainable: bool) -> list[LayerGradients]:
    """Of single layers all that can occur, of longer runs no more than tells layers from stages."""
    both, alone = LayerGradients(True, True), LayerGradients(False, True)
    wanted = [LayerGradients(False, False), LayerGradients(True, False), both]
    # A first stage has no input but what other modules send into it.
    has_input = layers[0] > 0 or (bool(module.sources) and 0 in module.entry_layers)
    if layers[1] - layers[0] == 1 or not has_input:
        wanted.append(alone)
    return [g for g in wanted if (has_input or not g.input_gradient) and (is_trainable or not g.weight_gradient)]


def runs_to_measure(workload: ModuleWorkload) -> list[LayerRange]:
    """One layer of each class, all blocks together, and the whole module."""
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
        module: ProfiledModule,
        microbatch: _Microbatch,
        samples: list[Sample],
        layers: LayerRange,
        gradients: LayerGradients,
        tp_size: int,
        options: ProfileOptions,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.stage, self.samples, self.gradients = stage, samples, gradients
        self.device, self.autocast = device, autocast
        # One thread's own time leaves out what other processes on the same cores take; the simulator adds it.
        is_alone = device.type == "cpu" and torch.get_num_threads() == 1 and tp_size == 1
        self.clock = time.thread_time if is_alone else time.perf_counter
        self.features: list[dict[str, Tensor]] = [{} for _ in samples]
        if stage.needs_features:
            self.features = [{k: v.to(device) for k, v in f.items()} for f in microbatch.features]
        dtype = options.parameter_dtype
        self.hidden = torch.randn(stage.input_shape(samples), device=device, dtype=dtype) if layers[0] else None
        enters = any(layers[0] <= layer < layers[1] for layer in module.entry_layers)
        self.incoming = {
            source: torch.randn(sum(s.num_outputs(source) for s in samples), width, device=device, dtype=dtype)
            for source, width in module.sources.items()
            if enters and any(sample.has(source) for sample in samples)
        }
        self.output_gradient: Tensor | None = None

    @property
    def has_input(self) -> bool:
        return self.hidden is not None or bool(self.incoming)

    def seconds(self) -> tuple[float, float]:
        """Of forward and backward."""
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
        with torch.set_grad_enabled(self.gradients.any), self.autocast():
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
