"""The reference of `motet verify` against transformers' own multimodal model and its own loss."""

from types import SimpleNamespace

import pytest
import torch
from tiny_encoders import VIT, modality_module
from tiny_language_models import SIZES, tiny_language_model
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from motet.assignment.sample import Sample, Segment
from motet.models.reference import plain_loss

IMAGE = 3
NUM_PATCHES = 16


def words(num_words: int, seed: int) -> torch.Tensor:
    return torch.randint(5, SIZES["vocab_size"], (num_words,), generator=torch.Generator().manual_seed(seed))


class Batch:
    """Text with two images in one sample, none in the next, one at the start of the last."""

    def __init__(self) -> None:
        image = torch.full((NUM_PATCHES,), IMAGE)
        self.ids = [
            torch.cat([words(2, 0), image, words(1, 1), image, words(5, 2)]),
            words(7, 3),
            torch.cat([image, words(4, 4)]),
        ]
        self.num_images = [2, 0, 1]
        self.samples = tuple(
            Sample(
                f"s{i}",
                {
                    "vision": tuple(
                        Segment(1 + NUM_PATCHES, item=k, num_outputs=NUM_PATCHES, grid=(4, 4)) for k in range(n)
                    )
                },
            )
            for i, n in enumerate(self.num_images)
        )

    def labels(self, sample: int) -> torch.Tensor:
        labels = torch.where(self.ids[sample] == IMAGE, -100, self.ids[sample])
        labels[2] = -100
        return labels

    def pixels(self, sample: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sample)
        return torch.randn(self.num_images[sample], 3, 16, 16, generator=generator, dtype=torch.float64)

    def features(self, module: str, sample: int) -> dict[str, torch.Tensor]:
        if module == "vision":
            return {"pixel_values": self.pixels(sample)}
        return {"input_ids": self.ids[sample], "labels": self.labels(sample)}


def num_counted(labels: torch.Tensor) -> int:
    return int((labels[1:] != -100).sum())


@pytest.mark.parametrize("feature_layer", [-1, -2])
def test_llava(feature_layer: int) -> None:
    torch.manual_seed(0)
    llava = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**VIT),
            text_config=LlamaConfig(**SIZES),
            image_token_id=IMAGE,
            vision_feature_layer=feature_layer,
        )
    ).double()
    batch = Batch()
    total = torch.zeros((), dtype=torch.float64)
    for i, ids in enumerate(batch.ids):
        images = {"pixel_values": batch.pixels(i)} if batch.num_images[i] else {}
        labels = batch.labels(i)
        total = total + llava(input_ids=ids[None], labels=labels[None], **images).loss * num_counted(labels)
    expected = total / sum(num_counted(batch.labels(i)) for i in range(3))
    expected.backward()
    gradients = {name: p.grad for name, p in llava.named_parameters() if p.grad is not None}
    llava.zero_grad()

    language_model = LlamaForCausalLM(llava.config.text_config).double()
    language_model.model, language_model.lm_head = llava.model.language_model, llava.lm_head
    vision = modality_module(llava.model.vision_tower, llava.model.multi_modal_projector)
    vision.feature_layer = feature_layer
    loss = plain_loss(
        {"vision": vision}, language_model, batch, merge="placeholder", placeholder_token_ids={"vision": IMAGE}
    )
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert len(gradients) > 50
    for name, parameter in llava.named_parameters():
        if name in gradients and gradients[name].norm() > 1e-6:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


class AsGiven:
    """Stands for an encoder whose outputs are its inputs."""

    config = SimpleNamespace(model_type="qwen2_5_vl_vision")

    def __call__(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(pooler_output=pixels)


def test_prepended_outputs_stand_in_front_of_the_text() -> None:
    """As if the embeddings had been given by hand."""
    model = tiny_language_model("llama")
    tokens = torch.randn(3, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    text = words(6, 1)
    ids = torch.cat([torch.full((3,), IMAGE), text])
    labels = torch.cat([torch.full((3,), -100), text])
    batch = SimpleNamespace(
        samples=[Sample("s", {"sound": (Segment(3),)})], features=lambda module, i: {"input_ids": ids, "labels": labels}
    )
    encoder = modality_module(AsGiven(), preprocess_callback=lambda inputs: {"pixel_values": tokens})
    loss = plain_loss({"sound": encoder}, model, batch, merge="prepend", placeholder_token_ids={})
    embedded = torch.cat([tokens, model.get_input_embeddings()(text)])
    expected = model(inputs_embeds=embedded[None], labels=labels[None]).loss
    torch.testing.assert_close(loss, expected.double(), rtol=1e-6, atol=0)
