"""What HF processors return, as a batch of towers, and models of towers in one process."""

import pytest
import torch
from transformers import BertConfig, BertModel, CLIPVisionConfig, CLIPVisionModel

from motet.errors import UserError
from motet.models.batch import batch_of_towers
from motet.models.contrastive import ContrastiveModule
from motet.models.graph import ModalityModule
from motet.models.stages.contrastive import ContrastiveLoss
from motet.plan import CONTRASTIVE

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def image_tower() -> ModalityModule:
    return ModalityModule(CLIPVisionModel(CLIPVisionConfig(**SMALL, image_size=16, patch_size=8)), "projection")


def text_tower() -> ModalityModule:
    return ModalityModule(BertModel(BertConfig(**SMALL, vocab_size=30)), "projection")


def model() -> ContrastiveModule:
    return ContrastiveModule({"image": image_tower(), "text": text_tower()}, width=8).eval()


def test_padding_of_bert_is_taken_off() -> None:
    torch.manual_seed(0)
    towers = model()
    ids = torch.randint(1, 30, (2, 5))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    images = torch.randn(2, 3, 16, 16)
    batch = batch_of_towers(towers, {"pixel_values": images, "input_ids": ids, "attention_mask": mask})
    assert [sample.num_tokens("text") for sample in batch.samples] == [3, 5]
    assert all(sample.num_loss_tokens == {CONTRASTIVE: 1} for sample in batch.samples)
    found = towers(pixel_values=images, input_ids=ids, attention_mask=mask).text_embeds
    tower = towers.modality_modules()["text"]
    pooled = tower.module(input_ids=ids, attention_mask=mask).pooler_output
    torch.testing.assert_close(found, torch.nn.functional.normalize(tower.projector(pooled), dim=-1))


def test_what_nothing_reads_is_refused() -> None:
    towers, images, ids = model(), torch.randn(2, 3, 16, 16), torch.ones(2, 4, dtype=torch.long)
    right = {"pixel_values": images, "input_ids": ids}
    kinds = torch.zeros_like(ids)
    assert torch.equal(towers(**right).loss, towers(**right, token_type_ids=kinds, return_loss=True).loss)
    mask = torch.ones_like(ids)
    gap, left, none = mask.clone(), mask.clone(), mask.clone()
    gap[0, 1], left[1, 0], none[1] = 0, 0, 0
    for wrong, message in (
        ({"token_type_ids": 1 + kinds}, "token_type_ids are not all 0"),
        ({"labels": ids}, "batch: nothing reads 'labels'; leave it out, or give one of attention_mask, input_ids"),
        ({"pixel_value": images}, "batch: nothing reads 'pixel_value'"),
        ({"decoder": {}}, "batch: nothing reads 'decoder'"),
        ({"image": {"pixel_values": images, "mask": mask}}, r"batch\['image'\]: nothing reads 'mask'; .* pixel_values"),
        ({"text": ids}, r"batch\['text'\]: is a Tensor; give a dict"),
        ({"attention_mask": mask[:, :3]}, "attention_mask is .* give the shape of input_ids, \\[2, 4\\]"),
        ({"attention_mask": gap}, "attention_mask of sample 0 has a gap in columns 0 to 3"),
        ({"attention_mask": left}, "attention_mask of sample 1: BERT's padding stands on the right"),
        ({"attention_mask": none}, "sample 1 is all padding"),
    ):
        with pytest.raises(UserError, match=message):
            towers(**{**right, **wrong})
    present = {"text": torch.tensor([True, False])}
    assert towers(**right, attention_mask=none, present=present).text_embeds.shape == (1, 8)


def test_two_towers_of_images() -> None:
    towers = ContrastiveModule({"left": image_tower(), "right": image_tower()}, width=8)
    left, right = torch.randn(3, 3, 16, 16), torch.randn(3, 3, 16, 16)
    output = towers(left={"pixel_values": left}, right={"pixel_values": right})
    assert output.left_embeds.shape == output.right_embeds.shape == (3, 8)
    with pytest.raises(UserError, match="several towers read pixel_values; give each a dict of its own"):
        towers(pixel_values=left)


def test_what_does_not_fit() -> None:
    towers, images, ids = model(), torch.randn(2, 3, 16, 16), torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(UserError, match="input_ids of tower text is missing"):
        towers(pixel_values=images)
    with pytest.raises(UserError, match="different numbers of samples \\(image 2, text 1\\)"):
        towers(pixel_values=images, input_ids=ids[:1])
    with pytest.raises(UserError, match="loss: 'softmin' is not known; give one of softmax, sigmoid"):
        ContrastiveLoss("softmin")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="logit_bias: the softmax loss does not depend on one"):
        ContrastiveLoss("softmax", logit_bias=1.0)
    with pytest.raises(UserError, match="width: is missing, but image's projector is to be built"):
        ContrastiveModule({"image": image_tower(), "text": text_tower()})
    with pytest.raises(UserError, match="at least two"):
        ContrastiveModule({"image": image_tower()}, width=8)


def test_a_frozen_tower_stays_frozen() -> None:
    towers = model()
    towers.modality_modules()["image"].module.requires_grad_(False)
    towers.train()
    assert not towers.modality_modules()["image"].module.training
    output = towers(pixel_values=torch.randn(2, 3, 16, 16), input_ids=torch.ones(2, 4, dtype=torch.long))
    output.loss.backward()
    assert all(p.grad is None for p in towers.modality_modules()["image"].module.parameters())
    assert towers.loss.logit_scale.grad is not None
