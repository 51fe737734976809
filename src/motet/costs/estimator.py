"""The estimator: seconds and bytes of the layers of any module under any degrees of parallelism, for a typical batch.

Planners, templates and lower bounds ask it before there is a plan; `motet.costs.iteration` prices the actions of a
given plan with the same functions. Answers have one value per layer, which callers add up over a run of layers.
Times are T_l = F_l + B_l of thesis 3.3.1 and follow the frozen rule for each kind of microbatch: one that lacks a
modality may have no backward in a frozen module.

Arguments common to most methods: `tp`, `cp`: sizes of the tensor-parallel and context-parallel groups; `dp`: number of
replicas that share the batch; `packed`: samples share a row, as context parallelism requires.

Where the table was measured with context-parallel groups or experts over ranks, a layer takes the least of what was
measured and what is computed without exchanges, so that bounds hold for every method.

Limits: microbatches are those of a batch that is cut in the given order; only `seconds_with_exchange` includes what
context-parallel groups exchange. Methods raise `UserError` if the cost table lacks the tensor-parallel size.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from motet.assignment.batch_assignment import split_evenly
from motet.assignment.sample import Sample, kinds_of_samples
from motet.cluster import Cluster, Link
from motet.costs.cells import LayerGradients, entries_of, gradients_of_layers, gradients_of_modules
from motet.costs.communication import all_reduce_seconds, message_link
from motet.costs.cost_model import (
    CostTable,
    LayerCost,
    LayerPasses,
    LinkCost,
    Load,
    ModuleCosts,
    Sharing,
    microbatch_load,
)
from motet.costs.memory import MemoryOptions, boundary_bytes, gathered_bytes, saved_layer_bytes, static_layer_bytes
from motet.costs.recomputed import layer_passes
from motet.costs.stage_seconds import is_gathered_in_backward, key_exchange, parameter_gather, token_gather
from motet.errors import UserError
from motet.plan import ContextOptions, Edge, LayerRange, Stage
from motet.shapes.module_shape import LayerShape, ModuleWorkload

T = TypeVar("T")

Entering = frozenset[str]
"""Modules that bring a gradient into a microbatch."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    """The part of the backward that computes weight gradients, which no other stage waits for."""

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


class Work(NamedTuple):
    """The work of a module's layers in the microbatches of one kind."""

    gradients: Sequence[LayerGradients]
    """Gradients that each layer computes."""
    load: Load
    """Load of a whole context-parallel group."""
    num_actions: float
    """Number of actions that pay the constants of a cost; an empty microbatch has none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimator:
    """Answers for one model, cluster and typical global batch. Results are remembered."""

    workloads: Mapping[str, ModuleWorkload]
    """With the treatment of each block's activations."""
    trainable: Mapping[str, Sequence[bool]]
    """Whether each layer is trainable, by module."""
    edges: Sequence[Edge]
    table: CostTable
    cluster: Cluster
    memory: MemoryOptions
    samples: Sequence[Sample]
    """The typical global batch."""
    num_microbatches: int
    """Per replica."""
    cuts_evenly: bool = True
    """All microbatches hold equally many samples, as far as the batch can be divided."""
    known: dict[object, Any]
    """Results so far; estimators that differ only in the number of devices share them."""
    known_loads: dict[object, Any]
    """Loads so far, which depend on nothing but modules, samples and how these are cut; estimators of one model and one
    batch share them."""

    def remembered(self, key: object, compute: Callable[[], T]) -> T:
        """Returns what `compute` returned for this key the first time."""
        return _remembered(self.known, key, compute)

    def _of_loads(self, key: object, compute: Callable[[], T]) -> T:
        return _remembered(self.known_loads, key, compute)

    @cached_property
    def gradients(self) -> Mapping[str, tuple[LayerGradients, ...]]:
        """The gradients that each layer of each module computes when every modality is present."""
        return gradients_of_modules(self.trainable, self.edges)

    def has_backward(self, name: str, layers: LayerRange) -> bool:
        return any(needs.any for needs in self.gradients[name][slice(*layers)])

    # Loads ----------------------------------------------------------------------------------------------------------

    @property
    def sample_kinds(self) -> list[int]:
        """For each sample, a number from 0 on; samples of equal number cost the same."""
        return self._of_loads("kinds of samples", lambda: kinds_of_samples(self.samples))

    def microbatch_loads(self, name: str, dp: int = 1, *, packed: bool = False) -> Sequence[tuple[Load, Entering]]:
        """The load of each microbatch, empty ones included, with the modules that bring a gradient into it."""

        def compute() -> list[tuple[Load, Entering]]:
            shares = split_evenly(range(len(self.samples)), dp)
            microbatches = [m for share in shares for m in split_evenly(share, self.num_microbatches)]
            return self._loads_of(name, microbatches, packed=packed)

        return self._of_loads(("loads", name, dp, self.num_microbatches, packed), compute)

    def single_sample_loads(self, name: str) -> Sequence[tuple[Load, Entering]]:
        """Like `microbatch_loads`, with each sample as a microbatch of its own."""
        return self._of_loads(
            ("sample loads", name), lambda: self._loads_of(name, [(i,) for i in range(len(self.samples))])
        )

    def typical_load(self, name: str, dp: int = 1, *, cp: int = 1, packed: bool = False) -> Load:
        """The mean load of the microbatches on each rank of a context-parallel group.

        `packed`: without a group too, because another stage of the replica has one."""
        packed = packed or cp > 1

        def compute() -> Load:
            return _mean([load for load, _ in self.microbatch_loads(name, dp, packed=packed)]).share(cp)

        return self._of_loads(("mean", name, dp, self.num_microbatches, cp, packed), compute)

    def mean_sample_load(self, name: str) -> Load:
        """The mean load of the samples, each by itself."""
        return self._of_loads(
            ("mean sample", name), lambda: _mean([load for load, _ in self.single_sample_loads(name)])
        )

    def _loads_of(
        self, name: str, microbatches: Sequence[Sequence[int]], *, packed: bool = False
    ) -> list[tuple[Load, Entering]]:
        sources = tuple(edge.source for edge in self.edges if edge.target == name)
        bringing = [source for source in sources if any(needs.any for needs in self.gradients[source])]
        known: dict[tuple[int, ...], tuple[Load, Entering]] = self._of_loads(("loads of kinds", name, packed), dict)
        workload = self.workloads[name].packed() if packed else self.workloads[name]
        loads, kinds = [], self.sample_kinds
        for members in microbatches:
            key = tuple([kinds[i] for i in members])
            if key not in known:
                able = [self.samples[i] for i in members if self.samples[i].has(name)]
                entering = frozenset(source for source in bringing if any(sample.has(source) for sample in able))
                known[key] = microbatch_load(workload, name, able, sources), entering
            loads.append(known[key])
        return loads

    # Seconds --------------------------------------------------------------------------------------------------------

    def layer_times(
        self,
        name: str,
        tp: int = 1,
        dp: int = 1,
        *,
        cp: int = 1,
        packed: bool = False,
        frozen_aware: bool = True,
        lightest: bool = False,
        sequence_parallel: bool = False,
    ) -> list[LayerTime]:
        """Mean time of each layer over the microbatches.

        `frozen_aware`: False: every layer pays its whole backward. `lightest`: instead of the mean, a lower bound for
        every microbatch."""
        packed = packed or cp > 1

        def compute() -> list[LayerTime]:
            kinds = self._kinds(name, self.microbatch_loads(name, dp, packed=packed), frozen_aware)
            works = [(_lightest_work if lightest else _mean_work)(gradients, members) for gradients, members in kinds]
            return self._times(name, tp, cp, works, sequence_parallel=sequence_parallel)

        return self.remembered(("times", name, tp, dp, cp, packed, frozen_aware, lightest, sequence_parallel), compute)

    def layer_seconds(
        self, name: str, tp: int = 1, dp: int = 1, *, cp: int = 1, packed: bool = False, frozen_aware: bool = True
    ) -> list[float]:
        """Forward and backward of `layer_times`."""
        times = self.layer_times(name, tp, dp, cp=cp, packed=packed, frozen_aware=frozen_aware)
        return [time.total_s for time in times]

    def lower_bound_times(
        self,
        name: str,
        tp: int = 1,
        dp: int = 1,
        *,
        cp: int = 1,
        alone: bool = True,
        lightest: bool = False,
        sequence_parallel: bool = False,
    ) -> list[LayerTime]:
        """Mean time of each layer over the microbatches, or a lower bound where it depends on how the batch is cut.

        `alone`: each replica has a share of the batch to itself. `lightest`: a lower bound for every microbatch."""
        if alone and self.cuts_evenly:
            return self.layer_times(name, tp, dp, cp=cp, lightest=lightest, sequence_parallel=sequence_parallel)
        if lightest:
            return self.lower_bound_microbatch_times(name, tp, cp=cp, sequence_parallel=sequence_parallel)
        num_microbatches = dp * self.num_microbatches
        total = self.lower_bound_batch_times(name, tp, dp, cp=cp, alone=alone, sequence_parallel=sequence_parallel)
        return [LayerTime(*(seconds / num_microbatches for seconds in astuple(time))) for time in total]

    def lower_bound_batch_times(
        self,
        name: str,
        tp: int = 1,
        dp: int = 1,
        *,
        cp: int = 1,
        alone: bool = False,
        sequence_parallel: bool = False,
    ) -> list[LayerTime]:
        """Lower bound of each layer's time for all microbatches together, however the batch is cut into them.

        It holds because no sum of a load is less for several samples than the sum of theirs (padding and packing only
        add to it), and because there are at least as many actions as it takes to hold the samples. `alone`: each
        replica has a share of the batch to itself; if that is cut evenly, the result is exact."""
        is_known = alone and self.cuts_evenly
        num_samples = len(self.samples)
        # Samples of unequal load may be dealt to one of the replicas that have a share's microbatch together.
        num_parts = self.num_microbatches * (1 if any(self.sample_kinds) else dp)
        largest = -(-num_samples // num_parts) if self.cuts_evenly else num_samples

        def work() -> list[Work]:
            loads = self.microbatch_loads(name, dp, packed=cp > 1) if is_known else self.single_sample_loads(name)
            return [
                Work(
                    gradients,
                    Load(*map(sum, zip(*members, strict=True))),
                    float(sum(map(any, members)) // (1 if is_known else largest)),
                )
                for gradients, members in self._kinds(name, loads)
            ]

        def compute() -> list[LayerTime]:
            key = ("work", name, cp > 1, dp, self.num_microbatches) if is_known else ("work of samples", name, largest)
            return self._times(name, tp, cp, self._of_loads(key, work), sequence_parallel=sequence_parallel)

        return self.remembered(("batch bound", name, tp, dp, cp, is_known, sequence_parallel), compute)

    def lower_bound_microbatch_times(
        self, name: str, tp: int = 1, num_samples: int = 1, *, cp: int = 1, sequence_parallel: bool = False
    ) -> list[LayerTime]:
        """Lower bound of each layer's time for a microbatch of that many samples."""

        def work() -> list[Work]:
            return [_lightest_work(*kind) for kind in self._kinds(name, self.single_sample_loads(name))]

        def compute() -> list[LayerTime]:
            lightest = self._of_loads(("lightest work", name), work)
            several = [work._replace(load=Load(*(num_samples * x for x in work.load))) for work in lightest]
            return self._times(name, tp, cp, several, sequence_parallel=sequence_parallel)

        return self.remembered(("microbatch bound", name, tp, num_samples, cp, sequence_parallel), compute)

    def seconds_with_exchange(
        self, name: str, tp: int, dp: int, *, cp: int = 1, packed: bool = False, fully_sharded: bool = False
    ) -> list[float]:
        """Forward and backward of each layer for a mean microbatch, with the exchanges of a context-parallel group.

        Exchanged are keys and values in the forward, and with their gradients in the backward, the tokens that an
        encoder's head gathers, and the parameters of a fully sharded stage, which counts as if it had a block. A
        microbatch without images exchanges as much as one with them."""
        shared = self.layer_seconds(name, tp, dp, cp=cp, packed=packed)
        if cp == 1:
            return shared
        workload, gradients = self.workloads[name], self.gradients[name]
        measured = self.table.of_group(name, Sharing.of(tp, cp, ContextOptions(), 1))
        if measured is not None:
            kinds = self._kinds(name, self.microbatch_loads(name, dp, packed=True))
            works = [_mean_work(gradients, members) for gradients, members in kinds]
            shared = [time.total_s for time in self._times_by(measured, name, tp, cp, works)]
        whole = self.layer_seconds(name, tp, dp, packed=packed)
        load = self.typical_load(name, dp, cp=cp)
        stage = Stage(layers=(0, workload.num_layers), ranks=tuple(range(tp * cp)), tp_size=tp, cp_size=cp)
        seconds = []
        for index, (layer, needs) in enumerate(zip(workload.layers, gradients, strict=True)):
            runs_again = needs.any and layer.treatment in ("recomputed", "attention")
            keys_s, returned_s = (
                key_exchange(layer, stage, ContextOptions(), self.cluster, self.memory, backward=backward).seconds(load)
                for backward in (False, True)
            )
            if measured is not None:
                total_s = shared[index]
            else:
                total_s = (shared if workload.is_shared(layer) else whole)[index]
                total_s += (1 + runs_again) * keys_s + needs.any * returned_s
            if measured is None and workload.encodes_items and layer.part == "head":
                tokens_s = token_gather(workload, index, stage, self.cluster, self.memory).seconds(load)
                total_s += (1 + needs.input_gradient) * tokens_s
            if fully_sharded:
                num_sent = 1 + is_gathered_in_backward(layer, needs, gradients) + needs.weight_gradient
                total_s += num_sent * parameter_gather(layer, tp, stage.ranks[::tp], self.cluster, self.memory).seconds(
                    load
                )
            seconds.append(total_s)
        return seconds

    def layer_passes(self, name: str, tp: int = 1) -> list[LayerPasses]:
        """Seconds of each layer's passes as functions of the load, when every modality is present."""
        layers, shapes, gradients = self.table.of(name, tp).layers, self.workloads[name].layers, self.gradients[name]
        return [
            layer_passes(
                cost,
                shape,
                needs.input_gradient,
                needs.weight_gradient,
                tp_size=tp,
                cluster=self.cluster,
                memory=self.memory,
            )
            for cost, shape, needs in zip(layers, shapes, gradients, strict=True)
        ]

    def link(self, sender: int, receiver: int) -> Link | LinkCost:
        """The link that messages between these ranks take."""
        return message_link(self.table, self.cluster, sender, receiver)

    def all_reduce_seconds(self, ranks: Sequence[int], num_bytes: float) -> float:
        return all_reduce_seconds(self.table, self.cluster, ranks, num_bytes)

    def optimizer_seconds(self, num_parameters: float) -> float:
        """The optimizer step of a rank that updates that many parameters."""
        return self.table.optimizer_constant_s + self.table.optimizer_s_per_parameter * num_parameters

    def _kinds(
        self, name: str, loads: Sequence[tuple[Load, Entering]], frozen_aware: bool = True
    ) -> list[tuple[Sequence[LayerGradients], list[Load]]]:
        """The layers' gradients in microbatches of each kind, and their loads; those of other kinds are empty."""
        everything = (LayerGradients(True, True),) * self.workloads[name].num_layers
        return [
            (
                self._gradients_with(name, kind) if frozen_aware else everything,
                [load if entering == kind else Load() for load, entering in loads],
            )
            for kind in sorted({entering for _, entering in loads}, key=sorted)
        ]

    def _gradients_with(self, name: str, sources: AbstractSet[str]) -> tuple[LayerGradients, ...]:
        """The gradients of a microbatch into which these modules bring a gradient."""
        return self.remembered(
            ("gradients", name, frozenset(sources)),
            lambda: gradients_of_layers(self.trainable[name], entries_of(name, sources, self.edges)),
        )

    def _times(self, name: str, tp: int, cp: int, works: Sequence[Work], *, sequence_parallel: bool) -> list[LayerTime]:
        """Each layer's time, added up over the kinds of microbatches."""
        computed = self.table.of(name, tp, sequence_parallel=sequence_parallel)
        times = self._times_by(computed, name, tp, cp, works, sequence_parallel=sequence_parallel)
        for measured in self.table.of_groups(name, tp, cp):
            others = self._times_by(measured, name, tp, cp, works)
            times = [
                LayerTime(*map(min, astuple(time), astuple(other))) for time, other in zip(times, others, strict=True)
            ]
        return times

    def _times_by(
        self,
        module: ModuleCosts,
        name: str,
        tp: int,
        cp: int,
        works: Sequence[Work],
        *,
        sequence_parallel: bool = False,
    ) -> list[LayerTime]:
        """`_times` by these costs of the module."""
        workload, costs = self.workloads[name], module.layers
        if len(costs) != workload.num_layers:
            raise UserError(
                f"costs: {name} has {len(costs)} layers in the table, but {workload.num_layers} in the model; profile "
                "it again"
            )
        works = [work._replace(load=work.load.share(cp)) for work in works]
        times: list[LayerTime] = []
        known: dict[object, LayerTime] = {}
        needed = zip(*(work.gradients for work in works), strict=True) if works else [()] * len(costs)
        for cost, shape, gradients in zip(costs, workload.layers, needed, strict=True):
            # Most layers are alike.
            key = (id(cost), id(shape), gradients)
            if key not in known:
                parts = [
                    self._layer_time(cost, shape, own, work, tp, sequence_parallel)
                    for own, work in zip(gradients, works, strict=True)
                ]
                known[key] = LayerTime(*(sum(values) for values in zip(*parts, strict=True)))
            times.append(known[key])
        return times

    def _layer_time(
        self, cost: LayerCost, shape: LayerShape, needs: LayerGradients, work: Work, tp: int, sequence_parallel: bool
    ) -> tuple[float, float, float]:
        """Seconds of forward, backward and weight gradients: the sums of the load once, constants once an action."""
        passes = layer_passes(
            cost,
            shape,
            needs.input_gradient,
            needs.weight_gradient,
            tp_size=tp,
            cluster=self.cluster,
            memory=self.memory,
            sequence_parallel=sequence_parallel,
        )
        parts = (passes.forward, passes.backward, passes.weight_gradient)
        seconds = [q.seconds(work.load) + (work.num_actions - 1) * q.constant for q in parts]
        return seconds[0], seconds[1], seconds[2]

    # Bytes ----------------------------------------------------------------------------------------------------------

    def num_trainable(self, name: str, *, tp: int, ep: int = 1) -> list[int]:
        """Parameters of each layer with a gradient on each rank of a tensor-parallel group, whose experts `ep` ranks
        share."""
        layers = self.workloads[name].layers
        # Most layers are alike.
        numbers = {number: layer.num_trained_per_rank(tp, ep) for number, layer in {id(x): x for x in layers}.items()}
        of_layers = zip(layers, self.trainable[name], strict=True)
        return [numbers[id(layer)] if trainable else 0 for layer, trainable in of_layers]

    def static_bytes(
        self, name: str, tp: int = 1, dp: int = 1, *, cp: int = 1, fully_sharded: bool = False, ep: int = 1
    ) -> list[int]:
        """Parameters, gradients and optimizer state of each layer on each rank.

        Under ZeRO-1 all ranks that hold the same shard share the optimizer state. The `cp` ranks of a fully sharded
        stage each keep a share, and the whole of layers outside of blocks, which are gathered for as long as the stage
        computes."""
        num_holders, num_shares = (dp, cp) if fully_sharded else (dp * cp, 1)

        def compute() -> list[int]:
            workload, options = self.workloads[name], self.memory.of(self.workloads[name])
            kinds = [
                (id(layer), trainable) for layer, trainable in zip(workload.layers, self.trainable[name], strict=True)
            ]
            known = {
                kind: sum(
                    static_layer_bytes(
                        layer,
                        trainable=kind[1],
                        tp_size=tp,
                        num_holders=num_holders,
                        options=options,
                        num_shares=num_shares,
                        ep=ep,
                    )
                )
                for kind, layer in dict(zip(kinds, workload.layers, strict=True)).items()  # Most layers are alike.
            }
            static = [known[kind] for kind in kinds]
            if not fully_sharded:
                return static
            gathered = self._gathered_bytes(name, tp, cp)
            parts = [layer.part for layer in self.workloads[name].layers]
            return [a + b * (part != "block") for a, b, part in zip(static, gathered, parts, strict=True)]

        return self.remembered(("static bytes", name, tp, num_holders, num_shares, fully_sharded, ep), compute)

    def gathered_block_bytes(self, name: str, tp: int, cp: int) -> int:
        """Parameters and gradients of the largest block that a rank of a fully sharded stage gathers from others."""
        of_layers = zip(self._gathered_bytes(name, tp, cp), self.workloads[name].layers, strict=True)
        return max((num_bytes for num_bytes, layer in of_layers if layer.part == "block"), default=0)

    def _gathered_bytes(self, name: str, tp: int, cp: int) -> list[int]:
        of_layers = zip(self.workloads[name].layers, self.trainable[name], strict=True)
        return [gathered_bytes([each], tp_size=tp, num_shares=cp, options=self.memory) for each in of_layers]

    def saved_bytes(
        self,
        name: str,
        tp: int = 1,
        dp: int = 1,
        *,
        cp: int = 1,
        packed: bool = False,
        sequence_parallel: bool = False,
    ) -> list[int]:
        """Activations that each layer saves on each rank for the backward of a mean microbatch."""
        workload = self.workloads[name]
        shared, whole = (
            self.saved_bytes_of_load(
                name,
                self.typical_load(name, dp, cp=size, packed=packed),
                tp=tp,
                sequence_parallel=sequence_parallel,
            )
            for size in (cp, 1)
        )
        return [(shared if workload.is_shared(layer) else whole)[i] for i, layer in enumerate(workload.layers)]

    def saved_bytes_of_load(self, name: str, load: Load, *, tp: int, sequence_parallel: bool = False) -> list[int]:
        """Activations that each layer saves for the backward of a microbatch of this load."""
        layers = self.workloads[name].layers

        def compute() -> list[int]:
            kinds = [(id(layer), needs) for layer, needs in zip(layers, self.gradients[name], strict=True)]
            known = {
                (number, needs): saved_layer_bytes(
                    layer,
                    load,
                    input_gradient=needs.input_gradient,
                    weight_gradient=needs.weight_gradient,
                    tp_size=tp,
                    options=self.memory,
                    sequence_parallel=sequence_parallel,
                )
                for (number, needs), layer in dict(zip(kinds, layers, strict=True)).items()  # Most layers are alike.
            }
            return [known[kind] for kind in kinds]

        return self.remembered(("saved bytes", name, load, tp, sequence_parallel), compute)

    def gradient_bytes(self, name: str, *, tp: int) -> list[int]:
        """Gradients of each layer that its replicas sum."""
        return [number * self.memory.summed_bytes for number in self.num_trainable(name, tp=tp)]

    def boundary_bytes(
        self, name: str, border: int, load: Load, *, num_shares: int = 1, num_row_shares: int = 1
    ) -> float:
        """The message that crosses the boundary before layer `border` for a microbatch of this load."""
        size = self.memory.activation_bytes
        return boundary_bytes(
            self.workloads[name], border, load, size, num_shares=num_shares, num_row_shares=num_row_shares
        )

    def output_bytes(self, name: str, dp: int = 1) -> float:
        """Bytes of a module's output to another module, for a mean microbatch."""
        num_outputs = sum(sample.num_outputs(name) for sample in self.samples) / (dp * self.num_microbatches)
        return num_outputs * self.workloads[name].output_size * self.memory.activation_bytes

    def transferred_bytes(self, name: str) -> list[int]:
        """Parameters and optimizer state that a rank receives when it takes over a layer, whole.

        0 for frozen layers, with which stages are built."""
        per_parameter = self.memory.parameter_bytes + self.memory.state_bytes
        return [number * per_parameter for number in self.num_trainable(name, tp=1)]

    def optimizer_state_bytes(self, name: str) -> list[list[int]]:
        """Optimizer state of each layer: of each linear, of an embedding table, and of the other parameters.

        A table that is tied to the head counts in the embedding."""
        workload = self.workloads[name]
        tied = {head: workload.layers[words].vocabulary for words, head in workload.tied}
        result = []
        for index, layer in enumerate(workload.layers):
            linears = [linear for linear in layer.linears if linear.out_features != tied.get(index)]
            sizes = [linear.num_parameters for linear in linears]
            sizes += [layer.vocabulary * layer.hidden_size, layer.other_parameters]
            if layer.num_adapter_parameters():
                features = [
                    (linear.adapter_rank, n) for linear in linears for n in (linear.in_features, linear.out_features)
                ]
                sizes = [rank * n for rank, n in features]
            result.append([size * self.memory.state_bytes for size in sizes if size and self.trainable[name][index]])
        return result


def _remembered(known: dict[object, Any], key: object, compute: Callable[[], T]) -> T:
    if key not in known:
        known[key] = compute()
    value: T = known[key]
    return value


def _mean(loads: Sequence[Load]) -> Load:
    return Load(*(sum(values) / len(loads) for values in zip(*loads, strict=True)))


def _mean_work(gradients: Sequence[LayerGradients], members: Sequence[Load]) -> Work:
    return Work(gradients, _mean(members), sum(map(any, members)) / len(members))


def _lightest_work(gradients: Sequence[LayerGradients], members: Sequence[Load]) -> Work:
    lightest = Load(*(min(values) for values in zip(*members, strict=True)))
    return Work(gradients, lightest, float(all(map(any, members))))
