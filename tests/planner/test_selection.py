"""Which layouts are simulated: those that may be faster and seem to fit, by what was learned from the ones before."""

from dataclasses import replace
from math import inf

import pytest
from small_problem import small_problem, with_memory

from motet.costs.memory import usable_bytes
from motet.planner import selection
from motet.planner.layouts.layout import layout_plan
from motet.planner.layouts.layout_costs import LayoutCosts
from motet.planner.layouts.own_layouts import own_layouts
from motet.planner.selection import best_layout, within_memory
from motet.schedule.generators import GENERATORS


@pytest.mark.parametrize("off", [1.0, 1.5])
def test_of_a_family_whose_estimate_was_too_low_only_those_that_would_fit_are_simulated(monkeypatch, off):
    problem = small_problem(num_devices=4, frozen=(), num_microbatches=8)
    layouts = list(own_layouts(problem, tuple(GENERATORS)))
    needed = sorted(LayoutCosts(problem).needed_bytes(layout) for layout in layouts)
    tight = with_memory(problem, needed[len(needed) // 2] / 0.9)
    real = selection.evaluate
    simulated = []

    def evaluate(problem, plan):
        evaluation = real(problem, plan)
        simulated.append(evaluation)
        return evaluation

    class Costs(LayoutCosts):
        def needed_bytes(self, layout):
            return super().needed_bytes(layout) / off

    found = best_layout(tight, layouts, max_simulated=10**6, costs=Costs(tight), simulate=evaluate)
    assert found == sorted(simulated, key=selection.rank)
    assert found[0].fits
    simulated.clear()
    monkeypatch.setattr(selection, "usable_bytes", lambda cluster: inf)
    whatever_seems_to_fit = best_layout(tight, layouts, max_simulated=10**6, costs=Costs(tight))
    assert len(found) < len(whatever_seems_to_fit)
    # Nothing that fits and is faster was passed over.
    assert selection.rank(found[0]) == selection.rank(whatever_seems_to_fit[0])


def test_what_keeps_somewhat_too_much_is_tried_under_a_schedule_that_goes_by_memory():
    problem = small_problem(num_devices=4, frozen=(), num_microbatches=8)
    layouts = list(own_layouts(problem, ("1f1b", "bubble_filling")))
    costs = LayoutCosts(problem)
    needed = sorted(costs.needed_bytes(layout) for layout in layouts)
    tight = with_memory(problem, needed[len(needed) // 2] / 0.9 / 1.1)
    found = within_memory(tight, layouts, "bubble_filling", max_simulated=4)
    assert 0 < len(found) <= 4
    assert {evaluation.plan.schedule for evaluation in found} == {"bubble_filling"}
    too_large = [
        layout_plan(tight, layout, schedule="bubble_filling")
        for layout in layouts
        if 0 < LayoutCosts(tight).excess_bytes(layout) <= 0.25 * usable_bytes(tight.cluster)
    ]
    assert all(evaluation.plan in too_large for evaluation in found)
    assert any(evaluation.fits for evaluation in found)
    assert not within_memory(with_memory(problem, 1e15), layouts, "bubble_filling"), "nothing keeps too much"
    fitting = next(evaluation for evaluation in found if evaluation.fits)
    in_no_time = replace(fitting, problem=replace(tight, program_s=-1e9))
    assert not within_memory(tight, layouts, "bubble_filling", known=[in_no_time]), "nothing can be faster"


def test_what_is_needed_beyond_the_device_is_the_excess():
    problem = small_problem(num_devices=4, frozen=())
    layout = next(iter(own_layouts(problem, ("1f1b",))))
    costs = LayoutCosts(problem)
    tight = with_memory(problem, costs.needed_bytes(layout) / 0.9 / 2)
    assert usable_bytes(tight.cluster) == pytest.approx(costs.needed_bytes(layout) / 2)
    assert LayoutCosts(tight).excess_bytes(layout) == pytest.approx(costs.needed_bytes(layout) / 2)
    roomy = replace(tight, cluster=replace(tight.cluster, device=problem.cluster.device))
    assert LayoutCosts(roomy).excess_bytes(layout) == 0
