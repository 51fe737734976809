"""The datasets that a run file asks for, with tensors, ready to be drawn from by every rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer, WhisperFeatureExtractor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from motet.config import (
    ConversationsConfig,
    DescribedConfig,
    DialADigitConfig,
    PairsConfig,
    PartConfig,
    PreparedDataConfig,
    RunConfig,
    SameDigitsConfig,
)
from motet.data.conversation.word_tokenizer import word_level_tokenizer
from motet.data.dataset import ExampleDataset
from motet.data.preparation.preparation import EncoderInput, Preparation, TowerPreparation
from motet.data.run_file.samples import (
    check_processor_names,
    check_vocabulary,
    compared_towers,
    dial_a_digit_processor,
    feed_encoders,
    open_examples,
    open_tower_examples,
)
from motet.data.tasks.dial_a_digit import QUESTIONS
from motet.data.tasks.same_digits import NAMES
from motet.errors import UserError
from motet.families.model_graph import read_workloads
from motet.families.text_layout import CaptionLayout, TextLayout
from motet.families.token_counts import modality_of, reads_text
from motet.plan import DECODER, LANGUAGE_MODEL
from motet.shapes.module_shape import ModuleWorkload

PROCESSORS: Mapping[str, type] = {
    "SiglipImageProcessor": SiglipImageProcessorPil,
    "PixtralImageProcessor": PixtralImageProcessorPil,
    "Qwen2VLImageProcessor": Qwen2VLImageProcessorPil,
    "WhisperFeatureExtractor": WhisperFeatureExtractor,
}
"""Those of *dial a digit*, by the type that their values name."""


@dataclass(frozen=True)
class RunData:
    train: ExampleDataset
    held_out: ExampleDataset | None
    preparation: Preparation | TowerPreparation

    @property
    def conversational(self) -> Preparation:
        """Of a model with a language model."""
        assert isinstance(self.preparation, Preparation)
        return self.preparation


def open_data(config: RunConfig) -> RunData:
    """Raises `UserError` naming the key or file that is wrong."""
    preparation = open_preparation(config)
    examples = open_tower_examples(config, read_workloads(config)) if config.model.towers else open_examples(config)
    return RunData(
        train=ExampleDataset(examples.train, preparation),
        held_out=ExampleDataset(examples.held_out, preparation) if examples.held_out else None,
        preparation=preparation,
    )


def open_preparation(config: RunConfig) -> Preparation | TowerPreparation:
    """Tokenizer and processors, without any data. Raises `UserError` naming the key or file that is wrong."""
    workloads = read_workloads(config)
    data = data_to_prepare(config)
    if config.model.towers:
        return _tower_preparation(config, workloads)
    if isinstance(data, DialADigitConfig):
        tokenizer: Any = word_level_tokenizer(QUESTIONS.values())
        processors = {name: _dial_a_digit_processor(workloads[name], name) for name in config.model.encoders}
    else:
        assert isinstance(data, ConversationsConfig)
        check_processor_names(config, data)
        tokenizer = _loaded(AutoTokenizer, data.tokenizer, config.model.causal_lm, "data.tokenizer")
        processors = _stored_processors(config, data, workloads)
    encoders = feed_encoders(config, workloads, processors, EncoderInput)
    check_vocabulary(workloads[LANGUAGE_MODEL], len(tokenizer))
    return Preparation(tokenizer, encoders, config.model.merge)


def data_to_prepare(config: RunConfig) -> PreparedDataConfig:
    """Raises `UserError` for data that there are only sizes of."""
    if isinstance(config.data, DescribedConfig):
        raise UserError(
            "data.kind: is described, which has sizes but no data; motet plan and simulate take it, for this give "
            "conversations or dial-a-digit"
        )
    return config.data


def _tower_preparation(config: RunConfig, workloads: Mapping[str, ModuleWorkload]) -> TowerPreparation:
    data = config.data
    towers: dict[str, EncoderInput | TextLayout] = {}
    for name, part in config.model.towers.items():
        values, where = workloads[name].config, f"model.towers.{name}"
        if reads_text(values):
            towers[name] = TextLayout(_tower_tokenizer(config, part), values, where)
            continue
        if isinstance(data, SameDigitsConfig):
            processor = _dial_a_digit_processor(workloads[name], name)
        else:
            assert isinstance(data, PairsConfig)
            kind = AutoImageProcessor if modality_of(values) == "image" else AutoFeatureExtractor
            processor = _loaded(kind, data.processors.get(name), part, f"data.processors.{name}")
        towers[name] = EncoderInput(modality=modality_of(values), processor=processor, config=values, name=where)
    captions, decoder = None, config.model.decoder
    if decoder is not None:
        captions = CaptionLayout(_tower_tokenizer(config, decoder), workloads[DECODER].config, decoder.reads)
    return TowerPreparation(towers, compared_towers(config), captions)


def _tower_tokenizer(config: RunConfig, part: PartConfig) -> Any:
    if isinstance(config.data, SameDigitsConfig):
        return word_level_tokenizer([" ".join(NAMES)])
    assert isinstance(config.data, PairsConfig)
    return _loaded(AutoTokenizer, config.data.tokenizer, part, "data.tokenizer")


def _stored_processors(
    config: RunConfig, data: ConversationsConfig, workloads: Mapping[str, ModuleWorkload]
) -> dict[str, Any]:
    return {
        name: _loaded(
            AutoImageProcessor if modality_of(workloads[name].config) == "image" else AutoFeatureExtractor,
            data.processors.get(name),
            part,
            f"data.processors.{name}",
        )
        for name, part in config.model.encoders.items()
    }


def _loaded(kind: Any, given: str | None, part: PartConfig, key: str) -> Any:
    """A tokenizer or processor from where the run file says, or from beside the part's weights."""
    source = given or part.path or part.hub
    if source is None:
        raise UserError(f"{key}: is missing, and the model has random weights; give a hub id or a folder")
    try:
        return kind.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"{key}: {source} cannot be loaded: {' '.join(str(error).split())[:200]}") from None


def _dial_a_digit_processor(encoder: ModuleWorkload, name: str) -> Any:
    values = dial_a_digit_processor(encoder.config, name)
    kind = values.pop("image_processor_type", None) or values.pop("feature_extractor_type")
    return PROCESSORS[kind](**values)
