"""CLIPModel and SiglipModel in and out, against transformers itself."""

import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    SiglipConfig,
    SiglipModel,
    SiglipTextConfig,
    SiglipVisionConfig,
)

from motet.errors import UserError
from motet.models.contrastive import ContrastiveModule
from motet.models.graph import ModalityModule
from motet.models.hub.clip import from_transformers, to_transformers

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = {**SMALL, "image_size": 16, "patch_size": 8}
TEXT = {**SMALL, "vocab_size": 40, "max_position_embeddings": 10, "bos_token_id": 0, "pad_token_id": 1}


def clip(eos_token_id: int) -> CLIPModel:
    torch.manual_seed(0)
    text = CLIPTextConfig(**TEXT, eos_token_id=eos_token_id)
    return CLIPModel(
        CLIPConfig(text_config=text.to_dict(), vision_config=CLIPVisionConfig(**IMAGE).to_dict(), projection_dim=24)
    ).double()


def siglip() -> SiglipModel:
    """Its texts are wider inside than its features."""
    torch.manual_seed(0)
    text = SiglipTextConfig(**{**TEXT, "hidden_size": 40}, eos_token_id=2, projection_size=32)
    vision = SiglipVisionConfig(**IMAGE)
    return SiglipModel(SiglipConfig(text_config=text.to_dict(), vision_config=vision.to_dict())).double()


def batch(eos_token_id: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 38, (5, 10))
    for i in range(5):
        ids[i, 4 + i :] = eos_token_id
    return {"pixel_values": torch.randn(5, 3, 16, 16, dtype=torch.float64), "input_ids": ids}


@pytest.mark.parametrize("kind", ["clip", "clip of old", "siglip"])
def test_logits_and_loss_are_those_of_transformers_and_weights_survive(kind: str) -> None:
    eos = 2 if kind == "clip of old" else 39
    make = siglip if kind == "siglip" else lambda: clip(eos)
    inputs = batch(39 if kind == "clip of old" else eos)
    expected = make()(**inputs, return_loss=True)
    model = from_transformers(make())
    output = model(**inputs)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-12, atol=1e-12)
    logits = model.loss.logit_scale.exp() * output.text_embeds @ output.image_embeds.T
    if model.loss.logit_bias is not None:
        logits = logits + model.loss.logit_bias
    torch.testing.assert_close(logits, expected.logits_per_text, rtol=1e-12, atol=1e-12)
    again = to_transformers(model)
    assert type(again) is type(make())
    for (name, tensor), (other, value) in zip(make().state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(tensor, value)
    torch.testing.assert_close(again(**inputs).logits_per_text, expected.logits_per_text, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [("siglip", 0, 6), ("siglip", 4, 10), ("clip", 3, 10), ("clip", 0, 5), ("clip of old", 2, 9)],
)
def test_texts_with_a_mask_are_those_of_transformers(kind: str, first: int, last: int) -> None:
    """Padding on the right and on the left; of CLIP's also where it covers the token whose features are taken."""
    eos = 2 if kind == "clip of old" else 39
    make = siglip if kind == "siglip" else lambda: clip(eos)
    inputs = batch(39)
    mask = torch.zeros_like(inputs["input_ids"])
    for i in range(5):
        mask[i, min(first, i) : last + (last < 10 and i % 2)] = 1
    expected, model = make(), from_transformers(make())
    loss = expected(**inputs, attention_mask=mask, return_loss=True).loss
    assert abs(loss - expected(**inputs, return_loss=True).loss) > 1e-6
    output = model(**inputs, attention_mask=mask)
    torch.testing.assert_close(output.loss, loss, rtol=1e-12, atol=1e-12)
    loss.backward()
    output.loss.backward()
    for mine, theirs in (("image", expected.vision_model), ("text", expected.text_model)):
        module = model.modality_modules()[mine].module
        for name, parameter in theirs.named_parameters():
            torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12)


def test_other_models_are_refused() -> None:
    with pytest.raises(UserError, match="neither CLIPModel nor SiglipModel"):
        from_transformers(torch.nn.Linear(2, 2))
    image, text = clip(39).vision_model, clip(39).text_model
    model = ContrastiveModule({"image": ModalityModule(image, "mlp"), "text": ModalityModule(text, "mlp")}, width=8)
    with pytest.raises(UserError, match="transformers has no model of"):
        to_transformers(model)
