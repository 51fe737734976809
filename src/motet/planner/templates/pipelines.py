"""Pipeline templates (Oobleck), plans built from them, microbatch counts and combinations (thesis 2.3.1, 2.4, A).

A pipeline is one copy of the whole model: replica r of every module. The node is the unit of failure, so each pipeline
has whole nodes of its own. A template describes a pipeline on a given number of nodes. Node n has the ranks
[n * devices_per_node, (n + 1) * devices_per_node).

Replicas that share parameters by rows hold one copy together: they are one pipeline, of which templates are not made.

**Sizes.** n0 is the smallest number of nodes on which the model fits. There is a template for each of n0 .. N - f n0
nodes: the largest pipeline is what remains when f pipelines have n0 nodes. Appendix A asks for more than n0 - 1
templates, which is sufficient but not necessary: k pipelines of consecutive sizes n0 .. n_max have any number of nodes
in [k n0, k n_max], so all N' in [(f + 1) n0, N] are reachable if these intervals, for k > f, leave no gap. With
n_max = N - f n0 they never do. (The Frobenius number, (A.2), lost a factor n0 in the thesis.)

**Microbatches.** A pipeline with n microbatches takes fill_s + (n - 1) slowest_s. (The thesis multiplies the time of
one microbatch, which is the fill, by n.) The iteration ends when the last pipeline does, so `min_max_counts` minimises
the maximum; the thesis' equation 2.6 minimises the variance, which can be slower (docs/resilience.md).

**Combinations** of sizes are enumerated (coin change) while there are few. Beyond, the best one is found by bisection
over the times at which some pipeline finishes a microbatch: whether N nodes can compute all microbatches within a time
is a knapsack problem. This is exact for `iteration_s`.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from motet.errors import UserError
from motet.plan import Plan, Replica, Stage
from motet.planner.reconfiguration.shard_map import LayerBytes, StateBytes
from motet.ragged_arrays import Ints

MAX_ENUMERATED = 2000
"""Combinations beyond which they are not enumerated."""

UNREACHABLE = np.iinfo(np.int64).min // 2
"""Marks numbers of nodes that no pipelines add up to."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """One pipeline on `num_nodes` nodes."""

    num_nodes: int
    replicas: Mapping[str, Replica]
    """Replicas by module, which together use all ranks 0 to num_nodes * devices_per_node - 1."""
    fill_s: float = 0.0
    """Seconds of an iteration with one microbatch."""
    slowest_s: float = 1.0
    """Seconds that each further microbatch takes: the slowest stage's forward and backward."""

    def iteration_s(self, num_microbatches: int) -> float:
        return self.fill_s + (num_microbatches - 1) * self.slowest_s


@dataclass(frozen=True, kw_only=True)
class Templates:
    """The templates of one training job, consecutive in their numbers of nodes."""

    failures: int
    """f: the number of nodes that may fail at once; at least f + 1 pipelines are kept."""
    devices_per_node: int
    by_nodes: Mapping[int, Template]
    layer_bytes: LayerBytes | None = None
    """Used to move the fewest bytes; None: all layers are equal."""
    state_bytes: StateBytes | None = None
    """The optimizer states' part of `layer_bytes` where not all pipelines keep them (ZeRO-1); None: all do."""
    state_copies: int = 1
    """Number of pipelines that keep each optimizer state under ZeRO-1."""
    fully_sharded: tuple[str, ...] = ()
    """Modules whose parameters context-parallel ranks share."""

    @cached_property
    def min_nodes(self) -> int:
        """n0: nodes of the smallest pipeline."""
        return min(self.by_nodes)

    @cached_property
    def max_nodes(self) -> int:
        """Nodes of the largest pipeline."""
        return max(self.by_nodes)

    @property
    def min_total_nodes(self) -> int:
        """(f + 1) n0: with fewer nodes the guarantee cannot be kept."""
        return (self.failures + 1) * self.min_nodes

    def __post_init__(self) -> None:
        if self.failures < 0:
            raise UserError(f"failures: is {self.failures}; give 0 or more")
        sizes = sorted(self.by_nodes)
        assert sizes == list(range(sizes[0], sizes[-1] + 1)), f"templates of {sizes} nodes are not consecutive"


def build_plan(like: Plan, templates: Templates, sizes: Sequence[int], counts: Sequence[int]) -> Plan:
    """Builds the plan of `like`'s model with one pipeline on each number of nodes in `sizes`, one after the other.
    `counts`: microbatches of each pipeline."""
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


def renumber_ranks(plan: Plan, rank_of: Mapping[int, int]) -> Plan:
    """Returns the plan with rank r replaced by `rank_of[r]`. Groups with context parallelism stay ascending."""

    def renumbered(stage: Stage) -> Stage:
        ranks = [rank_of[rank] for rank in stage.ranks]
        return replace(stage, ranks=tuple(sorted(ranks) if stage.cp_size > 1 else ranks))

    modules = {}
    for name, module in plan.modules.items():
        replicas = tuple(Replica(stages=tuple(map(renumbered, replica.stages))) for replica in module.replicas)
        modules[name] = replace(module, replicas=replicas)
    return replace(plan, modules=modules)


def min_max_counts(templates: Sequence[Template], total: int) -> tuple[int, ...]:
    """Returns microbatches per pipeline, at least 1 each and `total` together, with the shortest iteration (exact).

    Each further microbatch goes to the pipeline that would finish first with it. Raises `UserError` if `total` is less
    than the number of pipelines."""
    check_num_microbatches(total, len(templates))
    counts = [1] * len(templates)
    queue = [(template.iteration_s(2), i) for i, template in enumerate(templates)]
    heapq.heapify(queue)
    for _ in range(total - len(templates)):
        _, i = queue[0]
        counts[i] += 1
        heapq.heapreplace(queue, (templates[i].iteration_s(counts[i] + 1), i))
    return tuple(counts)


def check_num_microbatches(total: int, num_pipelines: int) -> None:
    if total < num_pipelines:
        raise UserError(
            f"{total} microbatches cannot be divided among {num_pipelines} pipelines; "
            f"give at least {num_pipelines} (a larger global batch, or more and smaller microbatches)"
        )


def iteration_s(templates: Sequence[Template], counts: Sequence[int]) -> float:
    """Returns the seconds of an iteration of all pipelines, without reductions."""
    return max(template.iteration_s(count) for template, count in zip(templates, counts, strict=True))


def template_sizes(num_nodes: int, failures: int, min_nodes: int) -> range:
    """n0, n0 + 1, ... N - f n0. Raises `UserError` if there are fewer than (f + 1) n0 nodes."""
    least = (failures + 1) * min_nodes
    if num_nodes < least:
        raise UserError(
            f"{num_nodes} nodes are too few to survive {failures} failures: {failures + 1} pipelines of at least "
            f"{min_nodes} nodes need {least}; give more nodes, fewer failures, or devices with more memory"
        )
    return range(min_nodes, num_nodes - failures * min_nodes + 1)


def unreachable_totals(sizes: range, num_nodes: int, failures: int) -> list[int]:
    """The numbers of nodes from (f + 1) n0 to N that no f + 1 or more pipelines of these sizes add up to."""
    fewest, most = sizes[0], sizes[-1]
    return [
        n
        for n in range((failures + 1) * fewest, num_nodes + 1)
        if not any(k * fewest <= n <= k * most for k in range(failures + 1, n // fewest + 1))
    ]


def num_combinations(sizes: Sequence[int], num_nodes: int, least_pipelines: int) -> int:
    """Counts the combinations of at least `least_pipelines` pipelines that use exactly `num_nodes` nodes."""
    ways = np.zeros((least_pipelines + 1, num_nodes + 1), dtype=object)
    ways[0, 0] = 1
    for size in sizes:
        for n in range(size, num_nodes + 1):
            # The last row holds all combinations of at least so many pipelines.
            ways[-1, n] += ways[-1, n - size]
            ways[1:, n] += ways[:-1, n - size]
    return int(ways[-1, num_nodes])


def combinations(sizes: Sequence[int], num_nodes: int, least_pipelines: int) -> Iterator[tuple[int, ...]]:
    """Yields every combination as the pipelines' numbers of nodes, ascending."""

    def extend(chosen: tuple[int, ...], first: int, left: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            if len(chosen) >= least_pipelines:
                yield chosen
            return
        for i in range(first, len(sizes)):
            if sizes[i] <= left:
                yield from extend((*chosen, sizes[i]), i, left - sizes[i])

    return extend((), 0, num_nodes)


def best_combinations(
    templates: Mapping[int, Template], num_nodes: int, failures: int, total: int, *, most: int
) -> list[tuple[int, ...]]:
    """Returns the fastest combinations for `total` microbatches, the fastest first: up to `most`, or only the best one
    where there are too many to enumerate.

    Raises `UserError` if there is none: no combination of templates has exactly `num_nodes` nodes, or there are fewer
    microbatches than pipelines."""
    sizes = sorted(templates)
    number = num_combinations(sizes, num_nodes, failures + 1)
    found: list[tuple[int, ...]] = []
    if number <= MAX_ENUMERATED:
        fitting = (each for each in combinations(sizes, num_nodes, failures + 1) if len(each) <= total)
        found = sorted(fitting, key=lambda each: combination_s(templates, each, total))[:most]
    elif (best := best_combination(templates, num_nodes, failures, total)) is not None:
        found = [best]
    if not found and number:
        check_num_microbatches(total, failures + 1)
    if not found:
        raise UserError(
            f"{num_nodes} nodes cannot be divided into {failures + 1} or more pipelines of {sizes[0]} to {sizes[-1]} "
            f"nodes, each with one of {total} microbatches; give another number of nodes, or more microbatches"
        )
    return found


def combination_s(templates: Mapping[int, Template], sizes: Sequence[int], total: int) -> float:
    """Returns the seconds of an iteration of pipelines of these sizes with the best microbatch counts."""
    chosen = [templates[size] for size in sizes]
    return iteration_s(chosen, min_max_counts(chosen, total))


def best_combination(
    templates: Mapping[int, Template], num_nodes: int, failures: int, total: int
) -> tuple[int, ...] | None:
    """Returns the fastest combination without enumerating them; None if there is none."""
    first = np.array([t.fill_s for t in templates.values()])
    slowest = np.array([t.slowest_s for t in templates.values()])
    times = np.unique(first[:, None] + slowest[:, None] * np.arange(total))
    sizes = np.array(list(templates))

    def chosen(i: int) -> tuple[int, ...] | None:
        within = np.floor((times[i] * (1 + 1e-12) - first) / slowest).astype(np.int64) + 1
        return _most_microbatches(sizes, np.minimum(within, total), num_nodes, failures + 1, total)

    i = bisect_left(range(len(times)), True, key=lambda i: chosen(i) is not None)
    return chosen(i) if i < len(times) else None


def _most_microbatches(
    sizes: Ints, within: Ints, num_nodes: int, least_pipelines: int, total: int
) -> tuple[int, ...] | None:
    """Returns pipelines that use all nodes and compute at least `total` microbatches, or None. `within`: microbatches
    that a pipeline of each size computes in the given time. There are at most as many pipelines as microbatches."""
    sizes, within = sizes[within >= 1], within[within >= 1]
    if not len(sizes):
        return None
    # Pipelines are counted exactly only where there could be more of them than microbatches.
    is_counted = num_nodes // int(sizes.min()) > total
    last = total if is_counted else least_pipelines
    # [pipelines, nodes]: the most microbatches; the size that was added last; the row that it was added to.
    most = np.full((last + 1, num_nodes + 1), UNREACHABLE)
    added, rows = np.zeros_like(most), np.zeros_like(most)
    most[0, 0] = 0
    for n in range(1, num_nodes + 1):
        fitting = sizes <= n
        computed = most[:, n - sizes[fitting]] + within[fitting]
        steps = [(slice(1, None), slice(None, -1))]
        if not is_counted:
            steps.append((slice(last, None), slice(last, None)))
        for to_row, from_rows in steps if fitting.any() else ():
            best = computed[from_rows].argmax(axis=1)
            value = np.take_along_axis(computed[from_rows], best[:, None], axis=1)[:, 0]
            better = value > most[to_row, n]
            most[to_row, n][better] = value[better]
            added[to_row, n][better] = sizes[fitting][best[better]]
            rows[to_row, n][better] = np.arange(last + 1)[from_rows][better]
    row = least_pipelines + int(most[least_pipelines:, num_nodes].argmax()) if least_pipelines <= last else 0
    if most[row, num_nodes] < total:
        return None
    pipelines, n = [], num_nodes
    while n:
        pipelines.append(int(added[row, n]))
        row, n = int(rows[row, n]), n - pipelines[-1]
    return tuple(sorted(pipelines))


def recommended_batch(global_batch_size: int, total: int) -> int:
    """The multiple of `total` that is nearest, at least one: microbatches of equal size."""
    return max(1, round(global_batch_size / total)) * total
