"""Costs of one iteration's actions, messages and reductions, and the bytes that ranks hold: a plan's routes and samples
bound to a cost table and a cluster.

`IterationCosts` implements all protocols of `motet.simulator.costs`. Cells of one kind (`motet.costs.cells`) and one
load cost the same, so many are answered at once (`motet.costs.stage_seconds`).

Limits: the members of a tensor-parallel or context-parallel group are taken to be equally fast and to hold equal shares
of the tokens and pairs of each sequence. Of recomputed features, the largest graph is counted for the whole iteration,
though it exists only during one backward at a time.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import lcm
from typing import Protocol

import numpy as np

from motet.assignment.sample import Sample
from motet.cluster import Cluster
from motet.costs.cells import CellKind, Cells, LayerGradients, gradients_of_plan
from motet.costs.communication import all_reduce_seconds, collective_seconds, message_link, with_measured_links
from motet.costs.cost_model import CostTable, Load, Quadratic
from motet.costs.memory import (
    DEFAULT_MEMORY,
    NUM_BUFFERS,
    MemoryOptions,
    StaticBytes,
    boundary_bytes,
    gathered_bytes,
    half_saved_layer_bytes,
    logit_bytes,
    rounded,
    saved_layer_bytes,
    static_layer_bytes,
    usable_bytes,
)
from motet.costs.stage_seconds import StageCosts, StageSeconds, loss_saved_bytes, loss_share, parameter_gather
from motet.plan import LayerRange, ModulePlan, Stage, expert_groups
from motet.ragged_arrays import Floats, Ints
from motet.schedule.action import Compute, Kind, Reduce
from motet.schedule.dependencies import KINDS, Dependencies, Holder, reductions
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.lower import Message, is_resharded, row_shares
from motet.schedule.routes import Cell, Routes, replicas_together
from motet.shapes.module_shape import LayerShape, ModuleWorkload


def holders_and_shares(module: ModulePlan, cp_size: int) -> tuple[int, int]:
    """Number of ranks that hold the same part of a module, and number of ranks that share it (fully sharded)."""
    num_ranks, num_shares = len(module.replicas) * cp_size, cp_size * module.sharded_replicas
    return (num_ranks // num_shares, num_shares) if module.fully_sharded else (num_ranks, 1)


_Run = tuple[str, LayerRange, int, int, bool]
"""A stage's module, layers, tp_size, cp_size, and whether it gathers parameters block by block."""


class _Place(Protocol):
    """A cell or a stage."""

    @property
    def module(self) -> str: ...

    @property
    def replica(self) -> int: ...


class IterationCosts:
    """Costs of one iteration.

    `workloads`: by module (copies are looked up by the module they copy). `sample_kinds`: `kinds_of_samples`, if known.
    `replica_of`: where equal pipelines are simulated once, the replica that stands for each.
    Raises `UserError` if the table has no costs for a module at the plan's tensor-parallel size.
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
        replica_of: Mapping[tuple[str, int], tuple[str, int]] | None = None,
    ) -> None:
        self.routes, self.plan, self.samples = routes, routes.plan, samples
        self.workloads, self.table, self.cluster = workloads, table, with_measured_links(cluster, table)
        self.memory = replace(memory, zero1=True) if routes.plan.zero1 else memory
        self.cells = Cells(routes, samples, workloads, cluster.node, sample_kinds, replica_of)
        self._saved: dict[tuple[int, int], tuple[int, int]] = {}
        self._saved_of_layer: dict[tuple[object, ...], tuple[Ints | int, Ints | int]] = {}
        """By the layer's identity, as layers of equal shape are one object."""
        self._static: dict[tuple[_Run, ...], dict[str, int]] = {}
        self._groups: dict[object, list[tuple[int, ...]]] = {}

    @cached_property
    def _stages(self) -> StageSeconds:
        return StageSeconds(self.cells, self.table, self.cluster, self.memory)

    # Seconds --------------------------------------------------------------------------------------------------------

    @cached_property
    def fixed_s(self) -> float:
        """The optimizer's step of the rank that updates most, and the gathers and sums of parameters that replicas
        share and gather once."""
        optimizer_s = self.table.optimizer_constant_s + self.table.optimizer_s_per_parameter * max(
            self._num_updated().values()
        )
        return optimizer_s + max(self._gathered_once_s().values(), default=0.0)

    def _gathered_once_s(self) -> dict[int, float]:
        """By rank: seconds of gathers before, and sums after, all actions of an iteration."""
        result: dict[int, float] = defaultdict(float)
        known: dict[object, float] = {}
        for name, r, s, stage in self.plan.stages():
            module = self.plan.modules[name]
            by_block = self.cells.gathers_by_block(name, s)
            if not module.shares_over_replicas or (by_block and not module.whole_parameters):
                continue
            ranks = module.sharing_groups(r, s)[0]
            for index in range(*stage.layers):
                layer = self.cells.workload(name).layers[index]
                trains = module.is_trainable((index, index + 1)) and not by_block
                # Most layers are alike.
                key = id(layer), stage.tp_size, ranks, trains
                if key not in known:
                    known[key] = sum(
                        parameter_gather(
                            layer, stage.tp_size, ranks, self.cluster, self.memory, of_gradients=of_gradients
                        ).constant
                        for of_gradients in ((False, True) if trains else (False,))
                    )
                for rank in stage.ranks:
                    result[rank] += known[key]
        return result

    def compute_s(self, action: Compute) -> float:
        return self._seconds_of[KINDS.index(action.kind)][self.routes.number_of_cell[action.cell]]

    def compute_seconds(self, dependencies: Dependencies) -> Floats:
        assert dependencies.routes is self.routes
        return self._seconds.reshape(-1)

    def group_communication_s(self, action: Compute) -> float:
        """The part of `compute_s` in which the stage's ranks exchange tensors, computed from the links."""
        number = self.routes.number_of_cell[action.cell]
        # What is wholly hidden may be a rounding error below zero.
        return max(0.0, min(self._exchanging[KINDS.index(action.kind)][number], self.compute_s(action)))

    @cached_property
    def _exchanging(self) -> list[list[float]]:
        return self._by_action(self._stages.exchanges).tolist()

    @cached_property
    def _seconds(self) -> Floats:
        return self._by_action(self._stages.seconds)

    def _by_action(self, costs_of: Callable[[CellKind], StageCosts]) -> Floats:
        """Returns costs by kind of action (`KINDS`) and cell, without the communication that computation hides."""
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
        for number, kind in enumerate(cells.kinds):
            overlaps = self._stages.overlaps(kind)
            own = np.flatnonzero(cells.kind == number) if any(overlaps) else ()
            for action, of_action in zip((Kind.FORWARD, Kind.BACKWARD, Kind.INPUT), overlaps, strict=True):
                for overlap, count in of_action.items():
                    both = np.array([part.of_microbatch(kind.num_shares) for part in overlap])
                    by_kind[action][own] -= count * (both @ sums[cells.load[own]].T).min(axis=0)
        forward[self.routes.cell_ran_before] = 0.0  # Of `by_kind`, too.
        return np.stack([self._longest_together(by_kind[kind]) for kind in KINDS])

    def _longest_together(self, seconds: Floats) -> Floats:
        """Cells of replicas that share experts take as long as the longest of those that meet."""
        for name, module in self.plan.modules.items():
            for together in replicas_together(module):
                for s in range(len(module.replicas[0].stages)):
                    runs = [stage for stage in self.routes.stages if stage[:3] in {(name, r, s) for r in together}]
                    if len(runs) > 1:
                        longest = np.max([seconds[run.first : run.last] for run in runs], axis=0)
                        for run in runs:
                            seconds[run.first : run.last] = longest
        return seconds

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
        of_experts = 0.0
        if (num_expert_bytes := self._expert_bytes(reduce)) > 0:
            num_bytes -= num_expert_bytes
            of_experts = max(
                all_reduce_seconds(self.table, self.cluster, ranks, num_expert_bytes)
                for ranks in self._expert_holders(reduce)
            )
        return of_experts + max(all_reduce_seconds(self.table, self.cluster, ranks, num_bytes) for ranks in groups)

    def _expert_bytes(self, reduce: Reduce) -> int:
        """Bytes of a rank's experts of these layers, if replicas share the experts."""
        module = self.plan.modules[reduce.module]
        if reduce.tied or module.replicas_sharing_experts == 1:
            return 0
        layers = self.cells.workload(reduce.module).layers
        trainable = [i for i in range(reduce.first, reduce.last) if module.is_trainable((i, i + 1))]
        return sum(layers[i].num_expert_weights // module.ep for i in trainable) * self.memory.summed_bytes

    def _expert_holders(self, reduce: Reduce) -> list[tuple[int, ...]]:
        """The ranks that hold the same experts; groups that are placed alike on the nodes occur once."""
        module = self.plan.modules[reduce.module]
        stage = next(s for s in module.replicas[0].stages if s.layers[0] <= reduce.first < s.layers[1])
        alike: dict[object, tuple[int, ...]] = {}
        for ranks in zip(*map(sorted, expert_groups(module, stage.layers)), strict=True):
            alike.setdefault(tuple(sorted(Counter(map(self.cluster.node, ranks)).values())), ranks)
        return list(alike.values())

    def gather_s(self, reduce: Reduce) -> float:
        """The gather of new parameters after the optimizer step of ZeRO-1, where each rank updates a share of them."""
        if not self.memory.zero1:
            return 0.0
        groups, num_bytes = self._shard_groups(reduce)
        num_bytes = num_bytes * self.memory.parameter_bytes // self.memory.summed_bytes
        return max(
            collective_seconds(self.cluster, "all_gather", ranks, num_bytes)
            * (len(ranks) - self.memory.num_keepers(len(ranks)))
            / max(1, len(ranks) - 1)
            for ranks in groups
        )

    def _shard_groups(self, reduce: Reduce) -> tuple[list[tuple[int, ...]], int]:
        """For each tensor-parallel shard, the ranks that hold it (context-parallel ranks included), and its bytes.

        Shards whose ranks are placed alike on the nodes take equally long, so each placement occurs once."""
        holders = self._reductions[reduce]
        # If holders have different sizes, their common pieces are reduced. A rank then reduces several in turn.
        tp_size = lcm(*(self._stage_of(holder).tp_size for holder in holders))
        key = (tp_size, tuple([holder.ranks for holder in holders]))
        if key not in self._groups:
            groups: dict[tuple[int, ...], tuple[int, ...]] = {}
            for t in range(tp_size):
                ranks = tuple(dict.fromkeys(rank for holder in holders for rank in self._holding(holder, t, tp_size)))
                if self.plan.modules[reduce.module].shares_over_replicas:
                    ranks = self._holding_alike(holders, ranks)
                groups.setdefault(tuple(sorted(Counter(map(self.cluster.node, ranks)).values())), ranks)
            self._groups[key] = list(groups.values())
        return self._groups[key], self._reduced_bytes(reduce, tp_size)

    def _holding_alike(self, holders: Sequence[Holder], ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the ranks that keep the same rows as the first one, of those that share parameters over replicas."""
        groups = [
            group
            for holder in holders
            for group in self.plan.modules[holder.module].sharing_groups(holder.replica, holder.stage)
        ]
        place = next(group.index(ranks[0]) for group in groups if ranks[0] in group)
        return tuple(sorted({group[place] for group in groups if group[place] in ranks}))

    def _holding(self, holder: Holder, piece: int, num_pieces: int) -> tuple[int, ...]:
        """The ranks of a holder that hold a piece."""
        tp_size = self._stage_of(holder).tp_size
        return holder.ranks[piece * tp_size // num_pieces :: tp_size]

    # Bytes ----------------------------------------------------------------------------------------------------------

    def message_bytes(self, message: Message) -> int:
        source, target = message.source, message.target
        begin, end = self.routes.stage(source), self.routes.stage(target)
        route = next(route for route in self.routes.outgoing[source] if route.target == target)
        sizes = self._route_bytes(source, begin, target, end, self.cells.load_of(source), route.samples)
        return sizes[message.gradient]

    def carried_sizes(self, dependencies: Dependencies) -> Ints:
        """`message_bytes` of each route's activation, then of its gradient."""
        assert dependencies.routes is self.routes
        return self._carried_bytes.reshape(-1)

    @cached_property
    def _carried_bytes(self) -> Ints:
        """[activation or gradient, route]"""
        routes, cells = self.routes, self.cells
        sizes = np.zeros((2, routes.num_routes), dtype=np.int64)
        known: dict[object, tuple[int, int]] = {}
        loads = cells.load[routes.route_source].tolist()
        ends = (routes.cell_stage[routes.route_source].tolist(), routes.cell_stage[routes.route_target].tolist())
        for i, (load, source, target) in enumerate(zip(loads, *ends, strict=True)):
            begin, end = routes.stages[source], routes.stages[target]
            samples = routes.route_samples(i) if begin.module != end.module else ()
            key = source, target, load, tuple(samples)
            if key not in known:
                known[key] = self._route_bytes(begin, begin.planned, end, end.planned, cells.loads[load], samples)
            sizes[:, i] = known[key]
        return sizes

    def _route_bytes(
        self, source: _Place, begin: Stage, target: _Place, end: Stage, load: Load, samples: Sequence[int]
    ) -> tuple[int, int]:
        """A message of what a route carries, and one of its gradient, as each receiver gets it."""
        same_module = source.module == target.module
        forward, gradient = (
            self._boundary_bytes(source, begin, end, load, num_row_shares)
            if same_module
            else self._output_bytes(source.module, target.module, samples, num_row_shares)
            for num_row_shares in (
                row_shares(begin, end, gradient=is_gradient, same_module=same_module) for is_gradient in (False, True)
            )
        )
        return forward, gradient

    def _boundary_bytes(self, place: _Place, source: Stage, target: Stage, load: Load, num_row_shares: int) -> int:
        """A message from the stage to the next one of its module.

        Between groups of unequal size each place sends a piece to each place. Pieces are taken to be equal; of what all
        members hold, one place in turn sends the whole."""
        workload, border = self.cells.arranged(place.module, place.replica), source.layers[1]
        resharded = is_resharded(source, target)
        num_shares = source.cp_size * target.cp_size if resharded else target.cp_size
        num_bytes = boundary_bytes(
            workload,
            border,
            load,
            self.memory.activation_bytes,
            num_shares=num_shares,
            num_row_shares=num_row_shares,
        )
        return round(
            num_bytes / source.cp_size if resharded and workload.boundary(border)[0] != "tokens" else num_bytes
        )

    def _output_bytes(self, module: str, target: str, samples: Sequence[int], num_row_shares: int) -> int:
        """A module's output for these samples, as far as another module receives it."""
        workload = self.cells.workload(module)
        _, width = workload.boundary(workload.num_layers)
        outputs = self.cells.num_outputs(module, target)
        return -(-sum([outputs[i] for i in samples]) // num_row_shares) * width * self.memory.activation_bytes

    def saved_bytes(self, cell: Cell, half: bool) -> int:
        number = self.routes.number_of_cell[cell]
        if self.routes.cell_is_kept[number] or self.routes.cell_ran_before[number]:
            return self._kept_bytes(cell)
        return self._saved_sizes(int(self.cells.kind[number]), int(self.cells.load[number]))[half]

    def _kept_bytes(self, cell: Cell) -> int:
        """Bytes of a cell's output on each rank of its stage, which the next iteration hands on."""
        stage, workload = self.routes.stage(cell), self.cells.arranged(cell.module, cell.replica)
        load, element_bytes = self.cells.load_of(cell), self.memory.activation_bytes
        return round(boundary_bytes(workload, stage.layers[1], load, element_bytes, num_shares=stage.cp_size))

    def saved_sizes(self, dependencies: Dependencies) -> Ints:
        assert dependencies.routes is self.routes
        cells = self.cells
        pairs, place = np.unique(np.stack([cells.kind, cells.load]), axis=1, return_inverse=True)
        sizes = [self._saved_sizes(kind, load) for kind, load in pairs.T.tolist()]
        return np.array(sizes, dtype=np.int64).reshape(-1, 2)[place.reshape(-1)].T

    def _saved_sizes(self, kind_number: int, load_number: int) -> tuple[int, int]:
        """Bytes that the forward saves, and the input half of a backward."""
        key = (kind_number, load_number)
        if key not in self._saved:
            # Of all microbatches at once.
            kind, numbers = self.cells.kinds[kind_number], np.unique(self.cells.load[self.cells.kind == kind_number])
            whole, half = self._saved_of_kind(kind, numbers)
            for number, *sizes in zip(numbers.tolist(), whole.tolist(), half.tolist(), strict=True):
                self._saved[kind_number, number] = sizes[0], sizes[1]
        return self._saved[key]

    def _saved_of_kind(self, kind: CellKind, numbers: Ints) -> tuple[Ints, Ints]:
        """`numbers`: of loads."""
        if kind.is_loss:
            return self._saved_loss(kind, numbers), np.zeros(len(numbers), dtype=np.int64)
        if kind.module in self.plan.recompute_features:
            return self._saved_input(kind, numbers), self._saved_half(kind, numbers)
        return self._saved_whole(kind, numbers), self._saved_half(kind, numbers)

    def _loads(self, numbers: Ints) -> Load:
        """Several loads as one, with an array in each field."""
        return Load(*np.array([self.cells.loads[number] for number in numbers.tolist()], dtype=float).T)

    def _saved_loss(self, kind: CellKind, numbers: Ints) -> Ints:
        workload = self.cells.workload(kind.module)
        share = loss_share(self.plan, kind.module, workload)
        loads = (self.cells.loads[number] for number in numbers.tolist())
        sizes = [loss_saved_bytes(share, workload, load.tokens, self.memory.activation_bytes) for load in loads]
        return np.array(sizes, dtype=np.int64)

    def _saved_input(self, kind: CellKind, numbers: Ints) -> Ints:
        workload, border = self.cells.workload(kind.module), kind.stage.layers[0]
        if not border or not any(needs.any for needs in kind.gradients):
            return np.zeros(len(numbers), dtype=np.int64)
        element_bytes = self.memory.activation_bytes
        received = boundary_bytes(workload, border, self._loads(numbers), element_bytes, num_shares=kind.num_shares)
        sizes: Ints = rounded(received)
        return sizes

    def _saved_whole(self, kind: CellKind, numbers: Ints) -> Ints:
        module = self.plan.modules[kind.module]
        workload = self.cells.workload(kind.module)
        # The first layer's norm, or a recomputed block, saves the tensor that the stage receives, unless it gathers it.
        first = workload.layers[kind.stage.layers[0]]
        gathers = first.part == "head" and kind.stage.cp_size > 1 and not workload.is_shared(first)
        gathers = gathers or module.sequence_parallel or first.treatment == "offloaded"
        is_counted = first.saved_vectors > 0 and not gathers and not workload.num_time_vectors
        sizes = self._saved_input(kind, numbers) * (not is_counted)
        for layer, needs, count in kind.different:
            sizes = sizes + count * self._saved_by_layer(kind, layer, needs, numbers)[0]
        return sizes

    def _saved_half(self, kind: CellKind, numbers: Ints) -> Ints:
        sizes: Ints = np.zeros(len(numbers), dtype=np.int64)
        for layer, needs, count in kind.different:
            sizes = sizes + count * self._saved_by_layer(kind, layer, needs, numbers)[1]
        return sizes

    def _saved_by_layer(
        self, kind: CellKind, layer: LayerShape, needs: LayerGradients, numbers: Ints
    ) -> tuple[Ints | int, Ints | int]:
        """Bytes that a layer saves in its forward, and in the input half of its backward, for each of the loads."""
        tp_size, sequence_parallel = kind.stage.tp_size, self.plan.modules[kind.module].sequence_parallel
        num_shares = kind.num_shares if self.cells.workload(kind.module).is_shared(layer) else 1
        key = id(layer), needs, numbers.tobytes(), num_shares, tp_size, sequence_parallel
        if key not in self._saved_of_layer:
            own = self._load_on_rank(kind, layer, self._loads(numbers))
            whole = saved_layer_bytes(
                layer,
                own,
                input_gradient=needs.input_gradient,
                weight_gradient=needs.weight_gradient,
                tp_size=tp_size,
                options=self.memory,
                sequence_parallel=sequence_parallel,
            )
            half = half_saved_layer_bytes(
                layer, own, weight_gradient=needs.weight_gradient, tp_size=tp_size, options=self.memory
            )
            self._saved_of_layer[key] = whole, half
        return self._saved_of_layer[key]

    def _load_on_rank(self, kind: CellKind, layer: LayerShape, load: Load) -> Load:
        """The part of the layer that each rank of the stage computes."""
        return load.share(kind.num_shares) if self.cells.workload(kind.module).is_shared(layer) else load

    def static_bytes(self, rank: int) -> int:
        return sum(self.static_by_kind(rank).values())

    def static_by_kind(self, rank: int) -> dict[str, int]:
        """`static_bytes` by kind: `weights`, `gradients`, `moments` (and masters), `gathered` (other ranks'
        parameters and gradients while a fully sharded stage computes), `recomputed` (the largest graph that a backward
        of recomputed features makes)."""
        runs = tuple(
            [
                (name, stage.layers, stage.tp_size, stage.cp_size, self.cells.gathers_by_block(name, s))
                for name, _, s, stage in self.plan.stages_of_rank(rank)
            ]
        )
        if runs not in self._static:
            static, gathered = StaticBytes(), 0
            for run in runs:
                own, of_others = self._static_of_run(*run)
                static, gathered = static.plus(own), gathered + of_others
            self._static[runs] = {**static._asdict(), "gathered": gathered}
        return {**self._static[runs], "recomputed": self._recomputed_bytes.get(rank, 0)}

    def saved_logits(self, dependencies: Dependencies) -> Ints:
        """The part of `saved_sizes` that is what a loss keeps of its logits."""
        assert dependencies.routes is self.routes
        cells = self.cells
        pairs, place = np.unique(np.stack([cells.kind, cells.load]), axis=1, return_inverse=True)
        sizes = [(self._logits(cells.kinds[kind], cells.loads[load]), 0) for kind, load in pairs.T.tolist()]
        return np.array(sizes, dtype=np.int64).reshape(-1, 2)[place.reshape(-1)].T

    def _logits(self, kind: CellKind, load: Load) -> int:
        if kind.is_loss or kind.module in self.plan.recompute_features:
            return 0
        return sum(
            count
            * logit_bytes(layer, self._load_on_rank(kind, layer, load), tp_size=kind.stage.tp_size, options=self.memory)
            for layer, needs, count in kind.different
            if needs.any
        )

    @cached_property
    def _recomputed_bytes(self) -> Mapping[int, int]:
        """For each rank, the largest graph that a backward recomputes there as a whole."""
        result: dict[int, int] = {}
        for number in np.unique(np.stack([self.cells.kind, self.cells.load]), axis=1).T.tolist():
            kind = self.cells.kinds[number[0]]
            if kind.module in self.plan.recompute_features:
                graph = int(self._saved_whole(kind, np.array(number[1:]))[0])
                stages = [
                    s for s in self.routes.stages if (s.module, s.planned.layers) == (kind.module, kind.stage.layers)
                ]
                for rank in {rank for stage in stages for rank in stage.planned.ranks}:
                    result[rank] = max(result.get(rank, 0), graph)
        return result

    def _static_of_run(
        self, name: str, layers: LayerRange, tp_size: int, cp_size: int, by_block: bool
    ) -> tuple[StaticBytes, int]:
        """What a stage of these layers holds, and what it gathers."""
        module, workload = self.plan.modules[name], self.cells.workload(name)
        num_holders, num_shares = holders_and_shares(module, cp_size)
        options = self.memory.of(workload)
        static = StaticBytes()
        for index in range(*layers):
            of_layer = static_layer_bytes(
                workload.layers[index],
                trainable=module.is_trainable((index, index + 1)),
                tp_size=tp_size,
                num_holders=num_holders,
                options=options,
                num_shares=num_shares,
                ep=module.ep,
            )
            static = static.plus(of_layer)
        of_stage = [(workload.layers[index], module.is_trainable((index, index + 1))) for index in range(*layers)]
        gathered = gathered_bytes(
            of_stage,
            tp_size=tp_size,
            num_shares=num_shares,
            options=self.memory,
            by_rows=module.shares_over_replicas,
            by_block=by_block,
            whole_parameters=module.whole_parameters,
        )
        return static, gathered

    @cached_property
    def _gradients(self) -> Mapping[str, tuple[LayerGradients, ...]]:
        """The gradients that layers compute when every modality is present."""
        return gradients_of_plan(self.plan)

    def memory_limit(self) -> MemoryLimit:
        """Memory for activations: what static bytes and the buffers of messages leave free."""
        return self._memory_limit

    @cached_property
    def _kept_on_ranks(self) -> Mapping[int, int]:
        """By rank, bytes of what encoders have kept for this iteration, or keep for the next one if that is more."""
        result: dict[int, int] = {}
        for cells in (self.routes.ran_before, self.routes.kept):
            held: dict[int, int] = defaultdict(int)
            for cell in cells:
                for rank in self.routes.stage(cell).ranks:
                    held[rank] += self._kept_bytes(cell)
            result = {rank: max(held[rank], result.get(rank, 0)) for rank in held.keys() | result.keys()}
        return result

    @cached_property
    def _memory_limit(self) -> MemoryLimit:
        buffers = NUM_BUFFERS * int(self._carried_bytes.max(initial=0))
        usable = int(usable_bytes(self.cluster)) - buffers
        return MemoryLimit(
            saved_bytes=lambda cell: self.saved_bytes(cell, half=False),
            limit_bytes=lambda rank: usable - self.static_bytes(rank) - self._kept_on_ranks.get(rank, 0),
            half_saved_bytes=lambda cell: self.saved_bytes(cell, half=True),
        )

    # Loads, gradients and reductions ---------------------------------------------------------------------------------

    def load(self, cell: Cell) -> Load:
        """The load of the cell's microbatch, the same for all stages of a module's replica."""
        return self.cells.load_of(cell)

    def gradients(self, cell: Cell) -> tuple[LayerGradients, ...]:
        """The gradients that each layer of the cell's stage computes."""
        return self.cells.kind_of(cell).gradients

    @cached_property
    def _reductions(self) -> Mapping[Reduce, tuple[Holder, ...]]:
        return reductions(self.plan)

    def _stage_of(self, holder: Holder) -> Stage:
        return self.plan.modules[holder.module].replicas[holder.replica].stages[holder.stage]

    def _reduced_bytes(self, reduce: Reduce, tp_size: int) -> int:
        module, cp_size = self.plan.modules[reduce.module], self._stage_of(self._reductions[reduce][0]).cp_size
        if module.shares_over_replicas:
            return self._bytes_of_gradients(reduce, tp_size) // holders_and_shares(module, cp_size)[1]
        return self._bytes_of_gradients(reduce, tp_size)

    def _bytes_of_gradients(self, reduce: Reduce, tp_size: int) -> int:
        workload = self.cells.workload(reduce.module)
        if reduce.tied:
            embed = workload.layers[reduce.first]
            return embed.vocabulary * embed.hidden_size // tp_size * self.memory.summed_bytes
        return self._num_trainable(reduce.module, (reduce.first, reduce.last), tp_size) * self.memory.summed_bytes

    def _num_trainable(self, name: str, layers: LayerRange, tp_size: int) -> int:
        module, workload = self.plan.modules[name], self.cells.workload(name)
        return sum(
            workload.layers[index].num_trained_per_rank(tp_size, module.ep)
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
