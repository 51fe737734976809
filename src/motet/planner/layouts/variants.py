"""Variants of a problem: the options that the user leaves to planner `auto`, and the layouts worth a simulation.

The user may leave open the number of microbatches, recomputation, and whether the optimizer's state is sharded. A
variant sets them. More memory is saved only where less does not suffice: for each way to divide the devices, variants
come in the order of `savings`, and the first one whose layout seems to fit is taken.

`promising` goes through all ways to divide the devices into equal groups, the best bound first, and leaves out those
whose bound is above the fastest estimate so far. On the others it bounds the chains (all layers in a row, going round
the groups, there and back, or each module over all groups) without a simulation. Their order is an estimate: the bound,
plus what it leaves out of messages and sums of gradients.

Limits: the attention of all modules is recomputed, or blocks of single modules or of all; every n-th block and offload
are not among the savings, which a user may give. Encoders on groups of their own are not among the chains, so
`auto` searches these under the best variants only.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from motet.costs.communication import all_reduce_seconds
from motet.costs.memory import usable_bytes
from motet.planner.layouts.layout import Layout
from motet.planner.layouts.layout_costs import LayoutCosts
from motet.planner.problem import PlanningProblem
from motet.recomputation import with_kind
from motet.schedule.generators import SPLIT_BACKWARDS

MARGIN = 1.03
"""Estimated memory over the usable one up to which a layout is thought to fit: estimates err."""
MAX_COMBINATIONS = 80
"""Ways to divide the devices, with numbers of microbatches, on which chains are laid out: the most likely ones."""
MAX_CELLS = 60_000
"""Most microbatches times stages times replicas that differ: larger programs take seconds to simulate."""


Combine = Callable[[PlanningProblem], Iterable[tuple[PlanningProblem, Hashable, float, int]]]
"""problem -> (the problem on some of its devices, groups, seconds of all layers for a microbatch, number of groups)."""
Saving = tuple[tuple[str, ...], bool]
"""Modules whose blocks or attention are recomputed, as in a plan, and whether the optimizer's state is sharded."""
LayOut = Callable[[PlanningProblem, Any], Iterable[Layout]]
"""(problem, groups) -> layouts."""
TRUST = 1.05
"""Estimates of the fastest chain are trusted that far when others are left out."""


@dataclass(frozen=True)
class Promising:
    """A layout under a variant."""

    problem: PlanningProblem
    layout: Layout
    bound_s: float
    estimate_s: float
    needed_bytes: float

    @property
    def num_actions(self) -> int:
        """Estimate of the actions of its program; replicas that work alike count once."""
        splits = (self.layout.schedule or self.problem.schedule) in SPLIT_BACKWARDS
        return self.problem.num_microbatches * len(self.layout.chunks) * (3 if splits else 2)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= MARGIN * usable_bytes(self.problem.cluster)


def is_free(problem: PlanningProblem) -> bool:
    """Whether the user leaves anything open beside the layout."""
    return bool(problem.microbatch_numbers or problem.chooses_recompute or problem.chooses_zero1)


def variant(
    problem: PlanningProblem, num_microbatches: int, recompute: tuple[str, ...], zero1: bool
) -> PlanningProblem | None:
    """The problem with these options; None if no replica has enough samples."""
    dp_sizes = problem.dp_sizes
    if num_microbatches != problem.num_microbatches:
        dp_sizes = tuple(dp for dp in problem.free_dp_sizes if dp * num_microbatches <= len(problem.samples))
    if not dp_sizes or num_microbatches > len(problem.samples):
        return None
    if (num_microbatches, recompute, zero1) == (problem.num_microbatches, problem.recompute, problem.memory.zero1):
        return problem
    return problem.with_options(
        num_microbatches=num_microbatches,
        dp_sizes=dp_sizes,
        recompute=recompute,
        memory=replace(problem.memory, zero1=zero1),
        plans_zero1=problem.plans_zero1 or zero1 > problem.memory.zero1,
    )


def savings(problem: PlanningProblem) -> list[Saving]:
    """What may be saved; what costs less time first, and everything last."""
    given = (problem.recompute, problem.memory.zero1)
    blocks = tuple(name for name in problem.modules if name != problem.loss_module)
    trained = [name for name in blocks if any(needs.any for needs in problem.gradients[name])]
    recomputed = [problem.recompute]
    if problem.chooses_recompute:
        recomputed.append(tuple(with_kind(name, "attention") for name in trained))
        recomputed += [(name,) for name in trained if len(trained) > 1] + [tuple(trained)]
    may_shard = problem.chooses_zero1 and not problem.memory.zero1 and problem.may_share_parameters
    sharded = [problem.memory.zero1, *([True] if may_shard else [])]
    return list(dict.fromkeys([given, *((modules, zero1) for modules in recomputed for zero1 in sharded)]))


def microbatch_numbers(problem: PlanningProblem) -> list[int]:
    return sorted({*problem.microbatch_numbers, problem.num_microbatches})


@dataclass(frozen=True)
class Combination:
    """Equal groups on some devices, with a number of microbatches."""

    problem: PlanningProblem
    """On those devices, without any saving of memory."""
    groups: Hashable
    least_s: float
    """Lower bound: all work, evenly spread over the groups."""
    likely_s: float
    """The same with the bubble of a pipeline without interleaving."""


def promising(problem: PlanningProblem, combine: Combine, lay_out: LayOut) -> list[Promising]:
    """The best chains under all variants: those that seem to fit first, by estimate; then, of these groups, those with
    all savings; then those that do not fit.

    `combine`: ways to divide the devices of a problem, with the seconds of all layers for a microbatch and the number
    of groups. `lay_out`: the chains on such groups."""
    combinations = []
    for number in microbatch_numbers(problem):
        changed = variant(problem, number, problem.recompute, problem.memory.zero1)
        if changed is not None:
            for smaller, groups, seconds, num_groups in combine(changed):
                least_s = number * seconds / num_groups
                combinations.append(Combination(smaller, groups, least_s, least_s * (1 + (num_groups - 1) / number)))
    found: list[Promising] = []
    misfits: list[Promising] = []
    spared: list[Promising] = []  # Needed if what seems to fit does not, by a simulation.
    fastest_s = inf
    known: dict[tuple[int, Saving], PlanningProblem] = {}
    first, *others = savings(problem)

    def laid_out(combination: Combination, saving: Saving) -> list[Promising]:
        """The chains on these groups that seem to fit; if none does, the one that needs least is a misfit."""
        key = combination.problem.num_microbatches, saving
        if key not in known:
            # Kept, as variants remember the costs of layers.
            changed = variant(problem, key[0], *saving)
            assert changed is not None
            known[key] = changed
        changed = known[key].with_num_devices(combination.problem.num_devices)
        costs = LayoutCosts(changed)
        estimated = [
            _estimated(changed, costs, layout)
            for layout in lay_out(changed, combination.groups)
            if changed.num_microbatches * len(layout.chunks) <= MAX_CELLS
        ]
        fitting = [each for each in estimated if each.fits]
        if not fitting:
            misfits.extend(sorted(estimated, key=lambda each: each.needed_bytes)[:1])
        return fitting

    for each in sorted(combinations, key=lambda each: each.likely_s)[:MAX_COMBINATIONS]:
        if each.least_s > TRUST * fastest_s:
            continue
        fitting = laid_out(each, first)
        # Nothing fits with some savings if nothing does with all.
        if not fitting and others and (with_all := laid_out(each, others[-1])):
            between = (laid_out(each, saving) for saving in others[:-1])
            fitting = next(filter(None, between), with_all)
            if fitting is not with_all:
                spared += with_all
        if fitting:
            found += fitting
            fastest_s = min(fastest_s, *(own.estimate_s for own in fitting))
    misfits.sort(key=lambda own: own.needed_bytes)
    by_estimate = [sorted(each, key=lambda own: own.estimate_s) for each in (found, spared)]
    return [*by_estimate[0], *by_estimate[1], *misfits]


def _estimated(problem: PlanningProblem, costs: LayoutCosts, layout: Layout) -> Promising:
    splits = (layout.schedule or problem.schedule) in SPLIT_BACKWARDS
    bound_s = costs.bound_s(layout, split_backward=splits) + problem.program_s
    unhidden_s = _messages_s(problem, layout) + _reductions_s(problem, costs, layout)
    return Promising(problem, layout, bound_s, bound_s + unhidden_s, costs.needed_bytes(layout))


def _messages_s(problem: PlanningProblem, layout: Layout) -> float:
    """Seconds of the messages on a microbatch's way through the chain and back, which nothing hides."""
    cluster = problem.cluster
    link = cluster.between_nodes if sum(layout.group_sizes) > cluster.devices_per_node else cluster.within_node
    seconds = 0.0
    for before, after in zip(layout.chunks, layout.chunks[1:], strict=False):
        if before.group != after.group and before.module == after.module:
            load = problem.estimator.typical_load(before.module, layout.dp, cp=layout.cp(before.module))
            shares = layout.tp(after.module, after.group)
            size = problem.estimator.boundary_bytes(before.module, before.layers[1], load, num_row_shares=shares)
            seconds += link.seconds(size)
    return 2 * seconds


def _reductions_s(problem: PlanningProblem, costs: LayoutCosts, layout: Layout) -> float:
    """Seconds of the longest sum of a group's gradients over the replicas; with a sharded state, of the gathers too."""
    if layout.dp == 1:
        return 0.0
    size = costs.num_summed(layout) * problem.memory.parameter_bytes
    stride = sum(layout.group_sizes)
    key = ("summed", layout.dp, stride, round(size))

    def seconds() -> float:
        ranks = range(0, layout.dp * stride, stride)
        return all_reduce_seconds(problem.table, problem.cluster, ranks, size)

    return problem.remembered(key, seconds) * (1.5 if problem.memory.zero1 else 1.0)


def best_variants(evaluations: Sequence[tuple[PlanningProblem, float]], most: int) -> Iterator[PlanningProblem]:
    """The variants of the fastest plans, each once. `evaluations`: problems with the seconds of plans."""
    seen: list[tuple[object, ...]] = []
    for problem, seconds in sorted(evaluations, key=lambda each: each[1]):
        content = (problem.num_microbatches, problem.recompute, problem.memory.zero1)
        if seconds < inf and content not in seen and len(seen) < most:
            seen.append(content)
            yield problem
