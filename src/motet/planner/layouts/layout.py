"""Builds plans from degrees of parallelism and from layouts of groups.

Degrees (`build_plan`) give every module ranks of its own, or put encoders on the same ranks (Cornstarch section 4.1 and
its baselines in section 6):

* `parallel`: each encoder has ranks of its own, so encoders run side by side (modality parallelism);
* `colocated`: stage s of every encoder is on the same ranks, so encoders take turns there;
* `replicated`: the encoders are on the ranks of every stage of the language model. Where their output enters later
  stages too (cross-attention), this saves sending it. With token merging nothing reads the output of the later copies,
  and a trainable encoder's later copies get no gradient: this is a baseline.

Modules on ranks of their own may have unequal numbers of replicas (DistTrain 4.1). A share is the smallest part of the
whole model in which every module has whole replicas.

A `Layout` (`layout_plan`) can express more: a group may hold several runs of a module's layers (interleaving) or runs
of several modules (encoders inside the language model's stages), and groups may differ in size. Searches generate,
bound and compare layouts before ranks are numbered.

Ranks are numbered within a share (a replica of the whole model) first, then by module, replica and stage, or by group;
tensor parallelism is fastest. Where this would divide groups among nodes, `motet.cluster.rank_placement` renumbers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd
from typing import Literal, NamedTuple

from motet.errors import UserError
from motet.plan import Edge, LayerRange, ModulePlan, Plan, Replica, Stage
from motet.planner.layouts.degrees import check_degrees, largest_ep, most_stages
from motet.planner.layouts.partition import partition, partition_by_sizes
from motet.planner.problem import DEFAULT_CONTEXT, Degrees, PlanningProblem

Placement = Literal["parallel", "colocated", "replicated"]


def explicit_plan(
    problem: PlanningProblem,
    degrees: Mapping[str, Degrees],
    *,
    placement: Placement = "parallel",
) -> Plan:
    """The plan with these degrees; the exact partition cuts the stages where the degrees do not set their layers.

    Raises `UserError` for degrees that no plan can have: more stages than layers, tensor parallelism that does not
    divide the heads, unequal data parallelism on shared ranks, a number of ranks that is not the cluster's.
    """
    plan = build_plan(problem, degrees, placement=placement)
    if plan.num_ranks != problem.num_devices:
        raise UserError(
            f"parallel: the plan uses {plan.num_ranks} ranks but cluster has {problem.num_devices}; "
            f"set cluster.num_devices to {plan.num_ranks} or change tp, pp and dp"
        )
    return plan


def build_plan(
    problem: PlanningProblem,
    degrees: Mapping[str, Degrees],
    *,
    placement: Placement = "parallel",
    frozen_aware: bool = True,
    planner: str = "explicit",
) -> Plan:
    """Builds a plan like `explicit_plan`, on any number of ranks."""
    _check(problem, degrees, placement)
    cuts = {name: cut_module(problem, name, degrees[name], frozen_aware=frozen_aware) for name in problem.modules}
    num_shares = gcd(*(degrees[name].dp for name in problem.modules))
    offsets, ranks_per_share = _offsets(problem, degrees, placement, num_shares)
    modules = {}
    for name in problem.modules:
        own = degrees[name]
        ranks_per_replica = own.ranks_per_stage * own.pp
        starts = [
            share * ranks_per_share + offsets[name] + i * ranks_per_replica
            for share in range(num_shares)
            for i in range(own.dp // num_shares)
        ]
        modules[name] = problem.modules[name].planned(
            [_replica(own, cuts[name], start) for start in starts],
            sequence_parallel=own.sequence_parallel,
            fully_sharded=own.fully_sharded,
            sharded_replicas=own.sharded_replicas,
            whole_parameters=own.whole_parameters,
            ep=own.ep,
            context=own.context,
        )
    edges = problem.edges
    if placement == "replicated":
        modules, edges = _replicate(problem, modules, cuts)
    return problem.plan(modules, planner=planner, edges=edges)


def cut_module(
    problem: PlanningProblem, name: str, degrees: Degrees, *, frozen_aware: bool = True
) -> tuple[LayerRange, ...]:
    """The stages of one module."""
    num_layers = problem.modules[name].workload.num_layers
    if degrees.layers_per_stage is not None:
        try:
            return partition_by_sizes(num_layers, degrees.layers_per_stage)
        except UserError as error:
            raise UserError(f"parallel: {name}.{error}") from None
    seconds = problem.estimator.layer_seconds(name, degrees.tp, degrees.dp, cp=degrees.cp, frozen_aware=frozen_aware)
    return partition(seconds, degrees.num_stages)


def _check(problem: PlanningProblem, degrees: Mapping[str, Degrees], placement: Placement) -> None:
    for name in degrees:
        if name not in problem.modules:
            raise UserError(f"parallel: there is no module {name!r}; the model has {', '.join(problem.modules)}")
    for name in problem.modules:
        if name not in degrees:
            raise UserError(f"parallel: {name} has no degrees; give its tp, pp and dp")
        check_degrees(problem, name, degrees[name])
    by_dp: dict[int, str] = {}
    for name in problem.modules:
        by_dp.setdefault(degrees[name].dp, name)
    if len(by_dp) > 1 and placement != "parallel":
        (dp, name), (other_dp, other) = list(by_dp.items())[:2]
        raise UserError(
            f"parallel: dp is {dp} for {name} but {other_dp} for {other}, which share ranks; "
            "give all modules the same, or placement parallel"
        )
    if placement == "colocated":
        shapes: dict[tuple[int, int, int], str] = {}
        for name in problem.sources:
            shapes.setdefault((degrees[name].tp, degrees[name].cp, degrees[name].pp), name)
        if len(shapes) > 1:
            first, second = list(shapes.values())[:2]
            raise UserError(
                f"parallel: placement colocated puts {first} and {second} on the same ranks; "
                "give them the same tp, cp and pp"
            )
    if placement == "replicated":
        if len(problem.sinks) != 1:
            raise UserError("parallel: placement replicated needs one module that all others enter")
        sink = degrees[problem.sinks[0]]
        if sink.virtual_stages > 1:
            raise UserError(
                f"parallel: {problem.sinks[0]}.virtual_stages is {sink.virtual_stages}, but placement replicated puts "
                "the encoders on each stage; give 1, or placement parallel or colocated"
            )
        for name in problem.sources:
            if (degrees[name].num_stages, degrees[name].tp, degrees[name].cp) != (1, sink.tp, sink.cp):
                raise UserError(
                    f"parallel: placement replicated puts {name} whole on each stage of {problem.sinks[0]}; "
                    f"give it pp 1, tp {sink.tp} and cp {sink.cp}"
                )


def _offsets(
    problem: PlanningProblem, degrees: Mapping[str, Degrees], placement: Placement, num_shares: int
) -> tuple[dict[str, int], int]:
    """Each module's first rank within a share, and the number of ranks of a share."""
    offsets: dict[str, int] = {}
    next_rank = shared = 0
    for name in problem.modules:
        size = degrees[name].ranks_per_stage * degrees[name].pp * (degrees[name].dp // num_shares)
        if name in problem.sources and placement != "parallel":
            offsets[name] = 0
            shared = size if placement == "colocated" else 0
        else:
            offsets[name] = shared + next_rank
            next_rank += size
    return offsets, shared + next_rank


def _replica(degrees: Degrees, cut: Sequence[LayerRange], first_rank: int) -> Replica:
    size = degrees.ranks_per_stage
    groups = [tuple(range(first_rank + g * size, first_rank + (g + 1) * size)) for g in range(degrees.pp)]
    return Replica(
        stages=tuple(
            Stage(layers=layers, ranks=groups[s % degrees.pp], tp_size=degrees.tp, cp_size=degrees.cp)
            for s, layers in enumerate(cut)
        )
    )


def _replicate(
    problem: PlanningProblem, modules: dict[str, ModulePlan], cuts: Mapping[str, tuple[LayerRange, ...]]
) -> tuple[dict[str, ModulePlan], tuple[Edge, ...]]:
    """Copies every encoder to the later stages of the sink; each copy feeds the layers of its own stage."""
    sink = problem.sinks[0]
    result: dict[str, ModulePlan] = {}
    edges: list[Edge] = []
    for name in problem.sources:
        module = modules[name]
        edge = next(edge for edge in problem.edges if edge.source == name)
        for s, (first, last) in enumerate(cuts[sink]):
            copy = name if s == 0 else f"{name}@{s}"
            replicas = tuple(
                Replica(stages=(replace(own.stages[0], ranks=of_sink.stages[s].ranks),))
                for own, of_sink in zip(module.replicas, modules[sink].replicas, strict=True)
            )
            result[copy] = replace(module, replicas=replicas, copy_of=name if s else None)
            layers = tuple(layer for layer in edge.layers if first <= layer < last)
            if layers:
                edges.append(Edge(source=copy, target=sink, layers=layers))
    result[sink] = modules[sink]
    return result, tuple(edges)


class Chunk(NamedTuple):
    """A run of one module's layers on one group."""

    module: str
    layers: LayerRange
    group: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    planner: str
    chunks: tuple[Chunk, ...]
    """Modules in the problem's order, the chunks of each in the order of its layers."""
    group_sizes: tuple[int, ...]
    """Ranks of each group within one replica of the whole model: tensor- times context-parallel size."""
    dp: int = 1
    """Replicas of the whole model."""
    split: frozenset[str] = frozenset()
    """Modules without tensor parallelism: each rank of the group holds the whole module, and the ranks take turns at
    the samples (DistTrain 2.1)."""
    shared: tuple[tuple[str, int], ...] = ()
    """Modules with context parallelism, and its size."""
    schedule: str | None = None
    """The schedule that the layout is made for; None: the problem's."""
    sequence_parallel: bool = False
    """Whether every module with tensor parallelism has sequence parallelism."""

    @property
    def content(self) -> tuple[object, ...]:
        """Everything but the planner and the schedule: searches find the same layouts several times."""
        return self.chunks, self.group_sizes, self.dp, self.split, self.shared, self.sequence_parallel

    @property
    def num_devices(self) -> int:
        return self.dp * sum(self.group_sizes)

    def tp(self, module: str, group: int) -> int:
        return 1 if module in self.split else self.group_sizes[group] // self.cp(module)

    def cp(self, module: str) -> int:
        return next((size for name, size in self.shared if name == module), 1)

    def num_replicas(self, module: str) -> int:
        if module not in self.split:
            return self.dp
        return self.dp * next(self.group_sizes[chunk.group] for chunk in self.chunks if chunk.module == module)


def layout_plan(problem: PlanningProblem, layout: Layout, *, schedule: str | None = None) -> Plan:
    """The plan of a layout. `schedule` None: the layout's own."""
    modules = {name: _planned(problem, layout, name) for name in problem.modules}
    return problem.plan(modules, planner=layout.planner, schedule=schedule or layout.schedule)


def _planned(problem: PlanningProblem, layout: Layout, name: str) -> ModulePlan:
    first_rank = [0, *accumulate(layout.group_sizes)]
    chunks = [chunk for chunk in layout.chunks if chunk.module == name]
    replicas = []
    for d in range(layout.dp):
        start = d * first_rank[-1]
        groups = [tuple(range(start + a, start + b)) for a, b in pairwise(first_rank)]
        if name in layout.split:
            replicas += [
                Replica(stages=tuple(Stage(layers=c.layers, ranks=(groups[c.group][place],)) for c in chunks))
                for place in range(layout.group_sizes[chunks[0].group])
            ]
        else:
            replicas.append(
                Replica(
                    stages=tuple(
                        Stage(
                            layers=c.layers,
                            ranks=groups[c.group],
                            tp_size=layout.tp(name, c.group),
                            cp_size=layout.cp(name),
                        )
                        for c in chunks
                    )
                )
            )
    module = problem.modules[name]
    is_cut = any(layout.tp(name, chunk.group) > 1 for chunk in chunks)
    tp_sizes = {layout.tp(name, chunk.group) for chunk in chunks}
    return module.planned(
        replicas,
        sequence_parallel=layout.sequence_parallel and is_cut,
        ep=largest_ep(problem, name, min(tp_sizes), len(replicas)) if len(tp_sizes) == 1 else 1,
        context=module.context if layout.cp(name) > 1 else DEFAULT_CONTEXT,
    )


def layout_of_degrees(
    problem: PlanningProblem,
    degrees: Mapping[str, Degrees],
    cuts: Mapping[str, Sequence[LayerRange]],
    *,
    colocated: bool,
    planner: str,
) -> Layout:
    """Each module on groups of its own; `colocated`: stage s of every encoder on the same group."""
    chunks: list[Chunk] = []
    sizes: list[int] = []
    for name in problem.modules:
        first = 0 if colocated and name in problem.sources else len(sizes)
        sizes += [degrees[name].ranks_per_stage] * (first + len(cuts[name]) - len(sizes))
        chunks += [Chunk(name, layers, first + s) for s, layers in enumerate(cuts[name])]
    return Layout(
        planner=planner,
        chunks=tuple(chunks),
        group_sizes=tuple(sizes),
        dp=degrees[next(iter(problem.modules))].dp,
        shared=tuple((name, degrees[name].cp) for name in problem.modules if degrees[name].cp > 1),
    )


def cut_chain(costs: Mapping[str, Sequence[float]], groups: Sequence[int]) -> list[Chunk]:
    """Cuts the modules' layers in a row into as many runs as there are `groups`, so that the costliest run costs least;
    run i is on `groups[i]`. `costs`: of each layer, by module, in the order of the row."""
    runs = partition([cost for own in costs.values() for cost in own], len(groups))
    return chunks_of_runs({name: len(own) for name, own in costs.items()}, runs, groups)


def chunks_of_runs(num_layers: Mapping[str, int], runs: Sequence[LayerRange], groups: Sequence[int]) -> list[Chunk]:
    """The chunks of runs of layers, numbered along the row of all modules; a run that spans modules is a chunk of each.

    `num_layers`: by module, in the order of the row."""
    chunks: list[Chunk] = []
    offset = 0
    for name, number in num_layers.items():
        for (first, last), group in zip(runs, groups, strict=True):
            begin, end = max(first - offset, 0), min(last - offset, number)
            if begin < end:
                chunks.append(Chunk(name, (begin, end), group))
        offset += number
    return chunks


def has_few_stages(problem: PlanningProblem, chunks: Sequence[Chunk]) -> bool:
    """Whether no module has more runs of layers than the user allows."""
    counts = Counter(chunk.module for chunk in chunks)
    return all(counts[name] <= most_stages(problem, name) for name in problem.modules)
