"""Planner `auto` over options that the user leaves open, and searches that end early."""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from mistakes import expect_mistake
from small_problem import sample, small_problem
from tiny_run import write_tiny_run

from motet.balancing.policies import assign
from motet.cli.main import main
from motet.errors import UserError
from motet.plan import Plan
from motet.planner.ending import until
from motet.planner.evaluate import evaluate
from motet.planner.layouts.variants import savings, variant
from motet.planner.registry import choose


def open_problem(**options):
    problem = small_problem(num_devices=4, num_microbatches=4, dp_sizes=(1, 2))
    numbers = {"microbatch_numbers": (1, 2, 4, 8), "free_dp_sizes": (1, 2, 4)}
    opened = {"chooses_recompute": True, "chooses_zero1": True, "chooses_assignment": True, **numbers}
    return replace(problem, **{**opened, **options})


def test_open_options_are_hardly_ever_slower_than_closed_ones():
    """Both searches try moves and schedules on their best plans alone, so one may miss what the other finds."""
    opened = open_problem()
    choice = choose(opened)
    closed = choose(small_problem(num_devices=4, num_microbatches=4, dp_sizes=(1, 2)))
    assert choice.evaluation.iteration_time_s <= 1.01 * closed.evaluation.iteration_time_s
    assert choice.lower_bound_s <= choice.evaluation.iteration_time_s
    for number in (1, 2, 8):
        changed = variant(opened, number, (), zero1=False)
        single = choose(replace(changed, microbatch_numbers=(), chooses_recompute=False, chooses_zero1=False))
        assert choice.lower_bound_s <= single.evaluation.iteration_time_s


def test_a_plan_holds_what_was_chosen():
    """Another problem on the same devices, with what the run file said, predicts the same of it."""
    opened = open_problem()
    peak = min(point.peak_memory_bytes for point in choose(opened).points)
    device = replace(opened.cluster.device, memory_bytes=0.7 * peak / 0.9)
    tight = replace(opened, cluster=replace(opened.cluster, device=device))
    choice = choose(tight)
    plan = Plan.from_json(choice.evaluation.plan.to_json())
    assert choice.evaluation.fits
    assert plan.recompute or plan.zero1
    said = replace(small_problem(num_devices=4, num_microbatches=4, dp_sizes=(1, 2)), cluster=tight.cluster)
    again = evaluate(said, plan)
    assert again.iteration_time_s == pytest.approx(choice.evaluation.iteration_time_s)
    assert again.result.peak_memory_bytes == choice.evaluation.result.peak_memory_bytes


def test_savings_begin_with_what_the_run_file_says():
    opened = open_problem()
    assert savings(opened)[0] == ((), False)
    assert savings(opened)[-1] == (tuple(opened.modules), True)
    assert savings(replace(opened, chooses_recompute=False, chooses_zero1=False)) == [((), False)]


def test_balanced_microbatches_are_even():
    """More even than contiguous ones on both kinds of work, and every sample is there once."""
    problem = small_problem(num_devices=3, num_microbatches=4)
    samples = tuple(sample(i, image=i < 8, sound=False, words=10 + 40 * (i % 4)) for i in range(16))
    problem = replace(problem, samples=samples)
    plan = choose(replace(problem, assignment="balanced")).evaluation.plan
    workloads = {name: module.workload for name, module in problem.all_modules.items()}

    def spread(module: str, assignment: str) -> float:
        cut = assign(replace(plan, assignment=assignment), samples, workloads=workloads, table=problem.table)
        microbatches = [m for replica in cut.microbatches[module] for m in replica]
        assert sorted(i for m in microbatches for i in m) == [i for i in range(16) if samples[i].has(module)]
        loads = [sum(samples[i].num_tokens(module) for i in m) for m in microbatches]
        return max(loads) / (sum(loads) / len(loads))

    for module in ("vision", "language_model"):
        assert spread(module, "balanced") < spread(module, "contiguous")


def test_uneven_samples_say_whether_deferral_pays():
    problem = small_problem(num_devices=4, num_microbatches=4)
    samples = tuple(sample(i, image=i % 3 == 0, words=10 + 30 * (i % 5)) for i in range(16))
    choice = choose(replace(problem, samples=samples, chooses_assignment=True))
    assert set(choice.assignments_s) == {"contiguous", "balanced", "entrain"}
    assert choice.evaluation.iteration_time_s <= min(choice.assignments_s.values())
    assert "deferral" in choice.why


def test_an_interrupt_leaves_the_best_so_far():
    found = []

    def interrupt_after_two(line: str) -> None:
        found.append(line)
        if len(found) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    choice = choose(open_problem(), interruptible=True, progress=interrupt_after_two)
    whole = choose(open_problem())
    assert choice.ended_early == "interrupted"
    assert 0 < len(choice.points) < len(whole.points)
    assert choice.evaluation.iteration_time_s == min(point.iteration_time_s for point in choice.points if point.fits)


def test_training_is_not_begun_by_an_interrupt():
    with pytest.raises(KeyboardInterrupt):
        choose(open_problem(), progress=lambda line: os.kill(os.getpid(), signal.SIGINT))


def test_a_budget_ends_whatever_runs():
    with until(0.05) as ending:
        while True:
            pass
    assert ending.why == "the budget of 0.05 s was spent"


def test_a_budget_is_for_the_main_thread():
    raised = []

    def search() -> None:
        with pytest.raises(UserError, match="main thread") as error, until(1.0):
            pass
        raised.append(error)

    thread = threading.Thread(target=search)
    thread.start()
    thread.join()
    assert raised


def test_the_command_tells_its_progress_and_keeps_its_budget(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_file = write_tiny_run(tmp_path)
    options = ["--set", "parallel.planner=auto", "--set", "parallel.num_microbatches=2", "--json"]
    assert main(["plan", str(run_file), *options, "--budget-s", "100"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["planner"] == "auto"
    assert " ms" in shown.err
    expect_mistake(capsys, ["plan", run_file, *options, "--budget-s", "0"], "--budget-s: is 0; give seconds above 0")
    named = ["plan", run_file, "--budget-s", "1", "--set", "parallel.planner=cornstarch"]
    expect_mistake(capsys, named, "--budget-s: is for parallel.planner auto, not cornstarch; leave it out")
