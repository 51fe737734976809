"""What a planner is given: the model's shape and trainability, its costs, the devices, and a typical global batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from motet.cluster import Cluster
from motet.costs.cost_model import CostTable, LayerCost
from motet.costs.iteration import LayerGradients
from motet.costs.load import Load, microbatch_load
from motet.costs.memory import DEFAULT_MEMORY, MemoryOptions
from motet.data.assignment import split_evenly
from motet.data.sample import Sample
from motet.errors import UserError
from motet.models.shards import check_tp
from motet.plan import Edge, LayerRange
from motet.workload import ModuleWorkload


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How one module is laid out."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    """None: the planner's partition."""
    sequence_parallel: bool = False


@dataclass(frozen=True, kw_only=True)
class ModuleProblem:
    workload: ModuleWorkload
    trainable: tuple[LayerRange, ...]
    loss_weight: float = 0.0
    tp_sizes: tuple[int, ...] = (1,)
    """That a planner may choose from."""
    max_stages: int | None = None
    """That a planner may choose; None: as many as there are layers."""

    def is_trainable(self, layer: int) -> bool:
        return any(first <= layer < last for first, last in self.trainable)


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Seconds of one layer for a typical microbatch."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    modules: Mapping[str, ModuleProblem]
    """Encoders before the language model: ranks are numbered in this order."""
    edges: tuple[Edge, ...]
    cluster: Cluster
    table: CostTable
    samples: tuple[Sample, ...]
    """A typical global batch."""
    num_microbatches: int
    """Per replica."""
    schedule: str = "1f1b"
    recompute: tuple[str, ...] = ()
    memory: MemoryOptions = DEFAULT_MEMORY
    dp_sizes: tuple[int, ...] = (1,)
    """That a planner may choose from, the same for all modules."""
    num_cores: float | None = None
    """That all devices share (processes on one machine); None: each has its own."""
    program_s: float = 0.0
    """What it takes to derive an iteration's program, if that is not hidden behind the iteration before."""
    _loads: dict[tuple[str, int], Load] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.samples:
            raise UserError("data: has no samples to plan for")
        for edge in self.edges:
            for end in (edge.source, edge.target):
                assert end in self.modules, f"edge to {end!r}, which is no module"

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @property
    def sources(self) -> tuple[str, ...]:
        """The modules whose outputs enter others: the encoders."""
        return tuple(name for name in self.modules if any(edge.source == name for edge in self.edges))

    @property
    def sinks(self) -> tuple[str, ...]:
        return tuple(name for name in self.modules if name not in self.sources)

    def with_num_devices(self, num_devices: int) -> "PlanningProblem":
        return replace(self, cluster=replace(self.cluster, num_devices=num_devices))

    @cached_property
    def gradients(self) -> Mapping[str, tuple[LayerGradients, ...]]:
        """For each layer, which gradients it computes: the frozen rule over the whole graph of modules.

        An input gradient is needed if something trainable lies strictly before: an earlier layer of the module, or
        anything in a module whose output has entered by then (thesis 3.3.1, eq. 3.2 and 3.3, read strictly).
        """
        result: dict[str, tuple[LayerGradients, ...]] = {}
        brings_gradient: dict[str, bool] = {}
        remaining = list(self.modules)
        while remaining:
            name = next(m for m in remaining if not any(e.target == m and e.source in remaining for e in self.edges))
            remaining.remove(name)
            entries = {
                layer
                for edge in self.edges
                if edge.target == name and brings_gradient[edge.source]
                for layer in edge.layers
            }
            layers, reached = [], False
            for layer in range(self.modules[name].workload.num_layers):
                reached = reached or layer in entries
                trainable = self.modules[name].is_trainable(layer)
                layers.append(LayerGradients(reached, trainable))
                reached = reached or trainable
            result[name], brings_gradient[name] = tuple(layers), reached
        return result

    def typical_load(self, name: str, dp: int = 1) -> Load:
        """The mean over the microbatches of a batch that is cut in the order in which it comes, empty ones included."""
        if (name, dp) not in self._loads:
            self._loads[name, dp] = self._mean_load(name, dp)
        return self._loads[name, dp]

    def _mean_load(self, name: str, dp: int) -> Load:
        sources = tuple(edge.source for edge in self.edges if edge.target == name)
        loads = []
        for share in split_evenly(range(len(self.samples)), dp):
            for members in split_evenly(share, self.num_microbatches):
                able = [self.samples[i] for i in members if self.samples[i].has(name)]
                loads.append(microbatch_load(self.modules[name].workload, name, able, sources))
        return Load(*(sum(values) / len(loads) for values in zip(*loads, strict=True)))

    def layer_times(self, name: str, tp: int = 1, dp: int = 1, *, frozen_aware: bool = True) -> list[LayerTime]:
        """T_l = F_l + B_l of thesis 3.3.1 for each layer. Unaware of what is frozen, every layer pays its whole
        backward. Raises `ValueError` if the table has no costs at this tensor-parallel size."""
        load = self.typical_load(name, dp)
        costs = self.table.of(name, tp).layers
        workload = self.modules[name].workload
        assert len(costs) == workload.num_layers, (
            f"{name}: {len(costs)} layers in the table, {workload.num_layers} here"
        )
        if frozen_aware:
            gradients: Sequence[LayerGradients] = self.gradients[name]
        else:
            gradients = [LayerGradients(True, True)] * workload.num_layers
        return [
            _layer_time(cost, needs, load, recompute=name in self.recompute and workload.has_block((index, index + 1)))
            for index, (cost, needs) in enumerate(zip(costs, gradients, strict=True))
        ]

    def check_degrees(self, name: str, degrees: Degrees) -> None:
        """Raises `ValueError` naming what is wrong with a module's degrees."""
        workload = self.modules[name].workload
        for key in ("tp", "pp", "dp"):
            if getattr(degrees, key) < 1:
                raise UserError(f"parallel: {name}.{key} is {getattr(degrees, key)}; give at least 1")
        if degrees.pp > workload.num_layers:
            raise UserError(
                f"parallel: {name}.pp is {degrees.pp}, but it has {workload.num_layers} layers; "
                f"give at most {workload.num_layers}"
            )
        try:
            check_tp(workload.family, workload.config, degrees.tp)
        except UserError as error:
            raise UserError(f"parallel: {name}.{error}") from None


def _layer_time(cost: LayerCost, needs: LayerGradients, load: Load, *, recompute: bool) -> LayerTime:
    recomputed = needs.any and recompute
    forward = cost.forward if needs.any and not recomputed else cost.forward_without_graph
    backward = cost.backward(input_gradient=needs.input_gradient, weight_gradient=needs.weight_gradient)
    if recomputed:
        backward = backward.plus(cost.forward)
    return LayerTime(forward_s=forward.seconds(load), backward_s=backward.seconds(load))
