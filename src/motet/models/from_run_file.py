"""Makes the nodes of a run file's model: with weights in chosen layers, or whole and by plain transformers.

`build_node` draws or reads the weights of the layers that a stage holds (`motet.models.materialize`). `plain_nodes`
calls transformers' own constructors, for the reference of `motet verify`, which then replaces the weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from motet.attention.masks.rules import rule_of_family
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
from motet.families.classes import Kind, compute_experts_in, default_dtype, model_class_of
from motet.families.configured_graph import ConfiguredGraph, read_graph
from motet.families.discovery.composite import Composite, composite_class_of, find_parts, read_composite_config
from motet.families.stored_weights import keep_corrections_wide
from motet.models.composite import CompositeNode
from motet.models.generation import CodeNode, generator_node, query_node
from motet.models.graph import (
    DecoderNode,
    EncoderNode,
    LanguageModelNode,
    LossNode,
    ModalityModule,
    ModuleNode,
    TowerNode,
)
from motet.models.hub.clip import initial_loss, read_projection
from motet.models.materialize import (
    build_own,
    compute_constants,
    layer_seed,
    materialize,
    materialize_composite,
    read_part_config,
)
from motet.models.stages.encoder import num_encoder_layers
from motet.parallel.adapters import Adapters, add_adapters
from motet.parallel.float8_linears import use_float8_linears
from motet.plan import LANGUAGE_MODEL, LayerRange
from motet.shapes.module_shape import QUERY_TOKENS

KIND_OF: Mapping[type, Kind] = {
    EncoderConfig: "encoder",
    TowerConfig: "encoder",
    LanguageModelConfig: "language_model",
    DecoderConfig: "decoder",
}
"""Of the parts of a run file that are transformers models."""

BuildModel = Callable[[Any, Kind, str], nn.Module]
"""From a part of the run file, its kind and its key to the transformers model."""


def build_node(config: RunConfig, name: str, layers: LayerRange | None, dtype: torch.dtype) -> ModuleNode:
    """One module of the run file with weights in `layers` (None: all). What is not trained is frozen."""

    if config.model.composite is not None:
        model, composite = materialize_composite(config.model.composite, name, layers=layers, dtype=dtype)
        return _composite_nodes(config, model, composite)[name]

    def build(part: Any, kind: Kind, key: str) -> nn.Module:
        return materialize(part, kind, name=name, where=key, layers=layers, dtype=dtype)

    return _node(config, name, build, dtype, {})


def plain_nodes(config: RunConfig, placeholder_token_ids: Mapping[str, int]) -> dict[str, ModuleNode]:
    """The modules of the run file by transformers' own constructors, on the CPU, without dropout. Linear layers that
    compute in float8 do here, too."""
    dtype = getattr(torch, config.train.dtype)
    if config.model.composite is None:
        nodes = {name: _plain_node(config, name, dtype, placeholder_token_ids) for name in read_graph(config).modules}
        for node in nodes.values():
            if node.adapters is not None:
                add_adapters(node.parts["module"], *node.running_blocks, node.adapters)
            if config.train.linears == "float8":
                path, num_blocks = node.running_blocks
                blocks = list(node.parts["module"].get_submodule(path).children())
                use_float8_linears(blocks[:num_blocks], torch.device("cpu"))
        return nodes
    hf_config = read_composite_config(config.model.composite)
    with default_dtype(dtype):
        model = composite_class_of(hf_config)(hf_config)
    compute_constants(model)
    remove_dropout(model)
    return dict(_composite_nodes(config, model, find_parts(model)))


def _composite_nodes(config: RunConfig, model: Any, composite: Composite) -> dict[str, CompositeNode]:
    """The parts of a model of several modalities. What is not trained is frozen."""
    nodes = {}
    for name, described in read_graph(config).modules.items():
        assert isinstance(described.part, CompositePartConfig)
        nodes[name] = CompositeNode(
            name=name,
            loss_weight=described.loss_weight,
            model=model,
            composite=composite,
            shape=described.workload,
        )
        for part, view in nodes[name].parts.items():
            view.requires_grad_(getattr(described.part.train, part))
    return nodes


def _plain_node(
    config: RunConfig, name: str, dtype: torch.dtype, placeholder_token_ids: Mapping[str, int]
) -> ModuleNode:
    def build(part: Any, kind: Kind, key: str) -> nn.Module:
        if getattr(part, "module", None) is not None:
            own = build_own(part, name=name, where=key, dtype=dtype)
            remove_dropout(own)
            return own
        hf_config = read_part_config(part, kind, where=key)
        compute_experts_in(hf_config, dtype)
        with default_dtype(dtype):
            model: nn.Module = model_class_of(hf_config.model_type, kind)(hf_config)
        compute_constants(model)
        keep_corrections_wide(model)
        remove_dropout(model)
        return model

    node = _node(config, name, build, dtype, placeholder_token_ids)
    if isinstance(node, CodeNode):
        remove_dropout(node.model)
    return node


def _node(
    config: RunConfig, name: str, build: BuildModel, dtype: torch.dtype, placeholder_token_ids: Mapping[str, int]
) -> ModuleNode:
    graph = read_graph(config)
    described = graph.modules[name]
    part, loss_weight = described.part, described.loss_weight
    if isinstance(part, GeneratorConfig):
        is_queries = described.workload.family == QUERY_TOKENS
        return (
            query_node(name, described, dtype) if is_queries else generator_node(name, described, graph.modules, dtype)
        )
    if isinstance(part, EncoderConfig | TowerConfig):
        return _encoder_node(name, graph, build, dtype)
    if isinstance(part, ContrastiveConfig):
        loss = initial_loss(config.model).to(torch.promote_types(dtype, torch.float32))
        _set_trainable(loss, part.train)
        return LossNode(name=name, loss_weight=loss_weight, loss=loss, pairs=graph.compared, width=graph.feature_size)
    if isinstance(part, DecoderConfig):
        decoder = build(part, "decoder", described.key)
        _set_trainable(decoder, part.train.module)
        return DecoderNode(name=name, loss_weight=loss_weight, decoder=decoder, reads=part.reads)
    assert isinstance(part, LanguageModelConfig), f"{name} cannot be run"
    module = ModalityModule(build(part, "language_model", described.key))
    _set_trainable(module.module, part.train.module, in_training=part.train.trains_module)
    return LanguageModelNode(
        name=name,
        loss_weight=loss_weight,
        adapters=adapters_of(part),
        module=module,
        num_embeddings=module.module.get_input_embeddings().num_embeddings,
        merge=config.model.merge,
        placeholder_token_ids=placeholder_token_ids,
        media_attention=media_attention_of(config, module.module.config.model_type),
        preprocess_callback=None,
        router_aux_loss=part.router_aux_loss,
        counts_experts=part.router_bias_update_rate > 0,
    )


def _encoder_node(name: str, graph: ConfiguredGraph, build: BuildModel, dtype: torch.dtype) -> EncoderNode:
    described = graph.modules[name]
    part: Any = described.part
    model = build(part, "encoder", described.key)
    is_tower = isinstance(part, TowerConfig)
    module = ModalityModule(model, part.projector, feature_layer=None if is_tower else part.feature_layer)
    width = graph.feature_size if is_tower else graph.modules[LANGUAGE_MODEL].workload.hidden_size
    # The projector is the encoder's last layer, and is drawn as the others are: no two modules have the same one.
    module.build_projector(width, seed=layer_seed(part.seed, name, num_encoder_layers(model, None)))
    _set_trainable(module.module, part.train.module, in_training=part.train.trains_module)
    if is_tower:
        module.pooling = described.pooling
        read_projection(part, module.config.model_type, module.projector, where=described.key)
    if module.projector is not None:
        module.projector.to(dtype)
        _set_trainable(module.projector, part.train.projector)
    return (TowerNode if is_tower else EncoderNode)(name=name, module=module, adapters=adapters_of(part))


def _set_trainable(part: nn.Module, trainable: bool, *, in_training: bool | None = None) -> None:
    """A frozen part is in evaluation mode as well: no dropout. `in_training`: whether it is not, where adapters are
    trained in the place of a part's own weights."""
    part.requires_grad_(trainable).train(trainable if in_training is None else in_training)


def adapters_of(part: PartConfig) -> Adapters | None:
    """The adapters that a part of the run file asks for."""
    lora = part.train.lora  # type: ignore[attr-defined]
    if lora is None:
        return None
    targets = None if lora.targets is None else tuple(lora.targets)
    return Adapters(rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, targets=targets, seed=part.seed)


def media_attention_of(config: RunConfig, family: str) -> str:
    """The attention of media tokens that the run file asks for, of a language model of the family."""
    given = config.model.media_attention
    return rule_of_family(family).media if given == "family" else given


def remove_dropout(model: nn.Module) -> None:
    """Random numbers differ between stages and one process. transformers keeps rates as modules and as attributes."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
