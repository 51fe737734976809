"""The examples that a run file asks for, and their metadata. Pure: plans are made from it, and no torch is imported.

What `motet.data.run_file.datasets` adds are tokenizers and processors as transformers makes them, and tensors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from motet.assignment.sample import Sample
from motet.config import (
    ConversationsConfig,
    DescribedConfig,
    DialADigitConfig,
    PairsConfig,
    PartConfig,
    RunConfig,
    SameDigitsConfig,
)
from motet.data.conversation.chat import read_tokenizer
from motet.data.conversation.example import ExampleSource, Modality
from motet.data.conversation.word_tokenizer import plain_word_level_tokenizer
from motet.data.formats.conversation_sources import open_conversations
from motet.data.formats.described import described_samples
from motet.data.formats.pairs import PairExamples
from motet.data.preparation.encoder_layout import EncoderLayout
from motet.data.preparation.sample_layout import SampleLayouts, SampleSource
from motet.data.preparation.tower_layouts import TowerLayouts
from motet.data.tasks.dial_a_digit import (
    IMAGE_MEAN,
    IMAGE_SIZE,
    IMAGE_STD,
    QUESTIONS,
    SAMPLING_RATE,
    DialADigit,
    DialADigitExamples,
)
from motet.data.tasks.same_digits import NAMES, SameDigits, SameDigitsExamples
from motet.errors import UserError
from motet.families.model_graph import read_workloads
from motet.families.text_layout import CaptionLayout, TextLayout
from motet.families.token_counts import modality_of, reads_text
from motet.plan import DECODER, LANGUAGE_MODEL
from motet.schedule.batch_sync import Pair, pairs_of
from motet.shapes.module_shape import ModuleWorkload

E = TypeVar("E", bound=EncoderLayout)

PROCESSOR_FILES = (
    ("preprocessor_config.json", ()),
    ("processor_config.json", ("image_processor", "feature_extractor")),
)
"""Where a processor's values stand, and under which keys of the file."""


@dataclass(frozen=True)
class RunExamples:
    train: ExampleSource
    held_out: ExampleSource | None


@dataclass(frozen=True)
class LaidOutExamples:
    """Metadata alone."""

    examples: ExampleSource
    layouts: SampleLayouts | TowerLayouts

    def __len__(self) -> int:
        return len(self.examples)

    def sample(self, index: int) -> Sample:
        return self.layouts.sample(self.examples[index])


def open_samples(config: RunConfig) -> SampleSource:
    """The training samples. Raises `UserError` naming the key or file that is wrong.

    A tokenizer without tokenizer.json, and an image processor of a type for whose sizes no rule is known, can only be
    asked themselves: then torch is imported after all."""
    workloads = read_workloads(config)
    if isinstance(config.data, DescribedConfig):
        return described_samples(config, config.data, workloads)
    if config.model.towers:
        towers = plain_tower_layouts(config, workloads)
        if towers is not None:
            return LaidOutExamples(open_tower_examples(config, workloads).train, towers)
    layouts = None if config.model.towers else _plain_layouts(config, workloads)
    if layouts is None:
        from motet.data.run_file.datasets import open_data

        return open_data(config).train
    return LaidOutExamples(open_examples(config).train, layouts)


def _plain_layouts(config: RunConfig, workloads: Mapping[str, ModuleWorkload]) -> SampleLayouts | None:
    names = config.model.encoders
    if isinstance(config.data, DialADigitConfig):
        tokenizer = plain_word_level_tokenizer(QUESTIONS.values())
        processors = {name: dial_a_digit_processor(workloads[name].config, name) for name in names}
    else:
        assert isinstance(config.data, ConversationsConfig)
        find = partial(stored_file, config.data.tokenizer or source_of(config.model.causal_lm))
        read = read_tokenizer(find)
        given = {
            name: stored_processor(config.data.processors.get(name) or source_of(part)) for name, part in names.items()
        }
        if read is None or None in given.values():
            return None
        tokenizer, processors = read, {name: values for name, values in given.items() if values is not None}
    encoders = feed_encoders(config, workloads, processors, EncoderLayout)
    if not all(encoder.has_rule for encoder in encoders.values()):
        return None
    check_vocabulary(workloads[LANGUAGE_MODEL], len(tokenizer))
    return SampleLayouts(tokenizer, encoders, config.model.merge)


def open_examples(config: RunConfig) -> RunExamples:
    """Raises `UserError` for files that are not there, or are no conversations."""
    data = config.data
    if isinstance(data, ConversationsConfig):
        check_processor_names(config, data)
        folders: dict[Modality, Path] = {"image": Path(data.image_folder), "audio": Path(data.audio_folder)}
        train = open_conversations(data.files, folders)
        return RunExamples(train, open_conversations(data.eval_files, folders) if data.eval_files else None)
    assert isinstance(data, DialADigitConfig), "described samples have no examples"
    task = DialADigit(
        seed=data.seed,
        max_digits=data.max_digits,
        max_images=data.max_images,
        max_clips=data.max_clips,
        no_image=data.no_image,
        no_sound=data.no_sound,
        sum_questions=data.sum_questions,
    )
    return RunExamples(
        DialADigitExamples(task, "train", data.num_train), DialADigitExamples(task, "held_out", data.num_held_out)
    )


def check_processor_names(config: RunConfig, data: ConversationsConfig) -> None:
    for name in data.processors:
        if name not in config.model.encoders:
            known = ", ".join(config.model.encoders) or "no encoders"
            raise UserError(f"data.processors.{name}: is no encoder; the model has {known}")


def feed_encoders(
    config: RunConfig, workloads: Mapping[str, ModuleWorkload], processors: Mapping[str, Any], kind: type[E]
) -> dict[str, E]:
    """By encoder. `processors`: what `kind` takes as one. Raises `UserError` if two encoders take the same modality."""
    encoders = {
        name: kind(
            modality=modality_of(workloads[name].config),
            processor=processors[name],
            config=workloads[name].config,
            feature_select=part.feature_select,
            placeholder=config.model.placeholder_tokens.get(name),
            name=f"model.encoders.{name}",
        )
        for name, part in config.model.encoders.items()
    }
    modalities = [fed.modality for fed in encoders.values()]
    for modality in modalities:
        if modalities.count(modality) > 1:
            raise UserError(f"model.encoders: several take {modality}; a data set feeds one encoder of each modality")
    return encoders


def check_vocabulary(language_model: ModuleWorkload, num_tokens: int) -> None:
    """`num_tokens`: of the tokenizer."""
    own = language_model.config["vocab_size"]
    if num_tokens > own:
        raise UserError(
            f"model.{LANGUAGE_MODEL}: its vocabulary has {own} tokens, but the tokenizer has {num_tokens}; set "
            f"vocab_size to {num_tokens} or take the model's own tokenizer"
        )


def dial_a_digit_processor(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The values of a processor that fits the task's page and its second of sound to the encoder's own sizes."""
    if modality_of(config) == "audio":
        return _dial_a_digit_extractor(config, name)
    look = {"image_mean": [IMAGE_MEAN] * 3, "image_std": [IMAGE_STD] * 3}
    if config["model_type"] == "qwen2_5_vl_vision":
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": config["patch_size"],
            "temporal_patch_size": config["temporal_patch_size"],
            "merge_size": config["spatial_merge_size"],
            "size": {"shortest_edge": IMAGE_SIZE**2, "longest_edge": 4 * IMAGE_SIZE**2},
            **look,
        }
    if config["model_type"] == "pixtral":
        patch = {"height": config["patch_size"], "width": config["patch_size"]}
        size = {"longest_edge": config["image_size"]}
        return {"image_processor_type": "PixtralImageProcessor", "patch_size": patch, "size": size, **look}
    side = config["image_size"]
    height, width = (side, side) if isinstance(side, int) else side
    size = {"height": height, "width": width}
    return {"image_processor_type": "SiglipImageProcessor", "size": size, **look}


def _dial_a_digit_extractor(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_frames = 2 * config["max_source_positions"]
    chunk_s = max(1, num_frames // 100)
    if chunk_s * SAMPLING_RATE % num_frames:
        raise UserError(
            f"model.encoders.{name}.values.max_source_positions: {config['max_source_positions']} does not divide "
            f"{chunk_s} s of sound into whole frames; give e.g. 25"
        )
    hop_length = chunk_s * SAMPLING_RATE // num_frames
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config["num_mel_bins"],
        "chunk_length": chunk_s,
        "hop_length": hop_length,
        "n_fft": max(400, hop_length * 3 // 2),
        "sampling_rate": SAMPLING_RATE,
    }


def stored_file(source: str | None, name: str) -> Path | None:
    """A file of a folder or of a model on the hub; None if there is none."""
    if source is None:
        return None
    if Path(source).is_dir():
        file = Path(source) / name
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, name))
    except Exception:  # Absent, offline, no such model: transformers says what it is.
        return None


def source_of(part: PartConfig) -> str | None:
    return part.path or part.hub


def stored_processor(source: str | None) -> dict[str, Any] | None:
    for name, keys in PROCESSOR_FILES:
        file = stored_file(source, name)
        if file is None:
            continue
        values = json.loads(file.read_text(encoding="utf-8"))
        nested = [values[key] for key in keys if key in values]
        return nested[0] if nested else values
    return None


# The examples for contrastive towers that a run file asks for, and their metadata. Pure.


Workloads = Mapping[str, ModuleWorkload]


def open_tower_examples(config: RunConfig, workloads: Workloads) -> RunExamples:
    """Raises `UserError` naming the key or file that is wrong."""
    data = config.data
    if isinstance(data, SameDigitsConfig):
        task = SameDigits(seed=data.seed, min_digits=data.min_digits, max_digits=data.max_digits)
        return RunExamples(
            SameDigitsExamples(task, "train", data.num_train), SameDigitsExamples(task, "held_out", data.num_held_out)
        )
    assert isinstance(data, PairsConfig)
    for name in data.processors:
        if name not in config.model.towers:
            raise UserError(f"data.processors.{name}: is no tower; the model has {', '.join(config.model.towers)}")
    kinds = {
        name: "text" if reads_text(w.config) else modality_of(w.config)
        for name, w in _towers(config, workloads).items()
    }
    pairs = [(kinds[first], kinds[second]) for first, second in compared_towers(config)]
    folders: dict[Modality, Path] = {"image": Path(data.image_folder), "audio": Path(data.audio_folder)}
    train = PairExamples(data.files, folders, pairs)
    return RunExamples(train, PairExamples(data.eval_files, folders, pairs) if data.eval_files else None)


def compared_towers(config: RunConfig) -> tuple[Pair, ...]:
    return pairs_of(tuple(config.model.towers), config.model.contrastive.anchor)


def plain_tower_layouts(config: RunConfig, workloads: Workloads) -> TowerLayouts | None:
    """None where only transformers itself can tell: see `motet.data.run_file.samples.open_samples`."""
    towers: dict[str, EncoderLayout | TextLayout] = {}
    for name, workload in _towers(config, workloads).items():
        values, where = workload.config, f"model.towers.{name}"
        if reads_text(values):
            tokenizer = _plain_tokenizer(config, config.model.towers[name])
            if tokenizer is None:
                return None
            towers[name] = TextLayout(tokenizer, values, where)
            continue
        if isinstance(config.data, SameDigitsConfig):
            processor = dial_a_digit_processor(values, name)
        else:
            assert isinstance(config.data, PairsConfig)
            stored = stored_processor(config.data.processors.get(name) or source_of(config.model.towers[name]))
            if stored is None:
                return None
            processor = stored
        layout = EncoderLayout(modality=modality_of(values), processor=processor, config=values, name=where)
        if not layout.has_rule:
            return None
        towers[name] = layout
    captions = None
    if config.model.decoder is not None:
        tokenizer = _plain_tokenizer(config, config.model.decoder)
        if tokenizer is None:
            return None
        captions = CaptionLayout(tokenizer, workloads[DECODER].config, config.model.decoder.reads)
    return TowerLayouts(towers, compared_towers(config), captions)


def _plain_tokenizer(config: RunConfig, part: PartConfig) -> Any:
    if isinstance(config.data, SameDigitsConfig):
        return plain_word_level_tokenizer([" ".join(NAMES)])
    assert isinstance(config.data, PairsConfig)
    return read_tokenizer(partial(stored_file, config.data.tokenizer or source_of(part)))


def _towers(config: RunConfig, workloads: Workloads) -> dict[str, ModuleWorkload]:
    return {name: workloads[name] for name in config.model.towers}
