"""Where `auto` looks beside the named planners' own plans: families of layouts, some of which no paper has.

* separate: every module on groups of its own, or all encoders on the same (Cornstarch), for all sizes; and these with
  several runs of the language model on each of its groups, interleaved;
* chains: all layers in a row, cut frozen-aware into V runs for each group, which then holds several (Megatron-LM
  balanced, but frozen-aware), going round the groups, or there and back again (the V of zero-bubble schedules);
* spread: each module by itself over *all* groups, so that every group has its share of encoder work and of language
  model work and one can fill the bubbles of the other (Optimus' placement with Cornstarch's cut).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from motet.planner.cornstarch import frozen_aware_cut
from motet.planner.degrees import uniform_degrees
from motet.planner.explicit import Placement
from motet.planner.layout import Chunk, Layout, cut_chain
from motet.planner.layout_costs import LayoutCosts
from motet.planner.megatron import VIRTUAL_STAGES, language_model, layer_seconds
from motet.planner.partition import partition
from motet.planner.problem import PlanningProblem
from motet.planner.search import layouts_of, most_stages

MAX_COUNTS = 200
"""Ways to share groups out among modules that are all looked at, for each choice of sizes; beyond, Algorithm 1's."""
MAX_INTERLEAVED = 40
"""Of the layouts with every module apart, those that are worth interleaving."""
PLANNER = "auto"
INTERLEAVING = ("interleaved_1f1b_adjusted",)
V_SHAPED = "zero_bubble_v"


def own_layouts(problem: PlanningProblem, schedules: Sequence[str]) -> Iterator[Layout]:
    """`schedules`: those that may be used."""
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
    return layouts_of(problem, frozen_aware_cut, problem.num_devices, PLANNER, placements, MAX_COUNTS)


def interleaved(problem: PlanningProblem, layout: Layout, num_chunks: int, schedule: str) -> Iterator[Layout]:
    """The same, but each of the language model's groups holds `num_chunks` runs of it."""
    name = language_model(problem)
    groups = [chunk.group for chunk in layout.chunks if chunk.module == name]
    tp, num_runs = layout.group_sizes[groups[0]], num_chunks * len(groups)
    if len(groups) > 1 and num_runs <= most_stages(problem, name):
        times = [time.total_s for time in problem.layer_times(name, tp, layout.dp)]
        runs = problem.remembered(("runs", name, tp, layout.dp, num_runs), lambda: partition(times, num_runs))
        own = [Chunk(name, run, groups[i % len(groups)]) for i, run in enumerate(runs)]
        chunks = [chunk for other in problem.modules for chunk in (own if other == name else _chunks_of(layout, other))]
        yield replace(layout, chunks=tuple(chunks), schedule=schedule)


def _chunks_of(layout: Layout, name: str) -> list[Chunk]:
    return [chunk for chunk in layout.chunks if chunk.module == name]


def chains(problem: PlanningProblem, num_chunks: int) -> Iterator[Layout]:
    for dp, tp, num_groups in uniform_degrees(problem):
        if num_groups > 1 or num_chunks == 1:
            yield from _chain(
                problem, dp, tp, num_groups, [v % num_groups for v in range(num_chunks * num_groups)], None
            )


def v_shaped(problem: PlanningProblem) -> Iterator[Layout]:
    for dp, tp, num_groups in uniform_degrees(problem):
        if num_groups > 1:
            there = list(range(num_groups))
            yield from _chain(problem, dp, tp, num_groups, [*there, *reversed(there)], V_SHAPED)


def _chain(
    problem: PlanningProblem, dp: int, tp: int, num_groups: int, groups: Sequence[int], schedule: str | None
) -> Iterator[Layout]:
    costs = layer_seconds(problem, tp, dp)
    if len(groups) <= sum(map(len, costs.values())):
        chunks = cut_chain(problem, tuple(problem.modules), costs, groups)
        yield Layout(planner=PLANNER, chunks=tuple(chunks), group_sizes=(tp,) * num_groups, dp=dp, schedule=schedule)


def spread(problem: PlanningProblem) -> Iterator[Layout]:
    for dp, tp, num_groups in uniform_degrees(problem):
        if num_groups == 1 or any(most_stages(problem, name) < num_groups for name in problem.modules):
            continue
        costs = layer_seconds(problem, tp, dp)
        chunks = [
            Chunk(name, run, group)
            for name in problem.modules
            for group, run in enumerate(partition(costs[name], num_groups))
        ]
        yield Layout(planner=PLANNER, chunks=tuple(chunks), group_sizes=(tp,) * num_groups, dp=dp)
