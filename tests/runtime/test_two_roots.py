"""A module that hands hidden states on and has a loss of its own: both are roots of one backward."""

from datetime import timedelta

import pytest
import torch
from distributed import run_distributed
from plans import module, replica
from toy_model import ToyBatch, reference, toy_stage_maker

from motet.assignment.sample import Sample, Segment
from motet.plan import Edge, Plan
from motet.runtime.engine import Engine

LAYOUTS = [
    {"vision": (Segment(2),), "llm": (Segment(3),), "generator": (Segment(2),)},
    {"llm": (Segment(4),), "generator": (Segment(1),)},
    {"vision": (Segment(1),), "llm": (Segment(2),)},
    {"llm": (Segment(3),)},
]
BATCH = ToyBatch([Sample(str(i), layouts, {"llm": 3, "generator": 1}) for i, layouts in enumerate(2 * LAYOUTS)])


def plan_of(schedule: str, recompute: bool = False) -> Plan:
    """A language model over both ranks, whose last hidden states enter a generator on rank 1."""
    return Plan(
        modules={
            "vision": module(replica(0), trainable=()),
            "llm": module(replica(0, 1), kind="language_model", loss_weight=0.7),
            "generator": module(replica(1), kind="language_model", loss_weight=1.3),
        },
        edges=(Edge(source="vision", target="llm"), Edge(source="llm", target="generator")),
        num_microbatches=4,
        schedule=schedule,
        recompute_features=("llm",) if recompute else (),
    )


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_gradients_of_both_roots(schedule: str, recompute: bool) -> None:
    plan = plan_of(schedule, recompute)

    def work(rank: int) -> tuple[float, dict[str, torch.Tensor]]:
        engine = Engine(
            plan,
            toy_stage_maker(plan),
            device=torch.device("cpu"),
            boundary_dtype=torch.float64,
            timeout=timedelta(seconds=30),
        )
        result = engine.run(BATCH)
        return result.loss, {p.name: p.parameter.grad for p in engine.model.parameters if p.parameter.grad is not None}

    loss, gradients = reference(plan, BATCH)
    seen = set()
    for found_loss, found in run_distributed(work, plan.num_ranks):
        assert found_loss == pytest.approx(loss, rel=1e-12)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-14)
        seen |= found.keys()
    assert seen == gradients.keys()
