"""Measured costs beside computed ones: ratios by hand, and what a person and a program are told."""

from dataclasses import replace

import pytest
from small_problem import small_problem

from motet.costs.cost_model import LayerCost
from motet.planner.registry import make_plan
from motet.report.plan_report import compare_costs, report, report_text


def slower(table, factors):
    """A "measured" table: the computed one with every module's forwards and backwards times its factors."""
    modules = {}
    for name, sizes in table.modules.items():
        forward, backward = factors[name]
        modules[name] = {
            size: replace(
                costs,
                layers=tuple(
                    LayerCost(
                        **{
                            part: getattr(layer, part).times(forward if part.startswith("forward") else backward)
                            for part in LayerCost.__dataclass_fields__
                        }
                    )
                    for layer in costs.layers
                ),
            )
            for size, costs in sizes.items()
        }
    return replace(table, modules=modules, source="profiled")


@pytest.fixture(scope="module")
def problem():
    computed = small_problem()
    factors = {"vision": (2.0, 4.0), "audio": (1.0, 0.5), "language_model": (1.25, 1.0)}
    return replace(computed, table=slower(computed.table, factors), computed=computed.table)


def test_ratios_are_those_of_the_tables(problem):
    rows = {row["module"]: row for row in compare_costs(problem, make_plan(problem, "cornstarch"))}
    expected = {"vision": (0.5, 0.25), "audio": (1.0, 2.0), "language_model": (0.8, 1.0)}
    for name, (forward, backward) in expected.items():
        assert rows[name]["forward_ratio"] == pytest.approx(forward)
        assert rows[name]["backward_ratio"] == pytest.approx(backward)
        times = problem.estimator.layer_times(name, rows[name]["tp_size"])
        assert rows[name]["measured_forward_s"] == pytest.approx(sum(time.forward_s for time in times))


def test_both_are_told(problem):
    values = report(make_plan(problem, "cornstarch"), problem)
    assert [row["module"] for row in values["cost_comparison"]] == ["vision", "audio", "language_model"]
    text = report_text(values)
    assert "measured against computed" in text
    assert "-50%" in text


def test_a_frozen_module_without_backward_has_no_ratio(problem):
    frozen = replace(problem, modules={**problem.modules, "vision": replace(problem.modules["vision"], trainable=())})
    rows = {row["module"]: row for row in compare_costs(frozen, make_plan(frozen, "cornstarch"))}
    assert rows["vision"]["backward_ratio"] is None
    assert report_text(report(make_plan(frozen, "cornstarch"), frozen))


def test_computed_costs_have_nothing_to_be_compared_with():
    computed = small_problem()
    plan = make_plan(computed, "cornstarch")
    assert compare_costs(computed, plan) == []
    assert "measured against computed" not in report_text(report(plan, computed))
