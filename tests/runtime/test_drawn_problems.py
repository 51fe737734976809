"""A sample of the fuzz (tests/schedule/test_fuzz.py) on real processes: drawn problems equal one process.

With `MOTET_FUZZ_DRAWS` one in twenty of the draws is executed, at least 12; `MOTET_FUZZ_SEED` draws others.
"""

import os
from datetime import timedelta
from random import Random

import pytest
import torch
from distributed import run_distributed
from drawing import Limits, draw_problem
from toy_model import ToyBatch, reference, toy_stage_maker

from motet.runtime.engine import Engine

NUM_DRAWS = max(6, int(os.environ.get("MOTET_FUZZ_DRAWS", "0")) // 20)
SEED = os.environ.get("MOTET_FUZZ_SEED", "0")


@pytest.mark.parametrize("draw", range(NUM_DRAWS))
def test_drawn_problems_equal_one_process(draw: int) -> None:
    problem = draw_problem(Random(f"{SEED}/{draw}"), Limits(max_ranks=4, equal_groups=True))
    batch = ToyBatch(problem.samples)
    loss, gradients = reference(problem.plan, batch)

    def work(rank: int) -> dict[str, torch.Tensor | None]:
        engine = Engine(
            problem.plan,
            toy_stage_maker(problem.plan),
            device=torch.device("cpu"),
            boundary_dtype=torch.float64,
            timeout=timedelta(seconds=20),
            assign=lambda plan, samples: problem.assignment,
        )
        assert engine.run(batch).loss == pytest.approx(loss, rel=1e-11)
        return {p.name: p.parameter.grad for p in engine.model.parameters if p.parameter.requires_grad}

    seen = set()
    try:
        for held in run_distributed(work, problem.plan.num_ranks):
            for name, gradient in held.items():
                assert gradient is not None, name
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12, msg=name)
                seen.add(name)
        assert seen == set(gradients)
    except (AssertionError, TimeoutError) as error:
        error.add_note(f"MOTET_FUZZ_SEED={SEED}, draw {draw}:\n{problem}")
        raise
