"""Plans with encoders that run ahead: predicted time and memory, bounds, and the choice of `auto`."""

from dataclasses import replace

import pytest
from small_problem import sample, small_problem, with_memory

from motet.errors import UserError
from motet.planner.auto import bound_of_all
from motet.planner.evaluate import evaluate
from motet.planner.layouts.layout import layout_plan
from motet.planner.layouts.own_layouts import own_layouts
from motet.planner.registry import Degrees, choose, make_plan
from motet.report.plan_report import report_evaluation, report_text
from motet.schedule.action import Compute, Kind
from motet.schedule.generators import CONTRASTING, GENERATORS

ENCODERS = {"encoders": ("vision",), "frozen": ("vision",)}


def problem_of(**options):
    """Each device has a processor of its own."""
    return replace(small_problem(**{"num_devices": 3, **ENCODERS, **options}), num_cores=None)


def beside(problem, llm_stages=2):
    """The encoder on a rank of its own."""
    return make_plan(problem, "explicit", degrees={"vision": Degrees(), "language_model": Degrees(pp=llm_stages)})


def test_an_encoder_beside_saves_its_first_microbatch():
    """And what its output takes to the language model; messages are short."""
    problem = problem_of()
    without = evaluate(problem, beside(problem))
    ahead = evaluate(problem, problem.with_run_ahead(without.plan))
    first = next(cell for cell in without.costs.routes.cells if cell.module == "vision")
    saved_s = without.iteration_time_s - ahead.iteration_time_s
    assert saved_s == pytest.approx(without.costs.compute_s(Compute(Kind.FORWARD, first)), rel=0.3)


@pytest.mark.parametrize("schedule", [name for name in GENERATORS if name not in CONTRASTING])
def test_time_is_above_the_bounds_of_the_plan_and_of_all_plans(schedule):
    problem = replace(problem_of(num_devices=2), schedule=schedule)
    layouts = [layout_plan(problem, layout) for layout in own_layouts(problem, [schedule])][:6]
    plans = [problem.with_run_ahead(replace(plan, schedule=schedule)) for plan in layouts]
    running = problem.with_options(run_ahead=True)
    assert plans
    for plan in plans:
        evaluation = evaluate(problem, plan)
        assert evaluation.lower_bound_s <= evaluation.iteration_time_s * (1 + 1e-9)
        assert 0 < bound_of_all(running, [plan], plan) <= evaluation.iteration_time_s * (1 + 1e-9)


def test_work_and_flops_of_an_iteration_are_those_without():
    problem = problem_of()
    without = evaluate(problem, beside(problem))
    ahead = evaluate(problem, problem.with_run_ahead(without.plan))
    assert ahead.costs.cells.model_flops() == pytest.approx(without.costs.cells.model_flops())
    assert ahead.result.busy_s.sum() == pytest.approx(without.result.busy_s.sum(), rel=0.05)


def test_outputs_that_are_kept_count_as_memory():
    """Of four samples of 64 vectors a microbatch, four microbatches: the frozen layers' output, 64 wide, in float32."""
    problem = problem_of()
    without = evaluate(problem, beside(problem))
    ahead = evaluate(problem, problem.with_run_ahead(without.plan))
    assert ahead.result.memory[0].bytes_held[-1] - ahead.costs.static_bytes(0) == 4 * 4 * 64 * 64 * 4
    limit = ahead.costs.memory_limit().limit_bytes(0)
    assert without.costs.memory_limit().limit_bytes(0) - limit == 4 * 4 * 64 * 64 * 4
    peak = ahead.result.peak_memory_bytes[0]
    assert peak > without.result.peak_memory_bytes[0]
    assert not evaluate(with_memory(problem, peak), ahead.plan).fits


@pytest.mark.parametrize("schedule", ["1f1b", "bubble_filling", "zero_bubble_h1"])
@pytest.mark.parametrize("devices_per_node", [2, 16])
def test_equal_pipelines_are_simulated_once(schedule, devices_per_node):
    problem = problem_of(num_devices=12, dp_sizes=(4,))
    cluster = replace(problem.cluster, devices_per_node=devices_per_node)
    samples = tuple(sample(i, image=i < 12, sound=False) for i in range(16))
    problem = replace(problem, samples=samples, schedule=schedule, cluster=cluster)
    degrees = {"vision": Degrees(dp=4), "language_model": Degrees(dp=4, pp=2)}
    plan = problem.with_run_ahead(make_plan(problem, "explicit", degrees=degrees))
    folded, whole = evaluate(problem, plan), evaluate(problem, plan, folded=False)
    assert folded.iteration_time_s == pytest.approx(whole.iteration_time_s)
    assert folded.result.peak_memory_bytes == whole.result.peak_memory_bytes


def test_auto_lets_encoders_run_ahead_where_it_is_faster_and_it_may():
    """With a frozen projector: no stage has to be cut."""
    problem = problem_of(num_microbatches=2)
    modules = {**problem.modules, "vision": replace(problem.modules["vision"], trainable=())}
    problem = replace(problem, modules=modules)
    closed, free = choose(problem), choose(problem.with_options(chooses_run_ahead=True))
    assert not closed.evaluation.plan.run_ahead
    assert free.evaluation.plan.run_ahead
    assert "encoders run ahead" in free.why
    assert free.evaluation.iteration_time_s < closed.evaluation.iteration_time_s
    assert free.lower_bound_s <= free.evaluation.iteration_time_s
    assert choose(problem.with_options(run_ahead=True)).evaluation.plan.run_ahead


def test_auto_says_why_no_encoder_can_run_ahead():
    problem = small_problem(num_devices=2, encoders=("vision",), frozen=(), run_ahead=True)
    with pytest.raises(UserError, match=r"^parallel\.run_ahead: no encoder begins with a frozen layer; freeze vision"):
        choose(problem)


def test_the_report_tells_the_time_without():
    problem = problem_of()
    plan = beside(problem)
    report = report_evaluation(evaluate(problem, problem.with_run_ahead(plan)))
    assert report["run_ahead"]["layers"] == {"vision": plan.modules["vision"].num_layers - 1}
    assert report["run_ahead"]["without_s"] == pytest.approx(evaluate(problem, plan).iteration_time_s, rel=0.02)
    assert "run ahead: the next batch's forwards of vision [0, 8); without, an iteration takes" in report_text(report)
    assert report_evaluation(evaluate(problem, plan))["run_ahead"] is None
