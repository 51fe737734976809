"""Draws random problems: a DAG of modules, a plan for it, a batch and its cut. For fuzzing all that reads a plan.

What is drawn stays within what plans, assignments and layouts may say, not within what anyone would choose: encoders
that feed encoders, replicas that do not look alike, unequal numbers of them, groups of unequal size, ranks shared at
will, copies of encoders, layers frozen in any pattern, modalities that samples lack, microbatches cut differently per
module, some of them empty.
"""

from dataclasses import dataclass, replace
from random import Random

from motet.assignment.batch_assignment import BatchAssignment, Microbatch, contiguous_assignment
from motet.assignment.sample import Sample, Segment
from motet.plan import Edge, LayerRange, ModulePlan, Plan, Replica, Stage
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.routes import Routes, derive_routes


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_modules: int = 4
    max_layers: int = 4
    max_replicas: int = 3
    max_ranks: int = 8
    max_group: int = 3
    max_microbatches: int = 4
    max_samples: int = 8
    equal_groups: bool = False
    """Whether all that hold a layer must have equally many ranks, and each rank the same place among them."""
    copies: bool = True
    inner_losses: bool = False
    """Whether modules that feed others may have losses of their own."""
    tied: bool = False
    """Whether layers may share parameters."""


@dataclass(frozen=True)
class Problem:
    plan: Plan
    """Its modules stand in topological order; the last has a loss and every sample."""
    assignment: BatchAssignment
    samples: tuple[Sample, ...]

    @property
    def routes(self) -> Routes:
        return derive_routes(self.plan, self.assignment, self.samples)

    @property
    def dependencies(self) -> Dependencies:
        return Dependencies(self.routes)

    def __str__(self) -> str:
        return f"{self.plan.to_json()}\n{self.assignment}\n" + "\n".join(map(str, self.samples))


def draw_problem(rng: Random, limits: Limits = Limits()) -> Problem:
    """The same problem for the same state of `rng`."""
    plan = _draw_plan(rng, limits)
    samples = _draw_samples(rng, plan, limits)
    assignment = (
        contiguous_assignment(plan, samples) if rng.random() < 0.5 else _draw_assignment(rng, plan, samples, limits)
    )
    return Problem(plan, assignment, samples)


def _draw_plan(rng: Random, limits: Limits) -> Plan:
    names = [f"encoder{i}" for i in range(rng.randint(0, limits.max_modules - 1))] + ["llm"]
    num_layers = {name: rng.randint(1, limits.max_layers) for name in names}
    edges = _draw_edges(rng, names, num_layers)
    num_replicas = _draw_num_replicas(rng, names, limits)
    ranks = _RankPool(rng, limits)
    modules: dict[str, ModulePlan] = {}
    for name in names:
        cuts = [_draw_cut(rng, num_layers[name]) for _ in range(num_replicas[name])]
        if rng.random() < 0.5:
            cuts = [cuts[0]] * len(cuts)
        size = ranks.draw_size() if limits.equal_groups else None
        modules[name] = ModulePlan(
            kind="language_model" if name == "llm" else "encoder",
            num_layers=num_layers[name],
            replicas=tuple(_make_replica(cut, ranks, size) for cut in cuts),
            trainable=_draw_trainable(rng, num_layers[name]),
            tied=((0, num_layers[name] - 1),) if limits.tied and num_layers[name] > 1 and rng.random() < 0.2 else (),
            loss_weight=_draw_loss_weight(rng, name, edges, limits),
        )
    if limits.copies and any(edge.target == "llm" for edge in edges) and rng.random() < 0.25:
        modules, edges = _add_copies(rng, modules, edges, limits)
    return Plan(
        modules=_number_without_gaps(modules),
        edges=tuple(edges),
        num_microbatches=rng.randint(1, limits.max_microbatches),
        schedule=rng.choice(sorted(GENERATORS)),
    )


def _draw_edges(rng: Random, names: list[str], num_layers: dict[str, int]) -> list[Edge]:
    edges = []
    for i, source in enumerate(names):
        later = names[i + 1 :]
        targets = {"llm", *rng.sample(later, k=rng.randint(0, len(later)))} if later else set()
        if later and rng.random() < 0.2:
            targets.discard("llm")
        for target in sorted(targets):
            layers = range(num_layers[target])
            enters = (0,) if rng.random() < 0.5 else tuple(sorted(rng.sample(layers, k=rng.randint(1, len(layers)))))
            edges.append(Edge(source=source, target=target, layers=enters))
    return edges


def _draw_loss_weight(rng: Random, name: str, edges: list[Edge], limits: Limits) -> float:
    if name == "llm":
        return rng.choice([0.5, 1.0])
    if any(edge.source == name for edge in edges) and not limits.inner_losses:
        return 0.0
    return rng.choice([0.0, 0.0, 0.0, 2.0])


def _draw_num_replicas(rng: Random, names: list[str], limits: Limits) -> dict[str, int]:
    equal = rng.randint(1, limits.max_replicas)
    if rng.random() < 0.5:
        return dict.fromkeys(names, equal)
    return {name: rng.randint(1, limits.max_replicas) for name in names}


def _draw_cut(rng: Random, num_layers: int) -> list[LayerRange]:
    inner = sorted(rng.sample(range(1, num_layers), k=rng.randint(0, num_layers - 1)))
    return list(zip([0, *inner], [*inner, num_layers], strict=True))


class _RankPool:
    """Hands out groups of ranks: new ones while there are any, or (in some problems) any at all."""

    def __init__(self, rng: Random, limits: Limits) -> None:
        self.rng, self.limits = rng, limits
        self.num_used = 0
        self.shares = rng.random() < 0.5

    def draw_size(self) -> int:
        return min(self.limits.max_ranks, self.rng.choice([1, 1, 1, *range(1, self.limits.max_group + 1)]))

    def draw(self, size: int) -> tuple[int, ...]:
        if self.limits.equal_groups:  # Groups of a size are the same or have no rank in common.
            self.num_used += -self.num_used % size
        if self.num_used + size <= self.limits.max_ranks and not (self.shares and self.rng.random() < 0.5):
            self.num_used += size
            return tuple(range(self.num_used - size, self.num_used))
        if self.limits.equal_groups:
            first = size * self.rng.randrange(self.limits.max_ranks // size)
            return tuple(range(first, first + size))
        return tuple(self.rng.sample(range(self.limits.max_ranks), k=size))


def _make_replica(cut: list[LayerRange], ranks: _RankPool, size: int | None) -> Replica:
    groups = [ranks.draw(size or ranks.draw_size()) for _ in cut]
    return Replica(
        stages=tuple(Stage(layers=run, ranks=group, tp_size=len(group)) for run, group in zip(cut, groups, strict=True))
    )


def _draw_trainable(rng: Random, num_layers: int) -> tuple[LayerRange, ...]:
    pattern = rng.choice(["all", "all", "none", "last", "any"])
    if pattern == "all":
        return ((0, num_layers),)
    if pattern == "last":
        return ((num_layers - 1, num_layers),)
    return tuple((i, i + 1) for i in range(num_layers) if pattern == "any" and rng.random() < 0.5)


def _add_copies(
    rng: Random, modules: dict[str, ModulePlan], edges: list[Edge], limits: Limits
) -> tuple[dict[str, ModulePlan], list[Edge]]:
    """Repeats one source of the last module on the ranks of some of its stages; the copy feeds what stands there."""
    llm = modules["llm"]
    edge = rng.choice([edge for edge in edges if edge.target == "llm"])
    result = dict(modules)
    del result["llm"]
    kept = [other for other in edges if other != edge]
    entering = {*edge.layers, *(stage.layers[0] for stage in llm.replicas[0].stages)}
    for s, stage in enumerate(llm.replicas[0].stages):
        layers = {layer for layer in entering if stage.layers[0] <= layer < stage.layers[1]}
        held_by = [replica.stages[min(s, len(replica.stages) - 1)].ranks for replica in llm.replicas]
        size = len(modules[edge.source].replicas[0].stages[0].ranks)
        fits = not limits.equal_groups or {len(ranks) for ranks in held_by} == {size}
        if not fits or not layers or s == 0 or rng.random() < 0.3:
            continue
        entering -= layers
        name = f"{edge.source}@{s}"
        whole = (0, modules[edge.source].num_layers)
        result[name] = replace(
            modules[edge.source],
            replicas=tuple(
                Replica(stages=(Stage(layers=whole, ranks=ranks, tp_size=len(ranks)),)) for ranks in held_by
            ),
            copy_of=edge.source,
            tied=(),
            loss_weight=0.0,
        )
        kept += [replace(other, target=name) for other in edges if other.target == edge.source]
        kept.append(replace(edge, source=name, layers=tuple(sorted(layers))))
    if entering:
        kept.append(replace(edge, layers=tuple(sorted(entering))))
    result["llm"] = llm
    return result, kept


def _number_without_gaps(modules: dict[str, ModulePlan]) -> dict[str, ModulePlan]:
    used = sorted({rank for m in modules.values() for r in m.replicas for s in r.stages for rank in s.ranks})
    number = {rank: i for i, rank in enumerate(used)}
    return {
        name: replace(
            module,
            replicas=tuple(
                Replica(stages=tuple(replace(s, ranks=tuple(number[rank] for rank in s.ranks)) for s in r.stages))
                for r in module.replicas
            ),
        )
        for name, module in modules.items()
    }


def _draw_samples(rng: Random, plan: Plan, limits: Limits) -> tuple[Sample, ...]:
    originals = [name for name, module in plan.modules.items() if module.copy_of is None]
    presence = {name: 1.0 if name == "llm" else rng.choice([1.0, 0.7, 0.3]) for name in originals}
    samples = []
    for i in range(rng.randint(1, limits.max_samples)):
        has = [name for name in originals if rng.random() < presence[name]]
        layouts = {
            name: (
                Segment(rng.randint(1, 4)),
                *(
                    Segment(1, source=edge.source)
                    for edge in plan.edges
                    if edge.target == name and edge.source in has and plan.modules[edge.source].copy_of is None
                ),
            )
            for name in has
        }
        loss_tokens = {
            name: sum(segment.num_tokens for segment in layouts[name]) for name in has if plan.modules[name].loss_weight
        }
        samples.append(Sample(f"sample{i}", layouts, loss_tokens))
    return tuple(samples)


def _draw_assignment(rng: Random, plan: Plan, samples: tuple[Sample, ...], limits: Limits) -> BatchAssignment:
    microbatches: dict[str, tuple[tuple[Microbatch, ...], ...]] = {}
    for name, module in plan.modules.items():
        places: list[list[list[int]]] = [
            [[] for _ in range(rng.randint(1, limits.max_microbatches))] for _ in module.replicas
        ]
        for i, sample in enumerate(samples):
            if sample.has(module.data_module(name)):
                rng.choice(rng.choice(places)).append(i)
        microbatches[name] = tuple(tuple(tuple(members) for members in replica) for replica in places)
    return BatchAssignment(microbatches)
