"""Every rule for sizes against the real processor."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sampling import examples
from transformers import WhisperFeatureExtractor
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from motet.data.encoder_layout import RULES, TYPE_OF_FAMILY, image_rule, sound_rule
from motet.errors import UserError
from motet.families.encoders.token_counts import modality_of

SIDES = st.tuples(st.integers(3, 90), st.integers(3, 90))

CASES: list[tuple[Any, dict[str, Any]]] = [
    (SiglipImageProcessorPil, {"size": {"height": 32, "width": 24}}),
    (SiglipImageProcessorPil, {"size": {"shortest_edge": 20}}),
    (ViTImageProcessorPil, {"size": 16}),
    (ViTImageProcessorPil, {"do_resize": False}),
    (CLIPImageProcessorPil, {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 24}}),
    (CLIPImageProcessorPil, {"size": 20, "crop_size": 16}),
    (CLIPImageProcessorPil, {"size": 20, "do_center_crop": False}),
    (BitImageProcessorPil, {"size": {"shortest_edge": 32}, "crop_size": {"height": 28, "width": 28}}),
    (PixtralImageProcessorPil, {"size": {"longest_edge": 48}, "patch_size": {"height": 8, "width": 8}}),
    (PixtralImageProcessorPil, {"size": {"longest_edge": 50}, "patch_size": {"height": 16, "width": 8}}),
    (Qwen2VLImageProcessorPil, {"size": {"shortest_edge": 256, "longest_edge": 2048}, "patch_size": 4}),
    (Qwen2VLImageProcessorPil, {"min_pixels": 64, "max_pixels": 1024, "patch_size": 2, "merge_size": 3}),
]


def made_by(processor: Any, size: tuple[int, int]) -> tuple[int, int]:
    outputs = processor(images=[Image.new("RGB", size[::-1])], return_tensors="np")
    if "image_grid_thw" in outputs:
        _, rows, columns = outputs["image_grid_thw"][0]
        return int(rows) * processor.patch_size, int(columns) * processor.patch_size
    if "image_sizes" in outputs:
        return tuple(int(side) for side in outputs["image_sizes"][0])
    return outputs["pixel_values"].shape[-2:]


@pytest.mark.parametrize("case", range(len(CASES)))
@examples(15)
@given(size=SIDES)
def test_rules_are_those_of_the_processors(case: int, size: tuple[int, int]) -> None:
    kind, values = CASES[case]
    processor = kind(**values)
    expected = made_by(processor, size)
    for read in (processor.to_dict(), {"image_processor_type": kind.__name__, **values}):
        rule = image_rule(read, family="none")
        assert rule is not None
        assert pickle.loads(pickle.dumps(rule))(size) == expected


def test_every_rule_has_a_case() -> None:
    assert {kind.__name__.removesuffix("Pil") for kind, _ in CASES} == set(RULES)


@pytest.mark.parametrize("kind", list(dict.fromkeys(kind for kind, _ in CASES)), ids=lambda kind: kind.__name__)
def test_what_a_file_leaves_out_is_the_processors_default(kind: Any) -> None:
    size = (1500, 700)
    rule = image_rule({"image_processor_type": kind.__name__}, family="none")
    assert rule is not None
    assert rule(size) == made_by(kind(), size)


def test_old_names_and_a_familys_own_type() -> None:
    size = (50, 70)
    for name in ("CLIPFeatureExtractor", "CLIPImageProcessorFast", "CLIPImageProcessorPil"):
        assert image_rule({"image_processor_type": name, "crop_size": 12}, "dinov2")(size) == (12, 12)
    assert image_rule({}, "siglip_vision_model")(size) == (224, 224)
    assert image_rule({"image_processor_type": "OwlViTImageProcessor"}, "siglip_vision_model") is None


def test_every_family_of_images_has_a_type() -> None:
    encoders = ("siglip_vision_model", "clip_vision_model", "dinov2", "pixtral", "qwen2_5_vl_vision")
    assert set(encoders) == set(TYPE_OF_FAMILY)
    for family in encoders:
        assert modality_of({"model_type": family}) == "image"
    assert modality_of({"model_type": "whisper"}) == modality_of({"model_type": "qwen2_audio_encoder"}) == "audio"


def test_images_that_a_processor_refuses() -> None:
    with pytest.raises(UserError, match="one side is over 200 times the other"):
        image_rule({}, "qwen2_5_vl_vision")((1000, 4))


@pytest.mark.parametrize("values", [{}, {"chunk_length": 2, "hop_length": 80, "sampling_rate": 8000}])
def test_sounds(values: dict[str, int]) -> None:
    extractor = WhisperFeatureExtractor(**values)
    for read in (values, extractor.to_dict()):
        rule = sound_rule(read)
        assert (rule.num_frames, rule.num_samples) == (extractor.nb_max_frames, extractor.n_samples)
        assert (rule.sampling_rate, rule.hop_length) == (extractor.sampling_rate, extractor.hop_length)
