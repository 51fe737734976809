"""Where `auto` looks beside the named planners' own plans: families of layouts, some of which no paper has.

* separate: every module on groups of its own, or all encoders on the same (Cornstarch), for all sizes; and these with
  several runs of the language model on each of its groups, interleaved;
* chains: all layers in a row, cut frozen-aware into V runs for each group, which then holds several (Megatron-LM
  balanced, but frozen-aware), going round the groups, or there and back again (the V of zero-bubble schedules);
* spread: each module by itself over *all* groups, so that every group has its share of encoder work and of language
  model work and one can fill the bubbles of the other (Optimus' placement with Cornstarch's cut).

In all of them the groups of the language model may share the tokens of a microbatch (context parallelism), where
sequences are long enough; on groups that encoders share these use all ranks for tensor parallelism. Where its costs are
known, tensor parallelism comes with sequence parallelism, which computes norms once and saves memory.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from motet.planner.cornstarch import frozen_aware_cut
from motet.planner.cost_estimates.layer_times import layer_times
from motet.planner.cost_estimates.layout_costs import LayoutCosts
from motet.planner.degrees import cp_sizes, dp_sizes, has_few_stages, most_stages, tp_sizes
from motet.planner.explicit import Placement
from motet.planner.layout import Chunk, Layout, cut_chain
from motet.planner.megatron import VIRTUAL_STAGES, language_model
from motet.planner.partition import partition
from motet.planner.problem import PlanningProblem
from motet.planner.search import layouts_of

MAX_COUNTS = 200
"""Ways to share groups out among modules that are all looked at, for each choice of sizes; beyond, Algorithm 1's."""
MAX_INTERLEAVED = 40
"""Of the layouts with every module apart, those that are worth interleaving."""
PLANNER = "auto"
INTERLEAVING = ("interleaved_1f1b_adjusted",)
V_SHAPED = "zero_bubble_v"


def own_layouts(problem: PlanningProblem, schedules: Sequence[str]) -> Iterator[Layout]:
    """`schedules`: those that may be used."""
    for layout in _families(problem, schedules):
        yield replace(layout, sequence_parallel=knows_sequence_parallelism(problem, _cut_sizes(layout)))


def _cut_sizes(layout: Layout) -> dict[str, set[int]]:
    """Tensor-parallel sizes of each module, but for 1."""
    sizes: dict[str, set[int]] = {}
    for chunk in layout.chunks:
        tp = layout.tp(chunk.module, chunk.group)
        if tp > 1:
            sizes.setdefault(chunk.module, set()).add(tp)
    return sizes


def knows_sequence_parallelism(problem: PlanningProblem, cut: Mapping[str, Set[int]]) -> bool:
    """Whether something is cut, and its costs with sequence parallelism are known. `cut`: for each module that tensor
    parallelism cuts, its sizes."""
    known = problem.table.sequence_parallel
    return bool(cut) and all(sizes <= known.get(name, {}).keys() for name, sizes in cut.items())


def _families(problem: PlanningProblem, schedules: Sequence[str]) -> Iterator[Layout]:
    apart = list(separate(problem))
    yield from apart
    costs = LayoutCosts(problem)
    apart = sorted(apart, key=lambda layout: (costs.excess_bytes(layout), costs.bound_s(layout)))[:MAX_INTERLEAVED]
    for num_chunks in VIRTUAL_STAGES:
        for schedule in [s for s in INTERLEAVING if s in schedules] if num_chunks > 1 else []:
            yield from (found for layout in apart for found in interleaved(problem, layout, num_chunks, schedule))
        yield from chains(problem, num_chunks)
    if V_SHAPED in schedules:
        yield from v_shaped(problem)
    yield from spread(problem)


def separate(problem: PlanningProblem) -> Iterator[Layout]:
    placements: tuple[Placement, ...] = ("parallel", "colocated") if len(problem.sources) > 1 else ("parallel",)
    return layouts_of(
        problem, frozen_aware_cut, problem.num_devices, PLANNER, placements, MAX_COUNTS, shares_context=True
    )


def interleaved(problem: PlanningProblem, layout: Layout, num_chunks: int, schedule: str) -> Iterator[Layout]:
    """The same, but each of the language model's groups holds `num_chunks` runs of it."""
    name = language_model(problem)
    groups = [chunk.group for chunk in layout.chunks if chunk.module == name]
    tp, cp, num_runs = layout.tp(name, groups[0]), layout.cp(name), num_chunks * len(groups)
    if len(groups) > 1 and num_runs <= most_stages(problem, name):
        times = [time.total_s for time in layer_times(problem, name, tp, layout.dp, cp=cp)]
        runs = problem.remembered(("runs", name, tp, cp, layout.dp, num_runs), lambda: partition(times, num_runs))
        own = [Chunk(name, run, groups[i % len(groups)]) for i, run in enumerate(runs)]
        chunks = [chunk for other in problem.modules for chunk in (own if other == name else _chunks_of(layout, other))]
        yield replace(layout, chunks=tuple(chunks), schedule=schedule)


def _chunks_of(layout: Layout, name: str) -> list[Chunk]:
    return [chunk for chunk in layout.chunks if chunk.module == name]


class EqualGroups(NamedTuple):
    """Groups of one replica, on any of which any module may stand: alone the language model shares tokens there."""

    dp: int
    size: int
    number: int
    shared: tuple[tuple[str, int], ...]
    """As in `Layout`."""

    def layout(self, chunks: Sequence[Chunk], schedule: str | None = None) -> Layout:
        return Layout(
            planner=PLANNER,
            chunks=tuple(chunks),
            group_sizes=(self.size,) * self.number,
            dp=self.dp,
            shared=self.shared,
            schedule=schedule,
        )

    def layer_seconds(self, problem: PlanningProblem) -> dict[str, list[float]]:
        cp = {name: dict(self.shared).get(name, 1) for name in problem.modules}
        return {
            name: [time.total_s for time in layer_times(problem, name, self.size // cp[name], self.dp, cp=cp[name])]
            for name in problem.modules
        }


def equal_groups(problem: PlanningProblem) -> Iterator[EqualGroups]:
    """Every way to cut all devices into replicas of such groups."""
    backbone = language_model(problem)
    others = [set(tp_sizes(problem, name)) for name in problem.modules if name != backbone]
    for dp in dp_sizes(problem):
        for tp, cp in product(tp_sizes(problem, backbone), cp_sizes(problem, backbone, dp)):
            number, left = divmod(problem.num_devices, dp * tp * cp)
            if number and not left and all(tp * cp in sizes for sizes in others):
                yield EqualGroups(dp, tp * cp, number, ((backbone, cp),) if cp > 1 else ())


def chains(problem: PlanningProblem, num_chunks: int) -> Iterator[Layout]:
    for groups in equal_groups(problem):
        if groups.number > 1 or num_chunks == 1:
            yield from _chain(problem, groups, [v % groups.number for v in range(num_chunks * groups.number)], None)


def v_shaped(problem: PlanningProblem) -> Iterator[Layout]:
    for groups in equal_groups(problem):
        if groups.number > 1:
            there = list(range(groups.number))
            yield from _chain(problem, groups, [*there, *reversed(there)], V_SHAPED)


def _chain(
    problem: PlanningProblem, groups: EqualGroups, places: Sequence[int], schedule: str | None
) -> Iterator[Layout]:
    """`places`: the group of each run of layers."""
    costs = groups.layer_seconds(problem)
    if len(places) <= sum(map(len, costs.values())):
        chunks = cut_chain(problem, tuple(problem.modules), costs, places)
        if has_few_stages(problem, chunks):
            yield groups.layout(chunks, schedule)


def spread(problem: PlanningProblem) -> Iterator[Layout]:
    """Each module over all groups, a stage of it on each."""
    for groups in equal_groups(problem):
        if groups.number == 1 or any(most_stages(problem, name) < groups.number for name in problem.modules):
            continue
        costs = groups.layer_seconds(problem)
        yield groups.layout(
            [
                Chunk(name, run, group)
                for name in problem.modules
                for group, run in enumerate(partition(costs[name], groups.number))
            ]
        )
