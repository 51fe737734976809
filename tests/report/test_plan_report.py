"""What `motet plan` says of shared parameters."""

import pytest
from small_problem import small_problem

from motet.plan import ContextOptions
from motet.planner.evaluate import evaluate
from motet.planner.layouts.layout import explicit_plan
from motet.planner.problem import Degrees
from motet.report.plan_report import report_evaluation, report_text

OVER_REPLICAS = Degrees(dp=2, fully_sharded=True, sharded_replicas=2)
IN_STAGES = Degrees(dp=2, cp=2, fully_sharded=True, context=ContextOptions(block_size=16))
ONE_HOLDER = Degrees(cp=2, fully_sharded=True, context=ContextOptions(block_size=16))
GOES_ON = "the ranks of each stage share parameters by rows; after a failure training goes on with the shares that"


@pytest.mark.parametrize(
    ("degrees", "survives", "text"),
    [
        (OVER_REPLICAS, False, "2 replicas share parameters by rows; after a failure training restarts from the"),
        (IN_STAGES, True, GOES_ON),
        (IN_STAGES, False, "the ranks of each stage share parameters by rows; after a failure training restarts"),
        (ONE_HOLDER, True, "the ranks of each stage share parameters by rows; after a failure training restarts"),
        (Degrees(dp=2), True, None),
    ],
)
def test_a_plan_says_what_follows_the_loss_of_a_share(degrees: Degrees, survives: bool, text: str | None) -> None:
    size = degrees.dp * degrees.cp
    problem = small_problem(num_devices=size, encoders=(), frozen=(), survives_losses=survives)
    values = report_evaluation(evaluate(problem, explicit_plan(problem, {"language_model": degrees})))
    lines = [line for line in report_text(values).splitlines() if "share parameters" in line]
    assert len(lines) == (text is not None)
    assert all(line.startswith(f"language_model: {text}") for line in lines)
