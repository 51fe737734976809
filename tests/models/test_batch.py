"""Layouts and features from what processors return, and what is said about batches that do not fit."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiny_mllm import IMAGE, SOUND, VOCABULARY, tiny_audio, tiny_batch, tiny_llama, tiny_multimodal, tiny_vision
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, PixtralVisionConfig, PixtralVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from motet import ModalityModule, MultimodalModule
from motet.assignment.sample import Segment
from motet.errors import UserError
from motet.models.batch import DictBatch, batch_from_dict

LLM = "language_model"


def own(num_tokens: int) -> Segment:
    return Segment(num_tokens)


def model_with(encoder: nn.Module | ModalityModule, **arguments: Any) -> MultimodalModule:
    """One encoder, `vision`, merged at placeholders unless `arguments` say otherwise."""
    module = encoder if isinstance(encoder, ModalityModule) else ModalityModule(encoder, "linear")
    return MultimodalModule(
        {"vision": module}, tiny_llama(), **{"placeholder_token_ids": {"vision": IMAGE}, **arguments}
    )


def read(model: MultimodalModule, ids: list[list[int]], **others: Any) -> DictBatch:
    return batch_from_dict(model, {"input_ids": torch.tensor(ids), **others})


def test_items_at_placeholders() -> None:
    model = tiny_multimodal()
    ids = [[5, *[IMAGE] * 8, 6, *[SOUND] * 6], [7, *[IMAGE] * 4, *[0] * 11]]
    mask = [[1] * 16, [1] * 5 + [0] * 11]
    pixels, mel = torch.randn(3, 3, 8, 8), torch.randn(1, 5, 12)
    batch = read(
        model,
        ids,
        attention_mask=torch.tensor(mask),
        labels=torch.tensor([[5, *[-100] * 8, 6, *[-100] * 6], [7] * 16]),
        pixel_values=pixels,
        input_features=mel,
    )
    first, second = batch.samples
    assert first.layouts[LLM] == (
        own(1),
        Segment(4, source="vision", item=0),
        Segment(4, source="vision", item=1),
        own(1),
        Segment(6, source="audio", item=0),
    )
    assert second.layouts[LLM] == (own(1), Segment(4, source="vision", item=0))
    assert [segment.item for segment in first.layouts["vision"]] == [0, 1]
    assert "audio" not in second.layouts
    assert [sample.num_loss_tokens[LLM] for sample in batch.samples] == [1, 4]
    assert torch.equal(batch.features("vision", 0)["pixel_values"], pixels[:2])
    assert torch.equal(batch.features("vision", 1)["pixel_values"], pixels[2:])
    assert torch.equal(batch.features("audio", 0)["input_features"], mel)
    assert batch.features("audio", 1) == {}
    assert batch.features(LLM, 1)["input_ids"].tolist() == ids[1][:5]
    assert batch.features(LLM, 1)["labels"].tolist() == [7] * 5


def test_padding_on_the_left_is_stripped() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    batch = read(tiny_multimodal(), [[0, 0, 8, 9], [5, 6, 7, 8]], attention_mask=mask)
    assert batch.features(LLM, 0)["input_ids"].tolist() == [8, 9]
    assert [sample.layouts[LLM] for sample in batch.samples] == [(own(2),), (own(4),)]
    assert [sample.num_loss_tokens[LLM] for sample in batch.samples] == [0, 0]


def test_prepended_items_stand_before_the_text() -> None:
    model = tiny_multimodal(merge="prepend")
    text = torch.tensor([[5, 6], [7, 8]])
    pixels, mel = torch.randn(4, 3, 8, 8), torch.randn(1, 5, 12)
    batch = batch_from_dict(
        model,
        {"input_ids": text, "labels": text, "pixel_values": pixels, "input_features": mel, "num_audio_items": [0, 1]},
    )
    images = (Segment(4, source="vision", item=0), Segment(4, source="vision", item=1))
    assert batch.samples[0].layouts[LLM] == (*images, own(2))
    assert batch.samples[1].layouts[LLM] == (*images, Segment(6, source="audio", item=0), own(2))
    assert batch.features(LLM, 1)["labels"].tolist() == [-100] * 14 + [7, 8]
    assert batch.features(LLM, 1)["input_ids"][14:].tolist() == [7, 8]
    # The first text token is predicted by the last prepended one.
    assert [sample.num_loss_tokens[LLM] for sample in batch.samples] == [2, 2]


def test_placeholders_outside_the_vocabulary() -> None:
    model = model_with(tiny_vision(), placeholder_token_ids={"vision": -200})
    batch = read(model, [[5, *[-200] * 4, 6]], pixel_values=torch.randn(1, 3, 8, 8))
    assert batch.samples[0].layouts[LLM] == (own(1), Segment(4, source="vision"), own(1))
    assert batch.features(LLM, 0)["input_ids"].tolist() == [5, 0, 0, 0, 0, 6]


@pytest.mark.parametrize("label", [40, 41, -1])
def test_labels_outside_the_vocabulary_are_told_with_their_sample(label: int) -> None:
    ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
    labels = torch.tensor([[5, 6, 7], [5, label, -100]])
    pixels = torch.randn(0, 3, 8, 8)
    with pytest.raises(UserError, match=f"labels of sample 1 has {label}, but the language model predicts .* 0 to 39"):
        batch_from_dict(model_with(tiny_vision()), {"input_ids": ids, "labels": labels, "pixel_values": pixels})


def test_pixtral_has_breaks_between_rows() -> None:
    vision = PixtralVisionModel(
        PixtralVisionConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
        )
    )
    row = [IMAGE] * 3
    batch = read(
        model_with(vision),
        [[5, *row, 9, *row, 10, IMAGE, 10]],
        pixel_values=torch.randn(2, 3, 8, 12),
        image_sizes=torch.tensor([[8, 12], [4, 4]]),
    )
    assert batch.samples[0].layouts["vision"] == (
        Segment(6, item=0, num_outputs=6, grid=(2, 3)),
        Segment(1, item=1, num_outputs=1, grid=(1, 1)),
    )
    assert batch.samples[0].layouts[LLM] == (
        own(1),
        Segment(3, source="vision", item=0),
        own(1),
        Segment(3, source="vision", item=0),
        own(1),
        Segment(1, source="vision", item=1),
        own(1),
    )


def test_qwen_concatenates_patches() -> None:
    vision = Qwen2_5_VisionTransformerPretrainedModel(
        Qwen2_5_VLVisionConfig(depth=1, hidden_size=16, num_heads=2, intermediate_size=24, out_hidden_size=16)
    )
    patches = torch.randn(4 + 16, 3 * 2 * 14 * 14)
    grids = torch.tensor([[1, 2, 2], [1, 4, 4]])
    ids = [[IMAGE, 5, 5, 5], [*[IMAGE] * 4]]
    batch = read(model_with(vision), ids, pixel_values=patches, image_grid_thw=grids)
    assert [sample.layouts["vision"][0].grid for sample in batch.samples] == [(1, 2, 2), (1, 4, 4)]
    assert torch.equal(batch.features("vision", 1)["pixel_values"], patches[4:])


def test_padded_clips() -> None:
    model = tiny_multimodal()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 5:] = 0
    ids = [[SOUND] * 6 + [5] * 3, [SOUND] * 3 + [5] * 6]
    batch = read(model, ids, input_features=torch.randn(2, 5, 12), feature_attention_mask=mask)
    assert [sample.layouts["audio"][0] for sample in batch.samples] == [
        Segment(6, num_outputs=6, grid=(12,)),
        Segment(6, num_outputs=3, grid=(5,)),
    ]


def test_class_tokens_are_handed_on_if_asked_for() -> None:
    clip = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        )
    )
    pixels = torch.randn(1, 3, 8, 8)
    read(model_with(ModalityModule(clip, "linear")), [[5, *[IMAGE] * 4]], pixel_values=pixels)
    full = model_with(ModalityModule(clip, "linear", feature_select="full"))
    batch = read(full, [[5, *[IMAGE] * 5]], pixel_values=pixels)
    assert batch.samples[0].layouts["vision"] == (Segment(5, num_outputs=5, grid=(2, 2)),)


def test_two_encoders_of_the_same_tensor() -> None:
    encoders = {name: ModalityModule(tiny_vision(), "linear") for name in ("near", "far")}
    model = MultimodalModule(encoders, tiny_llama(), placeholder_token_ids={"near": 30, "far": 31})
    near, far = torch.randn(1, 3, 8, 8), torch.randn(1, 3, 16, 8)
    ids = [[*[31] * 8, *[30] * 4]]
    batch = read(model, ids, near={"pixel_values": near}, far={"pixel_values": far})
    assert batch.samples[0].layouts[LLM] == (Segment(8, source="far"), Segment(4, source="near"))
    assert torch.equal(batch.features("near", 0)["pixel_values"], near)
    with pytest.raises(ValueError, match="near and far both read pixel_values; give each its own, in dicts"):
        read(model, ids, pixel_values=near)


def halve(inputs: Mapping[str, Tensor], output: tuple[Tensor]) -> tuple[Tensor]:
    return (output[0][::2],)


def test_placeholders_say_what_callbacks_make_of_items() -> None:
    model = model_with(ModalityModule(tiny_vision(), "linear", postprocess_module_callback=halve))
    pixels = torch.randn(3, 3, 8, 8)
    batch = read(model, [[*[IMAGE] * 4, 5], [*[IMAGE] * 2, 5, 5, 5]], pixel_values=pixels, num_vision_items=[2, 1])
    assert [segment.num_outputs for sample in batch.samples for segment in sample.layouts["vision"]] == [2, 2, 2]
    given = read(model, [[*[IMAGE] * 4, 5], [*[IMAGE] * 2, 5, 5, 5]], pixel_values=pixels, num_vision_outputs=[3, 1, 2])
    assert [segment.num_outputs for sample in given.samples for segment in sample.layouts["vision"]] == [3, 1, 2]
    with pytest.raises(ValueError, match="placeholders of vision do not separate its items; give num_vision_outputs"):
        read(model, [[*[IMAGE] * 5], [*[IMAGE] * 2, 5, 5, 5]], pixel_values=pixels, num_vision_items=[2, 1])


GOOD = [[5, *[IMAGE] * 4, 6], [*[IMAGE] * 4, 5, 6]]
PIXELS = torch.zeros(2, 3, 8, 8)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": None}, "input_ids is of <class 'NoneType'>; give a tensor of token ids"),
    ({"input_ids": torch.zeros(2, 3)}, r"input_ids is a tensor \[2, 3\] of torch.float32; give a tensor of token ids"),
    ({"input_ids": torch.tensor([5, 6])}, r"input_ids is a tensor \[2\]"),
    ({"labels": torch.zeros(2, 5)}, r"labels is a tensor \[2, 5\] .*; give the shape of input_ids, \[2, 6\]"),
    ({"attention_mask": torch.zeros(2, 6)}, "sample 0 is all padding; leave it out"),
    (
        {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1]] * 2)},
        "mask of sample 0 has a gap in columns 0 to 5",
    ),
    ({"pixel_value": PIXELS}, "'pixel_value' is not a known key; known are .*pixel_values"),
    ({"position_ids": torch.zeros(2, 6)}, "'position_ids' is not a known key"),
    ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "sample 1 has 4 placeholders of vision, but its 0 items make 0 tokens"),
    ({"pixel_values": torch.zeros(3, 3, 8, 8)}, "there are 3 items of vision, but placeholders for only 2"),
    ({"pixel_values": None}, "sample 0 has 4 placeholders of vision, but its 0 items make 0 tokens"),
    (
        {"pixel_values": torch.zeros(2, 3, 16, 8)},
        "has 4 placeholders of vision, but its 1 items make 8 tokens",
    ),
    (
        {"pixel_values": torch.zeros(2, 8, 8)},
        r"of vision is a tensor \[2, 8, 8\] .*; give .* 4 dimensions",
    ),
    ({"pixel_values": [1, 2]}, "pixel_values of vision is of <class 'list'>; give a tensor of 4 dimensions"),
    ({"input_features": torch.zeros(1, 5, 12)}, "there are 1 items of audio, but placeholders for only 0"),
    ({"input_features": torch.zeros(1, 5, 14)}, "needs a grid .* of 1 to 12"),
    (
        {"feature_attention_mask": torch.ones(1, 12)},
        "input_features of audio is missing, but there is feature",
    ),
    ({"num_vision_items": [2]}, r"num_vision_items is \[2\]; give the number of items of each of 2 samples, 2 in all"),
    ({"num_vision_items": [2, 0]}, r"num_vision_items is \[2, 0\], but by the placeholders it is \[1, 1\]"),
    ({"num_vision_outputs": [4]}, "num_vision_outputs has 1 entries for 2 items; give one for each"),
    ({"vision": PIXELS}, r"vision is a tensor \[2, 3, 8, 8\] .*; give a dict with pixel_values"),
    (
        {"pixel_values": None, "vision": {"pixels": PIXELS}},
        "pixel_values of vision is missing, but there is pixels; give both",
    ),
    ({"vision": {"pixel_values": PIXELS}}, "'pixel_values' is not a known key"),
    (
        {"pixel_values": None, "vision": {"pixel_values": PIXELS, "scale": torch.zeros(3)}},
        r"scale of vision is a tensor \[3\] .*; give a tensor \[2, ...\]",
    ),
    ({"input_ids": torch.tensor(GOOD) + 1 - 1 + 60 * (torch.tensor(GOOD) == 6)}, "sample 0 has 66, but .* ids 0 to 39"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    model = tiny_multimodal()
    good = {"input_ids": torch.tensor(GOOD), "pixel_values": PIXELS}
    batch_from_dict(model, good)
    with pytest.raises(ValueError, match=message) as caught:
        batch_from_dict(model, {**good, **change})
    assert "\n" not in str(caught.value)


def test_what_else_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"input_ids is missing; give token ids \[samples, tokens\]"):
        batch_from_dict(tiny_multimodal(), {})
    prepending = tiny_multimodal(merge="prepend")
    with pytest.raises(ValueError, match="samples cannot have equally many of 3 items; give num_vision_items"):
        read(prepending, [[5], [6]], pixel_values=torch.zeros(3, 3, 8, 8))
    encoders = {"vision": ModalityModule(tiny_vision(), "linear"), "audio": ModalityModule(tiny_audio(), "linear")}
    half = MultimodalModule(encoders, tiny_llama(), placeholder_token_ids={"vision": IMAGE})
    with pytest.raises(ValueError, match="placeholder_token_ids: audio is missing; give the id of the token"):
        read(half, [[5], [6]], input_features=torch.zeros(2, 5, 12))
    unseen = model_with(
        tiny_vision(), placeholder_token_ids={"vision": VOCABULARY}, preprocess_callback=lambda outputs, inputs: inputs
    )
    with pytest.raises(ValueError, match="40 is outside the language model's 40 embeddings, where preprocess_callback"):
        read(unseen, [[VOCABULARY] * 4], pixel_values=torch.zeros(1, 3, 8, 8))


def test_the_tiny_batches_of_other_tests_are_what_they_say() -> None:
    items = [(1, 0), (0, 2), (2, 1)]
    batch = batch_from_dict(tiny_multimodal(), tiny_batch(items))
    counted = [tuple(len(s.layouts.get(name, ())) for name in ("vision", "audio")) for s in batch.samples]
    assert counted == items
