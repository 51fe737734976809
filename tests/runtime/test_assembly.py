"""What runs is what was planned: the engine of a run file orders its actions as the plan's evaluation does. And the
weights with which its modules begin."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import run_distributed
from scenario import Scenario, ScenarioBatch

from motet.config import RunConfig
from motet.models.from_run_file import build_node
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


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {"config": "CLIPVisionConfig", "values": {**SMALL, "image_size": 16, "patch_size": 8}, "projector": "linear"}
LLAMA = {"config": "LlamaConfig", "values": {**SMALL, "vocab_size": 32}}


@pytest.mark.parametrize(
    "model",
    [
        {"encoders": {"left": VISION, "right": VISION}, "language_model": LLAMA},
        {"towers": {"left": VISION, "right": VISION}, "contrastive": {"width": 16}},
    ],
)
def test_projectors_of_equal_shape_begin_with_weights_of_their_own(model: dict[str, Any]) -> None:
    def drawn(name: str, layers: tuple[int, int] | None = None, **changed: Any) -> torch.Tensor:
        kind = "towers" if "towers" in model else "encoders"
        parts = {**model, kind: {**model[kind], name: {**VISION, **changed}}}
        data = {"kind": "same-digits" if "towers" in model else "dial-a-digit"}
        config = RunConfig.model_validate({"model": parts, "data": data})
        projector = build_node(config, name, layers, torch.float32).parts["projector"]
        return projector.get_parameter("linear.weight")

    assert torch.equal(drawn("left"), drawn("left", (3, 5)))
    assert not torch.isclose(drawn("left"), drawn("right")).any()
    assert not torch.isclose(drawn("left"), drawn("left", seed=1)).any()
