"""Planner `auto`: the fastest plan in simulation, of the named planners' plans and of layouts of its own.

Candidates are

* the plan of every named planner, simulated unless a lower bound shows that another plan is faster, so that the choice
  is never slower than the best of them;
* layouts of its own (`motet.planner.layouts.own_layouts`), ordered by a lower bound and an estimate of memory, and
  simulated only while their bound is below the fastest plan so far. A few that slightly exceed the memory are simulated
  under a memory-aware schedule.

What the user leaves open (microbatches, recomputation, a sharded optimizer's state) is searched first, over chains of
layers under all variants (`motet.planner.layouts.variants`); the named planners then only matter where they beat that,
and all families of layouts are searched under the variants of the fastest chains.

Then `auto` tries

* the fastest few that do not fit, with parameters that their replicas share (`motet.planner.layouts.sharing`);
* the best few with other context parallelism (`motet.planner.layouts.context_methods`) and under other schedules;
* the best one, and the fastest that does not fit, with sequence parallelism;
* the layouts with the lowest bounds, under the schedule `critical_path`, and the best few with layers moved between
  groups;
* the best one with encoders whose ranks take turns at the samples, in the place of tensor parallelism;
* the best one under balanced assignments;
* the best few with encoders that run ahead;
* the best one under `iterated_critical_path`.

Plans that fit go before plans that are fast. If none fits, and the user has fixed these options, `auto` searches again
under options that save memory, the least intrusive first, and takes the plan of the first that fits. The options are
the user's, so the plan then does not fit as it is, and the report's suggestions name them. A lower bound over all plans
(`motet.planner.lower_bound`, which states its relaxation) tells how far the choice can be from the best.

A search can be ended at any time, by a budget or an interrupt (`motet.planner.ending`); it then has the best of what it
has simulated, and no lower bound.

`motet.planner.distmm.local_search` searches plans of contrastive towers.

Limits: at most `MAX_SIMULATED` of its own layouts are simulated, fewer where programs are large, so the best plan may
be missed; the lower bound then tells by how much at most.
"""

import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf

from motet.assignment.next_batch import why_not_ahead
from motet.cluster.rank_placement import replicas_side_by_side
from motet.errors import UserError
from motet.families.capabilities import OF_EXPERTS, SHOWN_EQUAL
from motet.plan import DEFAULT_ASSIGNMENT, Plan
from motet.planner.choice import Choice, best_of, points_of
from motet.planner.distmm.local_search import search_towers
from motet.planner.ending import Progress, silent, until
from motet.planner.evaluate import Evaluation, Simulations, differ_only_in, evaluate
from motet.planner.layouts.context_methods import context_variants
from motet.planner.layouts.degrees import check_degrees, cp_sizes
from motet.planner.layouts.layout import Layout, Placement, layout_plan
from motet.planner.layouts.layout_costs import LayoutCosts
from motet.planner.layouts.own_layouts import PLANNER, chains_on, divisions, knows_sequence_parallelism, own_layouts
from motet.planner.layouts.refined import layout_of, refinements, with_split_encoders
from motet.planner.layouts.sharing import sharing_plans
from motet.planner.layouts.variants import best_variants, is_free, microbatch_numbers, promising, variant
from motet.planner.lower_bound import problem_lower_bound_s
from motet.planner.megatron import language_model
from motet.planner.problem import Degrees, PlanningProblem, TooSlowError
from motet.planner.selection import PlanFunction, best_layout, device_counts, rank, within_memory
from motet.recomputation import of_module, with_kind
from motet.schedule.generators import CONTRASTING, GENERATORS, SPLIT_BACKWARDS
from motet.schedule.stage_graph import (
    GroupsOfReplica,
    groups_in_rounds,
    groups_in_v,
    shares_ranks_with_encoders,
)

MAX_SIMULATED = 12
"""Own layouts that are simulated."""
MAX_ACTIONS = 15_000
"""Limit on the actions of all simulations of the best plan under other schedules, and of those of the next ones."""
NUM_RESCHEDULED = 3
"""Number of the best plans that are tried under other schedules."""
MAX_SEARCHED_ACTIONS = 70_000
"""Actions of all simulated plans of a search for each `NUM_SEARCHED_DEVICES`, after which only the best is improved
further: larger clusters are searched for longer."""
NUM_SEARCHED_DEVICES = 64
UNLIMITED_BYTES = 2**60
MAX_VARIANTS = 16
"""Chains of all variants that are simulated."""
MAX_VARIANT_ACTIONS = 30_000
"""Limit on the actions of these simulations together."""
NUM_MISFITS = 4
"""Of these, the most that are simulated though they seem not to fit, or did not."""
CUTOFF = 1.15
"""Seconds over the fastest plan's up to which degrees are laid out: sequence parallelism makes them faster than their
bound."""
MIN_UNEVEN = 0.1
"""Share by which the longest sample exceeds the mean, in some module, before assignments are compared."""
MIN_BUDGET_S = 0.01
NUM_VARIANTS = 1
"""Variants, those of the fastest chains, under which all families of layouts are searched."""
BALANCED = ("balanced", "entrain")
"""Assignments that the best plan is tried under where the user leaves that open."""
NUM_SHARED = 4
"""Number of plans that do not fit, the fastest ones, that are tried with parameters that replicas share."""
NUM_PROMISING = 2
"""Number of schedules, those best for the best plan, that the next plans are tried under."""
MEMORY_AWARE = "bubble_filling"
"""The schedule for layouts that exceed the memory under their own."""
CRITICAL = "critical_path"
ITERATED = "iterated_critical_path"
"""Tried last: a search of its own, which takes as long as several others together."""
NUM_FOLLOWED = 4
"""Number of layouts, those with the least bounds, that are tried under critical paths though others were faster."""
MAX_FOLLOWED_ACTIONS = 8_000
"""Most actions of a plan that is tried so: with more, fewer policies are, and each takes longer."""
MOVES_BETWEEN = (1, 2, 4, 8)
"""Numbers of moves after which a layout is tried under critical paths, beside that after all."""
NEAR_CRITICAL = 1.03
"""Moved layouts are tried so if plans under critical paths have come this near to the best plan."""
BY_PROMISE = ("bubble_filling", "zero_bubble_h1", "critical_path", "zero_bubble_h2", "zero_bubble_v")
"""The order in which schedules are tried, before all others. The first of equally fast ones is chosen."""


def choose_among(
    problem: PlanningProblem,
    named: Mapping[str, PlanFunction],
    *,
    placement: Placement | None = None,
    budget_s: float | None = None,
    interruptible: bool = False,
    progress: Progress = silent,
) -> Choice:
    """Chooses among the plans of the named planners, which keep to the user's limits, and its own layouts. `placement`
    is passed on to the named planners; own layouts are left out then.

    `budget_s`: seconds after which the search ends with the best plan so far, as an interrupt does if it is
    `interruptible`. `progress` receives each improvement. Raises `UserError` if there is no plan."""
    # There are hardly any cycles of garbage here, and collecting them would take a third of the time.
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        if problem.loss_module is not None:
            return _choose_towers(problem, placement)
        begin_s = time.monotonic()
        choice = _choose(problem, named, placement, budget_s, interruptible, progress)
        # What is open has been searched; other options are the user's.
        if choice.evaluation.fits or choice.ended_early or problem.microbatch_numbers:
            return choice
        left_s = None if budget_s is None else max(MIN_BUDGET_S, budget_s - (time.monotonic() - begin_s))
        return _choose_repaired(problem, named, placement, choice, left_s, interruptible, progress)
    finally:
        if was_collecting:
            gc.enable()


def _choose(
    problem: PlanningProblem,
    planners: Mapping[str, PlanFunction],
    placement: Placement | None,
    budget_s: float | None,
    interruptible: bool,
    progress: Progress,
) -> Choice:
    search = _Search(problem, planners, placement, progress)
    with until(budget_s, interruptible=interruptible) as ending:
        search.run()
    if not search.evaluations:
        if ending.why is not None:
            raise UserError(
                f"parallel.planner: auto found no plan before the search ended ({ending.why}); give it longer"
            )
        raise UserError(_why_none(problem, placement, search.refused))
    return search.choice(ending.why)


class _Search:
    """One search, which can be ended at any time: `evaluations` holds all that was simulated so far."""

    def __init__(
        self,
        problem: PlanningProblem,
        planners: Mapping[str, PlanFunction],
        placement: Placement | None,
        progress: Progress,
    ) -> None:
        self.problem, self.planners, self.placement = problem, planners, placement
        self.schedules = problem.schedules or tuple(name for name in GENERATORS if name not in CONTRASTING)
        self._progress = progress
        self.simulations = Simulations()
        self.evaluations: list[Evaluation] = []
        self.named: dict[str, Evaluation] = {}
        self.too_slow: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.assignments_s: dict[str, float] = {}

    def run(self) -> None:
        searches_variants = self.placement is None and is_free(self.problem)
        if searches_variants:
            self._search_variants()
        self._ask_planners()
        if self.placement is None:
            self._search_layouts(self._variants() if searches_variants else [self.problem])
        if not self.evaluations:
            return
        self._improve()
        if self.placement is None:
            self._follow_bounds()
            self._refine()
            self._place_replicas()
        if self.problem.chooses_assignment:
            self._compare_assignments()
        self._try_run_ahead()
        self._iterate()

    def add(self, found: Iterable[Evaluation], what: str) -> None:
        for evaluation in found:
            is_better = not self.evaluations or rank(evaluation) < rank(min(self.evaluations, key=rank))
            self.evaluations.append(evaluation)
            self.simulations.add(evaluation)
            if is_better:
                fits = "" if evaluation.fits else ", does not fit"
                self._progress(f"{what}: {evaluation.iteration_time_s * 1e3:.2f} ms{fits}")

    def _best(self) -> list[Evaluation]:
        """The best `NUM_RESCHEDULED`, or only one if much has been simulated, best first; plans that differ only in
        sequence parallelism count once."""
        most = 1 if self._has_searched_long() else NUM_RESCHEDULED
        best: list[Evaluation] = []
        contents: list[object] = []
        for evaluation in sorted(self.evaluations, key=rank):
            plan = evaluation.plan
            content = plan.schedule, {name: module.replicas for name, module in plan.modules.items()}
            if len(best) < most and content not in contents:
                best.append(evaluation)
                contents.append(content)
        return best

    def _has_searched_long(self) -> bool:
        limit = MAX_SEARCHED_ACTIONS * -(-self.problem.num_devices // NUM_SEARCHED_DEVICES)
        return self.simulations.num_actions >= limit

    def _fastest_s(self) -> float:
        return min((e.iteration_time_s for e in self.evaluations if e.fits), default=inf)

    def _search_variants(self) -> None:
        """Simulates the most promising chains of all variants; of mixtures also with experts that ranks share."""
        self._search_variants_of(self.problem)
        if may_share_experts(self.problem) and self.problem.cluster.devices_per_node > 1:
            self._search_variants_of(self.problem.with_options(max_ep=self.problem.cluster.devices_per_node))

    def _search_variants_of(self, problem: PlanningProblem) -> None:
        num_actions, num_before = 0, len(self.evaluations)
        found = promising(problem, divisions, partial(chains_on, schedules=self.schedules))
        if found:
            self._progress(f"{len(found)} chains of layers under all options that are open")
        num_misfits = 0
        for each in found:
            if num_actions >= MAX_VARIANT_ACTIONS or len(self.evaluations) >= num_before + MAX_VARIANTS:
                break
            if each.bound_s >= self._fastest_s() or (not each.fits and num_misfits >= NUM_MISFITS):
                continue
            if num_actions + each.num_actions > MAX_VARIANT_ACTIONS:
                continue
            evaluation = self.simulations.evaluate(each.problem, layout_plan(each.problem, each.layout))
            num_actions += evaluation.num_actions
            num_misfits += not evaluation.fits
            self.add([evaluation], "a chain")

    def _variants(self) -> list[PlanningProblem]:
        """The variants of the best chains, and the problem as it is."""
        seconds = [(e.problem, e.iteration_time_s if e.fits else inf) for e in self.evaluations]
        return list(best_variants(seconds, NUM_VARIANTS)) or [self.problem]

    def _ask_planners(self) -> None:
        for name, make_plan in self.planners.items():
            # The bounds hold for the planners' own schedules, not for others that the user may ask for.
            cutoff_s = self._fastest_s() if self.problem.schedules is None else inf
            try:
                plan = make_plan(self.problem.with_cutoff(cutoff_s), placement=self.placement)
                evaluation = self.simulations.evaluate(self.problem, plan)
            except TooSlowError as error:
                self.too_slow[name] = error.at_least_s
                continue
            except UserError as error:
                self.refused[name] = str(error)
                continue
            is_allowed = evaluation.plan.schedule in self.schedules
            allowed = [evaluation] if is_allowed else self._under(evaluation, self.schedules)
            if allowed:
                self.named[name] = min(allowed, key=rank)
                self.add([self.named[name]], name)
            else:
                self.refused[name] = f"its plan needs schedule {evaluation.plan.schedule}, which is not allowed"

    def _search_layouts(self, problems: Iterable[PlanningProblem]) -> None:
        """Simulates the most promising layouts of all families under these variants."""
        for problem in problems:
            # Of layouts that cannot be faster, most are left out before they are laid out.
            faster = problem.with_cutoff(CUTOFF * self._fastest_s())
            layouts = [
                layout
                for num_devices in device_counts(problem)
                for layout in own_layouts(faster.with_num_devices(num_devices), self.schedules)
            ]
            self._simulate_layouts(problem, layouts, "a layout")
            if MEMORY_AWARE in self.schedules:
                found = within_memory(
                    problem, layouts, MEMORY_AWARE, known=self.evaluations, simulate=self.simulations.evaluate
                )
                self.add(found, f"under {MEMORY_AWARE}")
            if may_share_experts(problem):
                # Exchanges within a node are faster, those over all ranks save most memory.
                for max_ep in sorted({problem.cluster.devices_per_node, problem.num_devices} - {1}):
                    self._simulate_layouts(problem.with_options(max_ep=max_ep), layouts, "experts shared")

    def _simulate_layouts(self, problem: PlanningProblem, layouts: Sequence[Layout], what: str) -> None:
        found = best_layout(
            problem,
            layouts,
            max_simulated=MAX_SIMULATED,
            known=self.evaluations,
            simulate=self.simulations.evaluate,
        )
        self.add(found, what)

    def _improve(self) -> None:
        """Tries the best plans with shared parameters, sequence parallelism and other schedules."""
        self.add(self._sharing(), "parameters shared")
        self.add(
            [found for each in self._best() for found in self._sequence_parallel(each)],
            "sequence parallelism",
        )
        for each in self._best():
            variants = context_variants(each.problem, each.plan)
            self.add([self.simulations.evaluate(each.problem, plan) for plan in variants], "another exchange of keys")
        self.add(self._rescheduled(self._best()), "another schedule")
        best = min(self.evaluations, key=rank)
        self.add(self._sequence_parallel(best), "sequence parallelism")
        # Sequence parallelism saves activations too, so a faster plan that does not fit may fit with it.
        missed = [
            e
            for e in self.evaluations
            if best.fits
            and not e.fits
            and e.iteration_time_s < best.iteration_time_s
            and not _is_sequence_parallel(e.plan)
        ]
        if missed:
            fastest = min(missed, key=lambda e: e.iteration_time_s)
            self.add(self._sequence_parallel(fastest), "sequence parallelism")

    def _sharing(self) -> list[Evaluation]:
        """The fastest plans that do not fit, with parameters that replicas share."""
        missed = [
            e
            for e in self.evaluations
            if not e.fits
            and e.iteration_time_s < self._fastest_s()
            and not e.problem.memory.zero1
            and all(module.ep == 1 for module in e.plan.modules.values())
        ]
        tried = sorted(missed, key=lambda e: e.iteration_time_s)[:NUM_SHARED]
        return [
            self.simulations.evaluate(each.problem, plan)
            for each in tried
            for plan in sharing_plans(each.problem, each.plan)
            if not plan.run_ahead or why_not_ahead(plan) is None
        ]

    def _sequence_parallel(self, evaluation: Evaluation) -> list[Evaluation]:
        """The same plan with sequence parallelism in all modules with tensor parallelism, if it has none and the costs
        are known; else nothing."""
        problem, plan = evaluation.problem, evaluation.plan
        cut = {name: sizes for name in plan.modules if (sizes := plan.modules[name].tp_sizes - {1})}
        sizes_of = {plan.modules[name].data_module(name): sizes for name, sizes in cut.items()}
        if _is_sequence_parallel(plan) or not knows_sequence_parallelism(problem, sizes_of):
            return []
        takers = {
            name for name in cut if problem.modules[plan.modules[name].data_module(name)].workload.shares_sequences
        }
        modules = {name: replace(module, sequence_parallel=name in takers) for name, module in plan.modules.items()}
        return [self.simulations.evaluate(problem, replace(plan, modules=modules))]

    def _rescheduled(self, evaluations: Sequence[Evaluation]) -> list[Evaluation]:
        """The best plan under all schedules; the next plans under the schedules that were best for it and the first of
        `BY_PROMISE`. `evaluations`: best first."""
        first, *others = evaluations
        different = [name for name in self.schedules if _differs(name, first.plan, self.schedules)]
        found = self._under(first, [name for name in different if name != ITERATED], MAX_ACTIONS)
        promising = [evaluation.plan.schedule for evaluation in sorted([first, *found], key=rank)[:NUM_PROMISING]]
        wanted = [name for name in self.schedules if name in (*promising, BY_PROMISE[0])]
        left = MAX_ACTIONS
        for other in others:
            tried = self._under(other, [name for name in wanted if _differs(name, other.plan, self.schedules)], left)
            left -= sum(each.num_actions for each in tried)
            found += tried
        return found

    def _under(self, evaluation: Evaluation, schedules: Sequence[str], max_actions: float = inf) -> list[Evaluation]:
        """The plan under each of these schedules that supports its layout."""
        found: list[Evaluation] = []
        promise = {name: place for place, name in enumerate(BY_PROMISE)}
        for schedule in sorted(schedules, key=lambda name: promise.get(name, len(promise))):
            if sum(each.num_actions for each in found) >= max_actions:
                break
            if schedule != evaluation.plan.schedule:
                with suppress(UserError):
                    found.append(self.simulations.under_schedule(evaluation, schedule))
        return found

    def _follow_bounds(self) -> None:
        """Tries layouts that have less work on each group than others, and that closed forms make nothing of, under
        critical paths."""
        if CRITICAL not in self.schedules:
            return
        best = min(self.evaluations, key=rank)
        found: list[tuple[float, Evaluation]] = []
        known = [e.plan for e in self.evaluations if e.plan.schedule == CRITICAL]
        for each in self.evaluations:
            layout = layout_of(each.problem, each.plan) if each.num_actions <= MAX_FOLLOWED_ACTIONS else None
            if layout is not None and not any(
                differ_only_in(("schedule", "planner"), plan, each.plan) for plan in known
            ):
                known.append(each.plan)
                found.append((LayoutCosts(each.problem).bound_s(layout), each))
        found.sort(key=lambda pair: pair[0])
        for bound_s, each in found[:NUM_FOLLOWED]:
            if bound_s < best.iteration_time_s:
                self.add(self._under(each, [CRITICAL]), "critical paths")

    def _refine(self) -> None:
        """Moves layers and runs of the best plans between groups, under their own schedules and the most promising; and
        those of the best one without tensor parallelism of its encoders."""
        for number, each in enumerate(self._best()):
            if number > 0 and self._has_searched_long():
                break
            layout = layout_of(each.problem, each.plan)
            if layout is None:
                continue
            self._move_layers(each, layout)
            if number > 0 or each.num_actions > MAX_FOLLOWED_ACTIONS or self.problem.survives_losses:
                continue
            split = with_split_encoders(each.problem, layout)
            if split is not None:
                with suppress(UserError):
                    plan = layout_plan(each.problem, split, schedule=each.plan.schedule)
                    found = self.simulations.evaluate(each.problem, plan)
                    self.add([found, *self._under(found, self._promising(found))], "encoders in turns")
                    self._move_layers(each, split)

    def _move_layers(self, each: Evaluation, layout: Layout) -> None:
        splits = each.plan.schedule in SPLIT_BACKWARDS
        steps = list(refinements(each.problem, layout, LayoutCosts(each.problem), split_backward=splits))
        if each.num_actions <= MAX_FOLLOWED_ACTIONS and self._critical_is_near():
            # What evens out the work may take a schedule its order, so some moves can be better than all.
            some = [step for number, step in enumerate(steps[:-1], start=1) if number in MOVES_BETWEEN]
            for step in some:
                with suppress(UserError):
                    plan = layout_plan(each.problem, step, schedule=CRITICAL)
                    self.add([self.simulations.evaluate(each.problem, plan)], "some layers moved")
        if steps:
            with suppress(UserError):
                plan = layout_plan(each.problem, steps[-1], schedule=each.plan.schedule)
                found = self.simulations.evaluate(each.problem, plan)
                self.add([found, *self._under(found, self._promising(found), MAX_ACTIONS)], "layers moved")

    def _critical_is_near(self) -> bool:
        times_s = [e.iteration_time_s for e in self.evaluations if e.plan.schedule == CRITICAL]
        return min(times_s, default=inf) <= NEAR_CRITICAL * min(self.evaluations, key=rank).iteration_time_s

    def _promising(self, evaluation: Evaluation) -> list[str]:
        allowed = [name for name in BY_PROMISE if name in self.schedules]
        return [name for name in allowed if _differs(name, evaluation.plan, self.schedules)]

    def _place_replicas(self) -> None:
        """Puts equal stages of the best plans' replicas side by side on the nodes."""
        cluster = self.problem.cluster
        if cluster.num_nodes == 1 or self.problem.survives_losses:
            return
        for each in self._best():
            placed = replicas_side_by_side(each.plan, cluster.devices_per_node)
            if placed != each.plan:
                self.add([self.simulations.evaluate(each.problem, placed)], "replicas side by side")

    def _compare_assignments(self) -> None:
        """Tries the best plan under balanced assignments; samples that are nearly alike leave nothing to balance."""
        best = min(self.evaluations, key=rank)
        if not any(_are_uneven(best.problem, name) for name in best.problem.modules):
            return
        found = {best.plan.assignment: best}
        for name in BALANCED:
            with suppress(UserError):
                found[name] = self.simulations.evaluate(best.problem, replace(best.plan, assignment=name))
        self.add(found.values(), "another assignment")
        self.assignments_s = {name: each.iteration_time_s for name, each in found.items()}

    def _try_run_ahead(self) -> None:
        """Tries the best plans with encoders that run the next batch's forwards."""
        if self.problem.chooses_run_ahead or self.problem.run_ahead:
            best = [each for each in self._best() if not each.plan.run_ahead]
            self.add([found for each in best for found in self._with_run_ahead(each)], "encoders ahead")

    def _with_run_ahead(self, evaluation: Evaluation) -> list[Evaluation]:
        """The same plan with encoders that run ahead, if some can."""
        try:
            return [self.simulations.evaluate(evaluation.problem, evaluation.problem.with_run_ahead(evaluation.plan))]
        except UserError:
            return []

    def _iterate(self) -> None:
        """Searches longer for the best plan's order, if critical paths are near it and one order serves all batches."""
        best = min(self.evaluations, key=rank)
        if (
            ITERATED in self.schedules
            and best.num_actions <= MAX_FOLLOWED_ACTIONS
            and self._critical_is_near()
            and _has_one_order(best)
        ):
            self.add(self._under(best, [ITERATED]), "critical paths again")

    def choice(self, ended_early: str | None) -> Choice:
        if self.problem.run_ahead:
            found = [each for each in self.evaluations if each.plan.run_ahead]
            if not found:
                best = min(self.evaluations, key=rank)
                found = [self.simulations.evaluate(best.problem, best.problem.with_run_ahead(best.plan))]
            self.evaluations = found
        best = min(self.evaluations, key=rank)
        found_by = best.plan.planner if best.plan in [e.plan for e in self.named.values()] else PLANNER
        plan = replace(best.plan, planner=PLANNER)
        plans = [each.plan for each in self.evaluations]
        return Choice(
            # A chain may have been simulated on fewer devices than there are.
            evaluation=replace(best, plan=plan, problem=best.problem.with_num_devices(self.problem.num_devices)),
            found_by=found_by,
            named=self.named,
            too_slow=self.too_slow,
            refused=self.refused,
            lower_bound_s=None if ended_early else _bound_of_variants(self.problem, plans, plan),
            best=best_of(self.evaluations),
            points=points_of(self.evaluations),
            assignments_s=self.assignments_s,
            ended_early=ended_early,
        )


def _are_uneven(problem: PlanningProblem, name: str) -> bool:
    tokens = [sample.num_tokens(name) for sample in problem.samples]
    return max(tokens) > (1 + MIN_UNEVEN) * sum(tokens) / len(tokens)


def _has_one_order(evaluation: Evaluation) -> bool:
    """Whether all batches have the same cells and routes, so that a schedule is searched once and not while training
    goes on: each sample has every modality, each microbatch equally many samples, and replicas of unequal numbers meet
    samples that are alike."""
    problem, plan = evaluation.problem, evaluation.plan
    numbers = {len(module.replicas) for module in plan.modules.values()}
    return (
        plan.assignment == DEFAULT_ASSIGNMENT
        and problem.cuts_evenly
        and all(sample.num_tokens(name) for sample in problem.samples for name in problem.modules)
        and (len(numbers) == 1 or not any(problem.sample_kinds))
    )


def _bound_of_variants(problem: PlanningProblem, candidates: Sequence[Plan], chosen: Plan) -> float:
    """The bound over all variants: without recomputation, whatever the memory, for each number of microbatches."""
    if not is_free(problem):
        return _bound_of_choice(problem, candidates, chosen)
    least_s = inf
    # The chosen number probably has the least bound, which the others then only have to exceed.
    for number in sorted(microbatch_numbers(problem), key=lambda number: number != chosen.num_microbatches):
        changed = variant(problem, number, problem.recompute, zero1=problem.memory.zero1 or problem.chooses_zero1)
        if changed is not None:
            if problem.chooses_recompute:
                changed = _with_all_memory(changed)
            of_number = [plan for plan in candidates if plan.num_microbatches == number]
            always = problem.memory.zero1 and not problem.chooses_zero1
            least_s = min(least_s, _bound_of_choice(changed, of_number, chosen, least_s, gathers=always))
    return least_s


def _with_all_memory(problem: PlanningProblem) -> PlanningProblem:
    device = replace(problem.cluster.device, memory_bytes=UNLIMITED_BYTES)
    cluster = replace(problem.cluster, device=device)
    return problem.with_options(cluster=cluster, memory=replace(problem.memory, zero1=True))


def _choose_repaired(
    problem: PlanningProblem,
    planners: Mapping[str, PlanFunction],
    placement: Placement | None,
    choice: Choice,
    budget_s: float | None,
    interruptible: bool,
    progress: Progress,
) -> Choice:
    """The plan that fits under the first of the options that save memory, of those that are not open; `choice` if none
    does."""
    begin_s = time.monotonic()
    for changed in _saving_memory(problem):
        with suppress(UserError):
            left_s = None if budget_s is None else max(MIN_BUDGET_S, budget_s - (time.monotonic() - begin_s))
            found = _choose(changed, planners, placement, left_s, interruptible, progress)
            if found.ended_early:
                return replace(choice, ended_early=found.ended_early)
            if not found.evaluation.fits:
                continue
            fitting = found.evaluation.plan
            recomputed = tuple(
                with_kind(name, kind)
                for name, module in fitting.modules.items()
                if (kind := of_module(problem.recompute, module.data_module(name))) is not None
            )
            plan = replace(fitting, num_microbatches=problem.num_microbatches, recompute=recomputed, zero1=False)
            return replace(
                choice,
                evaluation=evaluate(problem, plan),
                found_by=found.found_by,
                repaired_s=found.evaluation.iteration_time_s,
            )
    return choice


def _saving_memory(problem: PlanningProblem) -> Iterator[PlanningProblem]:
    """The problem under options that save memory, the least intrusive first."""
    sharded = replace(problem.memory, zero1=True)
    blocks = tuple(name for name in problem.modules if name != problem.loss_module)
    may_shard = not problem.memory.zero1 and max(problem.dp_sizes) > 1
    if may_shard:
        yield problem.with_options(memory=sharded)
    if set(problem.recompute) != set(blocks):
        yield problem.with_options(recompute=blocks)
        if may_shard:
            yield problem.with_options(memory=sharded, recompute=blocks)
    for factor in (2, 4):
        number = factor * problem.num_microbatches
        dp_sizes = tuple(dp for dp in problem.dp_sizes if dp * number <= len(problem.samples))
        if dp_sizes:
            both = problem.with_options(memory=sharded if may_shard else problem.memory, recompute=blocks)
            yield both.with_options(num_microbatches=number, dp_sizes=dp_sizes)


def _why_none(problem: PlanningProblem, placement: Placement | None, refused: Mapping[str, str]) -> str:
    name = language_model(problem)
    backbone = problem.modules[name]
    if 1 not in backbone.cp_sizes and placement is not None:
        return (
            f"parallel.placement: planners that place encoders {placement} choose no context parallelism, but "
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
    # Cornstarch's reason is about the problem; some others only say what they do not plan.
    why = refused.get("cornstarch", next(iter(refused.values())))
    return f"parallel.planner: no planner finds a plan; {why}"


def _choose_towers(problem: PlanningProblem, placement: Placement | None) -> Choice:
    """Starts from the plans of `distmm`, the only named planner of towers; the lower bound does not cover them."""
    found = search_towers(problem, placement=placement)
    return Choice(
        evaluation=replace(found.best, plan=replace(found.best.plan, planner=PLANNER)),
        found_by="distmm" if found.best.plan == found.of_distmm.plan else PLANNER,
        named={"distmm": found.of_distmm},
        too_slow={},
        refused={},
        lower_bound_s=None,
        best=best_of([found.best, found.of_distmm]),
        points=points_of([found.best, found.of_distmm]),
    )


def _differs(schedule: str, plan: Plan, schedules: Sequence[str]) -> bool:
    """False if the schedule orders this plan's actions as a simpler one of `schedules` does."""
    if schedule == "zero_bubble_v" and "zero_bubble_h1" in schedules:
        return _has_several_stages_on_a_group(plan, groups_in_v(plan))
    if schedule in ("interleaved_1f1b", "interleaved_1f1b_adjusted") and "1f1b" in schedules:
        return _has_several_stages_on_a_group(plan, groups_in_rounds(plan, plan.modules.keys()))
    if schedule == "bubble_filling" and "1f1b" in schedules:
        return shares_ranks_with_encoders(plan)
    return True


def _has_several_stages_on_a_group(plan: Plan, groups: GroupsOfReplica | None) -> bool:
    """`groups` None: the stages are placed in another way."""
    replicas = (groups or {}).items()
    return any(len(plan.modules[name].replicas[r].stages) > len(own) for (name, r), own in replicas)


def may_share_experts(problem: PlanningProblem) -> bool:
    """Whether a module has experts that ranks can share, of a family that has been shown equal with it."""
    return not problem.survives_losses and any(
        module.workload.numbers_of_experts and SHOWN_EQUAL.get(module.workload.family, frozenset()) >= OF_EXPERTS
        for module in problem.modules.values()
    )


def _is_sequence_parallel(plan: Plan) -> bool:
    return any(module.sequence_parallel for module in plan.modules.values())


def _bound_of_choice(
    problem: PlanningProblem,
    candidates: Sequence[Plan],
    chosen: Plan,
    at_most_s: float = inf,
    *,
    gathers: bool = True,
) -> float:
    """The bound, with the costs of sequence parallelism too if it is chosen (in all modules or in none), and with the
    memory of shared experts. If replicas share parameters in the chosen plan, whatever the memory, and with one owner
    of each optimizer state."""
    if any(module.ep > 1 for module in chosen.modules.values()):
        problem = problem.with_options(max_ep=problem.num_devices)
    if any(module.shares_over_replicas for module in chosen.modules.values()):
        problem, gathers = _with_all_memory(problem), False
    if chosen.run_ahead:
        problem = problem.with_options(run_ahead=True)
    bound_s = bound_of_all(problem, candidates, chosen, at_most_s, gathers=gathers)
    if not _is_sequence_parallel(chosen):
        return bound_s
    table = problem.table
    modules = {name: {**costs, **table.sequence_parallel.get(name, {})} for name, costs in table.modules.items()}
    with_sequences = problem.with_options(table=replace(table, modules=modules))
    return bound_of_all(with_sequences, candidates, chosen, bound_s, gathers=gathers)


def bound_of_all(
    problem: PlanningProblem,
    candidates: Sequence[Plan],
    chosen: Plan,
    at_most_s: float = inf,
    *,
    gathers: bool = True,
) -> float:
    """Lower bound over all plans with sizes that the user allows or a candidate has, or `at_most_s` if that is less. If
    the chosen plan has several tensor-parallel sizes in one module, the bound is over plans that may have several."""
    replicas = {name: set(problem.dp_sizes) for name in problem.modules}
    tp = {name: set(module.tp_sizes) for name, module in problem.modules.items()}
    cp = {name: set(cp_sizes(problem, name)) for name in problem.modules}
    for plan in candidates:
        for name in problem.modules:
            replicas[name].add(len(plan.modules[name].replicas))
            tp[name] |= plan.modules[name].tp_sizes
            cp[name].add(plan.modules[name].replicas[0].stages[0].cp_size)
    return problem_lower_bound_s(
        problem,
        num_replicas={name: sorted(sizes) for name, sizes in replicas.items()},
        tp={name: sorted(sizes) for name, sizes in tp.items()},
        cp={name: sorted(sizes) for name, sizes in cp.items()},
        mixed=any(len(chosen.modules[name].tp_sizes) > 1 for name in problem.modules),
        gathers=gathers,
        at_most_s=at_most_s,
    )
