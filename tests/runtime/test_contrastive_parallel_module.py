"""`ContrastiveParallelModule`: gradients add up over calls, and what is wrong is said."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from contrastive_cases import Case, Tower
from distributed import run_distributed
from two_towers import CASE, batch

from motet.errors import UserError
from motet.models.contrastive import ContrastiveModule
from motet.models.graph import ModalityModule
from motet.runtime.parallel_specs import ContrastiveParallelModule, TowerSpec


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


@pytest.mark.parametrize("family", ["clip_text", "siglip_text"])
def test_masked_texts_equal_transformers_own_model(family: str) -> None:
    """Padding on the left and on the right, of texts whose tower is cut into stages and microbatches."""
    case = Case({"image": Tower(family.removesuffix("_text")), "text": Tower(family)}, dtype="float32")
    mask = torch.ones(6, 9, dtype=torch.long)
    mask[0, :3] = mask[2, :1] = mask[3, 5:] = mask[4, 8:] = 0
    inputs = {**batch(), "attention_mask": mask}
    inputs["input_ids"][:, 6] = 49  # CLIP's end of text

    def whole() -> transformers.PreTrainedModel:
        torch.manual_seed(5)
        towers = {name: tower.module.config for name, tower in case.build().modality_modules().items()}
        configs = {"vision_config": towers["image"].to_dict(), "text_config": towers["text"].to_dict()}
        configs["text_config"]["projection_size"] = towers["image"].hidden_size
        if family == "clip_text":
            return transformers.CLIPModel(transformers.CLIPConfig(**configs)).train()
        return transformers.SiglipModel(transformers.SiglipConfig(**configs)).train()

    def worker(rank: int) -> tuple[float, dict[str, torch.Tensor]]:
        specs = {"image": TowerSpec(), "text": TowerSpec(pp_size=2, num_microbatches=3)}
        parallel = ContrastiveParallelModule(whole(), specs)
        loss = parallel.execute(inputs).loss.item()
        held = parallel.stages["text"].named_parameters() if rank else ()
        return loss, {key.removeprefix("module."): p.grad for key, p in held if key.startswith("module.")}

    results = run_distributed(worker, 3)
    expected = whole()
    loss = expected(**inputs, return_loss=True).loss
    loss.backward()
    assert all(found == pytest.approx(loss.item(), rel=1e-5) for found, _ in results)
    gradients = {**results[1][1], **results[2][1]}
    assert gradients
    for key, parameter in expected.text_model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=2e-4, atol=2e-5)


def test_a_clip_model_comes_out_as_one() -> None:
    def worker(rank: int) -> bool:
        torch.manual_seed(0)
        small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        text = transformers.CLIPTextConfig(**small, vocab_size=30, max_position_embeddings=9, eos_token_id=29)
        vision = transformers.CLIPVisionConfig(**small, image_size=16, patch_size=8)
        config = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=4)
        given = transformers.CLIPModel(config)
        kept = copy.deepcopy(given)
        found = ContrastiveParallelModule(given, {"image": TowerSpec(), "text": TowerSpec(pp_size=2)}).whole_model()
        if rank:
            return found is None
        same = (torch.equal(a, b) for a, b in zip(found.state_dict().values(), kept.state_dict().values(), strict=True))
        return isinstance(found, transformers.CLIPModel) and all(same)

    assert all(run_distributed(worker, 3))


def test_ranks_that_read_different_batches_are_told() -> None:
    def worker(rank: int) -> str:
        parallel = ContrastiveParallelModule(CASE.build(), {"image": TowerSpec(), "text": TowerSpec()})
        own = batch()
        own["pixel_values"][3, 1, 5, 7] += rank
        with pytest.raises(UserError) as caught:
            parallel.execute(own)
        return str(caught.value)

    assert all("the ranks were given different batches" in said for said in run_distributed(worker, 2))


@pytest.mark.parametrize("when", ["reading", "computing"])
def test_gradients_outlive_a_batch_that_fails(when: str) -> None:
    """Of calls before, that are to be added up."""

    def worker(rank: int) -> bool:
        parallel = ContrastiveParallelModule(CASE.build(), {"image": TowerSpec(), "text": TowerSpec()})
        parallel.execute(batch())
        before = {name: parameter.grad.clone() for name, parameter in parallel.named_parameters()}
        run = parallel._engine.run

        def run_and_fail(*args: object, **kwargs: object) -> None:
            run(*args, **kwargs)
            raise RuntimeError("lost")

        if when == "reading":
            with pytest.raises(UserError):
                parallel.execute({})
        else:
            with mock.patch.object(parallel._engine, "run", run_and_fail), pytest.raises(RuntimeError, match="lost"):
                parallel.execute(batch())
        return all(torch.equal(before[name], parameter.grad) for name, parameter in parallel.named_parameters())

    assert all(run_distributed(worker, 2))


def test_the_scale_stays_below_its_limit() -> None:
    uses: dict[str, Callable[[ContrastiveParallelModule], Any]] = {
        "execute": lambda parallel: parallel.execute(batch()).loss.item(),
        "eval_loss": lambda parallel: parallel.eval_loss(batch()).item(),
        "whole_model": lambda parallel: parallel.whole_model(),
    }

    def worker(rank: int) -> dict[str, tuple[float, Any]]:
        model = CASE.build()
        model.loss.max_logit_scale = 1.4  # It begins at log 4 = 1.386.
        parallel = ContrastiveParallelModule(model, {"image": TowerSpec(), "text": TowerSpec()})
        scale, results = parallel.logit_scale, {}
        assert scale is not None
        for name, use in uses.items():
            with torch.no_grad():
                scale.add_(1.0)  # As an optimizer of the user's own.
            result = use(parallel)
            results[name] = scale.item(), result if isinstance(result, float) else result and result.loss.logit_scale
        return results

    first, second = run_distributed(worker, 2)
    alone = CASE.build()
    alone.loss.max_logit_scale = 1.4
    with torch.no_grad():
        alone.loss.logit_scale.fill_(2.4)
    expected = alone(**batch()).loss.item()
    assert alone.loss.logit_scale.item() == pytest.approx(1.4)
    for results in (first, second):
        assert all(scale == pytest.approx(1.4) for scale, _ in results.values())
        assert results["execute"][1] == results["eval_loss"][1] == pytest.approx(expected, rel=1e-5)
    assert first["whole_model"][1].item() == pytest.approx(1.4)


def test_batches_with_nothing_to_compare_are_refused() -> None:
    """Their loss is 0, of which nobody learns."""

    def worker(rank: int) -> list[str]:
        said = []
        for num_batches, num_samples in ((1, 0), (1, 1), (4, 6)):
            parallel = ContrastiveParallelModule(
                CASE.build(), {"image": TowerSpec(), "text": TowerSpec()}, num_contrastive_batches=num_batches
            )
            with pytest.raises(UserError) as raised:
                parallel.execute({key: value[:num_samples] for key, value in batch().items()})
            said.append(str(raised.value))
        return said

    for said in run_distributed(worker, 2):
        assert said[0].endswith("has no samples; give at least two")
        assert said[1].startswith("batch: has 1 samples for 1 contrastive batches")
        assert said[2].startswith("batch: has 6 samples for 4 contrastive batches")


@pytest.mark.parametrize(("num_samples", "num_batches"), [(1, 1), (1, 2), (3, 2), (5, 4)])
def test_small_batches_are_evaluated(num_samples: int, num_batches: int) -> None:
    """The last held-out batch is mostly one. A sample that is alone in its contrastive batch has a loss of 0."""
    own = {key: value[:num_samples] for key, value in batch().items()}

    def worker(rank: int) -> float:
        specs = {"image": TowerSpec(dp_size=2), "text": TowerSpec(num_microbatches=2)}
        parallel = ContrastiveParallelModule(CASE.build(), specs, num_contrastive_batches=num_batches)
        with pytest.raises(UserError, match=f"batch: has {num_samples} samples for {num_batches} contrastive batches"):
            parallel.execute(own)
        return parallel.eval_loss(own).item()

    alone, expected = CASE.build().eval(), 0.0
    for part in torch.arange(num_samples).tensor_split(num_batches):
        if len(part):
            expected += len(part) * alone(**{key: value[part] for key, value in own.items()}).loss.item()
    assert all(found == pytest.approx(expected / num_samples, rel=1e-5) for found in run_distributed(worker, 3))


def test_towers_that_share_a_parameter_are_for_one_process() -> None:
    """Each rank would train a copy of its own."""

    def tied(what: str) -> ContrastiveModule:
        torch.manual_seed(0)
        config = transformers.CLIPVisionConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32
        )
        modules = [transformers.CLIPVisionModel(config) for _ in range(2)]
        projectors = [torch.nn.Linear(16, 8, bias=False) for _ in range(2)]
        {"module": modules, "projector": projectors}[what][1] = {"module": modules, "projector": projectors}[what][0]
        towers = zip(("left", "right"), modules, projectors, strict=True)
        return ContrastiveModule({name: ModalityModule(module, projector) for name, module, projector in towers})

    def worker(rank: int) -> list[str]:
        said = []
        for what in ("module", "projector"):
            with pytest.raises(UserError) as caught:
                ContrastiveParallelModule(tied(what), {"left": TowerSpec(), "right": TowerSpec()})
            said.append(str(caught.value))
        return said

    said = run_distributed(worker, 2)[0]
    assert said[0].startswith("model: left.module and right.module have the parameter embeddings.class_embedding in")
    assert said[1].startswith("model: left.projector and right.projector have the parameter weight in common")
    images = torch.randn(3, 3, 32, 32)
    tied("module")(left={"pixel_values": images}, right={"pixel_values": images.flip(0)}).loss.backward()


def test_mistakes() -> None:
    assert type(TowerSpec(dp_size=np.int64(2)).dp_size) is int  # type: ignore[arg-type]
    for size in (0, 1.5, True, np.True_, np.float64(2.0), "2", None):
        with pytest.raises(UserError, match=f"TowerSpec: dp_size is {size}; give a whole number, at least 1"):
            TowerSpec(dp_size=size)  # type: ignore[arg-type]
    image, text = CASE.build().modality_modules().values()
    for name, said in (
        ("contrastive", "is the name of another module"),
        ("decoder", "is the name of another module"),
        ("a.b", "is not a valid name of a torch module"),
        ("keys", "is not a valid name of a torch module"),
    ):
        with pytest.raises(UserError, match=f"towers: '{name}' {said}; give the tower another"):
            ContrastiveModule({name: image, "text": text})
    with pytest.raises(UserError, match="there is no process group"):
        ContrastiveParallelModule(CASE.build(), {})

    def worker(rank: int) -> list[str]:
        said = []
        for specs, options in (
            ({"image": TowerSpec()}, {}),
            ({"image": TowerSpec(), "text": TowerSpec(), "sound": TowerSpec()}, {}),
            ({"image": TowerSpec(), "text": TowerSpec(dp_size=2)}, {}),
            ({"image": TowerSpec(), "text": TowerSpec()}, {"schedule": "2f2b"}),
            ({"image": TowerSpec(), "text": 2}, {}),
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
    assert said[4] == "tower_specs: text is a int; give a TowerSpec"
