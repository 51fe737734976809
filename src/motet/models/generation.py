"""Generators and their query tokens as nodes of the graph of modules."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from motet.assignment.sample import Segment
from motet.config import GeneratorConfig
from motet.families.classes import default_dtype, model_class_of
from motet.families.configured_graph import ConfiguredModule
from motet.families.diffusion_models import build_diffusion_model
from motet.models.graph import Layouts, ModuleNode
from motet.models.materialize import layer_seed, read_part_config
from motet.models.stages.codes import CodeLoss, CodeStage
from motet.models.stages.generator import Connector, DiffusionLoss, GeneratorStage
from motet.models.stages.queries import QueryStage, QueryTokens
from motet.plan import LANGUAGE_MODEL, LayerRange, queries_of
from motet.shapes.diffusion_transformers import own_values
from motet.shapes.module_shape import ModuleWorkload


@dataclass(frozen=True, kw_only=True, eq=False)
class QueryNode(ModuleNode):
    """The query tokens of a generator."""

    queries: QueryTokens
    shape: ModuleWorkload

    @property
    def parts(self) -> dict[str, nn.Module]:
        return {"module": self.queries}

    @property
    def family(self) -> str | None:
        return None

    @property
    def num_layers(self) -> int:
        return 1

    def make_stage(self, layers: LayerRange, *, packing: bool = False) -> QueryStage:
        return QueryStage(self.name, self.queries)

    def workload(self, *, packing: bool = False) -> ModuleWorkload:
        return self.shape

    def typical_layout(self, sources: Layouts) -> tuple[Segment, ...]:
        return (Segment(len(self.queries.weight)),)


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratorNode(ModuleNode):
    """A generator that reads the language model, and the connector before it."""

    stage_class: ClassVar[type[GeneratorStage] | type[CodeStage]]
    model: nn.Module
    connector: Connector
    loss: Any
    """That of its stage's class."""
    shape: ModuleWorkload
    incoming_size: int
    """Width of the language model's hidden states."""
    reads: str = LANGUAGE_MODEL
    queries: str = ""
    """The module of its query tokens; "": it reads all hidden states up to the placeholder."""

    @property
    def num_typical_loss_tokens(self) -> int:
        return 1

    @property
    def parts(self) -> dict[str, nn.Module]:
        return {"module": self.model, "projector": self.connector}

    @property
    def family(self) -> str | None:
        """diffusers' models have no `model_type`, and a decoder of codes is cut by no rules of a family."""
        return None

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    def make_stage(self, layers: LayerRange, *, packing: bool = False) -> GeneratorStage | CodeStage:
        return self.stage_class(
            self.name,
            self.reads,
            self.model,
            self.connector,
            layers,
            workload=self.shape,
            loss=self.loss,
            incoming_size=self.incoming_size,
        )

    def workload(self, *, packing: bool = False) -> ModuleWorkload:
        return self.shape


@dataclass(frozen=True, kw_only=True, eq=False)
class DiffusionNode(GeneratorNode):
    """A diffusion model."""

    stage_class = GeneratorStage
    guidance: float | None = None
    """Guidance scale for models with guidance embeddings; None: the model has none."""

    def typical_layout(self, sources: Layouts) -> tuple[Segment, ...]:
        """One image of the native size."""
        side = self.shape.config["native_side"] // self.shape.config["place_side"]
        return (Segment(side * side, grid=(side, side)),)


@dataclass(frozen=True, kw_only=True, eq=False)
class CodeNode(GeneratorNode):
    """A decoder of an audio codec's codes."""

    stage_class = CodeStage

    def typical_layout(self, sources: Layouts) -> tuple[Segment, ...]:
        """Half as long a sound as it can make."""
        codec, most = self.shape.config["codec"], self.shape.config["n_positions"]
        return (Segment(codec.num_tokens(max(1, (most - 1) // codec.num_codebooks // 2))),)


def query_node(name: str, described: ConfiguredModule, dtype: torch.dtype) -> QueryNode:
    part, shape = described.part, described.workload
    assert isinstance(part, GeneratorConfig)
    assert part.queries is not None
    queries = QueryTokens(part.queries, shape.hidden_size, dtype=dtype, seed=layer_seed(part.seed, name, 0))
    queries.requires_grad_(part.train.queries)
    return QueryNode(name=name, queries=queries, shape=shape)


def generator_node(
    name: str, described: ConfiguredModule, modules: Mapping[str, ConfiguredModule], dtype: torch.dtype
) -> GeneratorNode:
    """With all weights: random ones are drawn for the whole model, so every rank begins with the same.

    Raises `UserError` naming the key that is wrong."""
    part, shape = described.part, described.workload
    assert isinstance(part, GeneratorConfig)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(layer_seed(part.seed, name, 1))
        if part.codec is None:
            model = build_diffusion_model(part, own_values(shape.config), dtype, described.key)
        else:
            model = build_code_decoder(part, dtype, described.key)
    model.requires_grad_(part.train.module).train(part.train.module)
    incoming_size = modules[LANGUAGE_MODEL].workload.hidden_size
    connector = Connector(
        incoming_size,
        shape.config["condition_size"],
        shape.config["pooled_size"],
        part.projector,
        dtype=dtype,
        seed=layer_seed(part.seed, name, 0),
    )
    connector.requires_grad_(part.train.projector).train(part.train.projector)
    common: dict[str, Any] = {
        "name": name,
        "loss_weight": described.loss_weight,
        "model": model,
        "connector": connector,
        "shape": shape,
        "incoming_size": incoming_size,
        "queries": queries_of(name) if part.queries else "",
    }
    if part.codec is not None:
        return CodeNode(**common, loss=CodeLoss(per=part.loss_per, null_condition=part.null_condition))
    loss = DiffusionLoss(objective=part.objective, per=part.loss_per, null_condition=part.null_condition)
    return DiffusionNode(**common, loss=loss, guidance=shape.config["guidance"])


def build_code_decoder(part: GeneratorConfig, dtype: torch.dtype, where: str) -> Any:
    """The whole decoder of codes with random weights of the present state of torch's generator."""
    config = read_part_config(part, "decoder", where=where)
    with default_dtype(dtype):
        return model_class_of(config.model_type, "decoder")(config).to(dtype)
