"""Where `auto` looks beside the named planners' own plans: families of layouts, some of which no paper has.

* separate: every module on groups of its own, or all encoders on the same (Cornstarch), for all sizes;
* chains: all layers in a row, cut frozen-aware into V runs for each group, which then holds several (Megatron-LM
  balanced, but frozen-aware), going round the groups, or there and back again (the V of zero-bubble schedules);
* spread: each module by itself over *all* groups, so that every group has its share of encoder work and of language
  model work and one can fill the bubbles of the other (Optimus' placement with Cornstarch's cut).
"""

from collections.abc import Iterator, Sequence

from motet.planner.cornstarch import frozen_aware_cut
from motet.planner.degrees import uniform_degrees
from motet.planner.explicit import Placement
from motet.planner.layout import Chunk, Layout, cut_chain
from motet.planner.megatron import VIRTUAL_STAGES, layer_seconds
from motet.planner.partition import partition
from motet.planner.problem import PlanningProblem
from motet.planner.search import layouts_of, most_stages

MAX_COUNTS = 200
"""Ways to share groups out among modules that are all looked at, for each choice of sizes; beyond, Algorithm 1's."""
PLANNER = "auto"


def own_layouts(problem: PlanningProblem, schedules: Sequence[str]) -> Iterator[Layout]:
    """`schedules`: those that may be used."""
    yield from separate(problem)
    for num_chunks in VIRTUAL_STAGES:
        schedule = "interleaved_1f1b" if num_chunks > 1 and "interleaved_1f1b" in schedules else None
        yield from chains(problem, num_chunks, schedule)
    if "zero_bubble_v" in schedules:
        yield from v_shaped(problem, "zero_bubble_v")
    yield from spread(problem)


def separate(problem: PlanningProblem) -> Iterator[Layout]:
    placements: tuple[Placement, ...] = ("parallel", "colocated") if len(problem.sources) > 1 else ("parallel",)
    return layouts_of(problem, frozen_aware_cut, problem.num_devices, PLANNER, placements, MAX_COUNTS)


def chains(problem: PlanningProblem, num_chunks: int, schedule: str | None) -> Iterator[Layout]:
    for dp, tp, num_groups in uniform_degrees(problem):
        if num_groups > 1 or num_chunks == 1:
            yield from _chain(
                problem, dp, tp, num_groups, [v % num_groups for v in range(num_chunks * num_groups)], schedule
            )


def v_shaped(problem: PlanningProblem, schedule: str) -> Iterator[Layout]:
    for dp, tp, num_groups in uniform_degrees(problem):
        if num_groups > 1:
            there = list(range(num_groups))
            yield from _chain(problem, dp, tp, num_groups, [*there, *reversed(there)], schedule)


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
