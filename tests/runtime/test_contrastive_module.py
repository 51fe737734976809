"""`ContrastiveParallelModule`: gradients add up over calls, and what is wrong is said."""

import pytest
import torch
from contrastive_cases import Case, Tower
from distributed import run_distributed

from motet.errors import UserError
from motet.runtime.contrastive_module import ContrastiveParallelModule, TowerSpec

CASE = Case({"image": Tower("clip"), "text": Tower("siglip_text")}, dtype="float32")


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {"pixel_values": torch.randn(6, 3, 16, 16), "input_ids": torch.randint(1, 49, (6, 9))}


def test_equals_the_module_in_one_process() -> None:
    def worker(rank: int) -> tuple[float, float, dict[str, torch.Tensor]]:
        specs = {"image": TowerSpec(num_microbatches=2), "text": TowerSpec(pp_size=2, num_microbatches=3)}
        parallel = ContrastiveParallelModule(CASE.build(), specs, recompute_features=("text",))
        losses = [parallel.execute(batch()).loss.item() for _ in range(2)]
        name = ("image", "text", "text")[rank]
        return *losses, {key: p.grad for key, p in parallel.stages[name].named_parameters() if p.grad is not None}

    results = run_distributed(worker, 3)
    alone = CASE.build()
    loss = alone(**batch()).loss
    (2 * loss).backward()
    for first, second, _ in results:
        assert first == second == pytest.approx(loss.item(), rel=1e-5)
    for name, held in (("image", results[0][2]), ("text", {**results[1][2], **results[2][2]})):
        expected = {key: p.grad for key, p in alone.modality_modules()[name].named_parameters() if p.grad is not None}
        assert held.keys() == expected.keys()
        for key, gradient in held.items():
            torch.testing.assert_close(gradient, expected[key], rtol=2e-4, atol=2e-5)


def test_mistakes() -> None:
    with pytest.raises(UserError, match="TowerSpec: dp_size is 0; give at least 1"):
        TowerSpec(dp_size=0)
    with pytest.raises(UserError, match="there is no process group"):
        ContrastiveParallelModule(CASE.build(), {})

    def worker(rank: int) -> list[str]:
        said = []
        for specs, options in (
            ({"image": TowerSpec()}, {}),
            ({"image": TowerSpec(), "text": TowerSpec(), "sound": TowerSpec()}, {}),
            ({"image": TowerSpec(), "text": TowerSpec(dp_size=2)}, {}),
            ({"image": TowerSpec(), "text": TowerSpec()}, {"schedule": "2f2b"}),
        ):
            with pytest.raises(UserError) as caught:
                ContrastiveParallelModule(CASE.build(), specs, **options)
            said.append(str(caught.value))
        return said

    said = run_distributed(worker, 2)[0]
    assert said[0] == "tower_specs: text is missing; give its TowerSpec"
    assert said[1].startswith("tower_specs: there is no tower 'sound'; the model has image, text")
    assert said[2].startswith("tower_specs: take 3 ranks, but 2 processes run; start 3")
    assert said[3].startswith("schedule: '2f2b' is not known; give one of")
