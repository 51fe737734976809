"""What a planner is given: the model's shape and trainability, its costs, the devices, and a typical global batch.

`PlanningProblem.estimator` answers what layers take in seconds and bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, TypeVar

from motet.assignment.sample import Sample
from motet.cluster import Cluster
from motet.cluster.rank_placement import on_nodes
from motet.costs.cells import LayerGradients
from motet.costs.cost_model import CostTable
from motet.costs.estimator import Estimator
from motet.costs.memory import DEFAULT_MEMORY, MemoryOptions
from motet.errors import UserError
from motet.plan import DEFAULT_ASSIGNMENT, ContextOptions, Edge, LayerRange, ModulePlan, Plan, Replica
from motet.shapes.module_shape import ModuleWorkload

T = TypeVar("T")


class TooSlowError(UserError):
    """Every plan of a planner that fits takes longer than the problem's `cutoff_s`."""

    def __init__(self, at_least_s: float) -> None:
        super().__init__(f"takes at least {at_least_s:.4g} s")
        self.at_least_s = at_least_s


DEFAULT_CONTEXT = ContextOptions()


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How one module is laid out."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    """None: the planner's partition."""
    sequence_parallel: bool = False
    fully_sharded: bool = False
    context: ContextOptions = field(default_factory=ContextOptions)

    @property
    def ranks_per_stage(self) -> int:
        return self.tp * self.cp


@dataclass(frozen=True, kw_only=True)
class ModuleProblem:
    workload: ModuleWorkload
    trainable: tuple[LayerRange, ...]
    loss_weight: float = 0.0
    tp_sizes: tuple[int, ...] = (1,)
    """That a planner may choose from."""
    cp_sizes: tuple[int, ...] = (1,)
    """Those of a language model too; those of an encoder in templates alone; of other modules 1."""
    context: ContextOptions = DEFAULT_CONTEXT
    """How context-parallel groups that a planner chooses share tokens."""
    may_be_sharded: bool = False
    """Whether context-parallel groups that a planner chooses may share the parameters."""
    max_stages: int | None = None
    """That a planner may choose; None: as many as there are layers."""

    def is_trainable(self, layer: int) -> bool:
        return any(first <= layer < last for first, last in self.trainable)

    @property
    def trainable_layers(self) -> list[bool]:
        """For each layer, whether it is trainable."""
        return [self.is_trainable(layer) for layer in range(self.workload.num_layers)]

    def planned(
        self,
        replicas: Sequence[Replica],
        *,
        sequence_parallel: bool = False,
        fully_sharded: bool = False,
        context: ContextOptions = DEFAULT_CONTEXT,
        num_microbatches: int | None = None,
    ) -> ModulePlan:
        """The module as these replicas hold it."""
        return ModulePlan(
            kind=self.workload.kind,
            num_layers=self.workload.num_layers,
            replicas=tuple(replicas),
            trainable=self.trainable,
            tied=self.workload.tied,
            loss_weight=self.loss_weight,
            sequence_parallel=sequence_parallel,
            fully_sharded=fully_sharded,
            context=context,
            num_microbatches=num_microbatches,
        )


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
    schedules: tuple[str, ...] | None = None
    """That planner `auto` may choose from; None: all there are. Other planners take `schedule`."""
    assignment: str = DEFAULT_ASSIGNMENT
    """How batches are cut: a key of `motet.balancing.policies.ASSIGNMENTS`."""
    max_packed_tokens: int | None = None
    """As the plan's."""
    recompute: tuple[str, ...] = ()
    memory: MemoryOptions = DEFAULT_MEMORY
    dp_sizes: tuple[int, ...] = (1,)
    """That a planner may choose from, the same for all modules."""
    num_cores: float | None = None
    """That all devices share (processes on one machine); None: each has its own."""
    contrastive_batch_size: int | None = None
    """Samples that a loss of towers compares; None: the whole global batch."""
    computed: CostTable | None = None
    """What costs would be if they were computed, where those in `table` are measured."""
    failures: int = 0
    """Nodes that may fail at once, for planners that make plans which survive it."""
    cutoff_s: float = inf
    """Plans that cannot be faster need not be looked at: planners may raise `TooSlowError` instead."""
    program_s: float = 0.0
    """What it takes to derive an iteration's program, if that is not hidden behind the iteration before."""
    _known: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What has been computed from the samples and is asked for often."""

    def __post_init__(self) -> None:
        if not self.samples:
            raise UserError("data: has no samples to plan for")
        for edge in self.edges:
            for end in (edge.source, edge.target):
                assert end in self.modules, f"edge to {end!r}, which is no module"

    def plan(
        self,
        modules: Mapping[str, ModulePlan],
        *,
        planner: str,
        schedule: str | None = None,
        edges: tuple[Edge, ...] | None = None,
    ) -> Plan:
        """A plan of these modules that is as the problem says in all else. `schedule`, `edges`: None: the problem's.

        Ranks are renumbered where groups would lie on several nodes without need."""
        plan = Plan(
            modules=modules,
            edges=self.edges if edges is None else edges,
            num_microbatches=self.num_microbatches,
            schedule=schedule or self.schedule,
            planner=planner,
            assignment=self.assignment,
            max_packed_tokens=self.max_packed_tokens,
            recompute=tuple(name for name in modules if (modules[name].copy_of or name) in self.recompute),
        )
        return on_nodes(plan, self.cluster.devices_per_node)

    @property
    def cuts_evenly(self) -> bool:
        """Whether all microbatches hold equally many samples, as far as they can be divided."""
        return self.assignment == DEFAULT_ASSIGNMENT and self.max_packed_tokens is None

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @property
    def sample_kinds(self) -> list[int]:
        """A number for each sample, from 0 on, the same for those that cost the same."""
        return self.estimator.sample_kinds

    @property
    def sources(self) -> tuple[str, ...]:
        """The modules whose outputs enter others, but a language model that generators read: the encoders."""
        return tuple(
            name
            for name, module in self.modules.items()
            if module.workload.kind != "language_model" and any(edge.source == name for edge in self.edges)
        )

    @property
    def sinks(self) -> tuple[str, ...]:
        """All others."""
        return tuple(name for name in self.modules if name not in self.sources)

    @property
    def towers(self) -> tuple[str, ...]:
        """The modules that are contrasted."""
        return tuple(name for name, module in self.modules.items() if module.workload.kind == "tower")

    @property
    def loss_module(self) -> str | None:
        """The module that contrasts them."""
        return next((name for name, module in self.modules.items() if module.workload.kind == "loss"), None)

    @property
    def num_contrastive_batches(self) -> int:
        """In a global batch."""
        return -(-len(self.samples) // (self.contrastive_batch_size or len(self.samples)))

    def with_num_devices(self, num_devices: int) -> "PlanningProblem":
        """The same on the first of the devices; what is known of the problem is shared."""
        return self._sharing(replace(self, cluster=replace(self.cluster, num_devices=num_devices)))

    def with_cutoff(self, cutoff_s: float) -> "PlanningProblem":
        """The same problem; what is known of it is shared."""
        return self._sharing(replace(self, cutoff_s=cutoff_s))

    def _sharing(self, other: "PlanningProblem") -> "PlanningProblem":
        object.__setattr__(other, "_known", self._known)
        return other

    @cached_property
    def estimator(self) -> Estimator:
        """Estimates seconds and bytes of layers under any degrees of parallelism."""
        return Estimator(
            workloads={name: module.workload for name, module in self.modules.items()},
            trainable={name: module.trainable_layers for name, module in self.modules.items()},
            edges=self.edges,
            table=self.table,
            cluster=self.cluster,
            memory=self.memory,
            samples=self.samples,
            num_microbatches=self.num_microbatches,
            recompute=self.recompute,
            cuts_evenly=self.cuts_evenly,
            known=self._known,
        )

    @property
    def gradients(self) -> Mapping[str, tuple[LayerGradients, ...]]:
        """The gradients that each layer of each module computes when every modality is present."""
        return self.estimator.gradients

    def remembered(self, key: object, compute: Callable[[], T]) -> T:
        """Returns what `compute` returned for this key the first time."""
        return self.estimator.remembered(key, compute)
