"""The datasets that a run file asks for, ready to be drawn from by every rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer, WhisperFeatureExtractor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from motet.config import (
    LANGUAGE_MODEL,
    ConversationsConfig,
    DialADigitConfig,
    EncoderConfig,
    PartConfig,
    RunConfig,
)
from motet.data.conversations import ConversationExamples
from motet.data.dataset import ExampleDataset
from motet.data.dial_a_digit import (
    IMAGE_MEAN,
    IMAGE_SIZE,
    IMAGE_STD,
    QUESTIONS,
    SAMPLING_RATE,
    DialADigit,
    DialADigitExamples,
)
from motet.data.example import Modality
from motet.data.preparation import EncoderInput, Preparation
from motet.data.tokenizer import word_level_tokenizer
from motet.errors import UserError
from motet.models.encoders import ENCODER_FAMILIES
from motet.models.materialize import read_part_config

MODALITY_OF_FEATURE: Mapping[str, Modality] = {"pixel_values": "image", "input_features": "audio"}


@dataclass(frozen=True)
class RunData:
    train: ExampleDataset
    held_out: ExampleDataset | None
    preparation: Preparation


def open_data(config: RunConfig) -> RunData:
    """Raises `UserError` naming the key or file that is wrong."""
    if isinstance(config.data, DialADigitConfig):
        return _open_dial_a_digit(config, config.data)
    return _open_conversations(config, config.data)


def encoder_configs(config: RunConfig) -> dict[str, Any]:
    """By encoder: its transformers configuration."""
    return {
        name: read_part_config(part, "encoder", where=f"model.encoders.{name}")
        for name, part in config.model.encoders.items()
    }


def modality_of(encoder_config: Any) -> Modality:
    return MODALITY_OF_FEATURE[ENCODER_FAMILIES[encoder_config.model_type].feature]


def make_preparation(config: RunConfig, tokenizer: Any, processors: Mapping[str, Any]) -> Preparation:
    """`processors`: by encoder."""
    encoders = {}
    for name, encoder_config in encoder_configs(config).items():
        part: EncoderConfig = config.model.encoders[name]
        encoders[name] = EncoderInput(
            modality=modality_of(encoder_config),
            processor=processors[name],
            config=encoder_config,
            feature_select=part.feature_select,
            placeholder=config.model.placeholder_tokens.get(name),
            name=f"model.encoders.{name}",
        )
    modalities = [fed.modality for fed in encoders.values()]
    for modality in set(modalities):
        if modalities.count(modality) > 1:
            raise UserError(f"model.encoders: several take {modality}; a data set feeds one encoder of each modality")
    llm = read_part_config(config.model.language_model, "language_model", where=f"model.{LANGUAGE_MODEL}")
    if len(tokenizer) > llm.vocab_size:
        raise UserError(
            f"model.{LANGUAGE_MODEL}: its vocabulary has {llm.vocab_size} tokens, but the tokenizer has "
            f"{len(tokenizer)}; set vocab_size to {len(tokenizer)} or take the model's own tokenizer"
        )
    return Preparation(tokenizer, encoders, config.model.merge)


def _open_conversations(config: RunConfig, data: ConversationsConfig) -> RunData:
    for name in data.processors:
        if name not in config.model.encoders:
            known = ", ".join(config.model.encoders) or "no encoders"
            raise UserError(f"data.processors.{name}: is no encoder; the model has {known}")
    tokenizer = _loaded(AutoTokenizer, data.tokenizer, config.model.language_model, "data.tokenizer")
    processors = {}
    for name, encoder_config in encoder_configs(config).items():
        kind = AutoImageProcessor if modality_of(encoder_config) == "image" else AutoFeatureExtractor
        processors[name] = _loaded(
            kind, data.processors.get(name), config.model.encoders[name], f"data.processors.{name}"
        )
    preparation = make_preparation(config, tokenizer, processors)
    folders: dict[Modality, Path] = {"image": Path(data.image_folder), "audio": Path(data.audio_folder)}
    train = ConversationExamples(data.files, folders)
    held_out = ConversationExamples(data.eval_files, folders) if data.eval_files else None
    return RunData(
        train=ExampleDataset(train, preparation),
        held_out=ExampleDataset(held_out, preparation) if held_out else None,
        preparation=preparation,
    )


def _loaded(kind: Any, given: str | None, part: PartConfig, key: str) -> Any:
    """A tokenizer or processor from where the run file says, or from beside the part's weights."""
    source = given or part.path or part.hub
    if source is None:
        raise UserError(f"{key}: is missing, and the model has random weights; give a hub id or a folder")
    try:
        return kind.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"{key}: {source} cannot be loaded: {' '.join(str(error).split())[:200]}") from None


def _open_dial_a_digit(config: RunConfig, data: DialADigitConfig) -> RunData:
    tokenizer = word_level_tokenizer(QUESTIONS.values())
    processors = {name: _dial_a_digit_processor(c, name) for name, c in encoder_configs(config).items()}
    preparation = make_preparation(config, tokenizer, processors)
    task = DialADigit(
        seed=data.seed,
        max_digits=data.max_digits,
        max_images=data.max_images,
        max_clips=data.max_clips,
        no_image=data.no_image,
        no_sound=data.no_sound,
        sum_questions=data.sum_questions,
    )
    return RunData(
        train=ExampleDataset(DialADigitExamples(task, "train", data.num_train), preparation),
        held_out=ExampleDataset(DialADigitExamples(task, "held_out", data.num_held_out), preparation),
        preparation=preparation,
    )


def _dial_a_digit_processor(config: Any, name: str) -> Any:
    """Fits the task's page and its second of sound to the encoder's own sizes."""
    if modality_of(config) == "audio":
        return _feature_extractor(config, name)
    look = {"image_mean": [IMAGE_MEAN] * 3, "image_std": [IMAGE_STD] * 3}
    if config.model_type == "qwen2_5_vl_vision":
        return Qwen2VLImageProcessorPil(
            patch_size=config.patch_size,
            temporal_patch_size=config.temporal_patch_size,
            merge_size=config.spatial_merge_size,
            size={"shortest_edge": IMAGE_SIZE**2, "longest_edge": 4 * IMAGE_SIZE**2},
            **look,
        )
    if config.model_type == "pixtral":
        size = {"longest_edge": config.image_size}
        return PixtralImageProcessorPil(
            patch_size={"height": config.patch_size, "width": config.patch_size}, size=size, **look
        )
    return SiglipImageProcessorPil(size={"height": config.image_size, "width": config.image_size}, **look)


def _feature_extractor(config: Any, name: str) -> WhisperFeatureExtractor:
    num_frames = 2 * config.max_source_positions
    chunk_s = max(1, num_frames // 100)
    if chunk_s * SAMPLING_RATE % num_frames:
        raise UserError(
            f"model.encoders.{name}.values.max_source_positions: {config.max_source_positions} does not divide "
            f"{chunk_s} s of sound into whole frames; give e.g. 25"
        )
    hop_length = chunk_s * SAMPLING_RATE // num_frames
    return WhisperFeatureExtractor(
        feature_size=config.num_mel_bins,
        chunk_length=chunk_s,
        hop_length=hop_length,
        n_fft=max(400, hop_length * 3 // 2),
        sampling_rate=SAMPLING_RATE,
    )
