"""The graph of modules that a run file configures: shapes, trainable layers, weights of losses, and edges.

Encoders, language model, generators, towers, contrastive loss and caption decoder are nodes of one graph. Planners,
data layouts and the runtime ask the graph instead of the keys of `model`. Only configurations are read, no weights, and
torch is not imported.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from motet.config import (
    CompositePartConfig,
    ContrastiveConfig,
    DecoderConfig,
    EncoderConfig,
    GeneratorConfig,
    LanguageModelConfig,
    PartConfig,
    RunConfig,
    TowerConfig,
)
from motet.errors import UserError
from motet.families.capabilities import packed_by_sample
from motet.families.encoders.token_counts import Pooling
from motet.families.hf_config import codec_of, read_generator, shape_request
from motet.families.shape_reading.module_shapes import composite_shapes, make_shapes, shape_of
from motet.parallel.tensor.tensor_plans import setting
from motet.plan import CONTRASTIVE, DECODER, LANGUAGE_MODEL, Edge, LayerRange, queries_of
from motet.recomputation import split_entry
from motet.schedule.batch_sync import Pair, pairs_of
from motet.shapes.codes import code_decoder
from motet.shapes.diffusion_transformers import Connection
from motet.shapes.module_shape import (
    ModuleWorkload,
    contrastive_loss,
    query_tokens,
    with_adapters,
    with_feature_layer,
    with_projector,
)


@dataclass(frozen=True, kw_only=True)
class ConfiguredModule:
    """A module of the graph."""

    part: PartConfig | ContrastiveConfig | CompositePartConfig
    """Its entry in the run file."""
    key: str
    """The key of that entry, such as `model.encoders.vision`."""
    workload: ModuleWorkload
    """Its shape, with the projector as the last layer."""
    trainable: tuple[LayerRange, ...]
    loss_weight: float = 0.0
    """Weight of the loss that the module computes; 0: it computes none."""
    pooling: Pooling | None = None
    """Pooling of a contrastive model's encoder; None: it does not pool."""


@dataclass(frozen=True)
class ConfiguredGraph:
    modules: Mapping[str, ConfiguredModule]
    """Modules by name, in the order of plans."""
    edges: tuple[Edge, ...]

    @property
    def workloads(self) -> dict[str, ModuleWorkload]:
        return {name: node.workload for name, node in self.modules.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules that plans lay out."""
        return tuple(name for name, node in self.modules.items() if node.workload.kind != "loss")

    @property
    def feature_size(self) -> int:
        """Width of the features that a contrastive loss compares."""
        return self.modules[CONTRASTIVE].workload.hidden_size

    @property
    def compared(self) -> tuple[Pair, ...]:
        """The pairs of modules whose features a contrastive loss compares."""
        return tuple((first, second) for first, second in self.modules[CONTRASTIVE].workload.config["pairs"])

    def of_kind(self, *kinds: str) -> dict[str, ConfiguredModule]:
        return {name: node for name, node in self.modules.items() if node.workload.kind in kinds}


def read_graph(config: RunConfig) -> ConfiguredGraph:
    """The graph of the run file's model. Raises `UserError` naming the key that is wrong."""
    model = config.model
    if model.composite is None:
        make_shapes(
            shape_request(part, key) for key, part in _parts(config).items() if getattr(part, "module", None) is None
        )
    read = _composite_graph if model.composite else _contrastive_graph if model.towers else _language_model_graph
    return ConfiguredGraph(*read(config))


def _parts(config: RunConfig) -> dict[str, PartConfig]:
    """The models of transformers in the run file, by key."""
    model = config.model
    found: dict[str, PartConfig] = {f"model.encoders.{name}": part for name, part in model.encoders.items()}
    found |= {f"model.towers.{name}": part for name, part in model.towers.items()}
    if model.decoder is not None:
        found[f"model.{DECODER}"] = model.decoder
    if not model.towers:
        found[f"model.{LANGUAGE_MODEL}"] = model.causal_lm
    found |= {f"model.generators.{name}": part for name, part in model.generators.items() if part.codec is not None}
    return found


Graph = tuple[dict[str, ConfiguredModule], tuple[Edge, ...]]


def _composite_graph(config: RunConfig) -> Graph:
    part = config.model.composite
    assert part is not None
    workloads, edges = composite_shapes(part)
    _check_composite(config, tuple(workloads))
    modules = {}
    for name, workload in workloads.items():
        own = config.model.parts.get(name, CompositePartConfig())
        if own.train.lora is not None:
            raise UserError(f"model.parts.{name}.train.lora: is for modules that are given one by one; leave it out")
        modules[name] = ConfiguredModule(
            part=own,
            key=f"model.parts.{name}",
            workload=workload,
            trainable=_trainable_of_part(workload, own),
            loss_weight=1.0 if name == LANGUAGE_MODEL else 0.0,
        )
    if not any(module.trainable for module in modules.values()):
        raise UserError("model.parts: nothing is trainable; set train.module or train.projector of a part to true")
    return modules, edges


def _check_composite(config: RunConfig, modules: tuple[str, ...]) -> None:
    names = ", ".join(modules)
    for name in config.model.parts:
        if name not in modules:
            raise UserError(f"model.parts.{name}: the model has no such part; give {names}")
    if not config.model.parts.get(LANGUAGE_MODEL, CompositePartConfig()).train.projector:
        raise UserError(f"model.parts.{LANGUAGE_MODEL}.train.projector: applies to encoders only; leave it out")
    recomputed = [name for name, _ in map(split_entry, config.parallel.recompute)]
    for key, given in (("explicit", config.parallel.explicit), ("recompute", recomputed)):
        for name in given:
            if name not in modules:
                raise UserError(f"parallel.{key}: there is no module {name!r}; the model has {names}")
    missing = [name for name in modules if config.parallel.explicit and name not in config.parallel.explicit]
    if missing:
        raise UserError(f"parallel.explicit: has no {', '.join(missing)}; give the layout of every module")
    if config.parallel.packing:
        raise UserError("parallel.packing: packing is not supported for whole multimodal models; leave it out")
    if config.data.kind != "conversations":
        raise UserError(
            f"data.kind: is {config.data.kind}, but a whole model of several modalities takes conversations, which its "
            "processor prepares; give conversations"
        )


def _trainable_of_part(workload: ModuleWorkload, own: CompositePartConfig) -> tuple[LayerRange, ...]:
    """An encoder's projector is its last layer."""
    wanted = [
        (own.train.projector if layer.part == "projector" else own.train.module) and layer.num_parameters > 0
        for layer in workload.layers
    ]
    return runs_of(wanted)


def runs_of(wanted: Sequence[bool]) -> tuple[LayerRange, ...]:
    """The runs of layers that are wanted."""
    runs = groupby(range(len(wanted)), key=lambda layer: wanted[layer])
    found = [list(run) for is_wanted, run in runs if is_wanted]
    return tuple((run[0], run[-1] + 1) for run in found)


def _language_model_graph(config: RunConfig) -> Graph:
    model = config.model
    packing = config.parallel.packing or model.media_attention != "causal"
    language_model = _read_shape(model.causal_lm, f"model.{LANGUAGE_MODEL}", packing=packing)
    if config.parallel.packing and model.media_attention == "causal":
        language_model = packed_by_sample(language_model, config.parallel.packed_attention)
    width = language_model.hidden_size
    modules = {
        name: _with_projector(f"model.encoders.{name}", part, _encoder(f"model.encoders.{name}", part, width), width)
        for name, part in model.encoders.items()
    }
    modules[LANGUAGE_MODEL] = _whole(f"model.{LANGUAGE_MODEL}", model.causal_lm, language_model, loss_weight=1.0)
    queries = {queries_of(name): _queries(name, part, width) for name, part in model.generators.items() if part.queries}
    modules = {**{name: modules[name] for name in model.encoders}, **queries, LANGUAGE_MODEL: modules[LANGUAGE_MODEL]}
    for name, generator in model.generators.items():
        modules[name] = _generator(name, generator, width)
    return modules, tuple(_edges(config, language_model))


def _queries(name: str, part: GeneratorConfig, width: int) -> ConfiguredModule:
    """The query tokens of a generator."""
    assert part.queries is not None
    return ConfiguredModule(
        part=part,
        key=f"model.generators.{name}",
        workload=replace(query_tokens(part.queries, width), is_averaged=part.ema is not None),
        trainable=((0, 1),) if part.train.queries else (),
    )


def _generator(name: str, part: GeneratorConfig, width: int) -> ConfiguredModule:
    """The connector is the first layer of those that can be trained; others have none."""
    key = f"model.generators.{name}"
    if part.codec is None:
        shape = read_generator(part, name, width)
    else:
        connection = Connection(incoming_size=width, projector=part.projector)
        shape = code_decoder(_read_shape(part, key), codec_of(part, key), connection)
    shape = _adapted(key, part, shape)
    return ConfiguredModule(
        part=part,
        key=key,
        workload=replace(shape, is_averaged=part.ema is not None),
        trainable=_trainable(part, shape),
        loss_weight=part.loss_weight,
    )


def _encoder(key: str, part: EncoderConfig, width: int) -> ModuleWorkload:
    encoder = _read_shape(part, key)
    if part.feature_layer is not None:
        try:
            encoder = with_feature_layer(encoder, part.feature_layer)
        except UserError as error:
            raise UserError(f"{key}.{error}") from None
    if part.projector is None and encoder.output_size != width:
        raise UserError(
            f"{key}.projector: is null, but the encoder's width is {encoder.output_size} and the "
            f"language model's {width}; give linear or mlp"
        )
    return encoder


def _edges(config: RunConfig, language_model: ModuleWorkload) -> Iterator[Edge]:
    """Encoders enter the language model at layer 0 or at its cross-attention layers; it enters generators."""
    layers: tuple[int, ...] = (0,)
    if config.model.merge == "cross_attention":
        crossing = language_model.config.get("cross_attention_layers") or ()
        if not crossing:
            raise UserError(
                f"model.merge: {language_model.family} has no cross-attention layers; give placeholder or prepend"
            )
        layers = tuple(1 + layer for layer in crossing)
    for name in config.model.encoders:
        yield Edge(source=name, target=LANGUAGE_MODEL, layers=layers)
    for name, part in config.model.generators.items():
        if part.queries:
            yield Edge(source=queries_of(name), target=LANGUAGE_MODEL)
        yield Edge(source=LANGUAGE_MODEL, target=name)


def _contrastive_graph(config: RunConfig) -> Graph:
    model, loss = config.model, config.model.contrastive
    encoders = {name: _tower(f"model.towers.{name}", part) for name, part in model.towers.items()}
    width = _feature_size(config, {name: encoder.output_size for name, encoder in encoders.items()})
    modules = {}
    for name, part in model.towers.items():
        key = f"model.towers.{name}"
        if part.projector is not None:
            _check_stored_projection(key, part, encoders[name], width)
        is_read = model.decoder is not None and model.decoder.reads == name
        modules[name] = _with_projector(key, part, encoders[name], width, "first" if is_read else "alone")
    modules[CONTRASTIVE] = ConfiguredModule(
        part=loss,
        key=f"model.{CONTRASTIVE}",
        workload=contrastive_loss(
            pairs_of(tuple(modules), loss.anchor), width, num_parameters=1 if loss.loss == "softmax" else 2
        ),
        trainable=((0, 1),) if loss.train else (),
        loss_weight=loss.loss_weight,
    )
    edges = [Edge(source=name, target=CONTRASTIVE) for name in model.towers]
    if model.decoder is not None:
        shape = _decoder(model.decoder, encoders[model.decoder.reads], width)
        modules[DECODER] = _whole(f"model.{DECODER}", model.decoder, shape, loss_weight=model.decoder.loss_weight)
        edges.append(Edge(source=model.decoder.reads, target=DECODER, layers=shape.blocks))
    return modules, tuple(edges)


def _tower(key: str, part: TowerConfig) -> ModuleWorkload:
    encoder = _read_shape(part, key)
    if encoder.family == "siglip_vision_model" and not setting(encoder.config, "vision_use_head", True):
        raise UserError(f"{key}.values.vision_use_head: is false, so the encoder has no pooled output; set it")
    return encoder


def _feature_size(config: RunConfig, sizes: Mapping[str, int]) -> int:
    """Width of the features. Raises `UserError` if a tower without projector has another one."""
    whole = {name: sizes[name] for name, tower in config.model.towers.items() if tower.projector is None}
    width = config.model.contrastive.width or next(iter(whole.values()))
    for name, size in whole.items():
        if size != width:
            raise UserError(
                f"model.towers.{name}.projector: is null, but the tower's width is {size} and that of the features "
                f"{width}; give it a projector, or set model.contrastive.width"
            )
    return width


def _check_stored_projection(key: str, tower: TowerConfig, encoder: ModuleWorkload, width: int) -> None:
    """A projection is stored with the towers of a CLIPModel and with models "WithProjection". Other models have none,
    whatever their projection_dim says."""
    stored = encoder.config.get("projection_dim", width)
    is_stored = tower.part is not None or "WithProjection" in str(encoder.config.get("architectures"))
    if tower.config is None and is_stored and tower.projector == "projection" and stored != width:
        raise UserError(
            f"{key}.projector: the stored projection is {stored} wide, but the features are {width} "
            f"wide; set model.contrastive.width to {stored}, or give linear or mlp, which start with random weights"
        )


def _decoder(part: DecoderConfig, encoder: ModuleWorkload, width: int) -> ModuleWorkload:
    """The caption decoder. `encoder`: of the tower that it reads."""
    if encoder.hidden_size != encoder.output_size:
        raise UserError(
            f"model.towers.{part.reads}: outputs {encoder.hidden_size} features for each token, but a pooled output "
            f"of {encoder.output_size}, and the decoder reads both; give it a projection_size equal to its hidden_size"
        )
    key = f"model.{DECODER}"
    decoder = _read_shape(part, key)
    if decoder.hidden_size != width:
        raise UserError(
            f"{key}: is {decoder.hidden_size} wide, but the towers' features {width}; set "
            f"model.contrastive.width to {decoder.hidden_size}, and give towers of another width a projector"
        )
    return decoder


def _read_shape(part: PartConfig, key: str, *, packing: bool = False) -> ModuleWorkload:
    if getattr(part, "module", None) is not None:
        from motet.families.encoders.own_encoders import build_on_meta, own_workload

        return own_workload(build_on_meta(part.module, part.values, key))  # type: ignore[attr-defined]
    request = shape_request(part, key)
    try:
        return shape_of(request, packing=packing)
    except UserError as error:
        raise UserError(f"{key}{error}") from None


def _whole(
    key: str,
    part: LanguageModelConfig | DecoderConfig,
    workload: ModuleWorkload,
    *,
    loss_weight: float,
) -> ConfiguredModule:
    """A module without projector, which is trained or frozen as a whole, or by adapters, and computes a loss."""
    workload = _adapted(key, part, workload)
    return ConfiguredModule(
        part=part, key=key, workload=workload, trainable=_trainable(part, workload), loss_weight=loss_weight
    )


def _with_projector(
    key: str, part: EncoderConfig | TowerConfig, encoder: ModuleWorkload, width: int, pooling: Pooling | None = None
) -> ConfiguredModule:
    """An encoder or tower; its projector is its last layer and is trained or frozen by itself."""
    encoder = _adapted(key, part, encoder)
    workload = encoder if part.projector is None else with_projector(encoder, part.projector, width)
    return ConfiguredModule(
        part=part, key=key, workload=workload, trainable=_trainable(part, workload), pooling=pooling
    )


def _trainable(part: Any, workload: ModuleWorkload) -> tuple[LayerRange, ...]:
    """The layers that the run file trains, and those with adapters. A projector is trained or frozen by itself."""
    return runs_of(
        [
            part.train.projector
            if layer.part == "projector"
            else part.train.module or layer.num_adapter_parameters() > 0
            for layer in workload.layers
        ]
    )


def _adapted(key: str, part: PartConfig, workload: ModuleWorkload) -> ModuleWorkload:
    """With the adapters that the run file asks for. Raises `UserError` where they are not supported."""
    lora = part.train.lora  # type: ignore[attr-defined]
    if lora is None:
        return workload
    if not isinstance(part, LanguageModelConfig | EncoderConfig) or getattr(part, "module", None) is not None:
        raise UserError(f"{key}.train.lora: is for encoders and language models of transformers; leave it out")
    try:
        return with_adapters(workload, lora.rank, lora.targets)
    except UserError as error:
        raise UserError(f"{key}.train.lora.{error}") from None
