"""Stages that sleep for as long as a cost model says instead of computing, for the unmodified executor.

More ranks than a machine has cores can then run a plan in real time: program, messages, reductions and their waiting
are real; only the computation is not. Tensors between stages and summed gradients have their real sizes, their values
are zeros. Gradients of parameters are left out of the backward pass: a reduction zero-fills them and sends as many
bytes as usual. A layer that no other rank holds keeps a parameter of one element, because it is never sent.

A contrastive loss is computed, of features that are zeros: it is small, and its exchange is real.

A process is woken up late, by some tens of microseconds; what a stage has slept too long it takes off its next sleep.

Limits: no tied parameters, no sequence parallelism, no cross-attention; loss and gradients mean nothing.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from motet.assignment.sample import Sample
from motet.costs.iteration import IterationCosts
from motet.models.stages.causal import layout_of
from motet.models.stages.contrastive import ContrastiveLoss, ContrastiveStage
from motet.models.stages.stage import StageInput, StageOutput
from motet.parallel import split_backward
from motet.parallel.tensor.tensor_parallel import TensorParallel
from motet.plan import LANGUAGE_MODEL, ModulePlan, Stage
from motet.runtime.local_model import StageMaker
from motet.schedule.action import Compute, Kind
from motet.shapes.module_shape import ModuleWorkload

SampleIds = tuple[str, ...]


class Sleeper:
    """Sleeps that are right on average: lateness is taken off the next one."""

    def __init__(self) -> None:
        self._late_s = 0.0

    def sleep(self, seconds: float) -> None:
        started = time.perf_counter()
        time.sleep(max(0.0, seconds - self._late_s))
        self._late_s += time.perf_counter() - started - seconds


class Seconds(NamedTuple):
    """Seconds of a microbatch on a stage."""

    forward: float
    input_half: float
    weight_half: float


class _Sleep(torch.autograd.Function):
    """Zeros of some shapes after some seconds; its backward, or each half of it, takes other seconds and returns
    zeros."""

    @staticmethod
    def forward(
        ctx: Any, sleeper: Sleeper, shapes: Sequence[tuple[int, ...]], seconds: Seconds, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sleeper, ctx.seconds, ctx.split = sleeper, seconds, split_backward.SplitBackward.current
        ctx.shapes = [None if isinstance(tensor, nn.Parameter) else tensor.shape for tensor in inputs]
        sleeper.sleep(seconds.forward)
        return tuple(torch.zeros(shape) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight_half = _DeferredSleep(ctx.sleeper, ctx.seconds.weight_half)
        ctx.sleeper.sleep(ctx.seconds.input_half)
        if ctx.split is None:
            weight_half.finish()
        else:
            ctx.split.defer(weight_half)
        of_inputs = [
            torch.zeros(shape) if needed and shape is not None else None
            for needed, shape in zip(ctx.needs_input_grad[3:], ctx.shapes, strict=True)
        ]
        return (None, None, None, *of_inputs)


@dataclass(frozen=True)
class _DeferredSleep:
    sleeper: Sleeper
    seconds: float
    parameters: tuple[Tensor, ...] = ()

    def finish(self) -> None:
        self.sleeper.sleep(self.seconds)


class EmulatedStage(nn.Module):
    """A run of layers of one module, as `motet.models.stages.stage.StageModule`.

    Args:
        name: the module whose layouts are read.
        seconds: for each microbatch, by the ids of its samples.
        parameter_sizes: for each trainable layer, the elements of its parameter.
        incoming_sizes: widths of what other modules send into it, by module, where they are not its own.
    """

    needs_features = False

    def __init__(
        self,
        name: str,
        workload: ModuleWorkload,
        layers: tuple[int, int],
        seconds: Mapping[SampleIds, Seconds],
        parameter_sizes: Mapping[int, int],
        incoming_sizes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        # A generator's conditions travel with its places.
        if workload.tied or (workload.cross_attends and workload.kind != "generator"):
            raise ValueError(f"{name}: modules with tied parameters or cross-attention cannot be emulated")
        self.name, self.layers, self._workload, self._seconds = name, layers, workload, seconds
        self.hidden_size = workload.boundary(layers[0])[1]
        self.output_size = workload.boundary(layers[1])[1]
        self.weights = nn.ParameterDict(
            {str(layer): nn.Parameter(torch.zeros(size)) for layer, size in parameter_sizes.items()}
        )
        self._sleeper = Sleeper()
        self._incoming_sizes = incoming_sizes or {}
        self._has_loss = workload.kind in ("language_model", "generator") and layers[1] == workload.num_layers

    def incoming_size(self, source: str) -> int:
        return self._incoming_sizes.get(source, self.hidden_size)

    def after_update(self) -> None:
        """No parameter has a limit."""

    def canonical_name(self, local_name: str) -> str:
        return local_name

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        return (int(local_name.rpartition(".")[2]),)

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        return self._boundary_shape(self.layers[0], samples)

    def output_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        return self._boundary_shape(self.layers[1], samples)

    def _boundary_shape(self, layer: int, samples: Sequence[Sample]) -> tuple[int, ...]:
        rows, width = self._workload.boundary(layer)
        if self._workload.kind == "language_model":
            sequences = layout_of(samples, self.name, packed=self._workload.arrangement == "packed")
            return (*sequences.shape, width)
        if self._workload.kind == "generator":
            return self._generator_shape(layer, samples)
        counts = (s.num_outputs(self.name) if rows == "outputs" else s.num_tokens(self.name) for s in samples)
        return (sum(counts), width)

    def _generator_shape(self, layer: int, samples: Sequence[Sample]) -> tuple[int, ...]:
        """Behind the connector an image's conditions travel and, if there is one, the pooled condition; behind later
        layers its places, its conditions and the vectors of its time step."""
        num_images = sum(len(sample.layouts[self.name]) for sample in samples)
        num_conditions = sum(sample.num_outputs(LANGUAGE_MODEL, self.name) for sample in samples)
        sizes = self._workload.config["condition_size"], self._workload.config["pooled_size"]
        if layer == 1:
            return num_conditions + bool(sizes[1]) * num_images, max(sizes)
        num_places = sum(sample.num_tokens(self.name) for sample in samples)
        num_rows = num_places + num_conditions + self._workload.num_time_vectors * num_images
        return num_rows, self._workload.hidden_size

    def forward(self, inputs: StageInput) -> StageOutput:
        seconds = self._seconds[tuple(sample.id for sample in inputs.samples)]
        tensors = [*([] if inputs.hidden is None else [inputs.hidden]), *inputs.incoming.values(), *self.parameters()]
        if not self._has_loss:
            (hidden,) = _Sleep.apply(self._sleeper, [self.output_shape(inputs.samples)], seconds, *tensors)
            return StageOutput(hidden)
        if not inputs.hands_on:
            return StageOutput(loss=_Sleep.apply(self._sleeper, [()], seconds, *tensors)[0])
        num_rows = sum(sample.num_tokens(self.name) for sample in inputs.samples)
        return StageOutput(*_Sleep.apply(self._sleeper, [(num_rows, self.output_size), ()], seconds, *tensors))


def emulated_stage_maker(costs: IterationCosts) -> StageMaker:
    """Makes stages that take as long as `costs` says. The engine may then run the batch of `costs` and no other."""

    def make(name: str, module: ModulePlan, stage: Stage, tp: TensorParallel) -> EmulatedStage | ContrastiveStage:
        if module.sequence_parallel:
            raise ValueError(f"{name}: sequence parallelism cannot be emulated")
        replica = next(r for r, replica in enumerate(module.replicas) if stage in replica.stages)
        owner = module.data_module(name)
        workload = costs.workloads[owner]
        if module.kind == "loss":
            pairs = [(a, b) for a, b in workload.config["pairs"]]
            return ContrastiveStage(ContrastiveLoss("softmax", 0.0), pairs, workload.hidden_size)
        return EmulatedStage(
            owner,
            workload,
            stage.layers,
            dict(_seconds(costs, name, replica, module.replicas[replica].stages.index(stage))),
            parameter_sizes={
                layer: workload.layers[layer].num_parameters_per_rank(tp.size) if len(module.replicas) > 1 else 1
                for layer in range(*stage.layers)
                if module.is_trainable((layer, layer + 1))
            },
            incoming_sizes={
                edge.source: costs.workloads[edge.source].boundary(costs.workloads[edge.source].num_layers)[1]
                for edge in costs.plan.edges
                if edge.target == name
            },
        )

    return make


def _seconds(costs: IterationCosts, module: str, replica: int, stage: int) -> Iterator[tuple[SampleIds, Seconds]]:
    """For each microbatch of a stage: its samples, and what they take."""
    for cell in costs.routes.cells:
        if cell[:3] == (module, replica, stage):
            halves = (0.0, 0.0)
            if cell in costs.routes.with_backward:
                halves = (costs.compute_s(Compute(Kind.INPUT, cell)), costs.compute_s(Compute(Kind.WEIGHT, cell)))
            ids = tuple(costs.samples[i].id for i in costs.routes.samples(cell))
            yield ids, Seconds(costs.compute_s(Compute(Kind.FORWARD, cell)), *halves)
