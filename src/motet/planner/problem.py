"""The planning problem: a model's shape and trainability, its costs, the devices, and a typical global batch.

`PlanningProblem.estimator` answers what layers take in seconds and bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, TypeVar

from motet.assignment.next_batch import with_run_ahead
from motet.assignment.sample import Sample
from motet.cluster import Cluster
from motet.cluster.rank_placement import on_nodes
from motet.costs.cells import LayerGradients
from motet.costs.communication import with_measured_links
from motet.costs.cost_model import CostTable
from motet.costs.estimator import Estimator
from motet.costs.memory import DEFAULT_MEMORY, MemoryOptions
from motet.errors import UserError
from motet.plan import (
    DEFAULT_ASSIGNMENT,
    LANGUAGE_MODEL,
    ContextOptions,
    Edge,
    LayerRange,
    ModulePlan,
    Plan,
    Replica,
    Stage,
)
from motet.recomputation import of_module, with_kind
from motet.shapes.module_shape import ModuleWorkload

T = TypeVar("T")


class TooSlowError(UserError):
    """Raised if every fitting plan of a planner takes longer than the problem's `cutoff_s`."""

    def __init__(self, at_least_s: float) -> None:
        super().__init__(f"takes at least {at_least_s:.4g} s")
        self.at_least_s = at_least_s


DEFAULT_CONTEXT = ContextOptions()


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Degrees of parallelism of one module."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    virtual_stages: int = 1
    """Stages on each group, in rounds: stage s is on group s mod `pp`."""
    layers_per_stage: tuple[int, ...] | None = None
    """None: the planner's partition."""
    sequence_parallel: bool = False
    fully_sharded: bool = False
    sharded_replicas: int = 1
    """With `fully_sharded`: number of replicas that share parameters."""
    whole_parameters: bool = False
    ep: int = 1
    context: ContextOptions = field(default_factory=ContextOptions)

    @property
    def ranks_per_stage(self) -> int:
        return self.tp * self.cp

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual_stages


@dataclass(frozen=True, kw_only=True)
class ModuleProblem:
    """One module of a planning problem, and the degrees that a planner may choose for it."""

    workload: ModuleWorkload
    trainable: tuple[LayerRange, ...]
    loss_weight: float = 0.0
    tp_sizes: tuple[int, ...] = (1,)
    """Allowed tensor-parallel sizes."""
    cp_sizes: tuple[int, ...] = (1,)
    """Allowed context-parallel sizes of a language model, and of an encoder in templates; others have 1."""
    context: ContextOptions = DEFAULT_CONTEXT
    """How context-parallel groups that a planner chooses share tokens."""
    may_be_sharded: bool = False
    """Context-parallel groups that a planner chooses may share the parameters."""
    max_stages: int | None = None
    """Largest allowed number of stages; None: the number of layers."""

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
        sharded_replicas: int = 1,
        whole_parameters: bool = False,
        ep: int = 1,
        context: ContextOptions = DEFAULT_CONTEXT,
        num_microbatches: int | None = None,
    ) -> ModulePlan:
        """The plan of the module with these replicas."""
        return ModulePlan(
            kind=self.workload.kind,
            num_layers=self.workload.num_layers,
            replicas=tuple(replicas),
            trainable=self.trainable,
            tied=self.workload.tied,
            loss_weight=self.loss_weight,
            sequence_parallel=sequence_parallel and self.workload.shares_sequences,
            fully_sharded=fully_sharded,
            sharded_replicas=sharded_replicas,
            whole_parameters=whole_parameters,
            ep=ep,
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
    max_ep: int = 1
    """The most ranks over which searched layouts distribute a mixture's experts, as many as possible; lower bounds then
    hold for such plans too. 1: experts are not distributed."""
    query_tokens: Mapping[str, ModuleProblem] = field(default_factory=dict)
    """Query tokens of generators: a few rows, which every plan puts on the language model's first ranks. They are not
    among `modules`, and their edges not among `edges`: no planner has to place them."""
    schedule: str = "1f1b"
    schedules: tuple[str, ...] | None = None
    """Schedules from which planner `auto` may choose; None: all. Other planners take `schedule`."""
    assignment: str = DEFAULT_ASSIGNMENT
    """How batches are cut: a key of `motet.balancing.policies.ASSIGNMENTS`."""
    max_packed_tokens: int | None = None
    """As `Plan.max_packed_tokens`."""
    recompute: tuple[str, ...] = ()
    chooses_recompute: bool = False
    """Planner `auto` may recompute blocks of other modules than `recompute` says."""
    chooses_zero1: bool = False
    """Planner `auto` may shard the optimizer's state, where replicas do not share their parameters."""
    chooses_assignment: bool = False
    """Planner `auto` may take another `assignment`."""
    microbatch_numbers: tuple[int, ...] = ()
    """Numbers of microbatches that planner `auto` may choose; (): `num_microbatches` alone."""
    free_dp_sizes: tuple[int, ...] = ()
    """Data-parallel sizes if a replica has one microbatch; for more, those that leave some empty are left out."""
    plans_zero1: bool = False
    """Whether the plan says that the optimizer's state is sharded, and not the run file."""
    run_ahead: bool = False
    """Whether encoders that need no backward run the next batch's forwards, in plans in which some can."""
    chooses_run_ahead: bool = False
    """Planner `auto` may let them."""
    memory: MemoryOptions = DEFAULT_MEMORY
    dp_sizes: tuple[int, ...] = (1,)
    """Allowed data-parallel sizes, the same for all modules."""
    may_share_parameters: bool = True
    """Whether planners may let replicas share their parameters; they may not under ZeRO-1."""
    survives_losses: bool = False
    """Whether training goes on after the loss of a node (`train.failures`). Planners then distribute no experts over
    ranks, and let replicas share parameters in more than `failures` groups only; `auto` moves no ranks of several
    replicas to one node."""
    num_cores: float | None = None
    """Cores that all devices share (processes on one machine); None: each has its own."""
    contrastive_batch_size: int | None = None
    """Samples that a loss of towers compares; None: the whole global batch."""
    computed: CostTable | None = None
    """Computed costs, if those in `table` are measured."""
    failures: int = 0
    """Number of nodes that may fail at once, for planners whose plans survive failures."""
    cutoff_s: float = inf
    """Plans that cannot be faster may be skipped: planners may raise `TooSlowError` instead."""
    program_s: float = 0.0
    """Time to derive an iteration's program, unless the previous iteration hides it."""
    _known: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Remembered results."""
    _known_loads: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Remembered loads of the samples."""

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
        """A plan of these modules and the query tokens, with everything else from the problem. `schedule`, `edges`:
        None: the problem's.

        Ranks are renumbered if groups would span nodes unnecessarily."""
        queries = {
            name: module.planned(_first_ranks(modules[LANGUAGE_MODEL])) for name, module in self.query_tokens.items()
        }
        entering = tuple(Edge(source=name, target=LANGUAGE_MODEL) for name in queries)
        plan = Plan(
            modules={**queries, **modules},
            edges=entering + (self.edges if edges is None else edges),
            num_microbatches=self.num_microbatches,
            schedule=schedule or self.schedule,
            planner=planner,
            assignment=self.assignment,
            max_packed_tokens=self.max_packed_tokens,
            recompute=tuple(
                with_kind(name, kind)
                for name in modules
                if (kind := of_module(self.recompute, modules[name].copy_of or name)) is not None
            ),
            zero1=self.plans_zero1,
        )
        if self.run_ahead:
            with suppress(UserError):  # Another plan of the search may.
                plan = self.with_run_ahead(plan)
        return on_nodes(plan, self.cluster.devices_per_node)

    def with_run_ahead(self, plan: Plan) -> Plan:
        """The plan with encoders that run ahead. Raises `UserError` if none can."""
        changed = with_run_ahead(plan)
        for name, module in changed.modules.items():
            most = self.all_modules[module.data_module(name)].workload.max_stages
            if most is not None and max(len(replica.stages) for replica in module.replicas) > most:
                raise UserError(
                    f"parallel.run_ahead: {name} would be cut where its frozen layers end, but can have {most} "
                    f"stage{'s' * (most > 1)} at most; freeze all of its layers, or leave run_ahead out"
                )
        return changed

    @property
    def all_modules(self) -> dict[str, ModuleProblem]:
        """With the query tokens."""
        return {**self.query_tokens, **self.modules}

    @property
    def cuts_evenly(self) -> bool:
        """Whether all microbatches hold equally many samples, as far as the batch can be divided."""
        return self.assignment == DEFAULT_ASSIGNMENT and self.max_packed_tokens is None

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @property
    def sample_kinds(self) -> list[int]:
        """For each sample, a number from 0 on; samples of equal number cost the same."""
        return self.estimator.sample_kinds

    @property
    def sources(self) -> tuple[str, ...]:
        """The encoders: modules whose outputs enter others, except a language model that generators read."""
        return tuple(
            name
            for name, module in self.modules.items()
            if module.workload.kind != "language_model" and any(edge.source == name for edge in self.edges)
        )

    @property
    def sinks(self) -> tuple[str, ...]:
        """All modules that are not `sources`."""
        return tuple(name for name in self.modules if name not in self.sources)

    @property
    def towers(self) -> tuple[str, ...]:
        """The contrastive towers."""
        return tuple(name for name, module in self.modules.items() if module.workload.kind == "tower")

    @property
    def loss_module(self) -> str | None:
        """The module that contrasts the towers, if any."""
        return next((name for name, module in self.modules.items() if module.workload.kind == "loss"), None)

    @property
    def num_contrastive_batches(self) -> int:
        """Number of contrastive batches in a global batch."""
        return -(-len(self.samples) // (self.contrastive_batch_size or len(self.samples)))

    def with_options(self, **changes: Any) -> "PlanningProblem":
        """The same modules and samples with other options. What is remembered of the samples is shared."""
        changed = replace(self, **changes)
        object.__setattr__(changed, "_known_loads", self._known_loads)
        return changed

    def with_num_devices(self, num_devices: int) -> "PlanningProblem":
        """The same problem on the first devices. Remembered results are shared."""
        return self._sharing(replace(self, cluster=replace(self.cluster, num_devices=num_devices)))

    def with_cutoff(self, cutoff_s: float) -> "PlanningProblem":
        """The same problem with another `cutoff_s`. Remembered results are shared."""
        return self._sharing(replace(self, cutoff_s=cutoff_s))

    def _sharing(self, other: "PlanningProblem") -> "PlanningProblem":
        object.__setattr__(other, "_known", self._known)
        object.__setattr__(other, "_known_loads", self._known_loads)
        return other

    @cached_property
    def estimator(self) -> Estimator:
        """Estimates seconds and bytes of layers under any degrees of parallelism."""
        return Estimator(
            workloads={
                name: module.workload.treated(of_module(self.recompute, name)) for name, module in self.modules.items()
            },
            trainable={name: module.trainable_layers for name, module in self.modules.items()},
            edges=self.edges,
            table=self.table,
            cluster=with_measured_links(self.cluster, self.table),
            memory=self.memory,
            samples=self.samples,
            num_microbatches=self.num_microbatches,
            cuts_evenly=self.cuts_evenly,
            known=self._known,
            known_loads=self._known_loads,
        )

    @property
    def gradients(self) -> Mapping[str, tuple[LayerGradients, ...]]:
        """The gradients that each layer of each module computes when every modality is present."""
        return self.estimator.gradients

    def remembered(self, key: object, compute: Callable[[], T]) -> T:
        """Returns what `compute` returned for this key the first time."""
        return self.estimator.remembered(key, compute)


def _first_ranks(module: ModulePlan) -> list[Replica]:
    """A stage of one layer on the first rank of each replica."""
    return [Replica(stages=(Stage(layers=(0, 1), ranks=replica.stages[0].ranks[:1]),)) for replica in module.replicas]
