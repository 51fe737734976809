"""The costs of one iteration's actions and messages: plan, routes and samples bound to a cost table and a cluster.

Implements `motet.simulator.costs.Costs`. Which parts of a backward a layer pays is decided from the routes, over the
whole graph of modules, and inside a stage layer by layer: an input gradient is needed only if something trainable lies
strictly before (thesis 3.3.1). Recomputation runs a block's forward once more if the block has any gradient to compute.

Limits: the members of a tensor-parallel or context-parallel group are taken to be equally fast, the tokens and pairs of
a sequence to be divided equally over a context-parallel group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from motet.cluster import Cluster
from motet.costs.collectives import collective_terms
from motet.costs.communication import all_reduce_seconds, message_seconds
from motet.costs.cost_model import ZERO, CostTable, Quadratic, total
from motet.costs.load import Load, microbatch_load
from motet.costs.memory import (
    DEFAULT_MEMORY,
    MemoryOptions,
    half_saved_layer_bytes,
    saved_layer_bytes,
    static_layer_bytes,
)
from motet.data.sample import Sample
from motet.plan import LayerRange, Stage
from motet.schedule.action import Compute, Kind, Reduce
from motet.schedule.dependencies import Holder, reductions
from motet.schedule.lower import Message
from motet.schedule.routes import Cell, Routes
from motet.workload import LayerShape, ModuleWorkload


@dataclass(frozen=True, slots=True)
class LayerGradients:
    """Which gradients a layer computes for a microbatch."""

    input_gradient: bool
    weight_gradient: bool

    @property
    def any(self) -> bool:
        return self.input_gradient or self.weight_gradient


@dataclass(frozen=True, slots=True)
class _StageCosts:
    """Seconds of a stage, for one pattern of gradients."""

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
        self._loads: dict[tuple[str, int, int], Load] = {}
        self._stage_costs: dict[object, _StageCosts] = {}
        self._gradients: dict[Cell, tuple[LayerGradients, ...]] = {}
        self._patterns: dict[object, tuple[LayerGradients, ...]] = {}
        """The few different ones among them, so that equal ones are the same object."""

    # Seconds --------------------------------------------------------------------------------------------------------

    @cached_property
    def fixed_s(self) -> float:
        """The optimizer's step of the rank that updates most."""
        return self.table.optimizer_constant_s + self.table.optimizer_s_per_parameter * max(
            self._num_updated(rank) for rank in range(self.plan.num_ranks)
        )

    def compute_s(self, action: Compute) -> float:
        costs, load = self._costs_of(action.cell), self.rank_load(action.cell)
        if action.kind is Kind.FORWARD:
            return costs.forward.seconds(load)
        seconds = 0.0
        if action.kind is not Kind.WEIGHT:
            seconds += costs.input_half.seconds(load)
        if action.kind is not Kind.INPUT:
            seconds += costs.weight_half.seconds(load)
        return seconds

    def message_s(self, message: Message) -> float:
        return message_seconds(self.table, self.cluster, message.sender, message.receiver, self.message_bytes(message))

    def reduce_s(self, reduce: Reduce) -> float:
        holders = self._reductions[reduce]
        tp_size = self._stage_of(holders[0]).tp_size
        num_bytes = self._reduced_bytes(reduce, tp_size)
        # Context-parallel ranks hold the same shard, and sum their gradients too.
        groups = [tuple(rank for holder in holders for rank in holder.ranks[t::tp_size]) for t in range(tp_size)]
        return max(
            all_reduce_seconds(self.table, self.cluster, tuple(dict.fromkeys(ranks)), num_bytes) for ranks in groups
        )

    # Bytes ----------------------------------------------------------------------------------------------------------

    def message_bytes(self, message: Message) -> int:
        source, target = message.source, message.target
        workload = self._workload(source.module)
        rows, width = workload.boundary(self.routes.stage(source).layers[1])
        if source.module == target.module:
            load = self.rank_load(source)
            return round((load.tokens if rows == "tokens" else load.outputs) * width * self.memory.activation_bytes)
        data_module = self.plan.modules[source.module].data_module(source.module)
        route = next(route for route in self.routes.outgoing[source] if route.target == target)
        num_tokens = sum(self.samples[i].num_outputs(data_module) for i in route.samples)
        return num_tokens * width * self.memory.activation_bytes

    def saved_bytes(self, cell: Cell, half: bool) -> int:
        stage, load = self.routes.stage(cell), self.rank_load(cell)
        workload = self._workload(cell.module)
        if half:
            return sum(
                half_saved_layer_bytes(
                    workload.layers[index],
                    load,
                    weight_gradient=gradients.weight_gradient,
                    tp_size=stage.tp_size,
                    options=self.memory,
                )
                for index, gradients in zip(range(*stage.layers), self.gradients(cell), strict=True)
            )
        rows, width = workload.boundary(stage.layers[0])
        has_input = bool(stage.layers[0]) and cell in self.routes.with_backward
        stage_input = (load.tokens if rows == "tokens" else load.outputs) * width if has_input else 0
        return round(stage_input * self.memory.activation_bytes) + sum(
            saved_layer_bytes(
                workload.layers[index],
                load,
                input_gradient=gradients.input_gradient,
                weight_gradient=gradients.weight_gradient,
                recompute=cell.module in self.plan.recompute,
                tp_size=stage.tp_size,
                options=self.memory,
                sequence_parallel=self.plan.modules[cell.module].sequence_parallel,
            )
            for index, gradients in zip(range(*stage.layers), self.gradients(cell), strict=True)
        )

    def static_bytes(self, rank: int) -> int:
        num_bytes = 0
        for name, _, _, stage in self.plan.stages_of_rank(rank):
            module, workload = self.plan.modules[name], self._workload(name)
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
        key = (cell.module, cell.replica, cell.microbatch)
        if key not in self._loads:
            self._loads[key] = microbatch_load(
                self._workload(cell.module),
                self.plan.modules[cell.module].data_module(cell.module),
                [self.samples[i] for i in self.routes.samples(cell)],
                self._sources[cell.module],
            )
        return self._loads[key]

    def rank_load(self, cell: Cell) -> Load:
        """Of one rank of the cell's stage."""
        return self.load(cell).share(self.routes.stage(cell).cp_size)

    def gradients(self, cell: Cell) -> tuple[LayerGradients, ...]:
        """For each layer of the cell's stage, what its backward computes."""
        if cell not in self._gradients:
            self._gradients[cell] = self._derive_gradients(cell)
        return self._gradients[cell]

    def _derive_gradients(self, cell: Cell) -> tuple[LayerGradients, ...]:
        module, (first, last) = self.plan.modules[cell.module], self.routes.stage(cell).layers
        if cell not in self.routes.with_backward:
            return self._patterns.setdefault(last - first, (LayerGradients(False, False),) * (last - first))
        entries: set[int] = set()
        for route in self.routes.incoming[cell]:
            if route.carries_gradient:
                source = route.source.module
                entries |= {first} if source == cell.module else self._entries(source, cell.module)
        key = (cell.module, first, last, frozenset(entries))
        if key not in self._patterns:
            result, reached = [], False
            for index in range(first, last):
                reached = reached or index in entries
                trainable = module.is_trainable((index, index + 1))
                result.append(LayerGradients(reached, trainable))
                reached = reached or trainable
            self._patterns[key] = tuple(result)
        return self._patterns[key]

    def _costs_of(self, cell: Cell) -> _StageCosts:
        stage, gradients = self.routes.stage(cell), self.gradients(cell)
        group = stage.ranks if stage.cp_size > 1 else stage.tp_size
        key = (cell.module, stage.layers, group, id(gradients))
        if key not in self._stage_costs:
            self._stage_costs[key] = self._sum_stage(cell.module, stage, gradients)
        return self._stage_costs[key]

    def _sum_stage(self, name: str, stage: Stage, gradients: Sequence[LayerGradients]) -> _StageCosts:
        costs = self.table.of(
            self._owner(name), stage.tp_size, sequence_parallel=self.plan.modules[name].sequence_parallel
        )
        workload = self._workload(name)
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
                input_half.append(exchange)
            if needs.input_gradient:
                input_half.append(layer.input_gradient)
                weight_half.append(layer.weight_gradient if needs.weight_gradient else ZERO)
            elif needs.weight_gradient:
                weight_half.append(layer.weight_gradient_alone)
        return _StageCosts(total(forward), total(input_half), total(weight_half))

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

    def _entries(self, source: str, target: str) -> set[int]:
        return {
            layer for edge in self.plan.edges if (edge.source, edge.target) == (source, target) for layer in edge.layers
        }

    def _owner(self, module: str) -> str:
        return self.plan.modules[module].data_module(module)

    def _workload(self, module: str) -> ModuleWorkload:
        return self.workloads[self._owner(module)]

    @cached_property
    def _sources(self) -> Mapping[str, tuple[str, ...]]:
        """For each module, whose outputs enter it; a copy brings what its owner brings."""
        return {
            name: tuple(dict.fromkeys(self._owner(edge.source) for edge in self.plan.edges if edge.target == name))
            for name in self.plan.modules
        }

    @cached_property
    def _reductions(self) -> Mapping[Reduce, tuple[Holder, ...]]:
        return reductions(self.plan)

    def _stage_of(self, holder: Holder) -> Stage:
        return self.plan.modules[holder.module].replicas[holder.replica].stages[holder.stage]

    def _reduced_bytes(self, reduce: Reduce, tp_size: int) -> int:
        workload = self._workload(reduce.module)
        if reduce.tied:
            embed = workload.layers[reduce.first]
            return embed.vocabulary * embed.hidden_size // tp_size * self.memory.parameter_bytes
        return self._num_trainable(reduce.module, (reduce.first, reduce.last), tp_size) * self.memory.parameter_bytes

    def _num_trainable(self, name: str, layers: LayerRange, tp_size: int) -> int:
        module, workload = self.plan.modules[name], self._workload(name)
        return sum(
            workload.layers[index].num_parameters_per_rank(tp_size)
            for index in range(*layers)
            if module.is_trainable((index, index + 1))
        )

    def _num_updated(self, rank: int) -> float:
        """Parameters that the rank's optimizer updates."""
        return sum(
            self._num_trainable(name, stage.layers, stage.tp_size)
            / (len(self.plan.modules[name].replicas) * stage.cp_size if self.memory.zero1 else 1)
            for name, _, _, stage in self.plan.stages_of_rank(rank)
        )
