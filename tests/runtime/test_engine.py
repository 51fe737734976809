"""The engine on toy models: loss and gradients equal one process, for every kind of plan that the types carry."""

import pytest
import torch
from distributed import run_distributed
from toy_model import ToyBatch, reference, toy_stage_maker

from motet.assignment.sample import Sample, Segment
from motet.plan import Edge, ModulePlan, Plan, Replica, Stage
from motet.runtime.engine import Engine


def chain(bounds: list[int], ranks: list[tuple[int, ...]]) -> Replica:
    return Replica(
        stages=tuple(
            Stage(layers=(a, b), ranks=group, tp_size=len(group))
            for a, b, group in zip([0, *bounds], bounds, ranks, strict=False)
        )
    )


def samples(num: int, modules: dict[str, int], sink: str) -> list[Sample]:
    """Sample i has i % (m + 1) tokens of a module whose number is m, so that some lack it; the sink always has some."""
    result = []
    for i in range(num):
        layouts = {name: (Segment(i % (m + 1)),) for name, m in modules.items() if i % (m + 1)}
        layouts[sink] = (Segment(2 + i % 3),)
        result.append(Sample(str(i), layouts, {sink: 2 + i % 3}))
    return result


def run_and_compare(plan: Plan, batch: ToyBatch) -> None:
    loss, gradients = reference(plan, batch)

    def work(rank: int) -> dict[str, torch.Tensor | None]:
        engine = Engine(plan, toy_stage_maker(plan), device=torch.device("cpu"), boundary_dtype=torch.float64)
        result = engine.run(batch)
        assert result.loss == pytest.approx(loss, rel=1e-12)
        norm = sum(g.square().sum() for g in gradients.values()) ** 0.5
        assert result.gradient_norm == pytest.approx(float(norm), rel=1e-10)
        return {p.name: p.parameter.grad for p in engine.model.parameters if p.parameter.requires_grad}

    seen = set()
    for held in run_distributed(work, plan.num_ranks):
        for name, gradient in held.items():
            assert gradient is not None, name
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-11, atol=1e-13, msg=name)
            seen.add(name)
    assert seen == set(gradients)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_two_encoders_and_a_language_model_on_ranks_of_their_own(schedule: str) -> None:
    plan = Plan(
        modules={
            "vision": ModulePlan(
                kind="encoder", num_layers=3, replicas=(chain([2, 3], [(0,), (1,)]),), trainable=((2, 3),)
            ),
            "audio": ModulePlan(kind="encoder", num_layers=2, replicas=(chain([2], [(2,)]),), trainable=((0, 2),)),
            "llm": ModulePlan(
                kind="language_model", num_layers=3, replicas=(chain([1, 3], [(3,), (4,)]),), loss_weight=1.0
            ),
        },
        edges=(Edge(source="vision", target="llm"), Edge(source="audio", target="llm", layers=(0, 2))),
        num_microbatches=4,
        schedule=schedule,
    )
    run_and_compare(plan, ToyBatch(samples(9, {"vision": 2, "audio": 3}, "llm")))


def test_replicas_and_groups() -> None:
    plan = Plan(
        modules={
            "vision": ModulePlan(
                kind="encoder", num_layers=2, replicas=(chain([2], [(0,)]), chain([2], [(1,)])), trainable=((0, 2),)
            ),
            "llm": ModulePlan(
                kind="language_model",
                num_layers=3,
                replicas=(chain([1, 3], [(2,), (3,)]), chain([2, 3], [(4,), (5,)])),
                trainable=((0, 3),),
                loss_weight=2.0,
            ),
        },
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=2,
    )
    run_and_compare(plan, ToyBatch(samples(7, {"vision": 2}, "llm")))


def test_encoders_share_ranks_and_feed_groups_of_another_size() -> None:
    plan = Plan(
        modules={
            "vision": ModulePlan(kind="encoder", num_layers=2, replicas=(chain([2], [(0, 1)]),), trainable=((0, 2),)),
            "audio": ModulePlan(kind="encoder", num_layers=2, replicas=(chain([2], [(0,)]),), trainable=((0, 1),)),
            "llm": ModulePlan(
                kind="language_model",
                num_layers=2,
                replicas=(chain([1, 2], [(1, 2), (0, 1)]),),
                trainable=((0, 2),),
                loss_weight=1.0,
            ),
        },
        edges=(Edge(source="vision", target="llm"), Edge(source="audio", target="llm", layers=(1,))),
        num_microbatches=3,
    )
    run_and_compare(plan, ToyBatch(samples(6, {"vision": 2, "audio": 1}, "llm")))


def test_copies_of_an_encoder_feed_the_stages_they_stand_on() -> None:
    plan = Plan(
        modules={
            "vision": ModulePlan(kind="encoder", num_layers=2, replicas=(chain([2], [(0,)]),), trainable=((0, 2),)),
            "vision@1": ModulePlan(
                kind="encoder", num_layers=2, replicas=(chain([2], [(1,)]),), trainable=((0, 2),), copy_of="vision"
            ),
            "llm": ModulePlan(
                kind="language_model",
                num_layers=4,
                replicas=(chain([2, 4], [(0,), (1,)]),),
                trainable=((0, 4),),
                loss_weight=1.0,
            ),
        },
        edges=(Edge(source="vision", target="llm", layers=(0, 1)), Edge(source="vision@1", target="llm", layers=(3,))),
        num_microbatches=2,
    )
    run_and_compare(plan, ToyBatch(samples(5, {"vision": 2}, "llm")))


def test_a_batch_without_images_reduces_zeros() -> None:
    plan = Plan(
        modules={
            "vision": ModulePlan(
                kind="encoder", num_layers=1, replicas=(chain([1], [(0,)]), chain([1], [(1,)])), trainable=((0, 1),)
            ),
            "llm": ModulePlan(
                kind="language_model",
                num_layers=1,
                replicas=(chain([1], [(2,)]),),
                trainable=((0, 1),),
                loss_weight=1.0,
            ),
        },
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=2,
    )
    run_and_compare(plan, ToyBatch([Sample(str(i), {"llm": (Segment(3),)}, {"llm": 3}) for i in range(4)]))
