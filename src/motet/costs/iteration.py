"""The costs of one iteration's actions and messages: plan, routes and samples bound to a cost table and a cluster.

Implements all protocols of `motet.simulator.costs`. Cells of one kind (`motet.costs.cells`)
and one load cost the same, so many are answered at once. Recomputation runs a block's forward once more if the block
has any gradient to compute.

Limits: the members of a tensor-parallel or context-parallel group are taken to be equally fast, the tokens and pairs of
a sequence to be divided equally over a context-parallel group.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from motet.arrays import Floats, Ints
from motet.cluster import Cluster
from motet.costs.cells import CellKind, Cells
from motet.costs.collectives import collective_seconds, collective_terms
from motet.costs.communication import all_reduce_seconds, message_seconds
from motet.costs.cost_model import ZERO, CostTable, Quadratic, total
from motet.costs.kernels import KernelShape, layer_kernels
from motet.costs.layer_gradients import LayerGradients
from motet.costs.load import Load
from motet.costs.memory import (
    DEFAULT_MEMORY,
    RESERVE,
    MemoryOptions,
    half_saved_layer_bytes,
    saved_layer_bytes,
    static_layer_bytes,
)
from motet.data.sample import Sample
from motet.plan import LayerRange, Stage
from motet.schedule.action import Compute, Kind, Reduce
from motet.schedule.dependencies import KINDS, Dependencies, Holder, reductions
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.lower import Message
from motet.schedule.routes import Cell, Routes
from motet.workload import LayerShape, ModuleWorkload


@dataclass(frozen=True, slots=True)
class _StageCosts:
    """Seconds of a stage, for one pattern of gradients, as functions of its ranks' load."""

    forward: Quadratic
    input_half: Quadratic
    weight_half: Quadratic


class IterationCosts:
    """Costs of one iteration.

    `workloads`: by module (copies are looked up by the module they copy). Raises `ValueError` if the table has no costs
    for a module at the plan's tensor-parallel size.
    """

    def __init__(
        self,
        routes: Routes,
        samples: Sequence[Sample],
        *,
        workloads: Mapping[str, ModuleWorkload],
        table: CostTable,
        cluster: Cluster,
        memory: MemoryOptions = DEFAULT_MEMORY,
    ) -> None:
        self.routes, self.plan, self.samples = routes, routes.plan, samples
        self.workloads, self.table, self.cluster, self.memory = workloads, table, cluster, memory
        self.cells = Cells(routes, samples, workloads)
        self._saved: dict[tuple[int, int], tuple[int, int]] = {}
        self._groups: dict[object, list[tuple[int, ...]]] = {}

    # Seconds --------------------------------------------------------------------------------------------------------

    @cached_property
    def fixed_s(self) -> float:
        """The optimizer's step of the rank that updates most."""
        return self.table.optimizer_constant_s + self.table.optimizer_s_per_parameter * max(
            self._num_updated().values()
        )

    def compute_s(self, action: Compute) -> float:
        return self._seconds_of[KINDS.index(action.kind)][self.routes.number_of_cell[action.cell]]

    def compute_seconds(self, dependencies: Dependencies) -> Floats:
        assert dependencies.routes is self.routes
        return self._seconds.reshape(-1)

    def group_communication_s(self, action: Compute) -> float:
        """The part of `compute_s` in which the stage's ranks exchange tensors: computed from the links, at most all."""
        number = self.routes.number_of_cell[action.cell]
        return min(self._exchanging[KINDS.index(action.kind)][number], self.compute_s(action))

    @cached_property
    def _exchanging(self) -> list[list[float]]:
        return self._by_action(self._sum_exchanges).tolist()

    @cached_property
    def _seconds(self) -> Floats:
        return self._by_action(self._sum_stage)

    def _by_action(self, costs_of: Callable[[CellKind], _StageCosts]) -> Floats:
        """By kind of action (`KINDS`) and cell."""
        cells = self.cells
        terms = np.array(
            [
                [_of_microbatch(part, kind.stage.cp_size) for part in (c.forward, c.input_half, c.weight_half)]
                for kind in cells.kinds
                for c in (costs_of(kind),)
            ]
        ).reshape(-1, 3, len(Quadratic._fields))
        sums = np.array([(1.0, *load) for load in cells.loads]).reshape(-1, len(Quadratic._fields))
        forward, input_half, weight_half = np.einsum("ckt,ct->kc", terms[cells.kind], sums[cells.load])
        by_kind = {
            Kind.FORWARD: forward,
            Kind.BACKWARD: input_half + weight_half,
            Kind.INPUT: input_half,
            Kind.WEIGHT: weight_half,
        }
        return np.stack([by_kind[kind] for kind in KINDS])

    @cached_property
    def _seconds_of(self) -> list[list[float]]:
        return self._seconds.tolist()

    def message_s(self, message: Message) -> float:
        return message_seconds(self.table, self.cluster, message.sender, message.receiver, self.message_bytes(message))

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        """Latency and bytes per second of messages; measured links stand for all of the cluster's."""
        link = self.table.message or self.cluster.link(sender, receiver)
        return link.latency_s, link.bytes_per_s

    def reduce_s(self, reduce: Reduce) -> float:
        groups, num_bytes = self._shard_groups(reduce)
        return max(all_reduce_seconds(self.table, self.cluster, ranks, num_bytes) for ranks in groups)

    def gather_s(self, reduce: Reduce) -> float:
        """With ZeRO-1, each rank updates a share of the parameters, and all gather the new ones."""
        if not self.memory.zero1:
            return 0.0
        groups, num_bytes = self._shard_groups(reduce)
        return max(collective_seconds(self.cluster, "all_gather", ranks, num_bytes) for ranks in groups)

    def _shard_groups(self, reduce: Reduce) -> tuple[list[tuple[int, ...]], int]:
        """The ranks that hold a tensor-parallel shard (context-parallel ones do), and its size in bytes.

        Of the shards, those whose ranks lie differently on the nodes; the others' take as long as theirs."""
        holders = self._reductions[reduce]
        tp_size = self._stage_of(holders[0]).tp_size
        key = (tp_size, tuple([holder.ranks for holder in holders]))
        if key not in self._groups:
            groups: dict[tuple[int, ...], tuple[int, ...]] = {}
            for t in range(tp_size):
                ranks = tuple(dict.fromkeys(rank for holder in holders for rank in holder.ranks[t::tp_size]))
                groups.setdefault(tuple(sorted(Counter(map(self.cluster.node, ranks)).values())), ranks)
            self._groups[key] = list(groups.values())
        return self._groups[key], self._reduced_bytes(reduce, tp_size)

    # Bytes ----------------------------------------------------------------------------------------------------------

    def message_bytes(self, message: Message) -> int:
        source, target = message.source, message.target
        if source.module == target.module:
            return self._boundary_bytes(self.cells.kind_of(source), self.cells.load_of(source))
        route = next(route for route in self.routes.outgoing[source] if route.target == target)
        return self._output_bytes(source.module, route.samples)

    def carried_sizes(self, dependencies: Dependencies) -> Ints:
        """`message_bytes` of each route's activation, then of its gradient."""
        assert dependencies.routes is self.routes
        routes, cells = self.routes, self.cells
        stages = [cells.kinds[kind] for kind in cells.kind[routes.route_source].tolist()]
        to_other = np.array([stage.module for stage in routes.stages])[routes.cell_stage]
        crosses = to_other[routes.route_source] != to_other[routes.route_target]
        sizes = np.zeros(routes.num_routes, dtype=np.int64)
        for i, (kind, load) in enumerate(zip(stages, cells.load[routes.route_source].tolist(), strict=True)):
            if crosses[i]:
                sizes[i] = self._output_bytes(kind.module, routes.route_samples(i))
            else:
                sizes[i] = self._boundary_bytes(kind, cells.loads[load])
        return np.tile(sizes, 2)

    def _boundary_bytes(self, kind: CellKind, load: Load) -> int:
        """What one rank of the stage hands on to the next stage of its module."""
        rows, width = self.cells.workload(kind.module).boundary(kind.stage.layers[1])
        share = load.share(kind.stage.cp_size)
        return round((share.tokens if rows == "tokens" else share.outputs) * width * self.memory.activation_bytes)

    def _output_bytes(self, module: str, samples: Sequence[int]) -> int:
        """What a module hands on of these samples to another module."""
        workload = self.cells.workload(module)
        _, width = workload.boundary(workload.num_layers)
        num_tokens = sum(self.cells.num_outputs(module)[i] for i in samples)
        return num_tokens * width * self.memory.activation_bytes

    def saved_bytes(self, cell: Cell, half: bool) -> int:
        number = self.routes.number_of_cell[cell]
        return self._saved_sizes(int(self.cells.kind[number]), int(self.cells.load[number]))[half]

    def saved_sizes(self, dependencies: Dependencies) -> Ints:
        assert dependencies.routes is self.routes
        cells = self.cells
        pairs, place = np.unique(np.stack([cells.kind, cells.load]), axis=1, return_inverse=True)
        sizes = [self._saved_sizes(kind, load) for kind, load in pairs.T.tolist()]
        return np.array(sizes, dtype=np.int64).reshape(-1, 2)[place.reshape(-1)].T

    def _saved_sizes(self, kind_number: int, load_number: int) -> tuple[int, int]:
        """The whole and the half."""
        key = (kind_number, load_number)
        if key not in self._saved:
            kind, load = self.cells.kinds[kind_number], self.cells.loads[load_number]
            share = load.share(kind.stage.cp_size)
            self._saved[key] = self._saved_whole(kind, share), self._saved_half(kind, share)
        return self._saved[key]

    def _saved_whole(self, kind: CellKind, load: Load) -> int:
        workload, module = self.cells.workload(kind.module), self.plan.modules[kind.module]
        rows, width = workload.boundary(kind.stage.layers[0])
        has_input = bool(kind.stage.layers[0]) and any(needs.any for needs in kind.gradients)
        stage_input = (load.tokens if rows == "tokens" else load.outputs) * width if has_input else 0
        return round(stage_input * self.memory.activation_bytes) + sum(
            count
            * saved_layer_bytes(
                layer,
                load,
                input_gradient=needs.input_gradient,
                weight_gradient=needs.weight_gradient,
                recompute=kind.module in self.plan.recompute,
                tp_size=kind.stage.tp_size,
                options=self.memory,
                sequence_parallel=module.sequence_parallel,
            )
            for layer, needs, count in kind.different
        )

    def _saved_half(self, kind: CellKind, load: Load) -> int:
        return sum(
            count
            * half_saved_layer_bytes(
                layer,
                load,
                weight_gradient=needs.weight_gradient,
                tp_size=kind.stage.tp_size,
                options=self.memory,
            )
            for layer, needs, count in kind.different
        )

    def memory_limit(self) -> MemoryLimit:
        """What the parameters and all that is static leave for activations on the cluster's devices."""
        usable = int(self.cluster.device.memory_bytes * (1 - RESERVE))
        return MemoryLimit(
            saved_bytes=lambda cell: self.saved_bytes(cell, half=False),
            limit_bytes=lambda rank: usable - self.static_bytes(rank),
        )

    def static_bytes(self, rank: int) -> int:
        num_bytes = 0
        for name, _, _, stage in self.plan.stages_of_rank(rank):
            module, workload = self.plan.modules[name], self.cells.workload(name)
            for index in range(*stage.layers):
                num_bytes += static_layer_bytes(
                    workload.layers[index],
                    trainable=module.is_trainable((index, index + 1)),
                    tp_size=stage.tp_size,
                    num_holders=len(module.replicas) * stage.cp_size,
                    options=self.memory,
                )
        return num_bytes

    # What they are derived from --------------------------------------------------------------------------------------

    def load(self, cell: Cell) -> Load:
        """The same for all stages of a module's replica."""
        return self.cells.load_of(cell)

    def rank_load(self, cell: Cell) -> Load:
        """Of one rank of the cell's stage."""
        return self.load(cell).share(self.routes.stage(cell).cp_size)

    def gradients(self, cell: Cell) -> tuple[LayerGradients, ...]:
        """For each layer of the cell's stage, what its backward computes."""
        return self.cells.kind_of(cell).gradients

    def _sum_stage(self, kind: CellKind) -> _StageCosts:
        name, stage, gradients, _ = kind
        costs = self.table.of(
            self.cells.owner(name), stage.tp_size, sequence_parallel=self.plan.modules[name].sequence_parallel
        )
        workload = self.cells.workload(name)
        forward, input_half, weight_half = [costs.stage_forward], [], []
        has_block = workload.has_block(stage.layers)
        if has_block:
            forward.append(costs.blocks_forward)
        if any(g.any for g in gradients):
            input_half.append(costs.stage_backward)
            if has_block:
                input_half.append(costs.blocks_backward)
        for index, needs in zip(range(*stage.layers), gradients, strict=True):
            layer = costs.layers[index]
            recomputed = needs.any and name in self.plan.recompute and workload.has_block((index, index + 1))
            with_graph = needs.any and not recomputed
            exchange = self._key_exchange(workload.layers[index], stage)
            forward += [layer.forward if with_graph else layer.forward_without_graph, exchange]
            if recomputed:
                input_half += [layer.forward, exchange]
            if needs.input_gradient:
                input_half += [exchange, layer.input_gradient]
                weight_half.append(layer.weight_gradient if needs.weight_gradient else ZERO)
            elif needs.weight_gradient:
                weight_half += [exchange, layer.weight_gradient_alone]
        return _StageCosts(total(forward), total(input_half), total(weight_half))

    def _sum_exchanges(self, kind: CellKind) -> _StageCosts:
        """What tensor-parallel and context-parallel groups exchange: like `_sum_stage`, but of collectives alone."""
        forward, input_half, weight_half = [], [], []
        for layer, needs, count in kind.different:
            recomputed = needs.any and kind.module in self.plan.recompute and layer.part == "block" and layer.runs
            kernels = layer_kernels(
                layer,
                tp_size=kind.stage.tp_size,
                sequence_parallel=self.plan.modules[kind.module].sequence_parallel,
                element_bytes=self.memory.activation_bytes,
            )
            exchange = self._key_exchange(layer, kind.stage)
            once = total([exchange, *self._collectives(kernels.forward, kind.stage)]).times(count)
            forward.append(once)
            if recomputed:
                input_half.append(once)
            if needs.input_gradient:
                again = total([exchange, *self._collectives(kernels.input_gradient, kind.stage)])
                input_half.append(again.times(count))
            elif needs.weight_gradient:
                alone = total([exchange, *self._collectives(kernels.weight_gradient_alone, kind.stage)])
                weight_half.append(alone.times(count))
        return _StageCosts(total(forward), total(input_half), total(weight_half))

    def _collectives(self, kernels: Iterable[KernelShape], stage: Stage) -> Iterator[Quadratic]:
        """Seconds of those among the kernels, over the group's first tensor-parallel ranks."""
        for kernel in kernels:
            if kernel.collective is not None:
                terms = collective_terms(self.cluster, kernel.collective, stage.ranks[: stage.tp_size])
                yield Quadratic(constant=terms.latency_s).plus(kernel.num_bytes.times(1 / terms.bytes_per_s))

    def _key_exchange(self, layer: LayerShape, stage: Stage) -> Quadratic:
        """Seconds in which context-parallel ranks gather the keys and values of the whole sequence; their gradients
        go back by a reduce-scatter, which takes as long. A function of one rank's load."""
        attention = layer.attention
        if stage.cp_size == 1 or attention is None or attention.reads_encoder or not layer.runs:
            return ZERO
        terms = collective_terms(self.cluster, "all_gather", stage.ranks[:: stage.tp_size])
        width = 2 * attention.num_key_value_heads * attention.head_dim / stage.tp_size
        per_token = width * self.memory.activation_bytes * stage.cp_size / terms.bytes_per_s
        return Quadratic(constant=terms.latency_s, per_token=per_token)

    @cached_property
    def _reductions(self) -> Mapping[Reduce, tuple[Holder, ...]]:
        return reductions(self.plan)

    def _stage_of(self, holder: Holder) -> Stage:
        return self.plan.modules[holder.module].replicas[holder.replica].stages[holder.stage]

    def _reduced_bytes(self, reduce: Reduce, tp_size: int) -> int:
        workload = self.cells.workload(reduce.module)
        if reduce.tied:
            embed = workload.layers[reduce.first]
            return embed.vocabulary * embed.hidden_size // tp_size * self.memory.parameter_bytes
        return self._num_trainable(reduce.module, (reduce.first, reduce.last), tp_size) * self.memory.parameter_bytes

    def _num_trainable(self, name: str, layers: LayerRange, tp_size: int) -> int:
        module, workload = self.plan.modules[name], self.cells.workload(name)
        return sum(
            workload.layers[index].num_parameters_per_rank(tp_size)
            for index in range(*layers)
            if module.is_trainable((index, index + 1))
        )

    def _num_updated(self) -> dict[int, float]:
        """Parameters that each rank's optimizer updates."""
        num_trainable: dict[tuple[str, LayerRange, int], int] = {}
        result: dict[int, float] = defaultdict(float)
        for name, _, _, stage in self.plan.stages():
            run = (name, stage.layers, stage.tp_size)
            if run not in num_trainable:
                num_trainable[run] = self._num_trainable(*run)
            num_holders = len(self.plan.modules[name].replicas) * stage.cp_size if self.memory.zero1 else 1
            for rank in stage.ranks:
                result[rank] += num_trainable[run] / num_holders
        return result


def _of_microbatch(cost: Quadratic, cp_size: int) -> Quadratic:
    """A function of one rank's load (`Load.share`) as a function of the microbatch's."""
    shares = Load(*[1.0] * len(Load._fields)).share(cp_size)
    return Quadratic(cost.constant, *(value * share for value, share in zip(cost[1:], shares, strict=True)))
