"""Which layouts are simulated: those that may be faster and seem to fit, by what was learned from the ones before."""

from dataclasses import replace
from math import inf

import pytest
from small_problem import small_problem, with_memory

from motet.planner import bound_and_simulate
from motet.planner.auto_layouts import own_layouts
from motet.planner.bound_and_simulate import best_layout
from motet.planner.layout_costs import LayoutCosts, usable_bytes
from motet.schedule.generators import GENERATORS


@pytest.mark.parametrize("off", [1.0, 1.5])
def test_of_a_family_whose_estimate_was_too_low_only_those_that_would_fit_are_simulated(monkeypatch, off):
    problem = small_problem(num_devices=4, frozen=(), num_microbatches=8)
    layouts = list(own_layouts(problem, tuple(GENERATORS)))
    needed = sorted(LayoutCosts(problem).needed_bytes(layout) for layout in layouts)
    tight = with_memory(problem, needed[len(needed) // 2] / 0.9)
    real = bound_and_simulate.evaluate
    simulated = []

    def evaluate(problem, plan):
        evaluation = real(problem, plan)
        simulated.append(evaluation)
        return evaluation

    class Costs(LayoutCosts):
        def needed_bytes(self, layout):
            return super().needed_bytes(layout) / off

    monkeypatch.setattr(bound_and_simulate, "evaluate", evaluate)
    found = best_layout(tight, layouts, max_simulated=10**6, costs=Costs(tight))
    assert found == sorted(simulated, key=bound_and_simulate.rank)
    assert found[0].fits
    simulated.clear()
    monkeypatch.setattr(bound_and_simulate, "usable_bytes", lambda problem: inf)
    whatever_seems_to_fit = best_layout(tight, layouts, max_simulated=10**6, costs=Costs(tight))
    assert len(found) < len(whatever_seems_to_fit)
    # Nothing that fits and is faster was passed over.
    assert bound_and_simulate.rank(found[0]) == bound_and_simulate.rank(whatever_seems_to_fit[0])


def test_what_is_needed_beyond_the_device_is_the_excess():
    problem = small_problem(num_devices=4, frozen=())
    layout = next(iter(own_layouts(problem, ("1f1b",))))
    costs = LayoutCosts(problem)
    tight = with_memory(problem, costs.needed_bytes(layout) / 0.9 / 2)
    assert usable_bytes(tight) == pytest.approx(costs.needed_bytes(layout) / 2)
    assert LayoutCosts(tight).excess_bytes(layout) == pytest.approx(costs.needed_bytes(layout) / 2)
    roomy = replace(tight, cluster=replace(tight.cluster, device=problem.cluster.device))
    assert LayoutCosts(roomy).excess_bytes(layout) == 0
