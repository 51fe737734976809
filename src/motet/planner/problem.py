"""What a planner is given: the model's shape and trainability, its costs, the devices, and a typical global batch."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, TypeVar

from motet.cluster import Cluster
from motet.costs.cost_model import CostTable
from motet.costs.layer_gradients import LayerGradients, entries_of, gradients_of_layers, gradients_of_modules
from motet.costs.load import Load, microbatch_load
from motet.costs.memory import DEFAULT_MEMORY, MemoryOptions
from motet.data.assignment import split_evenly
from motet.data.sample import Sample, kinds_of_samples
from motet.errors import UserError
from motet.plan import DEFAULT_ASSIGNMENT, ContextOptions, Edge, LayerRange, ModulePlan, Plan, Replica
from motet.planner.layer_times import LayerTime, lightest_load, mean_load, times_of_layers
from motet.planner.ranks_on_nodes import on_nodes
from motet.workload import ModuleWorkload

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
    """Those of a language model too; of other modules 1."""
    context: ContextOptions = DEFAULT_CONTEXT
    """How context-parallel groups that a planner chooses share tokens."""
    may_be_sharded: bool = False
    """Whether context-parallel groups that a planner chooses may share the parameters."""
    max_stages: int | None = None
    """That a planner may choose; None: as many as there are layers."""

    def is_trainable(self, layer: int) -> bool:
        return any(first <= layer < last for first, last in self.trainable)

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
    """How batches are cut: a key of `motet.data.assignments.ASSIGNMENTS`."""
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
        return self.remembered("kinds of samples", lambda: kinds_of_samples(self.samples))

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
    def gradients(self) -> Mapping[str, tuple[LayerGradients, ...]]:
        """For each layer of each module, when every modality is there."""
        return gradients_of_modules({name: self._trainable(name) for name in self.modules}, self.edges)

    def _trainable(self, name: str) -> list[bool]:
        module = self.modules[name]
        return [module.is_trainable(layer) for layer in range(module.workload.num_layers)]

    def _gradients_with(self, name: str, sources: Set[str]) -> tuple[LayerGradients, ...]:
        """For a microbatch to which these modules bring something that needs a gradient."""
        return gradients_of_layers(self._trainable(name), entries_of(name, sources, self.edges))

    def has_backward(self, name: str, layers: LayerRange) -> bool:
        return any(needs.any for needs in self.gradients[name][slice(*layers)])

    def remembered(self, key: object, compute: Callable[[], T]) -> T:
        """What `compute` returned for this key the first time; planners ask the same of a problem many times."""
        if key not in self._known:
            self._known[key] = compute()
        value: T = self._known[key]
        return value

    def loads(self, name: str, dp: int = 1, *, packed: bool = False) -> Sequence[tuple[Load, frozenset[str]]]:
        """For each microbatch of a batch that is cut in the order in which it comes, empty ones included: its load, and
        which of the modules that bring a gradient enter it. `packed`: samples share a row, as under context
        parallelism."""

        def compute() -> list[tuple[Load, frozenset[str]]]:
            shares = split_evenly(range(len(self.samples)), dp)
            microbatches = [m for share in shares for m in split_evenly(share, self.num_microbatches)]
            return self._loads_of(name, microbatches, packed=packed)

        return self.remembered(("loads", name, dp, packed), compute)

    def _loads_of(
        self, name: str, microbatches: Sequence[Sequence[int]], *, packed: bool = False
    ) -> list[tuple[Load, frozenset[str]]]:
        sources = tuple(edge.source for edge in self.edges if edge.target == name)
        bringing = [source for source in sources if any(needs.any for needs in self.gradients[source])]
        known: dict[tuple[int, ...], tuple[Load, frozenset[str]]] = self.remembered(
            ("loads of kinds", name, packed), dict
        )
        workload = self.modules[name].workload.packed() if packed else self.modules[name].workload
        loads, kinds = [], self.sample_kinds
        for members in microbatches:
            key = tuple([kinds[i] for i in members])
            if key not in known:
                able = [self.samples[i] for i in members if self.samples[i].has(name)]
                entering = frozenset(source for source in bringing if any(sample.has(source) for sample in able))
                known[key] = microbatch_load(workload, name, able, sources), entering
            loads.append(known[key])
        return loads

    def typical_load(self, name: str, dp: int = 1, *, cp: int = 1, packed: bool = False) -> Load:
        """The mean over the microbatches, of each rank of a context-parallel group. `packed`: samples share a row also
        where there is no group, as another stage has one."""
        packed = packed or cp > 1
        loads = self.loads(name, dp, packed=packed)
        return self.remembered(("mean", name, dp, cp, packed), lambda: mean_load([load for load, _ in loads]).share(cp))

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
        """T_l = F_l + B_l of thesis 3.3.1 for each layer, the mean over the microbatches. Unaware of what is frozen,
        every layer pays its whole backward for each of them. `packed`: as `typical_load` has it. `lightest`: no
        microbatch takes less. What context-parallel groups exchange is not in it.

        Raises `ValueError` if the table has no costs at this tensor-parallel size."""
        packed = packed or cp > 1
        return self.remembered(
            ("times", name, tp, dp, cp, packed, frozen_aware, lightest, sequence_parallel),
            lambda: self._layer_times(name, tp, dp, cp, packed, frozen_aware, lightest, sequence_parallel),
        )

    def least_total_times(
        self, name: str, tp: int = 1, num_replicas: int = 1, *, cp: int = 1, alone: bool = False
    ) -> list[LayerTime]:
        """For each layer: at least what all microbatches together take, however the batch is cut into them.

        That holds because no sum of a load is less for several samples than the sum of theirs (padding and packing only
        add to it), and because there are at least as many actions as it takes to hold the samples. `alone`: each
        replica has a share of the batch to itself; where that is cut evenly, the microbatches are known, and so is what
        they take."""
        is_known = alone and self.cuts_evenly
        largest = (
            -(-len(self.samples) // (self.num_microbatches * num_replicas)) if self.cuts_evenly else len(self.samples)
        )

        def compute() -> list[LayerTime]:
            loads = self.loads(name, num_replicas, packed=cp > 1) if is_known else self._sample_loads(name)
            total = [
                (
                    gradients,
                    Load(*map(sum, zip(*members, strict=True))),
                    float(sum(map(any, members)) // (1 if is_known else largest)),
                )
                for gradients, members in self._kinds(name, loads, True)
            ]
            return self._times(name, tp, cp, total)

        return self.remembered(("least total", name, tp, num_replicas, cp, is_known), compute)

    def least_times(self, name: str, tp: int = 1, num_samples: int = 1, *, cp: int = 1) -> list[LayerTime]:
        """For each layer: at least what a microbatch of so many samples takes."""

        def compute() -> list[LayerTime]:
            lightest = [lightest_load(*kind) for kind in self._kinds(name, self._sample_loads(name), True)]
            several = [(gradients, Load(*(num_samples * x for x in load)), n) for gradients, load, n in lightest]
            return self._times(name, tp, cp, several)

        return self.remembered(("least", name, tp, num_samples, cp), compute)

    def _sample_loads(self, name: str) -> list[tuple[Load, frozenset[str]]]:
        return self.remembered(
            ("sample loads", name), lambda: self._loads_of(name, [(i,) for i in range(len(self.samples))])
        )

    def _layer_times(
        self,
        name: str,
        tp: int,
        dp: int,
        cp: int,
        packed: bool,
        frozen_aware: bool,
        lightest: bool,
        sequence_parallel: bool,
    ) -> list[LayerTime]:
        kinds = self._kinds(name, self.loads(name, dp, packed=packed), frozen_aware)
        if lightest:
            least = [lightest_load(gradients, members) for gradients, members in kinds]
            return self._times(name, tp, cp, least, sequence_parallel)
        # An empty microbatch is no action: it does not pay what every action pays.
        return self._times(
            name,
            tp,
            cp,
            [(gradients, mean_load(members), sum(map(any, members)) / len(members)) for gradients, members in kinds],
            sequence_parallel,
        )

    def _kinds(
        self, name: str, loads: Sequence[tuple[Load, frozenset[str]]], frozen_aware: bool
    ) -> list[tuple[Sequence[LayerGradients], list[Load]]]:
        """Microbatches that lack a modality may have no backward in a frozen module: each kind by itself, with nothing
        in the place of the others."""
        everything = (LayerGradients(True, True),) * self.modules[name].workload.num_layers
        return [
            (
                self._gradients_with(name, kind) if frozen_aware else everything,
                [load if entering == kind else Load() for load, entering in loads],
            )
            for kind in sorted({entering for _, entering in loads}, key=sorted)
        ]

    def _times(
        self,
        name: str,
        tp: int,
        cp: int,
        kinds: Sequence[tuple[Sequence[LayerGradients], Load, float]],
        sequence_parallel: bool = False,
    ) -> list[LayerTime]:
        """As `times_of_layers` has it; `kinds` with the load of all ranks of a context-parallel group."""
        workload = self.modules[name].workload
        table = self.table.of(name, tp, sequence_parallel=sequence_parallel)
        assert len(table.layers) == workload.num_layers, (
            f"{name}: {len(table.layers)} layers in the table, {workload.num_layers} here"
        )
        recomputed = [
            name in self.recompute and workload.has_block((layer, layer + 1)) for layer in range(workload.num_layers)
        ]
        shares = [(gradients, load.share(cp), num_actions) for gradients, load, num_actions in kinds]
        return times_of_layers(table.layers, shares, recomputed)
