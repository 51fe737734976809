"""`ContrastiveParallelModule` with a decoder: equal to the module in one process, and what it is refused to read."""

from typing import Any

import pytest
import torch
import transformers
from coca_cases import Coca, tiny_decoder
from contrastive_cases import MODELS, Tower
from distributed import run_distributed
from two_towers import CASE, batch

from motet.errors import UserError
from motet.models.contrastive import CaptionDecoder, ContrastiveModule
from motet.models.graph import ModalityModule
from motet.runtime.parallel_specs import ContrastiveParallelModule, TowerSpec

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
    with pytest.raises(
        UserError, match=r"decoder: GPT2LMHeadModel does not attend to an encoder; give .* add_cross_attention"
    ):
        ContrastiveModule(towers, decoder=CaptionDecoder(transformers.GPT2LMHeadModel(config), "image"))
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=9, add_cross_attention=True)
    with pytest.raises(UserError, match="decoder: is 16 wide, but image outputs features of 20; give all towers"):
        ContrastiveModule(towers, decoder=CaptionDecoder(transformers.GPT2LMHeadModel(config), "image"))
    towers = CASE.build().modality_modules()
    with pytest.raises(UserError, match="decoder: text outputs 32 features for each token, but a pooled output of 36"):
        ContrastiveModule(towers, decoder=CaptionDecoder(tiny_decoder("gpt2"), "text"))
    model = COCA.build().float()
    with pytest.raises(UserError, match="batch: decoder is missing; give it a dict with the captions' input_ids"):
        model(**batch())
    with pytest.raises(UserError, match=r"batch: present\['sound'\] is not a tower; the model has image, text"):
        model(**{**coca_batch(), "present": {"sound": torch.ones(6)}})
    with pytest.raises(
        UserError, match=r"batch: present\['text'\] must be a boolean tensor with one value for each of 6 samples"
    ):
        model(**{**coca_batch(), "present": {"text": torch.ones(5)}})
