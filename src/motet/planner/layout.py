"""A layout: which group of devices holds which layers, before ranks have numbers. What searches write down and compare.

Degrees (`motet.planner.problem.Degrees`) give each module ranks of its own, or the same for all encoders. A layout can
say more: a group may hold several runs of a module (interleaving), runs of several modules (encoders inside the
language model's stages), and groups may differ in size.

Ranks are numbered within a replica of the whole model first, then by group, tensor parallelism fastest (but see
`motet.planner.rank_placement`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from motet.plan import LayerRange, ModulePlan, Plan, Replica, Stage
from motet.planner.partition import partition
from motet.planner.problem import DEFAULT_CONTEXT, Degrees, PlanningProblem


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
    """Ranks of each group within one replica of the whole model: tensor parallelism, times context parallelism."""
    dp: int = 1
    """Replicas of the whole model."""
    split: frozenset[str] = frozenset()
    """Modules that do not use their group's tensor parallelism: each of its ranks holds the module whole and takes its
    turn at the samples (DistTrain 2.1)."""
    shared: tuple[tuple[str, int], ...] = ()
    """Modules whose groups share a microbatch's tokens, with the size of their context parallelism."""
    schedule: str | None = None
    """The one that it is made for; None: the problem's."""
    sequence_parallel: bool = False
    """In every module that tensor parallelism cuts."""

    @property
    def content(self) -> tuple[object, ...]:
        """What it is, whoever made it for whatever schedule: searches come upon the same ones."""
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
    """`schedule`: None for the layout's own."""
    return problem.plan(
        {name: _module_plan(problem, layout, name) for name in problem.modules},
        planner=layout.planner,
        schedule=schedule or layout.schedule,
    )


def _module_plan(problem: PlanningProblem, layout: Layout, name: str) -> ModulePlan:
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
    return module.planned(
        replicas,
        sequence_parallel=layout.sequence_parallel and is_cut,
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


def cut_chain(
    problem: PlanningProblem, modules: Sequence[str], costs: Mapping[str, Sequence[float]], groups: Sequence[int]
) -> list[Chunk]:
    """The modules' layers one after another, cut into as many runs as there are `groups` so that the costliest run
    costs least; run i is on `groups[i]`. A run that spans modules becomes a chunk of each."""
    layers = [(name, index) for name in modules for index in range(len(costs[name]))]
    runs = partition([cost for name in modules for cost in costs[name]], len(groups))
    chunks: list[Chunk] = []
    for (first, last), group in zip(runs, groups, strict=True):
        for name in dict.fromkeys(name for name, _ in layers[first:last]):
            mine = [index for other, index in layers[first:last] if other == name]
            chunks.append(Chunk(name, (mine[0], mine[-1] + 1), group))
    return sorted(chunks, key=lambda chunk: (modules.index(chunk.module), chunk.layers))
