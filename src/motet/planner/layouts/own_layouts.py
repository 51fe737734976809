"""Families of layouts that planner `auto` searches beside those of the named planners.

The families, some of which no paper has:

* separate: every module on groups of its own, or all encoders on the same groups (Cornstarch), for all sizes; these
  also with several runs of the language model on each of its groups (interleaving);
* chains: all layers in a row, cut frozen-aware into V runs per group, so that each group holds several (Megatron-LM
  balanced, but frozen-aware), going round the groups, or there and back again (the V of zero-bubble schedules);
* spread: each module over *all* groups, so that each group has its share of encoder work and of language model work and
  one can fill the bubbles of the other (Optimus' placement with Cornstarch's cut).

In all of them the language model may have context parallelism, where sequences are long enough; encoders on its groups
then use all their ranks for tensor parallelism. The named planners choose no context parallelism. Tensor parallelism
comes with sequence parallelism where its costs are known: it computes norms once and saves memory.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain, product
from math import inf
from typing import NamedTuple

from motet.planner.layouts.degrees import cp_sizes, dp_sizes, most_stages, tp_sizes
from motet.planner.layouts.layout import Chunk, Layout, Placement, cut_chain, cut_module, has_few_stages
from motet.planner.layouts.layout_costs import LayoutCosts
from motet.planner.layouts.partition import partition
from motet.planner.megatron import VIRTUAL_STAGES, language_model
from motet.planner.problem import PlanningProblem
from motet.planner.search import Cutoff, layouts_of
from motet.planner.selection import device_counts

PLANNER = "auto"
"""Name of the planner that the layouts are of."""
MAX_COUNTS = 200
"""Up to this many distributions of groups among modules are enumerated for each choice of sizes; beyond, Cornstarch's
Algorithm 1 picks some."""
MAX_INTERLEAVED = 40
"""Number of separate layouts, those with the best bounds, that are also interleaved."""
NUM_FILLED = 16
"""With so many microbatches for each group, a pipeline's bubble is small without interleaving."""
INTERLEAVED = "interleaved_1f1b_adjusted"
V_SHAPED = "zero_bubble_v"


def own_layouts(problem: PlanningProblem, schedules: Sequence[str]) -> Iterator[Layout]:
    """All layouts of the families above. `schedules`: those that may be used."""
    for layout in _families(problem, schedules):
        yield _with_sequence_parallelism(problem, layout)


def _with_sequence_parallelism(problem: PlanningProblem, layout: Layout) -> Layout:
    cut: dict[str, set[int]] = {}
    for chunk in layout.chunks:
        tp = layout.tp(chunk.module, chunk.group)
        if tp > 1:
            cut.setdefault(chunk.module, set()).add(tp)
    return replace(layout, sequence_parallel=knows_sequence_parallelism(problem, cut))


def knows_sequence_parallelism(problem: PlanningProblem, cut: Mapping[str, Set[int]]) -> bool:
    """Whether tensor parallelism cuts some module that can share its sequences, and the costs of all such of `cut` are
    known with it. `cut`: tensor-parallel sizes by module."""
    known = problem.table.sequence_parallel
    takers = {name: sizes for name, sizes in cut.items() if problem.modules[name].workload.shares_sequences}
    return bool(takers) and all(sizes <= known.get(name, {}).keys() for name, sizes in takers.items())


def _families(problem: PlanningProblem, schedules: Sequence[str]) -> Iterator[Layout]:
    placements: tuple[Placement, ...] = ("parallel", "colocated") if len(problem.sources) > 1 else ("parallel",)
    num_devices = problem.num_devices
    separate = list(
        layouts_of(
            problem,
            cut_module,
            num_devices,
            PLANNER,
            placements,
            MAX_COUNTS,
            chooses_cp=True,
            cutoff=Cutoff(problem),
        )
    )
    yield from separate
    costs = LayoutCosts(problem)
    separate.sort(key=lambda layout: (costs.excess_bytes(layout), costs.bound_s(layout)))
    for num_chunks in VIRTUAL_STAGES:
        if num_chunks > 1 and INTERLEAVED in schedules:
            for layout in separate[:MAX_INTERLEAVED]:
                yield from interleaved(problem, layout, num_chunks, INTERLEAVED)
        yield from chains(problem, num_chunks)
    if V_SHAPED in schedules:
        yield from v_shaped(problem)
    yield from spread(problem)


def interleaved(problem: PlanningProblem, layout: Layout, num_chunks: int, schedule: str) -> Iterator[Layout]:
    """The same layout, but with `num_chunks` runs of the language model on each of its groups."""
    name = language_model(problem)
    groups = [chunk.group for chunk in layout.chunks if chunk.module == name]
    tp, cp, num_runs = layout.tp(name, groups[0]), layout.cp(name), num_chunks * len(groups)
    if len(groups) > 1 and num_runs <= most_stages(problem, name):
        times = problem.estimator.layer_seconds(name, tp, layout.dp, cp=cp)
        runs = problem.remembered(("runs", name, tp, cp, layout.dp, num_runs), lambda: partition(times, num_runs))
        own = [Chunk(name, run, groups[i % len(groups)]) for i, run in enumerate(runs)]
        others = [chunk for chunk in layout.chunks if chunk.module != name]
        order = list(problem.modules)
        chunks = sorted([*others, *own], key=lambda chunk: order.index(chunk.module))
        yield replace(layout, chunks=tuple(chunks), schedule=schedule)


class EqualGroups(NamedTuple):
    """Groups of equal size in each replica, each of which can hold any module. Only the language model may have context
    parallelism there."""

    dp: int
    size: int
    number: int
    shared: tuple[tuple[str, int], ...]
    """`Layout.shared` of the layout."""

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
            name: problem.estimator.layer_seconds(name, self.size // cp[name], self.dp, cp=cp[name])
            for name in problem.modules
        }


def equal_groups(problem: PlanningProblem) -> Iterator[EqualGroups]:
    """Every way to divide all devices into replicas of equal groups."""
    backbone = language_model(problem)
    others = [set(tp_sizes(problem, name)) for name in problem.modules if name != backbone]
    for dp in dp_sizes(problem):
        for tp, cp in product(tp_sizes(problem, backbone), cp_sizes(problem, backbone, dp)):
            number, left = divmod(problem.num_devices, dp * tp * cp)
            if number and not left and all(tp * cp in sizes for sizes in others):
                groups = EqualGroups(dp, tp * cp, number, ((backbone, cp),) if cp > 1 else ())
                if problem.cutoff_s == inf or _least_s(problem, groups) < problem.cutoff_s:
                    yield groups


def _least_s(problem: PlanningProblem, groups: EqualGroups) -> float:
    """The iteration if the groups share all work evenly."""
    seconds = sum(map(sum, groups.layer_seconds(problem).values()))
    return problem.num_microbatches * seconds / groups.number


def chains(problem: PlanningProblem, num_chunks: int) -> Iterator[Layout]:
    for groups in equal_groups(problem):
        yield from _rounds(problem, groups, num_chunks)


def v_shaped(problem: PlanningProblem) -> Iterator[Layout]:
    for groups in equal_groups(problem):
        yield from _there_and_back(problem, groups)


def spread(problem: PlanningProblem) -> Iterator[Layout]:
    """Each module over all groups, with a stage on each."""
    for groups in equal_groups(problem):
        yield from _spread(problem, groups)


def divisions(problem: PlanningProblem) -> Iterator[tuple[PlanningProblem, EqualGroups, float, int]]:
    """All equal groups on any of `device_counts`, with the seconds of all layers for a microbatch and the number of
    groups."""
    for num_devices in device_counts(problem):
        smaller = problem.with_num_devices(num_devices)
        for groups in equal_groups(smaller):
            yield smaller, groups, sum(map(sum, groups.layer_seconds(smaller).values())), groups.number


def chains_on(problem: PlanningProblem, groups: EqualGroups, *, schedules: Sequence[str]) -> Iterator[Layout]:
    """`chains`, `v_shaped` and `spread` on these groups; those with several runs on a group only where a pipeline's
    bubble is not small anyway."""
    has_bubble = problem.num_microbatches < NUM_FILLED * groups.number
    layouts = [_rounds(problem, groups, 1)]
    if has_bubble and INTERLEAVED in schedules:
        layouts += [_rounds(problem, groups, v) for v in VIRTUAL_STAGES if v > 1]
    if has_bubble and V_SHAPED in schedules:
        layouts.append(_there_and_back(problem, groups))
    if len(problem.modules) > 1:
        layouts.append(_spread(problem, groups))
    for layout in chain.from_iterable(layouts):
        yield _with_sequence_parallelism(problem, layout)


def _rounds(problem: PlanningProblem, groups: EqualGroups, num_chunks: int) -> Iterator[Layout]:
    if groups.number > 1 or num_chunks == 1:
        yield from _chain(problem, groups, [v % groups.number for v in range(num_chunks * groups.number)])


def _there_and_back(problem: PlanningProblem, groups: EqualGroups) -> Iterator[Layout]:
    if groups.number > 1:
        there = list(range(groups.number))
        yield from _chain(problem, groups, [*there, *reversed(there)], V_SHAPED)


def _chain(
    problem: PlanningProblem, groups: EqualGroups, places: Sequence[int], schedule: str | None = None
) -> Iterator[Layout]:
    """`places`: the group of each run of layers."""
    costs = groups.layer_seconds(problem)
    if len(places) <= sum(map(len, costs.values())):
        chunks = cut_chain(costs, places)
        if has_few_stages(problem, chunks):
            yield groups.layout(chunks, schedule)


def _spread(problem: PlanningProblem, groups: EqualGroups) -> Iterator[Layout]:
    if groups.number == 1 or any(most_stages(problem, name) < groups.number for name in problem.modules):
        return
    costs = groups.layer_seconds(problem)
    yield groups.layout(
        [
            Chunk(name, run, group)
            for name in problem.modules
            for group, run in enumerate(partition(costs[name], groups.number))
        ]
    )
