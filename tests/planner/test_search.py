"""Searching planners: better than their baselines, as good as trying everything, and honest about memory."""

import itertools
from dataclasses import replace

import pytest
from small_problem import small_problem, with_memory

from motet.planner.baselines import cornstarch
from motet.planner.evaluate import evaluate
from motet.planner.layouts.layout import build_plan, cut_module
from motet.planner.problem import Degrees, TooSlowError
from motet.planner.registry import PLANNERS, make_plan
from motet.planner.search import layouts_of, search, usable_counts
from motet.report.plan_report import report, report_text


@pytest.mark.parametrize("planner", [name for name in PLANNERS if name != "distmm"])  # It takes towers alone.
@pytest.mark.parametrize("num_devices", [3, 5])
def test_every_planner_fills_the_devices(planner, num_devices):
    problem = small_problem(num_devices=num_devices, dp_sizes=(1, num_devices))
    plan = make_plan(problem, planner)
    assert plan.num_ranks == num_devices
    assert plan.planner == planner
    assert make_plan(problem, planner) == plan


def test_frozen_aware_is_no_slower_than_its_baselines():
    problem = small_problem(num_devices=6, frozen=("vision", "audio", "language_model"))
    times = {
        name: evaluate(problem, make_plan(problem, name)).iteration_time_s
        for name in ("cornstarch", "frozen_unaware", "even")
    }
    assert times["cornstarch"] <= min(times["frozen_unaware"], times["even"])
    assert times["cornstarch"] < max(times["frozen_unaware"], times["even"])


def test_as_good_as_simulating_every_distribution():
    problem = small_problem(num_devices=5)
    best = min(
        evaluate(
            problem,
            build_plan(problem, {n: Degrees(pp=p) for n, p in zip(problem.modules, counts, strict=True)}),
        ).iteration_time_s
        for counts in itertools.product(range(1, 4), repeat=3)
        if sum(counts) == 5
    )
    assert evaluate(problem, make_plan(problem, placement="parallel")).iteration_time_s <= best * (1 + 1e-12)


def test_algorithm_1_gives_encoders_as_many_stages_as_keep_up():
    problem = small_problem(num_devices=8)
    layouts = list(layouts_of(problem, cut_module, 8, "some", ["parallel"], max_enumerated=0))
    assert layouts
    assert all(layout.num_devices == 8 for layout in layouts)
    everything = list(layouts_of(problem, cut_module, 8, "some", ["parallel"]))
    assert len(layouts) < len(everything) == 21
    assert set(layouts) <= set(everything)


def test_replicas_and_tensor_parallelism_are_searched_where_allowed():
    problem = small_problem(num_devices=6, dp_sizes=(2,))
    plan = make_plan(problem)
    assert all(len(module.replicas) == 2 for module in plan.modules.values())


def test_tensor_parallel_sizes_that_do_not_divide_are_left_out():
    problem = small_problem(num_devices=3)
    modules = {name: replace(module, tp_sizes=(3, 1)) for name, module in problem.modules.items()}
    plan = make_plan(replace(problem, modules=modules))
    assert all(stage.tp_size == 1 for *_, stage in plan.stages())


def test_too_few_devices():
    with pytest.raises(ValueError, match="num_devices: is 1, but vision and audio and language_model need at least 3"):
        make_plan(small_problem(num_devices=1), placement="parallel")


def test_colocated_needs_one_device_less():
    assert make_plan(small_problem(num_devices=2)).num_ranks == 2


def test_what_does_not_fit_is_named_with_its_rank():
    problem = with_memory(small_problem(), 1e6)
    values = report(make_plan(problem), problem)
    assert not values["fits"]
    assert "rank" in values["overflows"][0]
    assert "MiB more than the 1 MiB" in values["overflows"][0]
    assert "does not fit: rank" in report_text(values)


def test_memory_decides_when_the_fastest_plan_does_not_fit():
    problem = small_problem(num_devices=4, num_microbatches=8)
    fastest = evaluate(problem, make_plan(problem))
    limit = max(fastest.result.peak_memory_bytes) / 0.9 - 1
    again = evaluate(with_memory(problem, limit), make_plan(with_memory(problem, limit)))
    assert again.fits or max(again.result.peak_memory_bytes) <= max(fastest.result.peak_memory_bytes)


def test_what_fits_is_found_if_anything_does():
    problem = small_problem(num_devices=7, frozen=())
    peaks = [
        max(evaluate(problem, build_plan(problem, degrees)).result.peak_memory_bytes)
        for counts in itertools.product(range(1, 6), repeat=3)
        if sum(counts) == 7
        for degrees in [{n: Degrees(pp=p) for n, p in zip(problem.modules, counts, strict=True)}]
    ]
    assert min(peaks) < max(peaks) / 1.3
    tight = with_memory(problem, 1.02 * min(peaks) / 0.9)
    assert evaluate(tight, make_plan(tight, placement="parallel")).fits


def test_report_has_the_keys_that_users_hold_on_to():
    problem = small_problem()
    plan = make_plan(problem)
    values = report(plan, problem, planning_time_s=0.5)
    assert {
        "planner",
        "fits",
        "iteration_time_s",
        "throughput_samples_per_s",
        "bubble_fraction",
        "mfu",
        "peak_memory_bytes",
        "num_devices",
        "stages",
        "lower_bound_s",
        "planning_time_s",
    } <= values.keys()
    assert values["throughput_samples_per_s"] == pytest.approx(16 / values["iteration_time_s"])
    assert len(values["peak_memory_bytes"]) == values["num_devices"] == 4
    assert values["mfu"] is None
    stages = values["stages"]
    assert {"module", "layers", "ranks", "forward_s", "backward_s"} <= stages[0].keys()
    assert sum(last - first for s in stages if s["module"] == "vision" for first, last in [s["layers"]]) == 9
    text = report_text(values)
    assert "language_model" in text
    computes = values["time_shares_s"]["compute"] / sum(values["time_shares_s"].values())
    assert f"share of time: compute {computes:.1%}, " in text


def test_replicas_that_are_cut_alike_are_shown_once():
    problem = small_problem(num_devices=6, dp_sizes=(2,))
    values = report(make_plan(problem), problem)
    shown = report_text(values)
    assert shown.count("1 of 2 replicas") == len(values["stages"]) / 2


def test_a_foreign_unimodal_planner_is_asked_for_every_cut():
    problem = small_problem(num_devices=4)

    def first_stages_are_single_layers(problem, name, degrees):
        return (*(1 for _ in range(degrees.pp - 1)), problem.modules[name].workload.num_layers - degrees.pp + 1)

    plan = cornstarch(problem, unimodal=first_stages_are_single_layers)
    for module in plan.modules.values():
        *early, _ = module.replicas[0].stages
        assert all(last - first == 1 for first, last in (stage.layers for stage in early))


@pytest.mark.parametrize("placements", [("parallel",), ("colocated",), ("parallel", "colocated"), ("replicated",)])
@pytest.mark.parametrize("num_encoders", [0, 1, 2])
def test_only_device_counts_that_are_left_out_have_no_layouts(placements, num_encoders):
    problem = small_problem(num_devices=80, encoders=("vision", "audio")[:num_encoders], dp_sizes=(1, 3))
    limits = {"vision": ((1, 2), 2), "audio": ((2,), 2), "language_model": ((2,), 5)}
    modules = {
        name: replace(module, tp_sizes=limits[name][0], max_stages=limits[name][1])
        for name, module in problem.modules.items()
    }
    problem = replace(problem, modules=modules)
    counts = usable_counts(problem, placements)
    assert counts == sorted(counts, reverse=True)
    for num_devices in range(1, 81):
        if placements == ("replicated",):  # All modules have the language model's size, and its stages.
            able = any(num_devices == dp * 2 * pp for dp in (1, 3) for pp in range(1, 6))
        else:
            able = any(layouts_of(problem, cut_module, num_devices, "some", placements))
        assert (num_devices in counts) == able


def test_devices_that_no_layout_can_use_are_passed_over(monkeypatch):
    """Of a million devices 2 x (9 + 10) stages can be used at most: others are not looked at one by one."""
    looked_at = []
    monkeypatch.setattr(
        "motet.planner.search.layouts_of",
        lambda *given, **named: looked_at.append(given[2]) or layouts_of(*given, **named),
    )
    problem = small_problem(num_devices=1_000_000, encoders=("vision",), dp_sizes=(1, 2))
    assert cornstarch(problem).num_ranks == max(looked_at) == 2 * (9 + 10)
    assert len(looked_at) == 1


@pytest.mark.parametrize("planner", [cornstarch, PLANNERS["even"].plan])
def test_a_cutoff_leaves_out_only_what_is_too_slow(planner):
    problem = small_problem(num_devices=6, num_microbatches=8, dp_sizes=(1, 2))
    best = evaluate(problem, planner(problem))
    above = problem.with_cutoff(1.001 * best.iteration_time_s)
    assert evaluate(problem, planner(above)).iteration_time_s == best.iteration_time_s
    for share in (0.99, 0.5, 1e-6):
        with pytest.raises(TooSlowError) as raised:
            planner(problem.with_cutoff(share * best.iteration_time_s))
        assert share * best.iteration_time_s <= raised.value.at_least_s <= best.iteration_time_s


def test_a_cutoff_knows_that_copies_whose_output_nobody_reads_keep_no_graph():
    """Measured forwards take less without one."""
    problem = small_problem(num_devices=2, encoders=("vision",), frozen=(), num_microbatches=16)
    cheap = {
        name: {
            size: replace(
                costs,
                layers=tuple(replace(layer, forward_without_graph=layer.forward.times(0.3)) for layer in costs.layers),
            )
            for size, costs in sizes.items()
        }
        for name, sizes in problem.table.modules.items()
    }
    problem = replace(problem, table=replace(problem.table, modules=cheap))

    def cut(problem, name, degrees):
        """Little for the first stage, whose copy keeps a graph."""
        num_layers = problem.modules[name].workload.num_layers
        return ((0, 1), (1, num_layers)) if degrees.pp == 2 else ((0, num_layers),)

    def plan(problem):
        return search(problem, cut, planner="drawn", placements=("replicated",))

    best = evaluate(problem, plan(problem))
    assert plan(problem.with_cutoff(1.001 * best.iteration_time_s)) == best.plan
