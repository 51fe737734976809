"""Contrastive models under every layout against a plain loss over the whole batch, in one process."""

from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from contrastive_cases import FROZEN_PARTS, TEXTS, Case, Tower, plain_gradients
from distributed import run_distributed
from one_process import Run
from sampling import in_campaigns

from motet.models.stages import contrastive as contrastive_stage
from motet.runtime.verification.verify import collect_gradients

CASES = {
    "clip": Case({"image": Tower("clip", num_microbatches=2), "text": Tower("clip_text", num_microbatches=2)}),
    "unequal replicas, 18 and 24 samples each": Case(
        {"image": Tower("clip", dp=4, num_microbatches=3), "text": Tower("clip_text", dp=3, num_microbatches=2)},
        num_samples=72,
    ),
    "stages": Case({"image": Tower("clip", pp=2, num_microbatches=3), "text": Tower("bert", dp=2)}, num_samples=12),
    "siglip, two contrastive batches": Case(
        {"image": Tower("siglip", num_microbatches=3), "text": Tower("siglip_text", dp=2)},
        kind="sigmoid",
        num_samples=20,
        num_batches=2,
        schedule="1f1b",
    ),
    "locked image tower": Case(
        {"image": Tower("dinov2", dp=2, frozen=FROZEN_PARTS), "text": Tower("clip_text", num_microbatches=2)},
        num_batches=2,
    ),
    "tensor parallelism": Case(
        {"image": Tower("siglip", tp=2, num_microbatches=2), "text": Tower("clip_text", tp=2, pp=2)}, num_samples=6
    ),
    "three towers": Case(
        {"image": Tower("clip"), "text": Tower("bert", num_microbatches=2), "audio": Tower("whisper", dp=2)}
    ),
    "an anchor": Case(
        {
            "image": Tower("clip", dp=2),
            "text": Tower("clip_text", tp=2),
            "audio": Tower("whisper", frozen=FROZEN_PARTS),
        },
        kind="sigmoid",
        anchor="text",
    ),
    "all in one process": Case(
        {"image": Tower("clip", num_microbatches=2), "text": Tower("bert"), "audio": Tower("whisper")}, colocated=True
    ),
    "towers share ranks": Case(
        {"image": Tower("clip", dp=2, num_microbatches=2), "text": Tower("bert")}, num_samples=7, colocated=True
    ),
    "replicas do not divide the batch": Case(
        {"image": Tower("clip", dp=3, num_microbatches=2), "text": Tower("clip_text", dp=2)}, num_samples=7
    ),
    "fewer samples than ranks": Case(
        {"image": Tower("clip", dp=3), "text": Tower("clip_text", tp=2)}, num_samples=1, kind="softmax"
    ),
    "a frozen scale": Case({"image": Tower("clip", dp=2), "text": Tower("bert")}, trains_loss=False),
    "features are computed again": Case(
        {"image": Tower("clip", pp=2, num_microbatches=2), "text": Tower("bert", num_microbatches=2)},
        num_batches=2,
        recompute_features=("image", "text"),
    ),
    "audio is lacking in some samples": Case(
        {
            "image": Tower("clip", dp=2, num_microbatches=2),
            "text": Tower("clip_text", lacking=(4,)),
            "audio": Tower("whisper", dp=2, lacking=(0, 1, 2, 5)),
        },
    ),
    "nobody has audio": Case(
        {"image": Tower("clip"), "text": Tower("bert", dp=2), "audio": Tower("whisper", lacking=tuple(range(6)))},
        kind="sigmoid",
        num_samples=6,
    ),
    "a contrastive batch without a pair, and samples with one tower": Case(
        {
            "image": Tower("clip", num_microbatches=2, lacking=(0, 2)),
            "text": Tower("bert", dp=2, lacking=(1, 3, 6)),
        },
        num_batches=2,
        schedule="distmm_pipe",
    ),
    "some lack a tower, all in one process": Case(
        {
            "image": Tower("clip", lacking=(0,)),
            "text": Tower("bert", lacking=(3,)),
            "audio": Tower("whisper", lacking=(1, 2)),
        },
        num_batches=2,
        colocated=True,
    ),
    "only the scale": Case(
        {"image": Tower("clip", dp=2, frozen=FROZEN_PARTS), "text": Tower("bert", frozen=FROZEN_PARTS)}, num_batches=2
    ),
}


def distributed_gradients(case: Case, run: Run = run_distributed) -> tuple[float, dict[str, list[torch.Tensor]]]:
    def worker(rank: int) -> tuple[float, dict[str, list[torch.Tensor]] | None]:
        model = case.build()
        engine = case.engine(model, case.plan(model))
        loss = engine.run(case.batch(model)).loss
        return loss, collect_gradients(engine.model)

    results = run(worker, case.num_ranks)
    assert len({loss for loss, _ in results}) == 1
    gradients = results[0][1]
    assert gradients is not None
    return results[0][0], gradients


def check(case: Case, tolerance: float = 1e-9, run: Run = run_distributed) -> None:
    loss, gradients = distributed_gradients(case, run)
    reference, expected = plain_gradients(case)
    assert loss == pytest.approx(reference, rel=tolerance)
    assert gradients.keys() == expected.keys()
    for name, versions in gradients.items():
        assert versions, name
        for version in versions:
            error = (version - expected[name]).norm() / max(expected[name].norm().item(), 1e-3)
            assert error < tolerance, f"{name}: {error}"


USUAL = (
    "stages",
    "siglip, two contrastive batches",
    "locked image tower",
    "tensor parallelism",
    "an anchor",
    "towers share ranks",
    "features are computed again",
    "a contrastive batch without a pair, and samples with one tower",
)
"""Cases of `make test`; the others combine what these and the drawn model have."""


@pytest.mark.parametrize("name", [*USUAL, *in_campaigns(name for name in CASES if name not in USUAL)])
def test_equals_one_process(name: str) -> None:
    check(CASES[name])


def test_a_wrong_exchange_is_noticed() -> None:
    """Without the other direction's log-sum-exps of all samples, gradients are those of another loss."""
    exchange = contrastive_stage._exchange_lse

    def own_direction(*arguments: Any) -> Any:
        return {side: (lse, other + 0.01) for side, (lse, other) in exchange(*arguments).items()}

    with mock.patch.object(contrastive_stage, "_exchange_lse", own_direction), pytest.raises(AssertionError):
        check(CASES["clip"])


def draw(seed: int) -> Case:
    """One of the product of losses, towers, layouts and schedules, on at most 6 ranks."""
    random = Random(seed)
    while True:
        families = {"image": random.choice(["clip", "siglip", "dinov2"]), "text": random.choice(TEXTS)}
        if random.random() < 0.4:
            families["audio"] = "whisper"
        locked = random.choice([None, None, *families])
        colocated = random.random() < 0.25
        towers = {
            name: Tower(
                family,
                dp=random.choice([1, 1, 2, 3]),
                pp=random.choice([1, 1, 2]),
                tp=random.choice([1, 1, 2]),
                num_microbatches=random.choice([1, 2, 3, 4]),
                frozen=random.choice([FROZEN_PARTS, ("module",)]) if name == locked else (),
            )
            for name, family in families.items()
        }
        num_batches = random.choice([1, 2, 3])
        per_batch = random.randint(1, 10)
        if random.random() < 0.3:
            share = random.choice([0.2, 0.5])
            towers = {
                name: replace(
                    tower, lacking=tuple(i for i in range(num_batches * per_batch) if random.random() < share)
                )
                for name, tower in towers.items()
            }
        case = Case(
            towers,
            kind=random.choice(["softmax", "sigmoid"]),
            num_samples=num_batches * per_batch,
            num_batches=num_batches,
            schedule=random.choice(["gpipe", "1f1b", "distmm_pipe", "zero_bubble_h1"]),
            anchor=random.choice([None, *families]),
            colocated=colocated,
            trains_loss=random.random() < 0.8,
            recompute_features=random.choice([(), tuple(families)]),
        )
        if 2 <= case.num_ranks <= 6:
            return case


@pytest.mark.parametrize("seed", [0, *in_campaigns(range(1, 120))])
def test_drawn_from_the_product(seed: int) -> None:
    case = draw(seed)
    print(f"seed {seed}: {case}")
    check(case)
