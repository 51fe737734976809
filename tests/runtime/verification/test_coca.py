"""CoCa-like models: a contrastive and a captioning loss at once, over one tower whose features a decoder attends to.

The decoder is transformers' GPT-2 or BERT with cross-attention. (Yu et al. 2022.) The reference is transformers' own
forward of every part, sample by sample, in one process.
"""

from random import Random

import pytest
from coca_cases import Coca, plain
from contrastive_cases import FROZEN_PARTS, TEXTS, Tower
from distributed import run_distributed
from sampling import in_campaigns
from torch import Tensor

from motet.models.materialize import float64_throughout
from motet.runtime.verification.verify import collect_gradients


def distributed(case: Coca) -> tuple[float, dict[str, list[Tensor]]]:
    def worker(rank: int) -> tuple[float, dict[str, list[Tensor]] | None]:
        model = case.build()
        engine = case.engine(model, case.plan(model))
        with float64_throughout():
            loss = engine.run(case.batch(model)).loss
        return loss, collect_gradients(engine.model)

    results = run_distributed(worker, case.all_ranks)
    assert results[0][1] is not None
    return results[0][0], results[0][1]


def check(case: Coca) -> None:
    loss, gradients = distributed(case)
    with float64_throughout():
        reference, expected = plain(case)
    assert loss == pytest.approx(reference, rel=1e-9)
    assert gradients.keys() == expected.keys()
    for key, versions in gradients.items():
        assert versions, key
        for version in versions:
            error = (version - expected[key]).norm() / max(expected[key].norm().item(), 1e-3)
            assert error < 1e-9, f"{key}: {error}"


CASES = {
    "gpt2": Coca({"image": Tower("clip"), "text": Tower("clip_text")}),
    "bert, unequal replicas, microbatches and stages": Coca(
        {"image": Tower("siglip", dp=2, num_microbatches=2), "text": Tower("bert", num_microbatches=3)},
        num_samples=12,
        num_batches=2,
        family="bert",
        pp=2,
        per_batch=3,
    ),
    "tensor parallelism": Coca(
        {"image": Tower("clip", tp=2, num_microbatches=2), "text": Tower("bert")},
        schedule="1f1b",
        family="bert",
        tp=2,
        per_batch=2,
    ),
    "gpt2's tensor parallelism": Coca(
        {"image": Tower("clip", num_microbatches=2), "text": Tower("bert")}, tp=2, pp=2, per_batch=2, recompute=True
    ),
    "gpt2 in four stages, untied": Coca(
        {"image": Tower("dinov2"), "text": Tower("clip_text")}, tied=False, pp=4, per_batch=2, num_batches=2
    ),
    "replicas, captions and images lacking, recomputed": Coca(
        {"image": Tower("clip", dp=2, lacking=(2,)), "text": Tower("clip_text", lacking=(5,))},
        family="bert",
        dp=2,
        pp=2,
        silent=(0, 4),
        recompute=True,
    ),
    "a frozen decoder reads what the tower hears": Coca(
        {"image": Tower("clip"), "text": Tower("bert"), "audio": Tower("whisper", num_microbatches=2)},
        reads="audio",
        frozen=True,
        anchor="audio",
        kind="sigmoid",
    ),
    "a locked image tower": Coca(
        {"image": Tower("clip", frozen=FROZEN_PARTS), "text": Tower("clip_text", dp=2)}, pp=2, schedule="distmm_pipe"
    ),
    "nobody has a caption": Coca({"image": Tower("clip"), "text": Tower("bert")}, silent=tuple(range(8))),
}


USUAL = (
    "gpt2's tensor parallelism",
    "replicas, captions and images lacking, recomputed",
    "a frozen decoder reads what the tower hears",
)
"""Cases of `make test`; the others combine what these and the drawn model have."""


@pytest.mark.parametrize("name", [*USUAL, *in_campaigns(name for name in CASES if name not in USUAL)])
def test_equals_one_process(name: str) -> None:
    check(CASES[name])


def draw(seed: int) -> Coca:
    """Towers, decoders, layouts, schedules, and what is lacking, on at most 7 ranks."""
    random = Random(1000 + seed)
    while True:
        names = {"image": random.choice(["clip", "siglip", "dinov2"]), "text": random.choice(TEXTS)}
        if random.random() < 0.3:
            names["audio"] = "whisper"
        num_batches, per_batch = random.choice([1, 2]), random.randint(1, 8)
        all_samples = range(num_batches * per_batch)
        share, locked = random.choice([0.0, 0.0, 0.3]), random.choice([None, None, *names])
        family = random.choice(["gpt2", "bert"])
        case = Coca(
            {
                name: Tower(
                    tower,
                    dp=random.choice([1, 1, 2, 3]),
                    pp=random.choice([1, 1, 2]),
                    tp=random.choice([1, 1, 2]),
                    num_microbatches=random.choice([1, 2, 3, 4]),
                    frozen=random.choice([FROZEN_PARTS, ("module",)]) if name == locked else (),
                    lacking=tuple(i for i in all_samples if random.random() < share),
                )
                for name, tower in names.items()
            },
            kind=random.choice(["softmax", "sigmoid"]),
            num_samples=len(all_samples),
            num_batches=num_batches,
            schedule=random.choice(["gpipe", "1f1b", "distmm_pipe", "zero_bubble_h1"]),
            anchor=random.choice([None, *names]),
            colocated=random.random() < 0.25,
            trains_loss=random.random() < 0.8,
            recompute_features=random.choice([(), tuple(names)]),
            family=family,
            reads=random.choice(["image", *(name for name in names if name == "audio")]),
            tied=random.random() < 0.7,
            dp=random.choice([1, 1, 2]),
            pp=random.choice([1, 2, 3]),
            tp=random.choice([1, 2]),
            per_batch=random.choice([1, 2, 3, 4]),
            frozen=random.random() < 0.15,
            silent=tuple(i for i in all_samples if random.random() < 0.2),
            recompute=random.random() < 0.3,
        )
        if case.all_ranks <= 7:
            return case


@pytest.mark.parametrize("seed", [0, *in_campaigns(range(1, 60))])
def test_drawn_from_the_product(seed: int) -> None:
    case = draw(seed)
    print(f"seed {seed}: {case}")
    check(case)
