"""transformers' own LLaVA and the `MultimodalModule` are the same function, both ways and through a folder."""

from itertools import cycle
from pathlib import Path

import pytest
import torch
import transformers
from sampling import in_campaigns
from tiny_encoders import ENCODERS
from tiny_language_models import SIZES, TINY
from tiny_multimodal import IMAGE_ID, tiny_multimodal
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, SiglipImageProcessor

from motet.data.chat import word_level_tokenizer
from motet.errors import UserError
from motet.models.hub.export import export_module, load_export
from motet.models.hub.llava import from_llava, to_llava
from motet.models.multimodal import MultimodalModule
from motet.models.stages.projector import MlpProjector

LANGUAGE_MODELS = [family for family in TINY if family != "mllama"]


def tiny_llava(vision: str = "clip", language_model: str = "llama", **values: object) -> LlavaForConditionalGeneration:
    _, vision_class, vision_values = ENCODERS[vision]
    _, text_class, text_values = TINY[language_model]
    config = LlavaConfig(
        vision_config=vision_class(**vision_values),
        text_config=text_class(**SIZES, **text_values),
        image_token_index=IMAGE_ID,
        **values,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batch_for(num_image_tokens: int) -> dict[str, torch.Tensor]:
    """Two samples of different length, the first with two images."""
    generator = torch.Generator().manual_seed(7)
    rows = [
        [5, 6, *[IMAGE_ID] * num_image_tokens, 7, *[IMAGE_ID] * num_image_tokens, 8, 9],
        [10, *[IMAGE_ID] * num_image_tokens, 11, 12],
    ]
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        "pixel_values": torch.randn(3, 3, 16, 16, generator=generator, dtype=torch.float64),
    }


@torch.no_grad()
def assert_same_logits(llava: LlavaForConditionalGeneration, ours: MultimodalModule, num_image_tokens: int) -> None:
    batch = batch_for(num_image_tokens)
    extra = {}
    if llava.config.vision_config.model_type == "pixtral":
        extra["image_sizes"] = torch.tensor([[16, 16]] * 3)
    expected = llava.eval()(**batch, **extra).logits
    found = ours.eval()(**batch).logits
    kept = batch["attention_mask"].bool()
    assert expected[kept].std() > 0.01
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("language_model", LANGUAGE_MODELS)
def test_llava_becomes_a_multimodal_module(language_model: str, tmp_path: Path) -> None:
    llava = tiny_llava(language_model=language_model)
    assert_same_logits(llava, from_llava(llava), 16)
    llava.save_pretrained(tmp_path)
    # In float64 from the start: `double()` after the fact keeps Gemma's factor of the embedding as float32 rounded it.
    assert_same_logits(LlavaForConditionalGeneration.from_pretrained(tmp_path), from_llava(tmp_path), 16)


@pytest.mark.parametrize(
    ("vision", "values", "num_image_tokens"),
    [
        ("clip", {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}, 16),
        ("clip", {"vision_feature_layer": 1, "vision_feature_select_strategy": "full"}, 17),
        ("clip", {"vision_feature_layer": [-1], "vision_feature_select_strategy": "default"}, 16),
        ("siglip", {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}, 16),
        ("siglip", {"vision_feature_layer": -2, "vision_feature_select_strategy": "full"}, 16),
        ("pixtral", {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}, 16),
        ("dinov2", {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}, 16),
        ("clip", {"projector_hidden_act": "relu"}, 16),
        ("clip", {"multimodal_projector_bias": False}, 16),
    ],
)
def test_every_vision_tower_and_projector(vision: str, values: dict, num_image_tokens: int) -> None:
    llava = tiny_llava(vision, **values)
    assert_same_logits(llava, from_llava(llava), num_image_tokens)


def test_a_named_projector_where_it_is_the_same_function() -> None:
    assert type(from_llava(tiny_llava()).vision_encoder.projector) is MlpProjector
    relu = from_llava(tiny_llava(projector_hidden_act="relu")).vision_encoder.projector
    assert type(relu) is not MlpProjector


VISIONS = [
    ("clip", {"feature_layer": -2}),
    ("clip", {"feature_select": "full"}),
    ("siglip", {"feature_layer": -1}),
    ("pixtral", {}),
    ("dinov2", {"feature_layer": 3}),
]
PAIRS = [(*vision, model) for model in LANGUAGE_MODELS for vision in VISIONS]
USUAL = [(*vision, model) for vision, model in zip(cycle(VISIONS), LANGUAGE_MODELS, strict=False)]
"""Every language model and every encoder once, for `make test`."""


@pytest.mark.parametrize(
    ("vision", "options", "language_model"), [*USUAL, *in_campaigns(pair for pair in PAIRS if pair not in USUAL)]
)
def test_a_multimodal_module_becomes_llava(vision: str, options: dict, language_model: str, tmp_path: Path) -> None:
    export_module(tiny_multimodal(vision=vision, language_model=language_model, **options), tmp_path / "parts")
    ours = load_export(tmp_path / "parts")
    to_llava(ours, tmp_path / "llava")
    llava = LlavaForConditionalGeneration.from_pretrained(tmp_path / "llava")
    num_image_tokens = 17 if options.get("feature_select") == "full" else 16
    assert llava.config.image_seq_length == num_image_tokens
    assert llava.dtype == torch.float64
    assert_same_logits(llava, ours, num_image_tokens)
    assert_same_logits(llava, from_llava(tmp_path / "llava"), num_image_tokens)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    to_llava(tiny_multimodal(vision="clip", language_model="llama-tied"), tmp_path / "llava")
    llava = LlavaForConditionalGeneration.from_pretrained(tmp_path / "llava")
    assert llava.lm_head.weight is llava.get_input_embeddings().weight
    causal = from_llava(llava).language_model.module
    assert causal.lm_head.weight is causal.get_input_embeddings().weight
    assert len(list(causal.parameters())) == len(list(llava.model.language_model.parameters()))


def test_an_imported_llava_is_exported_in_parts(tmp_path: Path) -> None:
    llava = tiny_llava()
    export_module(from_llava(llava), tmp_path / "parts")
    assert_same_logits(llava, load_export(tmp_path / "parts"), 16)


def test_gradients_reach_the_parts_of_an_imported_llava() -> None:
    ours = from_llava(tiny_llava())
    batch = batch_for(16)
    ours(**batch, labels=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)).loss.backward()
    missing = {name for name, parameter in ours.named_parameters() if parameter.grad is None}
    behind_the_feature_layer = {name for name in missing if "layers.3." in name or "post_layernorm" in name}
    assert missing == behind_the_feature_layer
    assert len(missing) < 25


def test_the_processor_expands_as_many_placeholders_as_the_model_wants(tmp_path: Path) -> None:
    tokenizer = word_level_tokenizer(["what do you see"])
    ours = tiny_multimodal(vision="clip", feature_layer=-2)
    ours.placeholder_token_ids["vision"] = tokenizer.convert_tokens_to_ids("<image>")
    image_processor = SiglipImageProcessor(size={"height": 16, "width": 16})
    to_llava(ours, tmp_path / "llava", tokenizer=tokenizer, image_processor=image_processor)
    processor = LlavaProcessor.from_pretrained(tmp_path / "llava")
    image = torch.rand(3, 20, 20)
    batch = processor(images=image, text="what do you see <image>", return_tensors="pt")
    assert int((batch["input_ids"] == ours.placeholder_token_ids["vision"]).sum()) == 16
    llava = LlavaForConditionalGeneration.from_pretrained(tmp_path / "llava")
    answer = llava.generate(**batch.to(torch.float64), max_new_tokens=3, do_sample=False)
    assert answer.shape[0] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vision": "siglip"}, "has passed a last norm"),
        ({"vision": "clip", "projector": "linear"}, "projector is linear"),
        ({"vision": "clip", "merge": "prepend"}, "merged by placeholder"),
        ({"vision": "clip", "audio": "whisper"}, "one vision encoder"),
        ({"vision": "qwen2_5_vl"}, "is a qwen2_5_vl_vision"),
    ],
)
def test_what_llava_has_not_is_refused(options: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        to_llava(tiny_multimodal(**options), tmp_path / "llava")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "llava").exists()


def test_a_placeholder_outside_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    ours = tiny_multimodal(vision="clip")
    ours.placeholder_token_ids["vision"] = SIZES["vocab_size"]
    with pytest.raises(UserError, match="within the vocabulary of 40"):
        to_llava(ours, tmp_path / "llava")


@pytest.mark.parametrize(
    ("vision", "values", "words"),
    [
        ("clip", {"vision_feature_layer": [-2, -1]}, "one layer"),
        ("siglip", {"vision_feature_select_strategy": "default"}, "no class token"),
    ],
)
def test_a_llava_that_motet_has_not_is_refused(vision: str, values: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_llava(tiny_llava(vision, **values))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        from_llava(tmp_path / "nowhere")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "llama")
    with pytest.raises(UserError, match="is a llama, not a LLaVA"):
        from_llava(tmp_path / "llama")
