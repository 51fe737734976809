"""The fastest plan in simulation that any planner finds, and beyond: bound and simulate.

Candidates are every named planner's own plan, simulated unless a lower bound shows that another one's is faster, so
that the choice is never slower than the best of them; and the layouts of `motet.planner.auto.planner`, ordered by a
lower bound and an estimate of memory, simulated only while their bound is below the best so far; a few of those that
keep too much are simulated under a schedule that goes by memory. Then the best few are tried under other schedules, and
with sequence parallelism the best and the fastest that does not fit without.

What fits goes before what is fast. How far the choice is from the best possible is told by a lower bound over all plans
(`motet.planner.lower_bound`), whose relaxation is stated there. Towers that a loss contrasts are
searched by `motet.planner.auto.towers`.

Context parallelism of the language model is a degree of its own layouts; the planners that it asks choose none.

Limits: `MAX_SIMULATED` of the candidates are simulated, fewer where programs are large, so what is best of all may be
missed; the bound then says by how much at most.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import NamedTuple

from motet.errors import UserError
from motet.plan import Plan
from motet.planner.auto.towers import search_towers
from motet.planner.baselines import frozen_aware_cut
from motet.planner.bound_and_simulate import best_layout, rank, within_memory
from motet.planner.degrees import check_limits, cp_sizes, dp_sizes, has_few_stages, most_stages, tp_sizes
from motet.planner.device_counts import device_counts
from motet.planner.evaluate import Evaluation, evaluate, under_schedule
from motet.planner.explicit import Placement, check_degrees
from motet.planner.layout import Chunk, Layout, cut_chain
from motet.planner.layout_costs import LayoutCosts
from motet.planner.lower_bound import problem_lower_bound_s
from motet.planner.megatron import VIRTUAL_STAGES, language_model
from motet.planner.partition import partition
from motet.planner.problem import Degrees, PlanningProblem, TooSlowError
from motet.planner.search import layouts_of
from motet.schedule.generators import CONTRASTING, GENERATORS
from motet.schedule.stage_graph import (
    GroupsOfReplica,
    groups_in_rounds,
    groups_in_v,
    shares_ranks_with_encoders,
)

# Where `auto` looks beside the named planners' own plans: families of layouts, some of which no paper has.
#
# * separate: every module on groups of its own, or all encoders on the same (Cornstarch), for all sizes; and these
# with several runs of the language model on each of its groups, interleaved; * chains: all layers in a row, cut
# frozen-aware into V runs for each group, which then holds several (Megatron-LM balanced, but frozen-aware), going
# round the groups, or there and back again (the V of zero-bubble schedules); * spread: each module by itself over
# *all* groups, so that every group has its share of encoder work and of language model work and one can fill the
# bubbles of the other (Optimus' placement with Cornstarch's cut).
#
# In all of them the groups of the language model may share the tokens of a microbatch (context parallelism), where
# sequences are long enough; on groups that encoders share these use all ranks for tensor parallelism. Where its costs
# are known, tensor parallelism comes with sequence parallelism, which computes norms once and saves memory.


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
        times = problem.estimator.layer_seconds(name, tp, layout.dp, cp=cp)
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
            name: [
                time.total_s
                for time in problem.estimator.layer_times(name, self.size // cp[name], self.dp, cp=cp[name])
            ]
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


MAX_SIMULATED = 12
NUM_RESCHEDULED = 3
"""So many of the best plans are tried under other schedules,"""
NUM_PROMISING = 2
"""the first of them under all, the others under so many."""
MAX_ACTIONS = 15_000
"""Of all simulations of the best plan under other schedules together, and of those of the next ones."""
FRUGAL = "bubble_filling"
"""Tried where layouts keep too much under schedules that do not go by memory."""
FIRST = ("optimus", "megatron_balanced")
"""Named planners that often have the best plan: the sooner it is known, the fewer of the others' are simulated."""
BY_PROMISE = ("bubble_filling", "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v")
"""The order in which schedules are tried; then come the others. Of equal ones the first is taken."""


@dataclass(frozen=True)
class Choice:
    evaluation: Evaluation
    """Of the plan that wins; its `planner` is auto."""
    found_by: str
    """The planner whose plan it is; auto: nobody's but ours."""
    named: Mapping[str, Evaluation]
    """Each named planner's own plan."""
    too_slow: Mapping[str, float]
    """Planners that have none as fast as the best of these: seconds that theirs take at least, if they fit."""
    refused: Mapping[str, str]
    """Why a planner has none."""
    lower_bound_s: float | None
    """No plan of the problem takes less; None for towers, which the bound does not cover."""

    @property
    def best_named(self) -> str | None:
        return min(self.named, key=lambda name: rank(self.named[name]), default=None)

    @property
    def why(self) -> str:
        """In one or two sentences."""
        plan, seconds = self.evaluation.plan, self.evaluation.iteration_time_s
        parts = [f"{_shape(plan)} under {plan.schedule}"]
        num_devices = self.evaluation.problem.num_devices
        if plan.num_ranks < num_devices:
            parts.append(f"{num_devices - plan.num_ranks} of {num_devices} devices idle")
        if self.found_by != PLANNER:
            parts.append(f"the plan of {self.found_by}")
        elif self.best_named is not None:
            best = self.named[self.best_named]
            if best.fits or not self.evaluation.fits:
                gain = best.iteration_time_s / seconds - 1
                parts.append(f"{gain:.1%} faster than the best named planner, {self.best_named}")
            else:
                parts.append(f"it fits; the best named planner's, {self.best_named}, does not")
        if self.lower_bound_s is not None and self.lower_bound_s < inf:
            # Where nothing is relaxed the two are equal but for rounding.
            parts.append(f"{max(0.0, seconds / self.lower_bound_s - 1):.1%} above what no plan undercuts")
        return "; ".join(parts)


def auto(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    return choose(problem, placement=placement).evaluation.plan


def choose(problem: PlanningProblem, *, placement: Placement | None = None) -> Choice:
    """Raises `UserError` if nobody finds a plan. `placement`: as the named planners understand it; ours are then left
    out."""
    check_limits(problem)
    # Hardly anything here is garbage in cycles, and to look for it takes a third of the time.
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        return _choose(problem, placement) if problem.loss_module is None else _choose_towers(problem, placement)
    finally:
        if was_collecting:
            gc.enable()


def _choose(problem: PlanningProblem, placement: Placement | None) -> Choice:
    schedules = problem.schedules or tuple(name for name in GENERATORS if name not in CONTRASTING)
    named, too_slow, refused = _named(problem, placement, schedules)
    evaluations = list(named.values())
    if placement is None:
        layouts = [
            layout
            for num_devices in device_counts(problem)
            for layout in own_layouts(problem.with_num_devices(num_devices), schedules)
        ]
        evaluations += best_layout(problem, layouts, max_simulated=MAX_SIMULATED, known=evaluations)
        if FRUGAL in schedules:
            evaluations += within_memory(problem, layouts, FRUGAL, known=evaluations)
    if not evaluations:
        raise UserError(_why_none(problem, placement, refused))
    evaluations += [found for each in _best(evaluations) for found in _sequence_parallel(each)]
    evaluations += _rescheduled(_best(evaluations), schedules)
    best = min(evaluations, key=rank)
    evaluations += _sequence_parallel(best)
    # It saves activations too: what is faster but does not fit may fit then.
    missed = [
        e
        for e in evaluations
        if best.fits and not e.fits and e.iteration_time_s < best.iteration_time_s and not _is_sequence_parallel(e.plan)
    ]
    evaluations += _sequence_parallel(min(missed, key=_seconds)) if missed else []
    best = min(evaluations, key=rank)
    found_by = best.plan.planner if best.plan in [e.plan for e in named.values()] else PLANNER
    plan = replace(best.plan, planner=PLANNER)
    return Choice(
        evaluation=replace(best, plan=plan),
        found_by=found_by,
        named=named,
        too_slow=too_slow,
        refused=refused,
        lower_bound_s=_bound_of_choice(problem, [e.plan for e in evaluations], plan),
    )


def _best(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """The best first; plans that differ in sequence parallelism alone count once."""
    best: list[Evaluation] = []
    for evaluation in sorted(evaluations, key=rank):
        if len(best) < NUM_RESCHEDULED and not any(_is_alike(evaluation.plan, other.plan) for other in best):
            best.append(evaluation)
    return best


def _is_alike(plan: Plan, other: Plan) -> bool:
    replicas = [{name: module.replicas for name, module in each.modules.items()} for each in (plan, other)]
    return plan.schedule == other.schedule and replicas[0] == replicas[1]


def _seconds(evaluation: Evaluation) -> float:
    return evaluation.iteration_time_s


def _why_none(problem: PlanningProblem, placement: Placement | None, refused: Mapping[str, str]) -> str:
    name = language_model(problem)
    backbone = problem.modules[name]
    if 1 not in backbone.cp_sizes and placement is not None:
        return (
            f"parallel.placement: who puts encoders {placement} chooses no context parallelism, but "
            f"parallel.limits.cp is {list(backbone.cp_sizes)}; allow 1 too, or leave placement out"
        )
    if 1 not in backbone.cp_sizes:
        least = Degrees(cp=min(backbone.cp_sizes), dp=min(problem.dp_sizes), context=backbone.context)
        try:
            check_degrees(problem, name, least)
        except UserError as error:
            why, *_ = str(error).removeprefix("parallel: ").split(";")
            return f"parallel.limits.cp: {why}; allow 1 too, or give longer samples or fewer microbatches"
        return (
            f"parallel.limits.cp: no layout on {problem.num_devices} devices has context parallelism of "
            f"{' or '.join(map(str, backbone.cp_sizes))}; allow 1 too, or smaller sizes"
        )
    # Not why one of them leaves the problem to others.
    why = refused.get("cornstarch", next(iter(refused.values())))
    return f"parallel.planner: no planner finds a plan; {why}"


def _choose_towers(problem: PlanningProblem, placement: Placement | None) -> Choice:
    """No other planner lays out towers, and the lower bound does not cover them."""
    found = search_towers(problem, placement=placement)
    return Choice(
        evaluation=replace(found.best, plan=replace(found.best.plan, planner=PLANNER)),
        found_by="distmm" if found.best.plan == found.of_distmm.plan else PLANNER,
        named={"distmm": found.of_distmm},
        too_slow={},
        refused={},
        lower_bound_s=None,
    )


NOT_TRIED = (PLANNER, "oobleck")
"""This one, and one that gives up speed for what survives failures."""


def _named(
    problem: PlanningProblem, placement: Placement | None, schedules: Sequence[str]
) -> tuple[dict[str, Evaluation], dict[str, float], dict[str, str]]:
    from motet.planner.registry import PLANNERS, plan_within_limits  # It names this planner too.

    named: dict[str, Evaluation] = {}
    too_slow: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in [*FIRST, *(name for name in PLANNERS if name not in (*FIRST, *NOT_TRIED))]:
        # Under other schedules than their own, which the user may demand, bounds are others.
        fitting = [e.iteration_time_s for e in named.values() if e.fits and problem.schedules is None]
        cutoff_s = min(fitting, default=inf)
        try:
            plan = plan_within_limits(problem.with_cutoff(cutoff_s), name, placement=placement)
            evaluation = evaluate(problem, plan)
        except TooSlowError as error:
            too_slow[name] = error.at_least_s
            continue
        except UserError as error:
            refused[name] = str(error)
            continue
        allowed = [evaluation] if evaluation.plan.schedule in schedules else _under(evaluation, schedules)
        if allowed:
            named[name] = min(allowed, key=rank)
        else:
            refused[name] = f"its plan needs schedule {evaluation.plan.schedule}, which is not allowed"
    return named, too_slow, refused


def _rescheduled(evaluations: Sequence[Evaluation], schedules: Sequence[str]) -> list[Evaluation]:
    """The best plan under all schedules, the next ones under those that did best there and the first `BY_PROMISE`.
    `evaluations`: the best first."""
    first, *others = evaluations
    found = _under(first, [name for name in schedules if _differs(name, first.plan, schedules)], MAX_ACTIONS)
    promising = [evaluation.plan.schedule for evaluation in sorted([first, *found], key=rank)[:NUM_PROMISING]]
    wanted = [name for name in schedules if name in (*promising, BY_PROMISE[0])]
    left = MAX_ACTIONS
    for other in others:
        tried = _under(other, [name for name in wanted if _differs(name, other.plan, schedules)], left)
        left -= sum(each.num_actions for each in tried)
        found += tried
    return found


def _under(evaluation: Evaluation, schedules: Sequence[str], max_actions: float = inf) -> list[Evaluation]:
    """A schedule that needs another shape of plan is left out."""
    found: list[Evaluation] = []
    promise = {name: place for place, name in enumerate(BY_PROMISE)}
    for schedule in sorted(schedules, key=lambda name: promise.get(name, len(promise))):
        if sum(each.num_actions for each in found) >= max_actions:
            break
        if schedule != evaluation.plan.schedule:
            with suppress(UserError):
                found.append(under_schedule(evaluation, schedule))
    return found


def _differs(schedule: str, plan: Plan, schedules: Sequence[str]) -> bool:
    """False if it orders the actions of such a plan as a simpler one of these schedules does."""
    if schedule == "zero_bubble_v" and "zero_bubble_h1" in schedules:
        return _goes_round(plan, groups_in_v(plan))
    if schedule in ("interleaved_1f1b", "interleaved_1f1b_adjusted") and "1f1b" in schedules:
        return _goes_round(plan, groups_in_rounds(plan, plan.modules.keys()))
    if schedule == "bubble_filling" and "1f1b" in schedules:
        return shares_ranks_with_encoders(plan)
    return True


def _goes_round(plan: Plan, groups: GroupsOfReplica | None) -> bool:
    """Whether a replica has several stages on a group. `groups`: None if they stand otherwise."""
    replicas = (groups or {}).items()
    return any(len(plan.modules[name].replicas[r].stages) > len(own) for (name, r), own in replicas)


def _sequence_parallel(evaluation: Evaluation) -> list[Evaluation]:
    """The same plan with sequence parallelism in all modules that tensor parallelism cuts, if it has none and its costs
    are known."""
    problem, plan = evaluation.problem, evaluation.plan
    cut = {name: sizes for name in plan.modules if (sizes := _tp_sizes(plan, name) - {1})}
    sizes_of = {plan.modules[name].data_module(name): sizes for name, sizes in cut.items()}
    if _is_sequence_parallel(plan) or not knows_sequence_parallelism(problem, sizes_of):
        return []
    modules = {name: replace(module, sequence_parallel=name in cut) for name, module in plan.modules.items()}
    return [evaluate(problem, replace(plan, modules=modules))]


def _is_sequence_parallel(plan: Plan) -> bool:
    return any(module.sequence_parallel for module in plan.modules.values())


def _bound_of_choice(problem: PlanningProblem, candidates: Sequence[Plan], chosen: Plan) -> float:
    """Where sequence parallelism is chosen, its costs count too. It is in all modules or in none."""
    bound_s = bound_of_all(problem, candidates, chosen)
    if not _is_sequence_parallel(chosen):
        return bound_s
    table = problem.table
    modules = {name: {**costs, **table.sequence_parallel.get(name, {})} for name, costs in table.modules.items()}
    return min(bound_s, bound_of_all(replace(problem, table=replace(table, modules=modules)), candidates, chosen))


def bound_of_all(problem: PlanningProblem, candidates: Sequence[Plan], chosen: Plan) -> float:
    """The lower bound over all plans with the sizes that the user allows or a candidate has; if the chosen one has
    several tensor-parallel sizes in one module, over all plans that may."""
    replicas = {name: set(problem.dp_sizes) for name in problem.modules}
    tp = {name: set(module.tp_sizes) for name, module in problem.modules.items()}
    cp = {name: set(cp_sizes(problem, name)) for name in problem.modules}
    for plan in candidates:
        for name in problem.modules:
            replicas[name].add(len(plan.modules[name].replicas))
            tp[name] |= _tp_sizes(plan, name)
            cp[name].add(plan.modules[name].replicas[0].stages[0].cp_size)
    return problem_lower_bound_s(
        problem,
        num_replicas={name: sorted(sizes) for name, sizes in replicas.items()},
        tp={name: sorted(sizes) for name, sizes in tp.items()},
        cp={name: sorted(sizes) for name, sizes in cp.items()},
        mixed=any(len(_tp_sizes(chosen, name)) > 1 for name in problem.modules),
    )


def _tp_sizes(plan: Plan, name: str) -> set[int]:
    return {stage.tp_size for replica in plan.modules[name].replicas for stage in replica.stages}


def _shape(plan: Plan) -> str:
    """Like `vision 2 stages x 4 replicas, language_model 6 x 4`."""
    parts = []
    for name, module in plan.modules.items():
        if module.copy_of is None and module.kind != "loss":
            stages = module.replicas[0].stages
            tp_sizes = sorted(_tp_sizes(plan, name))
            groups = f" x tp {' and '.join(map(str, tp_sizes))}" if tp_sizes != [1] else ""
            groups += " with sequence parallelism" if module.sequence_parallel else ""
            groups += f" x cp {stages[0].cp_size}" if stages[0].cp_size > 1 else ""
            parts.append(f"{name} {len(stages)} stages{groups} x {len(module.replicas)} replicas")
    return ", ".join(parts)
