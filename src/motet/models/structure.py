"""What planners need to know of a `MultimodalModule` in memory: shapes, what is trainable, and what enters where."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from motet.assignment.sample import Sample, Segment
from motet.families.language_models import cross_attention_layers, is_tied, num_language_model_layers
from motet.families.token_counts import encoder_segment
from motet.models.multimodal import ModalityModule, MultimodalModule
from motet.models.stages.caption_decoder import CaptionDecoderStage
from motet.models.stages.encoder import EncoderStage, num_encoder_layers
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.projector import PROJECTORS, projected_size
from motet.plan import DECODER, LANGUAGE_MODEL, Edge, LayerRange
from motet.shapes.families import decoder_workload, module_workload
from motet.shapes.module_shape import LayerShape, Linear, ModuleWorkload, with_projector

TYPICAL_TEXT_TOKENS = 256
"""Of the sample that stages are balanced for, beside what encoders put into its sequence; half of them carry loss."""


@dataclass(frozen=True, kw_only=True)
class ModuleStructure:
    workload: ModuleWorkload
    """Its kind, its layers (with the projector's) and which of them share a parameter."""
    trainable: tuple[LayerRange, ...]
    """The layers with a parameter that requires a gradient."""
    loss_weight: float
    """1 for a language model, which computes the loss, or what is given for a decoder; 0 for encoders."""


def module_structures(model: MultimodalModule, *, packing: bool = False) -> dict[str, ModuleStructure]:
    """By module name, encoders first. `packing`: the language model's samples stand in one row."""
    return {
        name: ModuleStructure(
            workload=workload_of(module, packing=packing),
            trainable=trainable_layers(name, module),
            loss_weight=float(name == LANGUAGE_MODEL),
        )
        for name, module in model.modality_modules().items()
    }


def module_edges(model: MultimodalModule) -> tuple[Edge, ...]:
    """Every encoder enters the language model: at its embedding, or at its cross-attention layers."""
    layers = cross_attention_layers(model.language_model.module) if model.merge == "cross_attention" else (0,)
    return tuple(Edge(source=name, target=LANGUAGE_MODEL, layers=layers) for name in model.encoders)


def typical_sample(model: MultimodalModule) -> Sample:
    """One item of its native size for each encoder, and some text: what stages are balanced for."""
    layouts: dict[str, tuple[Segment, ...]] = {}
    for name, encoder in model.modality_modules(encoders_only=True).items():
        config = encoder.module.config
        grid: tuple[int, ...] = ()
        if config.model_type == "pixtral":
            grid = (config.image_size // config.patch_size,) * 2
        elif config.model_type == "qwen2_5_vl_vision":  # It has no native size; this is a small image.
            grid = (1, 16 * config.spatial_merge_size, 16 * config.spatial_merge_size)
        layouts[name] = (encoder_segment(config, item=0, grid=grid, feature_select=encoder.feature_select),)
    merged: list[Segment] = []
    if model.merge != "cross_attention":
        merged = [Segment(segments[0].outputs, source=name) for name, segments in layouts.items()]
    layouts[LANGUAGE_MODEL] = (*merged, Segment(TYPICAL_TEXT_TOKENS))
    return Sample("typical", layouts, {LANGUAGE_MODEL: TYPICAL_TEXT_TOKENS // 2})


def trainable_layers(name: str, module: ModalityModule) -> tuple[LayerRange, ...]:
    """As docs/architecture.md numbers the layers."""
    stage: EncoderStage | LanguageModelStage
    if module.is_language_model:
        stage = LanguageModelStage(name, module.module, (0, num_language_model_layers(module.module)))
    else:
        stage = EncoderStage(name, module, (0, num_encoder_layers(module.module, module.projector)))
    return _trainable_layers_of(stage)


def _trainable_layers_of(stage: LanguageModelStage | EncoderStage | CaptionDecoderStage) -> tuple[LayerRange, ...]:
    layers = {
        layer
        for local_name, parameter in stage.named_parameters()
        if parameter.requires_grad
        for layer in stage.layers_of(local_name)
    }
    return _ranges(layers)


def _ranges(layers: Iterable[int]) -> tuple[LayerRange, ...]:
    runs = [list(run) for _, run in groupby(enumerate(sorted(layers)), key=lambda pair: pair[1] - pair[0])]
    return tuple((run[0][1], run[-1][1] + 1) for run in runs)


def workload_of(module: ModalityModule, *, packing: bool = False) -> ModuleWorkload:
    """Of the module with its projector, whose shape is read from its linears if it is the user's own."""
    workload = module_workload(module.module.config, packing=packing)
    if module.is_language_model:
        return replace(workload, tied=((0, workload.num_layers - 1),) if is_tied(module.module) else ())
    projector = module.projector
    if projector is not None:
        names = {projector_class: name for name, projector_class in PROJECTORS.items()}
        if type(projector) in names:
            workload = with_projector(workload, names[type(projector)], projected_size(projector))
        else:
            layer = _own_projector_layer(projector)
            workload = replace(workload, layers=(*workload.layers, layer), output_size=layer.hidden_size)
    assert workload.num_layers == num_encoder_layers(module.module, projector)
    return workload


def decoder_structure(decoder: nn.Module, *, loss_weight: float) -> ModuleStructure:
    """Of a caption decoder."""
    workload = decoder_workload(decoder.config.to_dict())  # type: ignore[union-attr, operator]
    return ModuleStructure(
        workload=replace(workload, tied=((0, workload.num_layers - 1),) if is_tied(decoder) else ()),
        trainable=_trainable_layers_of(CaptionDecoderStage(DECODER, decoder, (0, workload.num_layers))),
        loss_weight=loss_weight,
    )


def _own_projector_layer(projector: nn.Module) -> LayerShape:
    """A projector of the user's own: its linears are taken to be applied once to each token."""
    linears = [layer for layer in projector.modules() if isinstance(layer, nn.Linear)]
    shapes = tuple(
        Linear(layer.in_features, layer.out_features, layer.bias is not None, reads_layer_input=i == 0, rows="outputs")
        for i, layer in enumerate(linears)
    )
    num_parameters = sum(parameter.numel() for parameter in projector.parameters())
    return LayerShape(
        "projector",
        projected_size(projector),
        shapes,
        other_parameters=num_parameters - sum(shape.num_parameters for shape in shapes),
    )
