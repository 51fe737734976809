"""Improves a layout by small moves: layers between the runs of a module, and runs between groups.

The families of layouts cut each chain so that its longest *run* is short. A group with several runs can still have more
work than another: of 34 layers on 12 groups in 4 rounds, some groups get four and some two. `refined` starts from such
a layout and, again and again, takes the group whose lower bound of its end is latest, and tries to give one layer of
one of its runs to another run of the module (all boundaries in between move by a layer), or one of its runs of an
encoder to another group. It keeps the move that improves the sorted list of the groups' ends most, the latest end
first, as long as one does.

`with_split_encoders` gives up tensor parallelism of encoders: the ranks of a group take turns at the samples.

The ends are those of `LayoutCosts.ends_s`: no schedule is made, and messages cost nothing, so the result is simulated
beside the layout that it comes from.
"""

from collections.abc import Iterator
from dataclasses import replace

from motet.costs.memory import usable_bytes
from motet.plan import Plan
from motet.planner.layouts.layout import Chunk, Layout, layout_plan
from motet.planner.layouts.layout_costs import LayoutCosts
from motet.planner.problem import PlanningProblem

MAX_TRIED = 3_000
"""Layouts whose bounds are computed, times their runs divided by 10."""
RELATIVE = 1e-6
"""A move must shorten the ends by this share of the latest one."""


def layout_of(problem: PlanningProblem, plan: Plan) -> Layout | None:
    """The layout of a plan; None if no layout describes it."""
    groups: dict[tuple[int, ...], int] = {}
    chunks = []
    for name in problem.modules:
        if name not in plan.modules:
            return None
        for stage in plan.modules[name].replicas[0].stages:
            chunks.append(Chunk(name, stage.layers, groups.setdefault(stage.ranks, len(groups))))
    first = plan.modules[next(iter(problem.modules))]
    shared = {name: plan.modules[name].replicas[0].stages[0].cp_size for name in problem.modules}
    layout = Layout(
        planner=plan.planner,
        chunks=tuple(chunks),
        group_sizes=tuple(map(len, groups)),
        dp=len(first.replicas),
        shared=tuple((name, size) for name, size in shared.items() if size > 1),
        schedule=plan.schedule,
        sequence_parallel=any(module.sequence_parallel for module in plan.modules.values()),
    )
    if layout.num_devices != plan.num_ranks:
        return None
    try:
        same = layout_plan(problem, layout)
    except ValueError:
        return None
    return layout if _without_ranks(same) == _without_ranks(plan) else None


def _without_ranks(plan: Plan) -> object:
    """What a layout decides."""
    return {
        name: (
            module.sequence_parallel,
            module.fully_sharded,
            module.ep,
            module.context,
            [[(stage.layers, len(stage.ranks), stage.tp_size) for stage in r.stages] for r in module.replicas],
        )
        for name, module in plan.modules.items()
    }


def refinements(
    problem: PlanningProblem, layout: Layout, costs: LayoutCosts, *, split_backward: bool
) -> Iterator[Layout]:
    """The layout after each of the moves that improve it, the last one after all."""
    left = 10 * MAX_TRIED // len(layout.chunks)
    limit = max(usable_bytes(problem.cluster), costs.needed_bytes(layout))
    ends = costs.ends_s(layout, split_backward=split_backward)
    while left > 0:
        latest = max(ends)
        best, best_key = None, _key(ends, latest)
        for moved in _moves(problem, layout, ends.index(latest)):
            left -= 1
            own = costs.ends_s(moved, split_backward=split_backward)
            key = _key(own, latest)
            if key < best_key and costs.needed_bytes(moved, remembered=False) <= limit:
                best, best_key, ends = moved, key, own
        if best is None:
            break
        layout = best
        yield layout


def with_split_encoders(problem: PlanningProblem, layout: Layout) -> Layout | None:
    """The layout with encoders without tensor parallelism on the same groups; None if no encoder can be so."""
    sizes: dict[str, set[int]] = {}
    for chunk in layout.chunks:
        sizes.setdefault(chunk.module, set()).add(layout.group_sizes[chunk.group])
    split = frozenset(
        name
        for name in problem.sources
        if len(sizes[name]) == 1
        and 1 < max(sizes[name]) <= len(problem.samples) // layout.dp
        and layout.cp(name) == 1
        and 1 in problem.modules[name].tp_sizes
    )
    return replace(layout, split=split) if split - layout.split else None


def _key(ends: list[float], latest: float) -> list[int]:
    """The ends, the latest first, rounded so that differences that do not matter are equal."""
    unit = RELATIVE * latest
    return sorted((round(end / unit) for end in ends), reverse=True)


def _moves(problem: PlanningProblem, layout: Layout, group: int) -> Iterator[Layout]:
    for place, chunk in enumerate(layout.chunks):
        if chunk.group == group:
            yield from _shifts(problem, layout, place)
            if chunk.module in problem.sources and layout.cp(chunk.module) == 1:
                yield from _moved_runs(layout, place)


def _shifts(problem: PlanningProblem, layout: Layout, place: int) -> Iterator[Layout]:
    """One layer of a run goes to each other run of its module, those in between keep their numbers of layers."""
    chunks = layout.chunks
    first, last = chunks[place].layers
    if last - first < 2:
        return
    own = [i for i, chunk in enumerate(chunks) if chunk.module == chunks[place].module]
    for other in own:
        if other == place:
            continue
        changed = list(chunks)
        step = -1 if other > place else 1
        for i in range(min(place, other), max(place, other) + 1):
            begin, end = chunks[i].layers
            at_first, at_last = i == min(place, other), i == max(place, other)
            changed[i] = chunks[i]._replace(
                layers=(begin if at_first else begin + step, end if at_last else end + step)
            )
        yield replace(layout, chunks=tuple(changed))


def _moved_runs(layout: Layout, place: int) -> Iterator[Layout]:
    """A run on each other group of the same size."""
    chunks, sizes = layout.chunks, layout.group_sizes
    own = chunks[place]
    is_alone = sum(chunk.group == own.group for chunk in chunks) == 1
    for group, size in enumerate(sizes):
        if group != own.group and size == sizes[own.group] and not is_alone:
            changed = (*chunks[:place], own._replace(group=group), *chunks[place + 1 :])
            yield replace(layout, chunks=changed)
