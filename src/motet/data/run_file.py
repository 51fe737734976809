"""The samples that a run file's `data` asks for: metadata alone, or with tensors.

Importing this module does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from motet.assignment.sample import Sample
from motet.config import (
    ContrastiveConfig,
    DecoderConfig,
    DescribedConfig,
    EncoderConfig,
    GeneratorConfig,
    PartConfig,
    PreparedDataConfig,
    RunConfig,
    VideoConfig,
)
from motet.data.codes import CodeLayout
from motet.data.encoder_layout import EncoderLayout
from motet.data.example import ExampleSource
from motet.data.formats.described import described_samples
from motet.data.formats.registry import DATA_KINDS, Examples
from motet.data.generated import GeneratedLayout, QueryLayout, generated_modality
from motet.data.layouts import (
    CaptionLayout,
    ComparisonLayout,
    ConversationLayout,
    ModuleLayout,
    SampleLayouts,
    SampleSource,
    TextLayout,
    check_vocabulary,
)
from motet.data.stored_layouts import ExampleKey, LaidOut, PartLayout, StoredLayouts, layouts_file
from motet.data.tools import NeedsTransformersError, PlainTools, Tools, TransformersTools
from motet.errors import UserError
from motet.families.configured_graph import ConfiguredGraph, read_graph
from motet.families.encoders.token_counts import modality_of, reads_text
from motet.plan import LANGUAGE_MODEL, queries_of

if TYPE_CHECKING:
    from motet.data.preparation import ExampleDataset, Preparation

E = TypeVar("E", bound=EncoderLayout)


@dataclass(frozen=True)
class LaidOutExamples:
    """Metadata alone."""

    examples: ExampleSource
    layouts: SampleLayouts

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.examples.notes

    def sample(self, index: int) -> Sample:
        return self.layouts.sample(self.examples[index])


@dataclass(frozen=True)
class RunData:
    """Metadata and tensors."""

    train: "ExampleDataset"
    held_out: "ExampleDataset | None"
    preparation: "Preparation"


def open_samples(config: RunConfig) -> SampleSource:
    """The metadata of the training samples. Raises `UserError` naming the key or file that is wrong.

    Torch is imported only for a tokenizer without tokenizer.json, and for an image processor whose sizes follow no
    known rule: these must be asked themselves."""
    graph = read_graph(config)
    if isinstance(config.data, DescribedConfig):
        return described_samples(config, config.data, graph)
    if config.model.composite is not None:
        return _composite_samples(config, config.model.composite, graph)
    try:
        tools = PlainTools(config.data, DATA_KINDS[type(config.data)].words(config.data))
        layouts = SampleLayouts(_module_layouts(config, graph, tools, EncoderLayout))
    except NeedsTransformersError:
        return open_data(config).train
    return LaidOutExamples(_open_examples(config, graph).train, layouts)


def open_data(config: RunConfig) -> RunData:
    """The training and held-out samples. Raises `UserError` naming the key or file that is wrong."""
    from motet.data.preparation import ExampleDataset

    preparation = open_preparation(config)
    examples = _open_examples(config, read_graph(config))
    return RunData(
        train=ExampleDataset(examples.train, preparation),
        held_out=ExampleDataset(examples.held_out, preparation) if examples.held_out else None,
        preparation=preparation,
    )


def open_preparation(config: RunConfig) -> "Preparation":
    """Tokenizers and processors, without any data. Raises `UserError` naming the key or file that is wrong."""
    from motet.data.preparation import EncoderInput, Preparation

    data, graph = data_to_prepare(config), read_graph(config)
    if config.model.composite is not None:
        return Preparation(_composite_layouts(config.model.composite, data))
    _check_processor_names(data, graph)
    tools = TransformersTools(data, DATA_KINDS[type(data)].words(data))
    return Preparation(_module_layouts(config, graph, tools, EncoderInput))


def _composite_samples(config: RunConfig, part: PartConfig, graph: ConfiguredGraph) -> SampleSource:
    """Loads the model's processor only for examples that it has not laid out before."""
    data: Any = config.data
    file = layouts_file(part, data.tokenizer, data.video)
    if file is None:
        return open_data(config).train

    def make() -> Callable[[ExampleKey], LaidOut]:
        layouts: Any = _composite_layouts(part, data)
        whole = layouts[LANGUAGE_MODEL].whole

        def lay_out(key: ExampleKey) -> LaidOut:
            prepared = whole.lay_out(key)
            return LaidOut(prepared.layouts, prepared.num_loss_tokens)

        return lay_out

    stored = StoredLayouts(file, make)
    layouts = SampleLayouts({name: PartLayout(name, stored) for name in graph.names})
    return LaidOutExamples(_open_examples(config, graph).train, layouts)


def _composite_layouts(part: PartConfig, data: Any) -> dict[str, ModuleLayout]:
    """Raises `UserError` naming the key that is wrong."""
    from motet.data.composite import CompositePartLayout, CompositeProcessor, load_processor
    from motet.families.shape_reading.composite_shapes import read_composite

    if data.processors:
        raise UserError(
            f"data.processors.{next(iter(data.processors))}: the model has a processor of its own; leave it out, or "
            "name a folder with another one as data.tokenizer"
        )
    parts, _ = read_composite(part)
    whole = CompositeProcessor(load_processor(part, data.tokenizer), parts, data.video)
    return {name: CompositePartLayout(name, whole) for name in parts.modules}


def data_to_prepare(config: RunConfig) -> PreparedDataConfig:
    """Raises `UserError` for data that are only described by their sizes."""
    if isinstance(config.data, DescribedConfig):
        raise UserError(
            "data.kind: is described, which has sizes but no data, for motet plan and simulate only; give "
            "conversations or dial-a-digit"
        )
    return config.data


def _open_examples(config: RunConfig, graph: ConfiguredGraph) -> Examples:
    data: Any = config.data
    _check_processor_names(data, graph)
    return DATA_KINDS[type(data)].open(data, graph)


def _check_processor_names(data: Any, graph: ConfiguredGraph) -> None:
    encoders = graph.of_kind("encoder", "tower")
    for name in getattr(data, "processors", ()):
        if name not in encoders:
            known = ", ".join(encoders) or "no encoders"
            raise UserError(f"data.processors.{name}: is not an encoder; the model has {known}")


def _module_layouts(
    config: RunConfig, graph: ConfiguredGraph, tools: Tools, encoder_class: Callable[..., E]
) -> dict[str, ModuleLayout]:
    """The layout of every module of the graph. `encoder_class`: the layout of encoders of images and sounds.

    Raises `UserError` naming the key that is wrong, and `NeedsTransformersError`."""
    layouts: dict[str, ModuleLayout] = {}
    encoders: dict[str, E | QueryLayout] = {}
    for name, node in graph.modules.items():
        part, values = node.part, node.workload.config
        if isinstance(part, ContrastiveConfig):
            layouts[name] = ComparisonLayout(graph.compared)
        elif isinstance(part, DecoderConfig):
            layouts[name] = CaptionLayout(tools.tokenizer(node), values, part.reads)
        elif isinstance(part, GeneratorConfig) and node.workload.kind == "generator" and part.codec is not None:
            layouts[name] = CodeLayout(values["codec"], part.codec, values["n_positions"], part.loss_per, node.key)
        elif isinstance(part, GeneratorConfig) and node.workload.kind == "generator":
            layouts[name] = GeneratedLayout(values, part.loss_per, node.key, part.spectrogram, part.autoencoder)
        elif isinstance(part, GeneratorConfig):
            reader = next(other for other in config.model.generators if queries_of(other) == name)
            placeholder = config.model.placeholder_tokens.get(reader)
            kind = generated_modality(part)
            encoders[name] = layouts[name] = QueryLayout(values["num_queries"], reader, placeholder, kind)
        elif node.workload.kind == "language_model":
            for reader, generator in config.model.generators.items():
                if generator.queries is None:
                    placeholder = config.model.placeholder_tokens.get(reader)
                    encoders[reader] = QueryLayout(None, reader, placeholder, generated_modality(generator))
            _check_modalities(encoders)
            tokenizer = tools.tokenizer(node)
            check_vocabulary(tokenizer, values, node.key)
            layouts[name] = ConversationLayout(tokenizer, encoders, config.model.merge)
        elif reads_text(values):
            assert node.pooling is not None
            layouts[name] = TextLayout(tools.tokenizer(node), values, node.key, node.pooling)
        else:
            is_own = getattr(part, "module", None) is not None
            if is_own and encoder_class is EncoderLayout:
                raise NeedsTransformersError
            layout = (own_encoder_class() if is_own else encoder_class)(
                modality=modality_of(values),
                processor=None if is_own else tools.processor(name, node),
                config=values,
                feature_select=part.feature_select if isinstance(part, EncoderConfig) else "patch",
                placeholder=config.model.placeholder_tokens.get(name),
                name=node.key,
                pooling=node.pooling,
                video=getattr(config.data, "video", VideoConfig()),
            )
            if encoder_class is EncoderLayout and not layout.has_rule:
                raise NeedsTransformersError
            layouts[name] = encoders[name] = layout
    return layouts


def own_encoder_class() -> Any:
    """The layout of encoders of the user's own, which needs torch."""
    from motet.data.own_encoders import OwnEncoderInput

    return OwnEncoderInput


def _check_modalities(encoders: Mapping[str, EncoderLayout | QueryLayout]) -> None:
    modalities = [encoder.modality for encoder in encoders.values()]
    for modality in modalities:
        if modalities.count(modality) > 1:
            raise UserError(f"model.encoders: several take {modality}; a data set feeds one encoder of each modality")
