"""A planner is added with one file and one entry, whose fields say how the planner is asked."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from small_problem import small_problem

from motet.errors import UserError
from motet.planner.problem import PlanningProblem
from motet.planner.registry import PLANNERS, Planner, choose, make_plan

FILE = '''
from motet.planner.layouts.layout import build_plan
from motet.planner.problem import Degrees


def one_stage_each(problem, *, placement=None):
    """Every module is one stage; data parallelism takes the other devices."""
    degrees = Degrees(dp=problem.num_devices // len(problem.modules))
    return build_plan(problem, dict.fromkeys(problem.modules, degrees), planner="one_stage_each")
'''


@pytest.fixture
def planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planner:
    """The entry of a planner that a package outside of motet's adds."""
    package = tmp_path / "added_planners"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one_stage_each.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("added_planners.one_stage_each")
    monkeypatch.delitem(sys.modules, "added_planners.one_stage_each")
    monkeypatch.delitem(sys.modules, "added_planners")
    entry = Planner(plan=module.one_stage_each)
    monkeypatch.setitem(PLANNERS, "one_stage_each", entry)
    return entry


def problem_of(**changed: object) -> PlanningProblem:
    return small_problem(num_devices=6, dp_sizes=(1, 2), **changed)


def test_its_name_is_known(planner: Planner) -> None:
    problem = problem_of()
    plan = make_plan(problem, "one_stage_each")
    assert plan.planner == "one_stage_each"
    assert all(len(module.replicas) == 2 for module in plan.modules.values())
    with pytest.raises(UserError, match=r"'one_stage' is not known; .*one_stage_each"):
        make_plan(problem, "one_stage")


def test_auto_asks_it(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    choice = choose(problem)
    assert "one_stage_each" in {**choice.named, **choice.too_slow}
    monkeypatch.setitem(PLANNERS, "one_stage_each", replace(planner, is_tried_by_auto=False))
    assert "one_stage_each" not in {**choose(problem).named, **choose(problem).too_slow}


def test_the_limits_hold_for_it(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = replace(problem_of(), dp_sizes=(1,))
    planner_of_all = replace(planner, chooses_num_devices=True)
    monkeypatch.setitem(PLANNERS, "one_stage_each", planner_of_all)
    with pytest.raises(UserError, match=r"parallel.limits: dp of vision is 1, but planner one_stage_each needs 2"):
        make_plan(limited, "one_stage_each")
    monkeypatch.setitem(PLANNERS, "one_stage_each", replace(planner_of_all, limits_dp=False))
    assert make_plan(limited, "one_stage_each").num_ranks == 6


def test_it_is_asked_about_fewer_devices_unless_it_chooses_them(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(problem: PlanningProblem, *, placement: object = None) -> object:
        asked.append(problem.num_devices)
        return planner.plan(problem)

    problem = replace(problem_of(), cluster=replace(problem_of().cluster, num_devices=7))
    monkeypatch.setitem(PLANNERS, "one_stage_each", Planner(plan=counted, limits_dp=False))
    make_plan(problem, "one_stage_each")
    assert asked == [7, 6]
    asked.clear()
    monkeypatch.setitem(PLANNERS, "one_stage_each", Planner(plan=counted, limits_dp=False, chooses_num_devices=True))
    make_plan(problem, "one_stage_each")
    assert asked == [7]


def test_limits_without_cp_1_are_only_for_planners_that_choose_it(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of()
    modules = {**problem.modules, "language_model": replace(problem.modules["language_model"], cp_sizes=(2,))}
    problem = replace(problem, modules=modules)
    with pytest.raises(UserError, match=r"parallel.limits.cp: is \[2\], but planner one_stage_each chooses no context"):
        make_plan(problem, "one_stage_each")
    monkeypatch.setitem(PLANNERS, "one_stage_each", replace(planner, chooses_cp=True))
    with pytest.raises(UserError, match="cp of language_model is 2, but planner one_stage_each needs 1"):
        make_plan(problem, "one_stage_each")


def test_a_planner_that_is_gone_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"parallel.planner: 'alpa' is not known; give one of") as refused:
        make_plan(problem_of(), "alpa")
    assert "\n" not in str(refused.value)
