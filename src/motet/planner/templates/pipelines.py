"""Pipelines of whole nodes: what templates say, and plans made of them (thesis 2.3.1, 2.4).

A pipeline is one copy of the whole model: replica r of every module. The node is the unit of failure, so a pipeline has
nodes of its own. A template is what a pipeline on a given number of nodes looks like; a plan puts each place of a
template, a whole node, on a node of the cluster. Node n has the ranks [n * devices_per_node, (n + 1) * ...).
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from motet.errors import UserError
from motet.plan import Plan, Replica, Stage
from motet.planner.reconfiguration.holdings import LayerBytes, StateBytes
from motet.ragged_arrays import Ints


@dataclass(frozen=True, kw_only=True)
class Template:
    """One pipeline on `num_nodes` nodes."""

    num_nodes: int
    replicas: Mapping[str, Replica]
    """Of every module, on the ranks 0, 1, ... num_nodes * devices_per_node - 1; all of them are used."""
    first_s: float = 0.0
    """Seconds of an iteration with one microbatch."""
    slowest_s: float = 1.0
    """Seconds that each further microbatch takes: the slowest stage's forward and backward."""

    def iteration_s(self, num_microbatches: int) -> float:
        return self.first_s + (num_microbatches - 1) * self.slowest_s


@dataclass(frozen=True, kw_only=True)
class Templates:
    """The templates of one training job, consecutive in their numbers of nodes."""

    failures: int
    """f: so many nodes may fail at once; at least f + 1 pipelines are kept."""
    devices_per_node: int
    by_nodes: Mapping[int, Template]
    layer_bytes: LayerBytes | None = None
    """For plans that move the fewest bytes; None: all layers are equal."""
    state_bytes: StateBytes | None = None
    """What of `layer_bytes` are optimizer states, if not all pipelines keep them (ZeRO-1); None: all do."""
    state_copies: int = 1
    """Pipelines that keep each of them, then."""
    fully_sharded: tuple[str, ...] = ()
    """Modules of which context-parallel ranks share the parameters."""

    @cached_property
    def fewest_nodes(self) -> int:
        """n0."""
        return min(self.by_nodes)

    @cached_property
    def most_nodes(self) -> int:
        """Of one pipeline."""
        return max(self.by_nodes)

    @property
    def least_total(self) -> int:
        """(f + 1) n0: with fewer nodes the guarantee cannot be kept."""
        return (self.failures + 1) * self.fewest_nodes

    def __post_init__(self) -> None:
        if self.failures < 0:
            raise UserError(f"failures: is {self.failures}; give 0 or more")
        sizes = sorted(self.by_nodes)
        assert sizes == list(range(sizes[0], sizes[-1] + 1)), f"templates of {sizes} nodes are not consecutive"


def build_plan(like: Plan, templates: Templates, sizes: Sequence[int], counts: Sequence[int]) -> Plan:
    """The plan of `like`'s model with pipelines on so many nodes each, one after the other. `counts`: microbatches of
    each pipeline."""
    replicas: dict[str, list[Replica]] = {name: [] for name in like.modules}
    first = 0
    for num_nodes in sizes:
        for name, replica in templates.by_nodes[num_nodes].replicas.items():
            moved = (replace(stage, ranks=tuple(first + rank for rank in stage.ranks)) for stage in replica.stages)
            replicas[name].append(Replica(stages=tuple(moved)))
        first += num_nodes * templates.devices_per_node
    return replace(
        like,
        modules={name: replace(module, replicas=tuple(replicas[name])) for name, module in like.modules.items()},
        num_microbatches=max(counts),
        replica_microbatches=tuple(counts),
    )


def with_ranks(plan: Plan, rank_of: Mapping[int, int]) -> Plan:
    """The same plan on other ranks. Groups with context parallelism stay ascending, as plans have them."""

    def moved(stage: Stage) -> Stage:
        ranks = [rank_of[rank] for rank in stage.ranks]
        return replace(stage, ranks=tuple(sorted(ranks) if stage.cp_size > 1 else ranks))

    modules = {}
    for name, module in plan.modules.items():
        replicas = tuple(Replica(stages=tuple(map(moved, replica.stages))) for replica in module.replicas)
        modules[name] = replace(module, replicas=replicas)
    return replace(plan, modules=modules)


def nodes_of_pipelines(plan: Plan, devices_per_node: int) -> list[tuple[int, ...]]:
    """The nodes of each pipeline, ascending.

    Raises `UserError` for a plan that has no pipelines of whole nodes: modules with unequal numbers of replicas, or
    pipelines that share a node."""
    numbers = {name: len(module.replicas) for name, module in plan.modules.items()}
    if len(set(numbers.values())) > 1:
        listed = ", ".join(f"{name} {number}" for name, number in numbers.items())
        raise UserError(
            f"plan: modules have unequal numbers of replicas ({listed}); failures can be survived "
            "where each replica of a module belongs to one pipeline: give all modules equally many"
        )
    result: list[set[int]] = [set() for _ in range(next(iter(numbers.values())))]
    for _, r, _, stage in plan.stages():
        result[r] |= {rank // devices_per_node for rank in stage.ranks}
    owner: dict[int, int] = {}
    for r, nodes in enumerate(result):
        for node in nodes:
            if owner.setdefault(node, r) != r:
                raise UserError(
                    f"plan: node {node} belongs to replicas {owner[node]} and {r}; a node that fails would end both: "
                    f"give each replica whole nodes of {devices_per_node} devices"
                )
    return [tuple(sorted(nodes)) for nodes in result]


# How many microbatches each pipeline gets (thesis 2.4.2.2, eq. 2.6).
#
# A pipeline with n microbatches takes first_s + (n - 1) slowest_s: the first one fills it, then the slowest stage sets
# the pace. (The thesis multiplies the time of one microbatch, which is the fill, by n.) The iteration ends when the
# last pipeline does, so `min_max_counts` is what is used; `least_variance_counts` is eq. 2.6, which can be slower
# (docs/resilience.md).


def min_max_counts(templates: Sequence[Template], total: int) -> tuple[int, ...]:
    """Counts of at least 1 that add up to `total`, with the shortest iteration; exact.

    One after the other is given to the pipeline that would end first with it. Raises `UserError` if `total` is less
    than the number of pipelines."""
    check_total(len(templates), total)
    counts = [1] * len(templates)
    queue = [(template.iteration_s(2), i) for i, template in enumerate(templates)]
    heapq.heapify(queue)
    for _ in range(total - len(templates)):
        _, i = queue[0]
        counts[i] += 1
        heapq.heapreplace(queue, (templates[i].iteration_s(counts[i] + 1), i))
    return tuple(counts)


def check_total(num_pipelines: int, total: int) -> None:
    if total < num_pipelines:
        raise UserError(
            f"{total} microbatches cannot be shared out among {num_pipelines} pipelines; "
            f"give at least {num_pipelines} (a larger global batch, or more and smaller microbatches)"
        )


def iteration_s(templates: Sequence[Template], counts: Sequence[int]) -> float:
    """Of all pipelines together; reductions are not counted."""
    return max(template.iteration_s(count) for template, count in zip(templates, counts, strict=True))


def variance(templates: Sequence[Template], counts: Sequence[int]) -> float:
    """The objective of eq. 2.6: squared differences from the mean of the pipelines' times."""
    times = np.array([template.iteration_s(count) for template, count in zip(templates, counts, strict=True)])
    return float(((times - times.mean()) ** 2).sum())


def least_variance_counts(templates: Sequence[Template], total: int) -> tuple[int, ...]:
    """The exact integer optimum of eq. 2.6.

    The mean is the c that minimises the sum of (y_i - c)^2, so the optimum is among those for a fixed c, where the
    problem falls apart into marginal costs. As c rises the best counts change where two lines -2 c sum(y) + sum(y^2)
    cross; those crossings are found by bisection, and intervals that cannot hold their own mean are left out."""
    check_total(len(templates), total)
    first = np.array([template.first_s for template in templates])
    slowest = np.array([template.slowest_s for template in templates])
    extra = total - len(templates)
    steps = np.arange(max(1, extra))
    before = first[:, None] + slowest[:, None] * steps
    base, slope = slowest[:, None] * (2 * before + slowest[:, None]), 2 * slowest[:, None]

    def best_for(c: float) -> Ints:
        marginal = base - slope * c
        taken = np.argsort(marginal, axis=None, kind="stable")[:extra]
        return 1 + np.bincount(taken // marginal.shape[1], minlength=len(first))

    def times(counts: Ints) -> np.ndarray:
        return first + (counts - 1) * slowest

    def mean(counts: Ints) -> float:
        return float(times(counts).mean())

    lowest, highest = float(first.min()), float((first + slowest * extra).max())
    low, high = best_for(lowest), best_for(highest)
    found = [low, high]
    intervals = [(lowest, low, highest, high)]
    while intervals:
        c_left, left, c_right, right = intervals.pop()
        # The optimum is best for its own mean: that must lie in the interval.
        if mean(left) >= mean(right) or mean(right) < c_left or mean(left) > c_right:
            continue
        squares = (times(right) ** 2).sum() - (times(left) ** 2).sum()
        crossing = float(squares / (2 * (times(right).sum() - times(left).sum())))
        middle = best_for(crossing)
        if mean(left) < mean(middle) < mean(right):
            found.append(middle)
            intervals += [(c_left, left, crossing, middle), (crossing, middle, c_right, right)]
    best = min(found, key=lambda counts: variance(templates, counts.tolist()))
    return tuple(best.tolist())
