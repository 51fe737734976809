"""What runs is what was planned: the engine of a run file orders its actions as the plan's evaluation does."""

from dataclasses import replace

import pytest
import torch
from distributed import run_distributed
from scenario import Scenario, ScenarioBatch

from motet.planner.evaluate import evaluate
from motet.planner.from_run_file import planning_problem
from motet.runtime.assembly import build_engine
from motet.schedule.lower import Step
from motet.schedule.program import make_program

COLOCATED = Scenario(llm_pp=2, placement="colocated", frozen="all but projectors", num_microbatches=4)
"""The list scheduler orders what shares ranks, by what it takes."""


WITHIN_MEMORY = replace(COLOCATED, placement="parallel", schedule="eager_1f1b")


@pytest.mark.parametrize(("scenario", "memory_bytes"), [(COLOCATED, None), (WITHIN_MEMORY, 2**20)])
def test_the_engine_runs_the_program_that_was_simulated(scenario: Scenario, memory_bytes: int | None) -> None:
    config = scenario.config()
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"memory_bytes": memory_bytes})})
    plan, batch = scenario.plan(config), ScenarioBatch(scenario, config)
    simulated = evaluate(planning_problem(config, batch.samples), plan).program
    alike = make_program(plan.schedule, simulated.dependencies.routes)
    assert simulated.projections != alike.projections, "else this shows nothing"

    def work(rank: int) -> list[tuple[Step, ...]]:
        engine = build_engine(config, plan, torch.device("cpu"))
        engine.run(batch)
        return [program.steps for program in engine._programs.values()]

    assert run_distributed(work, plan.num_ranks) == [[steps] for steps in simulated.projections]
