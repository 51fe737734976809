"""The examples for contrastive towers that a run file asks for, and their metadata. Pure."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from motet.config import PairsConfig, PartConfig, RunConfig, SameDigitsConfig
from motet.data.conversation.example import Modality
from motet.data.conversation.plain_tokenizer import read_tokenizer
from motet.data.conversation.word_tokenizer import plain_word_level_tokenizer
from motet.data.formats.pairs import PairExamples
from motet.data.preparation.encoder_layout import EncoderLayout
from motet.data.preparation.tower_layouts import CaptionLayout, TextLayout, TowerLayouts
from motet.data.run_file.samples import (
    RunExamples,
    dial_a_digit_processor,
    source_of,
    stored_file,
    stored_processor,
)
from motet.data.tasks.same_digits import NAMES, SameDigits, SameDigitsExamples
from motet.errors import UserError
from motet.families.token_counts import modality_of, reads_text
from motet.plan import DECODER
from motet.schedule.batch_sync import Pair, pairs_of
from motet.shapes.module_shape import ModuleWorkload

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
