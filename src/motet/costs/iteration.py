"""The costs of one iteration's actions and messages: plan, routes and samples bound to a cost table and a cluster.

Implements all protocols of `motet.simulator.costs`. Cells of one kind (`motet.costs.cells`) and one load cost the same,
so many are answered at once (`motet.costs.stage_seconds`). What ranks hold is `motet.costs.memory`'s.

Limits: the members of a tensor-parallel or context-parallel group are taken to be equally fast, the tokens and pairs of
a sequence to be divided equally over a context-parallel group.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import lcm

import numpy as np

from motet.assignment.sample import Sample
from motet.cluster import Cluster
from motet.costs.cells import CellKind, Cells
from motet.costs.communication import all_reduce_seconds, collective_seconds, message_link
from motet.costs.cost_model import CostTable, Quadratic
from motet.costs.layer_gradients import LayerGradients
from motet.costs.load import Load
from motet.costs.memory import DEFAULT_MEMORY, NUM_BUFFERS, MemoryOptions, RankMemory, holders_and_shares, usable_bytes
from motet.costs.stage_seconds import StageCosts, StageSeconds
from motet.plan import LayerRange, Stage
from motet.ragged_arrays import Floats, Ints
from motet.schedule.action import Compute, Kind, Reduce
from motet.schedule.dependencies import KINDS, Dependencies, Holder, reductions
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.lower import Message
from motet.schedule.routes import Cell, Routes
from motet.shapes.module_shape import ModuleWorkload


class IterationCosts:
    """Costs of one iteration.

    `workloads`: by module (copies are looked up by the module they copy). `sample_kinds`: `kinds_of_samples`, where it
    is known. Raises `ValueError` if the table has no costs for a module at the plan's tensor-parallel size.
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
        sample_kinds: Sequence[int] | None = None,
    ) -> None:
        self.routes, self.plan, self.samples = routes, routes.plan, samples
        self.workloads, self.table, self.cluster, self.memory = workloads, table, cluster, memory
        self.cells = Cells(routes, samples, workloads, cluster.node, sample_kinds)
        self._held = RankMemory(self.cells, memory)
        self._groups: dict[object, list[tuple[int, ...]]] = {}

    @cached_property
    def _stages(self) -> StageSeconds:
        return StageSeconds(self.cells, self.table, self.cluster, self.memory)

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
        return self._by_action(self._stages.exchanges).tolist()

    @cached_property
    def _seconds(self) -> Floats:
        return self._by_action(self._stages.seconds)

    def _by_action(self, costs_of: Callable[[CellKind], StageCosts]) -> Floats:
        """By kind of action (`KINDS`) and cell."""
        cells = self.cells
        terms = np.array(
            [
                [part.of_microbatch(kind.num_shares) for part in (c.forward, c.input_half, c.weight_half)]
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
        link = message_link(self.table, self.cluster, message.sender, message.receiver)
        return link.seconds(self.message_bytes(message))

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        """Latency and bytes per second of messages."""
        link = message_link(self.table, self.cluster, sender, receiver)
        return link.latency_s, link.bytes_per_s

    def reduce_s(self, reduce: Reduce) -> float:
        groups, num_bytes = self._shard_groups(reduce)
        return max(all_reduce_seconds(self.table, self.cluster, ranks, num_bytes) for ranks in groups)

    def gather_s(self, reduce: Reduce) -> float:
        """With ZeRO-1, each rank updates a share of the parameters, and all gather the new ones that they lack."""
        if not self.memory.zero1:
            return 0.0
        groups, num_bytes = self._shard_groups(reduce)
        return max(
            collective_seconds(self.cluster, "all_gather", ranks, num_bytes)
            * (len(ranks) - self.memory.num_keepers(len(ranks)))
            / max(1, len(ranks) - 1)
            for ranks in groups
        )

    def _shard_groups(self, reduce: Reduce) -> tuple[list[tuple[int, ...]], int]:
        """The ranks that hold a tensor-parallel shard (context-parallel ones do), and its size in bytes.

        Of the shards, those whose ranks lie differently on the nodes; the others' take as long as theirs."""
        holders = self._reductions[reduce]
        # Where holders differ: their common pieces. A rank sums several of them then, one after the other.
        tp_size = lcm(*(self._stage_of(holder).tp_size for holder in holders))
        key = (tp_size, tuple([holder.ranks for holder in holders]))
        if key not in self._groups:
            groups: dict[tuple[int, ...], tuple[int, ...]] = {}
            for t in range(tp_size):
                ranks = tuple(dict.fromkeys(rank for holder in holders for rank in self._holding(holder, t, tp_size)))
                groups.setdefault(tuple(sorted(Counter(map(self.cluster.node, ranks)).values())), ranks)
            self._groups[key] = list(groups.values())
        return self._groups[key], self._reduced_bytes(reduce, tp_size)

    def _holding(self, holder: Holder, piece: int, num_pieces: int) -> tuple[int, ...]:
        """The ranks of a holder that hold a piece."""
        tp_size = self._stage_of(holder).tp_size
        return holder.ranks[piece * tp_size // num_pieces :: tp_size]

    # Bytes ----------------------------------------------------------------------------------------------------------

    def message_bytes(self, message: Message) -> int:
        source, target = message.source, message.target
        if source.module == target.module:
            ends = self.routes.stage(source), self.routes.stage(target)
            shares = _shares_carried(*ends, gradient=message.gradient)
            return self._boundary_bytes(self.cells.kind_of(source), self.cells.load_of(source), shares)
        route = next(route for route in self.routes.outgoing[source] if route.target == target)
        return self._output_bytes(source.module, route.samples)

    def carried_sizes(self, dependencies: Dependencies) -> Ints:
        """`message_bytes` of each route's activation, then of its gradient."""
        assert dependencies.routes is self.routes
        return self._carried_bytes.reshape(-1)

    @cached_property
    def _carried_bytes(self) -> Ints:
        """[activation or gradient, route]"""
        routes, cells = self.routes, self.cells
        stages = [cells.kinds[kind] for kind in cells.kind[routes.route_source].tolist()]
        to_other = np.array([stage.module for stage in routes.stages])[routes.cell_stage]
        crosses = to_other[routes.route_source] != to_other[routes.route_target]
        sizes = np.zeros((2, routes.num_routes), dtype=np.int64)
        for i, (kind, load) in enumerate(zip(stages, cells.load[routes.route_source].tolist(), strict=True)):
            if crosses[i]:
                sizes[:, i] = self._output_bytes(kind.module, routes.route_samples(i))
            else:
                sizes[:, i] = self._boundary_bytes(kind, cells.loads[load], kind.stage.cp_size)
        cp_sizes = np.array([stage.planned.cp_size for stage in routes.stages])[routes.cell_stage]
        changes = ~crosses & (cp_sizes[routes.route_source] != cp_sizes[routes.route_target])
        for i in np.flatnonzero(changes).tolist():
            source, target = (
                routes.stages[routes.cell_stage[end[i]]].planned for end in (routes.route_source, routes.route_target)
            )
            load = cells.loads[cells.load[routes.route_source[i]]]
            for back in (0, 1):
                shares = _shares_carried(source, target, gradient=bool(back))
                sizes[back, i] = self._boundary_bytes(stages[i], load, shares)
        return sizes

    def _boundary_bytes(self, kind: CellKind, load: Load, num_shares: int) -> int:
        """What a message from the stage to the next one of its module carries, of so many shares of the tokens one."""
        rows, width = self.cells.workload(kind.module).boundary(kind.stage.layers[1])
        # What an encoder's head has made is whole on all ranks.
        carried = load.share(num_shares).tokens if rows == "tokens" else load.outputs
        return round(carried * width * self.memory.activation_bytes)

    def _output_bytes(self, module: str, samples: Sequence[int]) -> int:
        """What a module hands on of these samples to another module."""
        workload = self.cells.workload(module)
        _, width = workload.boundary(workload.num_layers)
        outputs = self.cells.num_outputs(module)
        return sum([outputs[i] for i in samples]) * width * self.memory.activation_bytes

    def saved_bytes(self, cell: Cell, half: bool) -> int:
        return self._held.saved_bytes(cell, half)

    def saved_sizes(self, dependencies: Dependencies) -> Ints:
        assert dependencies.routes is self.routes
        return self._held.saved_sizes()

    def static_bytes(self, rank: int) -> int:
        return self._held.static_bytes(rank)

    def memory_limit(self) -> MemoryLimit:
        """What parameters, all that is static and the buffers of messages leave for activations on a device."""
        return self._memory_limit

    @cached_property
    def _memory_limit(self) -> MemoryLimit:
        buffers = NUM_BUFFERS * int(self._carried_bytes.max(initial=0))
        usable = int(usable_bytes(self.cluster)) - buffers
        return MemoryLimit(
            saved_bytes=lambda cell: self.saved_bytes(cell, half=False),
            limit_bytes=lambda rank: usable - self.static_bytes(rank),
            half_saved_bytes=lambda cell: self.saved_bytes(cell, half=True),
        )

    # What they are derived from --------------------------------------------------------------------------------------

    def load(self, cell: Cell) -> Load:
        """The same for all stages of a module's replica."""
        return self.cells.load_of(cell)

    def gradients(self, cell: Cell) -> tuple[LayerGradients, ...]:
        """For each layer of the cell's stage, what its backward computes."""
        return self.cells.kind_of(cell).gradients

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
            num_holders, num_shares = holders_and_shares(self.plan.modules[name], stage.cp_size)
            share = self.memory.num_keepers(num_holders) / (num_holders * num_shares)
            for rank in stage.ranks:
                result[rank] += num_trainable[run] * share
        return result


def _shares_carried(source: Stage, target: Stage, *, gradient: bool) -> int:
    """Of how many shares of the tokens a message between stages of a module carries one. Where the two share them out
    otherwise, gradients go back whole."""
    return 1 if gradient and source.cp_size != target.cp_size else target.cp_size
