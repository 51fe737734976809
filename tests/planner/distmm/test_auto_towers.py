"""`auto` for towers: never slower than distmm, and near the best of all layouts where all can be tried."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from sampling import in_campaigns
from tower_problems import tower_problem

from motet.errors import UserError
from motet.planner.distmm.planner import distmm
from motet.planner.distmm.towers import TowerLayout, tower_plan
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.registry import choose, make_plan
from motet.planner.selection import rank
from papers.distmm.systems import setting


def every(problem: PlanningProblem) -> Iterator[Evaluation]:
    """Every layout of two towers, apart and together."""
    layouts = [
        (TowerLayout(degrees=Degrees(tp=tp, pp=pp, dp=dp), per_batch=per_batch), tp * pp * dp)
        for tp, pp, dp, per_batch in product((1, 2), (1, 2, 3), (1, 2, 3), (1, 2, 4))
        if tp * pp * dp <= problem.num_devices
    ]
    for (first, some), (second, more) in product(layouts, repeat=2):
        for together in ((), (problem.towers,)):
            if first != second if together else some + more > problem.num_devices:
                continue
            chosen = dict(zip(problem.towers, (first, second), strict=True))
            some_towers = ((), problem.towers[:1], problem.towers[1:], problem.towers)
            for schedule, recomputed in product(("distmm_pipe", "gpipe"), some_towers):
                plan = tower_plan(problem, chosen, together=together, schedule=schedule, recompute_features=recomputed)
                yield evaluate(problem, plan)


@pytest.mark.parametrize(
    "problem",
    [
        tower_problem(num_devices=2, num_samples=16),
        tower_problem(num_devices=2, num_samples=64, memory_bytes=20e6),
        *in_campaigns([tower_problem(num_devices=3, num_samples=16, batch=8)]),
    ],
    ids=["two devices", "little memory", "two batches"],
)
def test_it_is_near_the_best_of_all_layouts(problem: PlanningProblem) -> None:
    best = min((each for each in every(problem) if each.fits), key=lambda each: each.iteration_time_s)
    choice = choose(problem)
    assert choice.evaluation.fits
    assert choice.evaluation.iteration_time_s <= 1.03 * best.iteration_time_s


@pytest.mark.parametrize("num_devices", [1, 5, 8])
@pytest.mark.parametrize("towers", [2, 3])
def test_it_is_never_slower_than_distmm(num_devices: int, towers: int) -> None:
    problem = tower_problem(num_devices=num_devices, towers=towers, batch=32)
    choice = choose(problem)
    own = evaluate(problem, distmm(problem))
    assert rank(choice.evaluation) <= rank(own)
    assert choice.named["distmm"].iteration_time_s == pytest.approx(own.iteration_time_s)
    assert choice.evaluation.plan.planner == "auto"
    assert choice.evaluation.plan.num_ranks <= num_devices
    assert make_plan(problem, "auto") == choice.evaluation.plan


def test_it_goes_beyond_distmm() -> None:
    """Where sums of gradients between nodes take long, a few long pipelines are better."""
    choice = choose(setting("single node", "CoCa").problem)
    assert choice.found_by == "auto"
    assert choice.evaluation.iteration_time_s < 0.9 * choice.named["distmm"].iteration_time_s
    assert "than the best named planner, distmm" in choice.why
    assert "loss" not in choice.why


def test_what_the_user_gives_holds() -> None:
    problem = tower_problem()
    apart, together = (choose(problem, placement=p).evaluation.plan for p in ("parallel", "colocated"))
    held = [
        [{r for rep in plan.modules[t].replicas for s in rep.stages for r in s.ranks} for t in problem.towers]
        for plan in (apart, together)
    ]
    assert held[0][0].isdisjoint(held[0][1])
    assert held[1][0] == held[1][1]
    given = replace(problem, schedule="gpipe", schedules=("gpipe",))
    assert choose(given).evaluation.plan.schedule == "gpipe"
    with pytest.raises(UserError, match="no layout of image and text fits into 8 devices"):
        choose(tower_problem(memory_bytes=1e5))
