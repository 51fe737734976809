"""The bytes that ranks hold in one iteration: what forwards save for backwards, and what is there all the time.

Saved: activations, by kind of cell and load (`motet.costs.cells`); of features that are recomputed, a stage's input
alone. Static: parameters, gradients, optimizer state and casts of weights, and what is gathered or made again for the
moment. What a single layer takes is `motet.costs.memory`'s; the buffers of messages are `motet.costs.iteration`'s.

Limits: the members of a context-parallel group are taken to hold equal shares. Of features that are recomputed, the
largest graph is counted for the whole iteration, though it is there for one backward at a time.
"""

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from motet.costs.cells import CellKind, Cells
from motet.costs.contrastive import loss_saved_bytes, loss_share
from motet.costs.layer_gradients import LayerGradients, gradients_of_plan
from motet.costs.load import Load
from motet.costs.memory import (
    MemoryOptions,
    cast_weight_bytes,
    gathered_bytes,
    half_saved_layer_bytes,
    saved_layer_bytes,
    static_layer_bytes,
)
from motet.plan import LayerRange, ModulePlan
from motet.ragged_arrays import Ints
from motet.schedule.routes import Cell
from motet.shapes.module_shape import LayerShape


class RankMemory:
    """Of the ranks of a plan. `saved_bytes` and `static_bytes` are as `motet.simulator.costs.Costs` has them."""

    def __init__(self, cells: Cells, options: MemoryOptions) -> None:
        self.cells, self.routes, self.plan, self.options = cells, cells.routes, cells.plan, options
        self._saved: dict[tuple[int, int], tuple[int, int]] = {}
        self._static: dict[tuple[str, LayerRange, int, int], int] = {}

    def saved_bytes(self, cell: Cell, half: bool) -> int:
        number = self.routes.number_of_cell[cell]
        return self._saved_sizes(int(self.cells.kind[number]), int(self.cells.load[number]))[half]

    def saved_sizes(self) -> Ints:
        """`saved_bytes` of each cell, in row 0 the whole and in row 1 the half."""
        cells = self.cells
        pairs, place = np.unique(np.stack([cells.kind, cells.load]), axis=1, return_inverse=True)
        sizes = [self._saved_sizes(kind, load) for kind, load in pairs.T.tolist()]
        return np.array(sizes, dtype=np.int64).reshape(-1, 2)[place.reshape(-1)].T

    def _saved_sizes(self, kind_number: int, load_number: int) -> tuple[int, int]:
        """The whole and the half."""
        key = (kind_number, load_number)
        if key not in self._saved:
            kind, load = self.cells.kinds[kind_number], self.cells.loads[load_number]
            if kind.is_loss:
                self._saved[key] = self._saved_loss(kind, load), 0
            elif kind.module in self.plan.recompute_features:
                self._saved[key] = self._saved_input(kind, load), self._saved_half(kind, load)
            else:
                self._saved[key] = self._saved_whole(kind, load), self._saved_half(kind, load)
        return self._saved[key]

    def _saved_loss(self, kind: CellKind, load: Load) -> int:
        workload = self.cells.workload(kind.module)
        share = loss_share(self.plan, kind.module, workload)
        return loss_saved_bytes(share, workload, load.tokens, self.options.activation_bytes)

    def _saved_input(self, kind: CellKind, load: Load) -> int:
        rows, width = self.cells.workload(kind.module).boundary(kind.stage.layers[0])
        has_input = bool(kind.stage.layers[0]) and any(needs.any for needs in kind.gradients)
        carried = load.share(kind.num_shares).tokens if rows == "tokens" else load.outputs
        stage_input = carried * width if has_input else 0
        return round(stage_input * self.options.activation_bytes)

    def _saved_whole(self, kind: CellKind, load: Load) -> int:
        module = self.plan.modules[kind.module]
        return self._saved_input(kind, load) + sum(
            count
            * saved_layer_bytes(
                layer,
                self._load_on_rank(kind, layer, load),
                input_gradient=needs.input_gradient,
                weight_gradient=needs.weight_gradient,
                recompute=kind.module in self.plan.recompute,
                tp_size=kind.stage.tp_size,
                options=self.options,
                sequence_parallel=module.sequence_parallel,
                fully_sharded=module.fully_sharded,
            )
            for layer, needs, count in kind.different
        )

    def _saved_half(self, kind: CellKind, load: Load) -> int:
        return sum(
            count
            * half_saved_layer_bytes(
                layer,
                self._load_on_rank(kind, layer, load),
                weight_gradient=needs.weight_gradient,
                tp_size=kind.stage.tp_size,
                options=self.options,
            )
            for layer, needs, count in kind.different
        )

    def _load_on_rank(self, kind: CellKind, layer: LayerShape, load: Load) -> Load:
        """What a rank of the stage computes of the layer."""
        return load.share(kind.num_shares) if self.cells.workload(kind.module).is_shared(layer) else load

    def static_bytes(self, rank: int) -> int:
        num_bytes = 0
        for name, _, _, stage in self.plan.stages_of_rank(rank):
            run = (name, stage.layers, stage.tp_size, stage.cp_size)
            if run not in self._static:
                self._static[run] = self._static_of_run(*run)
            num_bytes += self._static[run]
        return num_bytes + self._recomputed_bytes.get(rank, 0)

    @cached_property
    def _recomputed_bytes(self) -> Mapping[int, int]:
        """For each rank, the largest graph that a backward makes again there: it is all there at once."""
        result: dict[int, int] = {}
        for number in np.unique(np.stack([self.cells.kind, self.cells.load]), axis=1).T.tolist():
            kind, load = self.cells.kinds[number[0]], self.cells.loads[number[1]]
            if kind.module in self.plan.recompute_features:
                graph = self._saved_whole(kind, load)
                stages = [
                    s for s in self.routes.stages if (s.module, s.planned.layers) == (kind.module, kind.stage.layers)
                ]
                for rank in {rank for stage in stages for rank in stage.planned.ranks}:
                    result[rank] = max(result.get(rank, 0), graph)
        return result

    def _static_of_run(self, name: str, layers: LayerRange, tp_size: int, cp_size: int) -> int:
        module, workload = self.plan.modules[name], self.cells.workload(name)
        num_holders, num_shares = holders_and_shares(module, cp_size)
        static = sum(
            static_layer_bytes(
                workload.layers[index],
                trainable=module.is_trainable((index, index + 1)),
                tp_size=tp_size,
                num_holders=num_holders,
                options=self.options,
                num_shares=num_shares,
            )
            for index in range(*layers)
        )
        if not module.fully_sharded:
            static += sum(
                cast_weight_bytes(workload.layers[index], tp_size=tp_size, options=self.options)
                for index in range(*layers)
                if self._gradients[self.cells.owner(name)][index].any
            )
        of_stage = [(workload.layers[index], module.is_trainable((index, index + 1))) for index in range(*layers)]
        return static + gathered_bytes(of_stage, tp_size=tp_size, num_shares=num_shares, options=self.options)

    @cached_property
    def _gradients(self) -> Mapping[str, tuple[LayerGradients, ...]]:
        """When every modality is there."""
        return gradients_of_plan(self.plan)


def holders_and_shares(module: ModulePlan, cp_size: int) -> tuple[int, int]:
    """Ranks that hold the same of a module's stage, and those that keep a share each of what it holds."""
    num_replicas = len(module.replicas)
    return (num_replicas, cp_size) if module.fully_sharded else (num_replicas * cp_size, 1)
