"""What `motet plan` says of shared parameters."""

from dataclasses import replace

import pytest
from small_problem import small_problem

from motet.plan import ContextOptions
from motet.planner.evaluate import evaluate
from motet.planner.layouts.layout import explicit_plan
from motet.planner.problem import Degrees
from motet.report.plan_report import report_evaluation, report_text

OVER_REPLICAS = Degrees(dp=2, fully_sharded=True, sharded_replicas=2)
HYBRID = Degrees(dp=4, fully_sharded=True, sharded_replicas=2)
IN_STAGES = Degrees(dp=2, cp=2, fully_sharded=True, context=ContextOptions(block_size=16))
OF_TWO = "2 replicas share parameters by rows; after a failure training"
GOES_ON = "goes on with the shares that other replicas hold"
ONE_HOLDER = Degrees(cp=2, fully_sharded=True, context=ContextOptions(block_size=16))
IN_STAGE = "the ranks of each stage share parameters, each whole on one rank; after a failure training"


@pytest.mark.parametrize(
    ("degrees", "node_size", "survives", "text"),
    [
        (OVER_REPLICAS, 1, False, f"{OF_TWO} restarts from the checkpoint"),
        (OVER_REPLICAS, 1, True, f"{OF_TWO} restarts from the checkpoint"),
        (HYBRID, 1, True, f"{OF_TWO} {GOES_ON}"),
        (HYBRID, 2, True, f"{OF_TWO} {GOES_ON}"),
        (HYBRID, 4, True, f"{OF_TWO} restarts from the checkpoint"),
        (HYBRID, 1, False, f"{OF_TWO} restarts from the checkpoint"),
        (IN_STAGES, 2, True, f"{IN_STAGE} {GOES_ON}"),
        (IN_STAGES, 4, True, f"{IN_STAGE} restarts from the checkpoint"),
        (IN_STAGES, 2, False, f"{IN_STAGE} restarts from the checkpoint"),
        (ONE_HOLDER, 1, True, f"{IN_STAGE} restarts from the checkpoint"),
        (Degrees(dp=2), 1, True, None),
    ],
)
def test_a_plan_says_what_follows_the_loss_of_a_share(
    degrees: Degrees, node_size: int, survives: bool, text: str | None
) -> None:
    size = degrees.dp * degrees.cp
    problem = small_problem(num_devices=size, encoders=(), frozen=(), survives_losses=survives)
    problem = replace(problem, cluster=replace(problem.cluster, devices_per_node=node_size))
    values = report_evaluation(evaluate(problem, explicit_plan(problem, {"language_model": degrees})))
    lines = [line for line in report_text(values).splitlines() if "share parameters" in line]
    assert len(lines) == (text is not None)
    assert all(line.startswith(f"language_model: {text}") for line in lines)


@pytest.mark.parametrize(("failures", "follows"), [(0, "restarts from the checkpoint"), (1, GOES_ON)])
def test_under_zero1_a_loss_takes_states_that_nobody_else_keeps(failures: int, follows: str) -> None:
    problem = small_problem(num_devices=4, encoders=(), frozen=(), survives_losses=True, failures=failures)
    memory = replace(problem.memory, zero1=True, state_copies=failures + 1)
    problem = replace(problem, memory=memory, cluster=replace(problem.cluster, devices_per_node=2))
    values = report_evaluation(evaluate(problem, explicit_plan(problem, {"language_model": IN_STAGES})))
    assert f"{IN_STAGE} {follows}" in report_text(values)
