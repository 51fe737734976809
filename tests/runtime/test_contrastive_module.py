"""`ContrastiveParallelModule`: gradients add up over calls, and what is wrong is said."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from coca_cases import Coca, tiny_decoder
from contrastive_cases import MODELS, Case, Tower
from distributed import run_distributed

from motet.errors import UserError
from motet.models.contrastive import CaptionDecoder, ContrastiveModule
from motet.models.multimodal import ModalityModule
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


COCA = Coca({"image": Tower("clip"), "text": Tower("siglip_text")}, dtype="float32", family="bert")


def coca_batch() -> dict[str, Any]:
    captions = torch.randint(0, 40, (6, 8))
    mask = torch.ones_like(captions)
    mask[1, 5:] = mask[4] = 0  # One is short, one sample has none.
    present = {"text": torch.tensor([True, True, False, True, True, True])}
    return {**batch(), "decoder": {"input_ids": captions, "attention_mask": mask}, "present": present}


def test_a_decoder_and_samples_that_lack_a_tower_equal_the_module_in_one_process() -> None:
    def worker(rank: int) -> tuple[float, dict[str, torch.Tensor]]:
        specs = {
            "image": TowerSpec(num_microbatches=2),
            "text": TowerSpec(dp_size=2),
            "decoder": TowerSpec(pp_size=2, num_microbatches=3),
        }
        parallel = ContrastiveParallelModule(COCA.build().float(), specs)
        loss = parallel.execute(coca_batch()).loss.item()
        stages = parallel.stages.items()
        return loss, {f"{n}.{key}": p.grad for n, stage in stages for key, p in stage.named_parameters()}

    results = run_distributed(worker, 5)
    alone = COCA.build().float()
    out = alone(**coca_batch())
    out.loss.backward()
    assert out.loss.item() == pytest.approx((0.7 * out.contrastive_loss + 2.0 * out.caption_loss).item())
    assert all(loss == pytest.approx(out.loss.item(), rel=1e-5) for loss, _ in results)
    image, decoder = results[0][1], results[3][1]
    assert alone.decoder is not None
    expected = dict(alone.towers["image"].module.named_parameters())
    for key, parameter in expected.items():
        if parameter.grad is not None:
            torch.testing.assert_close(image[f"image.module.{key}"], parameter.grad, rtol=2e-4, atol=2e-5)
    words = "bert.embeddings.word_embeddings.weight"
    torch.testing.assert_close(
        decoder[f"decoder.module.{words}"], alone.decoder.get_parameter(words).grad, rtol=2e-4, atol=2e-5
    )


def model_whose_decoder_reads_texts(family: str, decoder: str) -> ContrastiveModule:
    torch.manual_seed(1)
    model_class, config_class, sizes = MODELS[family]
    text = model_class(config_class(**{**sizes, "projection_size": sizes["hidden_size"]}))
    towers = {"image": CASE.build().modality_modules()["image"], "text": ModalityModule(text, "projection")}
    captioner = CaptionDecoder(tiny_decoder(decoder).float(), "text")
    return ContrastiveModule(towers, width=20, decoder=captioner)


def test_a_decoder_that_reads_masked_texts_equals_the_module_in_one_process() -> None:
    mask = torch.ones(6, 9, dtype=torch.long)
    mask[0, :2] = mask[3, 5:] = 0
    inputs = {**batch(), "attention_mask": mask, "decoder": {"input_ids": torch.randint(0, 40, (6, 8))}}

    def worker(rank: int) -> float:
        specs = {"image": TowerSpec(), "text": TowerSpec(num_microbatches=2), "decoder": TowerSpec(pp_size=2)}
        parallel = ContrastiveParallelModule(model_whose_decoder_reads_texts("clip_text", "gpt2"), specs)
        return parallel.execute(inputs).loss.item()

    loss = model_whose_decoder_reads_texts("clip_text", "gpt2")(**inputs).loss.item()
    assert all(found == pytest.approx(loss, rel=1e-5) for found in run_distributed(worker, 4))


@pytest.mark.parametrize("family", ["clip_text", "siglip_text", "bert"])
@pytest.mark.parametrize("decoder", ["gpt2", "bert"])
def test_a_decoder_sees_nothing_of_masked_tokens(family: str, decoder: str) -> None:
    model = model_whose_decoder_reads_texts(family, decoder).eval()
    mask = torch.ones(6, 9, dtype=torch.long)
    mask[2, 8:] = mask[3, 5:] = 0
    if family != "bert":
        mask[0, :2] = 0
    inputs = {**batch(), "attention_mask": mask, "decoder": {"input_ids": torch.randint(0, 40, (6, 8))}}
    inputs["input_ids"][:, 3] = 49  # CLIP's end of text
    changed = {**inputs, "input_ids": torch.where(mask.bool(), inputs["input_ids"], 7)}
    loss = model(**inputs).caption_loss.item()
    assert model(**changed).caption_loss.item() == pytest.approx(loss, rel=1e-6)
    assert model(**{**inputs, "attention_mask": torch.ones_like(mask)}).caption_loss.item() != pytest.approx(loss)
    # transformers' own forwards, with their own masks.
    tower = model.modality_modules()["text"]
    states = tower.projector(tower.module(input_ids=inputs["input_ids"], attention_mask=mask).last_hidden_state)
    captions = inputs["decoder"]["input_ids"]
    out = model.decoder(input_ids=captions, encoder_hidden_states=states, encoder_attention_mask=mask, labels=captions)
    assert out.loss.item() == pytest.approx(loss, rel=1e-5)


def test_the_whole_model_comes_out_as_it_came_in() -> None:
    """Trained for a step under tensor parallelism, stages and replicas; towers, decoder and scale."""

    def worker(rank: int) -> tuple[dict[str, torch.Tensor] | None, float, float, float]:
        torch.manual_seed(0)
        specs = {"image": TowerSpec(tp_size=2), "text": TowerSpec(pp_size=2), "decoder": TowerSpec(dp_size=2)}
        parallel = ContrastiveParallelModule(COCA.build().float(), specs)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        parallel.execute(coca_batch())
        norm = parallel.clip_gradients(0.5).item()
        optimizer.step()
        whole = parallel.whole_model()
        held_out, again = parallel.eval_loss(coca_batch()).item(), parallel.execute(coca_batch()).loss.item()
        return None if whole is None else whole.state_dict(), norm, held_out, again

    results = run_distributed(worker, 6)
    alone = COCA.build().float()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    alone(**coca_batch()).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5).item()
    optimizer.step()
    expected = alone.state_dict()
    weights = results[0][0]
    assert weights is not None
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)
    assert all(other is None for other, *_ in results[1:])
    loss = alone(**coca_batch()).loss.item()
    for _, found, held_out, again in results:
        assert found == pytest.approx(norm, rel=1e-4)
        assert held_out == pytest.approx(again, rel=1e-6) == pytest.approx(loss, rel=1e-4)


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


def test_a_loaded_decoder_is_trained() -> None:
    """from_pretrained returns it in evaluation mode."""
    model = ContrastiveModule(
        CASE.build().modality_modules(), decoder=CaptionDecoder(tiny_decoder("gpt2").eval(), "image")
    )
    assert model.decoder.training
    assert all(parameter.requires_grad for parameter in model.decoder.parameters())
    model.decoder.eval()
    model.train()
    assert not any(parameter.requires_grad for parameter in model.decoder.parameters())


def test_mistakes_about_the_decoder() -> None:
    towers = CASE.build().modality_modules()
    with pytest.raises(UserError, match="decoder: there is no tower 'video' to read; give one of image, text"):
        ContrastiveModule(towers, decoder=CaptionDecoder(tiny_decoder("gpt2"), "video"))
    config = transformers.GPT2Config(n_embd=20, n_layer=1, n_head=2, vocab_size=9)
    with pytest.raises(UserError, match=r"decoder: GPT2LMHeadModel attends to no encoder; give .* add_cross_attention"):
        ContrastiveModule(towers, decoder=CaptionDecoder(transformers.GPT2LMHeadModel(config), "image"))
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=9, add_cross_attention=True)
    with pytest.raises(UserError, match="decoder: is 16 wide, but image hands on features of 20; give all towers"):
        ContrastiveModule(towers, decoder=CaptionDecoder(transformers.GPT2LMHeadModel(config), "image"))
    towers = CASE.build().modality_modules()
    with pytest.raises(UserError, match="decoder: text makes features of 32, but one of 36 of a whole item"):
        ContrastiveModule(towers, decoder=CaptionDecoder(tiny_decoder("gpt2"), "text"))
    model = COCA.build().float()
    with pytest.raises(UserError, match="batch: decoder is missing; give it a dict with the captions' input_ids"):
        model(**batch())
    with pytest.raises(UserError, match=r"batch: present\['sound'\] is of no tower; the model has image, text"):
        model(**{**coca_batch(), "present": {"sound": torch.ones(6)}})
    with pytest.raises(UserError, match=r"batch: present\['text'\] is no tensor of 6 truth values"):
        model(**{**coca_batch(), "present": {"text": torch.ones(5)}})


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
        ("a.b", "cannot name a module of PyTorch"),
        ("keys", "cannot name a module of PyTorch"),
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
