"""The cells of an iteration: the gradients that each layer computes, and the load of each microbatch.

The frozen rule decides over the whole graph of modules: a layer needs an input gradient if something trainable lies
strictly before it, which is an earlier layer of the module or anything in a module whose output has entered by then
(thesis 3.3.1, eq. 3.2 and 3.3). In a plan it is applied to each cell, because a microbatch may lack a modality.

Cells of equal `CellKind` and equal load cost the same. Both are numbered, as there are few of either.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from motet.assignment.sample import Sample, kinds_of_samples
from motet.costs.analytic import layer_flops
from motet.costs.cost_model import WHOLE, LayerCost, Load, Quadratic, microbatch_load, total
from motet.costs.recomputed import recomputed_share
from motet.plan import Edge, LayerRange, Plan, Stage
from motet.ragged_arrays import Floats, Ints
from motet.recomputation import of_module
from motet.schedule.routes import Cell, Routes
from motet.schedule.shared_gathers import gathers_by_block
from motet.shapes.module_shape import LayerShape, ModuleWorkload


@dataclass(frozen=True, slots=True)
class LayerGradients:
    """The gradients that a layer computes for a microbatch."""

    input_gradient: bool
    weight_gradient: bool

    @property
    def any(self) -> bool:
        return self.input_gradient or self.weight_gradient


def gradients_of_modules(
    trainable: Mapping[str, Sequence[bool]], edges: Sequence[Edge]
) -> dict[str, tuple[LayerGradients, ...]]:
    """The gradients of all layers when every modality is present. `trainable`: by module and layer."""
    result: dict[str, tuple[LayerGradients, ...]] = {}
    remaining = list(trainable)
    while remaining:
        name = next(m for m in remaining if not any(e.target == m and e.source in remaining for e in edges))
        remaining.remove(name)
        bringing = {source for source in result if any(needs.any for needs in result[source])}
        result[name] = gradients_of_layers(trainable[name], entries_of(name, bringing, edges))
    return result


def entries_of(name: str, bringing: Set[str], edges: Sequence[Edge]) -> set[int]:
    """The layers of a module at which a source enters that needs a gradient. `bringing`: these sources."""
    return {layer for edge in edges if edge.target == name and edge.source in bringing for layer in edge.layers}


def gradients_of_layers(trainable: Sequence[bool], entries: Set[int]) -> tuple[LayerGradients, ...]:
    """The gradients of one module's layers. `entries`: layers at which something enters that needs a gradient."""
    layers, reached = [], False
    for layer, own in enumerate(trainable):
        reached = reached or layer in entries
        layers.append(LayerGradients(reached, own))
        reached = reached or own
    return tuple(layers)


def gradients_of_plan(plan: Plan) -> dict[str, tuple[LayerGradients, ...]]:
    """The gradients of all modules but copies; an edge from a copy counts as one from its original."""
    owners = {name: module for name, module in plan.modules.items() if module.copy_of is None}
    trainable = {
        name: [module.is_trainable((layer, layer + 1)) for layer in range(module.num_layers)]
        for name, module in owners.items()
    }
    edges = [
        Edge(source=plan.modules[edge.source].data_module(edge.source), target=edge.target, layers=edge.layers)
        for edge in plan.edges
        if edge.target in owners
    ]
    return gradients_of_modules(trainable, edges)


class CellKind(NamedTuple):
    """A class of cells that cost the same under the same load."""

    module: str
    stage: Stage
    """One of the stages of equal cost."""
    gradients: tuple[LayerGradients, ...]
    """The gradients that a backward computes in each layer of the stage."""
    different: tuple[tuple[LayerShape, LayerGradients, int], ...]
    """The stage's distinct pairs of layer and gradients, and the number of each."""

    @property
    def is_loss(self) -> bool:
        """A contrastive loss, whose costs depend on its members."""
        return self.different[0][0].part == "loss"

    @property
    def num_shares(self) -> int:
        """Number of ranks that share a microbatch's load. The costs of a loss are a member's for the whole load."""
        return 1 if self.is_loss else self.stage.cp_size


class Cells:
    """By number of the cell (`Routes.cells`).

    `workloads`: by module (copies are looked up by the module they copy). `node`: on which a rank is."""

    kind: Ints
    """For each cell, its kind as an index into `kinds`."""
    load: Ints
    """For each cell, its microbatch's load as an index into `loads`."""

    def __init__(
        self,
        routes: Routes,
        samples: Sequence[Sample],
        workloads: Mapping[str, ModuleWorkload],
        node: Callable[[int], int],
        sample_kinds: Sequence[int] | None = None,
        replica_of: Mapping[tuple[str, int], tuple[str, int]] | None = None,
    ) -> None:
        self._node, self._replica_of = node, replica_of
        self.routes, self.plan, self.samples, self._workloads = routes, routes.plan, samples, workloads
        self.kinds: list[CellKind] = []
        self._sample_kinds = kinds_of_samples(samples) if sample_kinds is None else sample_kinds
        self._load_of_kinds: dict[tuple[str, str, tuple[int, ...]], Load] = {}
        self._outputs: dict[tuple[str, str], list[int]] = {}
        self._by_block: dict[tuple[str, int], bool] = {}
        self._treated: dict[str, ModuleWorkload] = {}
        self._number()

    def gathers_by_block(self, module: str, stage: int) -> bool:
        """Whether a stage of a fully sharded module gathers its parameters block by block."""
        if (module, stage) not in self._by_block:
            self._by_block[module, stage] = gathers_by_block(self.routes, module, stage, self._replica_of)
        return self._by_block[module, stage]

    def load_of(self, cell: Cell) -> Load:
        """The load of a cell's microbatch, the same for all stages of a replica."""
        return self.loads[self.load[self.routes.number_of_cell[cell]]]

    def kind_of(self, cell: Cell) -> CellKind:
        return self.kinds[self.kind[self.routes.number_of_cell[cell]]]

    def owner(self, module: str) -> str:
        """The module whose costs and data this one has: itself, or the module that it copies."""
        return self.plan.modules[module].data_module(module)

    def workload(self, module: str) -> ModuleWorkload:
        if module not in self._treated:
            own = self._workloads[self.owner(module)]
            self._treated[module] = own.treated(of_module(self.plan.recompute, module))
        return self._treated[module]

    def arranged(self, module: str, replica: int) -> ModuleWorkload:
        """The workload as a replica arranges its sequences."""
        workload = self.workload(module)
        return workload.packed() if self.plan.modules[module].replicas[replica].shares_context else workload

    def num_outputs(self, module: str, target: str) -> list[int]:
        """The number of rows of each sample that a module hands on to another one."""
        key = module, target
        if key not in self._outputs:
            owner, reader, of_kind = self.owner(module), self.owner(target), {}
            for kind, sample in zip(self._sample_kinds, self.samples, strict=True):
                if kind not in of_kind:
                    of_kind[kind] = sample.num_outputs(owner, reader)
            self._outputs[key] = [of_kind[kind] for kind in self._sample_kinds]
        return self._outputs[key]

    def model_flops(self, weights: Floats | None = None, *, recomputed: bool = False) -> float:
        """FLOPs of the forward and of the gradients that trainable layers need, without copies; of encoders that run
        ahead, the forwards that run in this iteration.

        `recomputed`: with the forwards that backwards repeat. `weights`: number of cells that each cell represents;
        None: 1."""
        known: dict[LayerShape, LayerCost] = {}
        terms = []
        for kind in self.kinds:
            parts = []
            for layer, needs, count in kind.different:
                if layer not in known:
                    known[layer] = layer_flops(layer)
                again = self._repeated(kind.module, layer) if recomputed else None
                passes = known[layer].passes(needs.input_gradient, needs.weight_gradient, recomputed=again)
                parts.append(passes.forward.plus(passes.backward).times(count))
            terms.append(total([] if self.plan.modules[kind.module].copy_of is not None else parts))
        if self.routes.cell_ran_before.any():
            weights = np.where(self.routes.cell_ran_before, 0.0, 1.0 if weights is None else weights)
        pairs, place = np.unique(np.stack([self.kind, self.load]), axis=1, return_inverse=True)
        counts = np.bincount(place.reshape(-1), weights)
        return sum(
            count * terms[kind].seconds(self.loads[load])
            for (kind, load), count in zip(pairs.T.tolist(), counts.tolist(), strict=True)
        )

    def _repeated(self, module: str, layer: LayerShape) -> Quadratic | None:
        """The share of the layer's forward that its backward repeats."""
        return WHOLE if module in self.plan.recompute_features else recomputed_share(layer)

    def _number(self) -> None:
        routes = self.routes
        self.kind, self.load = (np.zeros(routes.num_cells, dtype=np.int64) for _ in range(2))
        entering, cases = self._gradients_enter()
        kinds: dict[object, int] = {}
        loads: dict[Load, int] = {}
        of_replica: dict[tuple[str, int], Ints] = {}
        """By microbatch."""
        for stage in routes.stages:
            is_near = stage.planned.cp_size == 1 and len(set(map(self._node, stage.planned.ranks))) == 1
            group = stage.planned.tp_size if is_near else stage.planned.ranks
            codes = entering[stage.first : stage.last]
            for code in np.unique(codes).tolist():
                key = (stage.module, stage.planned.layers, group, code)
                if key not in kinds:
                    kinds[key] = len(kinds)
                    sources = cases[code] if code >= 0 else None
                    self.kinds.append(self._make_kind(stage.module, stage.planned, sources))
                self.kind[stage.first : stage.last][codes == code] = kinds[key]
            replica = stage.module, stage.replica
            if replica not in of_replica:
                of_replica[replica] = np.array([loads.setdefault(x, len(loads)) for x in self._loads(*replica)])
            self.load[stage.first : stage.last] = of_replica[replica][routes.cell_microbatch[stage.first : stage.last]]
        self.loads = list(loads)

    def _make_kind(self, name: str, stage: Stage, sources: Sequence[str] | None) -> CellKind:
        gradients = self._derive_gradients(name, stage.layers, sources)
        layers = self.workload(name).layers[slice(*stage.layers)]
        # Keyed by identity, because hashing a shape is slow.
        shapes = {id(layer): layer for layer in layers}
        counts = Counter(zip(map(id, layers), gradients, strict=True))
        different = tuple((shapes[layer], needs, count) for (layer, needs), count in counts.items())
        return CellKind(name, stage, gradients, different)

    def _loads(self, module: str, replica: int) -> Iterator[Load]:
        """The load of each microbatch, computed once for samples of the same kinds."""
        workload = self.arranged(module, replica)
        for members in self.routes.assignment.microbatches[module][replica]:
            key = (module, workload.arrangement, tuple([self._sample_kinds[i] for i in members]))
            if key not in self._load_of_kinds:
                self._load_of_kinds[key] = microbatch_load(
                    workload,
                    self.owner(module),
                    [self.samples[i] for i in members],
                    self._sources[module],
                )
            yield self._load_of_kinds[key]

    def _gradients_enter(self) -> tuple[Ints, list[tuple[str, ...]]]:
        """The modules to whose outputs each cell sends gradients, as an index into the distinct cases; -1 for a cell
        without a backward."""
        routes, names = self.routes, list(self.plan.modules)
        module_of_stage = np.array([names.index(stage.module) for stage in routes.stages], dtype=np.int64)
        back = routes.route_has_gradient
        sources = module_of_stage[routes.cell_stage[routes.route_source[back]]]
        entering: dict[int, list[str]] = defaultdict(list)
        for pair in np.unique(routes.route_target[back] * len(names) + sources).tolist():
            cell, module = divmod(pair, len(names))
            entering[cell].append(names[module])
        cases: dict[tuple[str, ...], int] = {(): 0}
        case = np.where(routes.cell_has_backward, 0, -1)
        for cell, modules in entering.items():
            case[cell] = cases.setdefault(tuple(modules), len(cases))
        return case, list(cases)

    def _derive_gradients(
        self, name: str, layers: LayerRange, sources: Sequence[str] | None
    ) -> tuple[LayerGradients, ...]:
        """The gradients of a stage's layers. `sources`: modules that receive gradients; None: there is no backward."""
        first, last = layers
        if sources is None:
            return (LayerGradients(False, False),) * (last - first)
        entries = entries_of(name, set(sources), self.plan.edges) | ({first} if name in sources else set())
        trainable = [self.plan.modules[name].is_trainable((index, index + 1)) for index in range(first, last)]
        return gradients_of_layers(trainable, {layer - first for layer in entries})

    @cached_property
    def _sources(self) -> Mapping[str, tuple[str, ...]]:
        """The modules whose outputs enter each module, with copies replaced by their originals."""
        return {
            name: tuple(dict.fromkeys(self.owner(edge.source) for edge in self.plan.edges if edge.target == name))
            for name in self.plan.modules
        }
