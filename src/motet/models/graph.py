"""The graph of modules: which modules a model in memory consists of, and how they are connected.

A `ModuleGraph` has nodes and edges. A node is an encoder, a language model, a tower, a contrastive loss or a caption
decoder. It makes its pipeline stages and describes itself to planners. An edge says at which layers the output of one
node enters another. `MultimodalModule` and `ContrastiveModule` are graphs with constructors for users; whatever runs,
plans, verifies or exports a model reads nodes and edges, and needs no change for a further kind of node.

Freezing: a part (a module or a projector) is frozen if it is in evaluation mode while the whole is in training, or if
none of its parameters requires a gradient. So `mllm.vision_encoder.module.train(mode=False)` freezes the vision
encoder, as in the papers' listings; `requires_grad_(True)` and `train()` on the part make it trainable again. Frozen
parts stay in evaluation mode (no dropout) when the whole is put into training mode.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from motet.assignment.sample import Sample, Segment
from motet.errors import UserError
from motet.families.capabilities import packed_by_sample
from motet.families.configured_graph import runs_of
from motet.families.discovery.language_model_parts import causal_paths, num_causal_layers
from motet.families.encoders.encoder_families import family_of, num_running_blocks
from motet.families.encoders.own_encoders import adopt, encoder_config, own_config, own_workload
from motet.families.encoders.token_counts import FeatureSelect, Pooling, encoder_segment, pooled
from motet.families.language_models import (
    cross_attention_layers,
    is_language_model,
    is_tied,
)
from motet.families.shape_reading.module_shapes import module_workload
from motet.models.stages.caption_decoder import CaptionDecoderStage
from motet.models.stages.contrastive import ContrastiveLoss, ContrastiveStage
from motet.models.stages.encoder import EncoderStage, num_encoder_layers
from motet.models.stages.language_model import LanguageModelStage, PreprocessCallback
from motet.models.stages.projector import PROJECTORS, build_projector, projected_size
from motet.models.stages.stage import Batch, StageInput, StageOutput
from motet.parallel.adapters import Adapters
from motet.plan import Edge, LayerRange
from motet.schedule.batch_sync import Pair
from motet.shapes.module_shape import (
    LayerShape,
    Linear,
    ModuleWorkload,
    contrastive_loss,
    with_projector,
)
from motet.shapes.shape_card import Role

Merge = Literal["placeholder", "prepend", "cross_attention"]
"""How encoder outputs reach the language model: in place of placeholder tokens, before the text, by cross-attention."""

TYPICAL_TEXT_TOKENS = 256
"""Text tokens of the typical sample that stages are balanced for; half of them carry loss."""
TYPICAL_CAPTION_TOKENS = 32

Layouts = Mapping[str, tuple[Segment, ...]]
"""The layout of one sample in each module."""


class ModalityModule(nn.Module):
    """A HuggingFace module with its projector and callbacks.

    Args:
        model: an encoder of a supported family or of your own class (`motet.register_encoder`), or a causal language
            model.
        projector: "linear", "mlp", your own module, or None. A projector given by name is built when the graph is made
            and the width of its output is known. `proj` is the papers' name for the same argument.
        preprocess_callback: (inputs) -> inputs, before the module.
        postprocess_module_callback: (inputs, output) -> output, between module and projector.
        postprocess_projector_callback: (inputs, output) -> output, after the projector.
        feature_layer: index of the hidden states that are the encoder's output (LLaVA: -2); None: the last.
        feature_select: "patch" drops class tokens and padding, "full" keeps them.

    `motet.models.stages.encoder` describes the arguments of the callbacks and when they are called.
    """

    def __init__(
        self,
        model: nn.Module,
        projector: str | nn.Module | None = None,
        *,
        proj: str | nn.Module | None = None,
        preprocess_callback: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        postprocess_module_callback: Callable[[dict[str, Any], Any], Any] | None = None,
        postprocess_projector_callback: Callable[[dict[str, Any], Any], Any] | None = None,
        feature_layer: int | None = None,
        feature_select: FeatureSelect = "patch",
    ) -> None:
        super().__init__()
        if hasattr(model, "peft_config"):
            raise UserError(
                f"{type(model).__name__} has adapters of peft, which a run file can give a module (train.lora); merge "
                "them into its weights (merge_and_unload), or give the model without them"
            )
        if projector is not None and proj is not None:
            raise UserError("projector and proj are two names for the same argument; give one")
        self.module: Any = model
        adopt(model)
        self.feature_layer = feature_layer
        self.feature_select = feature_select
        self.pooling: Pooling | None = None
        """Pooling of towers: output one vector of each item, or that vector and then all features of the item."""
        given = projector if projector is not None else proj
        self.projector = given if isinstance(given, nn.Module) else None
        self.projector_kind = given if isinstance(given, str) else None
        self.preprocess_callback = preprocess_callback
        self.postprocess_module_callback = postprocess_module_callback
        self.postprocess_projector_callback = postprocess_projector_callback
        # from_pretrained returns models in evaluation mode, which here would mean frozen.
        for part in self.parts().values():
            part.train()

    @property
    def config(self) -> Any:
        """The module's transformers configuration; an `OwnConfig` for an encoder of the user's own."""
        return encoder_config(self.module)

    @property
    def is_language_model(self) -> bool:
        return own_config(self.module) is None and is_language_model(self.module)

    @property
    def output_size(self) -> int:
        """Width of the module's own output, before the projector."""
        if self.is_language_model:
            return self.module.config.hidden_size
        return getattr(self.config, family_of(self.module).output_size)

    @property
    def projected_size(self) -> int:
        """Width of the module's output."""
        return self.output_size if self.projector is None else projected_size(self.projector)

    @property
    def callbacks(self) -> tuple[Callable[..., Any] | None, ...]:
        """Callbacks in call order."""
        return self.preprocess_callback, self.postprocess_module_callback, self.postprocess_projector_callback

    def build_projector(self, out_features: int, *, seed: int = 0) -> None:
        """Makes a projector that was given by name. Does nothing otherwise."""
        if isinstance(self.projector_kind, str) and self.projector is None:
            self.projector = build_projector(self.projector_kind, self.output_size, out_features, seed=seed)
            parameter = next(self.module.parameters())
            # A stage that lacks the encoder's first layers has these on the meta device; the projector is real.
            self.projector.to(dtype=parameter.dtype, device=None if parameter.is_meta else parameter.device)

    def parts(self) -> dict[str, nn.Module]:
        """`module`, and `projector` if there is one."""
        parts: dict[str, nn.Module] = {"module": self.module}
        return parts if self.projector is None else {**parts, "projector": self.projector}


EncoderModule = ModalityModule
"""The thesis' name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleNode(ABC):
    """A module of the graph. Layers are numbered as docs/architecture.md says."""

    name: str
    loss_weight: float = 0.0
    """The weight of the loss that its last layer computes; 0: it computes none."""
    adapters: Adapters | None = None
    """Adapters that stages of the module get when they have been cut; None: none."""

    @property
    @abstractmethod
    def parts(self) -> dict[str, nn.Module]:
        """`module` and, if there is one, `projector`: what is frozen or trained as a whole."""

    @property
    def trained_parts(self) -> frozenset[str]:
        """The names of the parts of which something is trained, or will be once adapters are there."""
        trained = {name for name, part in self.parts.items() if any(p.requires_grad for p in part.parameters())}
        return frozenset(trained if self.adapters is None else {*trained, "module"})

    @property
    @abstractmethod
    def num_layers(self) -> int: ...

    @abstractmethod
    def make_stage(self, layers: LayerRange, *, packing: bool = False) -> nn.Module:
        """A run of layers as a `motet.models.stages.stage.StageModule`, which takes the module over and drops its other
        layers. `packing`: a language model's samples stand in one row."""

    @abstractmethod
    def workload(self, *, packing: bool = False) -> ModuleWorkload:
        """The shapes of its layers."""

    @abstractmethod
    def typical_layout(self, sources: Layouts) -> tuple[Segment, ...]:
        """Returns the layout of a typical sample, given the layouts of the nodes whose output enters this one."""

    @property
    def num_typical_loss_tokens(self) -> int:
        """Number of loss tokens of a typical sample."""
        return 0

    @property
    def running_blocks(self) -> tuple[str, int]:
        """The path of the list of transformer blocks in the module, and how many of them run."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    @property
    def family(self) -> str | None:
        """The `model_type` of its transformers configuration; None: it is no transformers model."""
        config = getattr(self.parts["module"], "config", None)
        return None if config is None else cast(str, config.model_type)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parts["module"].parameters()).dtype

    @property
    def callbacks(self) -> tuple[Callable[..., Any] | None, ...]:
        """Functions of the user's."""
        return ()

    @property
    def trainable(self) -> tuple[LayerRange, ...]:
        """The layers with a parameter that requires a gradient."""
        stage: Any = self.make_stage((0, self.num_layers))
        layers = {
            layer
            for local_name, parameter in stage.named_parameters()
            if parameter.requires_grad
            for layer in stage.layers_of(local_name)
        }
        return runs_of([layer in layers for layer in range(self.num_layers)])


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderNode(ModuleNode):
    """An encoder of images or sounds, and its projector."""

    role: ClassVar[Role] = "encoder"

    module: ModalityModule

    @property
    def parts(self) -> dict[str, nn.Module]:
        return self.module.parts()

    @property
    def callbacks(self) -> tuple[Callable[..., Any] | None, ...]:
        return self.module.callbacks

    @property
    def running_blocks(self) -> tuple[str, int]:
        model = self.module.module
        return family_of(model).blocks, num_running_blocks(model, self.module.feature_layer)

    @property
    def config(self) -> Any:
        """The encoder's transformers configuration, or an `OwnConfig`."""
        return self.module.config

    @property
    def num_layers(self) -> int:
        return num_encoder_layers(self.module.module, self.module.projector)

    def make_stage(self, layers: LayerRange, *, packing: bool = False) -> EncoderStage:
        return EncoderStage(self.name, self.module, layers)

    def workload(self, *, packing: bool = False) -> ModuleWorkload:
        """A projector of the user's own is described by its linears."""
        own = own_config(self.module.module)
        workload = module_workload(self.config, role=self.role, packing=packing) if own is None else own_workload(own)
        projector = self.module.projector
        if projector is not None:
            names = {projector_class: name for name, projector_class in PROJECTORS.items()}
            if type(projector) in names:
                workload = with_projector(workload, names[type(projector)], projected_size(projector))
            else:
                layer = _own_projector_layer(projector)
                workload = replace(workload, layers=(*workload.layers, layer), output_size=layer.hidden_size)
        assert workload.num_layers == self.num_layers
        return workload

    def typical_layout(self, sources: Layouts) -> tuple[Segment, ...]:
        """One item of the encoder's native size."""
        config = self.config
        grid: tuple[int, ...] = ()
        if own_config(self.module.module) is not None:
            grid = config.encoder.example
        elif config.model_type == "pixtral":
            grid = (config.image_size // config.patch_size,) * 2
        elif config.model_type == "qwen2_5_vl_vision":  # It has no native size; this is a small image.
            grid = (1, 16 * config.spatial_merge_size, 16 * config.spatial_merge_size)
        return (encoder_segment(config, item=0, grid=grid, feature_select=self.module.feature_select),)


@dataclass(frozen=True, kw_only=True, eq=False)
class TowerNode(EncoderNode):
    """An encoder that outputs one vector of each item, followed by all its features if a caption decoder reads it."""

    role: ClassVar[Role] = "tower"

    def typical_layout(self, sources: Layouts) -> tuple[Segment, ...]:
        (segment,) = super().typical_layout(sources)
        return (pooled(segment, self.module.pooling),)


@dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModelNode(ModuleNode):
    """A causal language model, and how encoder outputs enter it."""

    module: ModalityModule
    num_embeddings: int
    """Ids that can be looked up. Read when the model is whole: a stage may lack its embedding."""
    merge: Merge
    placeholder_token_ids: Mapping[str, int]
    media_attention: str
    preprocess_callback: PreprocessCallback | None
    router_aux_loss: float = 0.0
    """Weight of the auxiliary loss of a mixture of experts."""
    counts_experts: bool = False
    """Whether stages count the tokens of each expert, for the update of routers' corrections."""

    @property
    def num_typical_loss_tokens(self) -> int:
        return TYPICAL_TEXT_TOKENS // 2

    @property
    def parts(self) -> dict[str, nn.Module]:
        return self.module.parts()

    @property
    def callbacks(self) -> tuple[Callable[..., Any] | None, ...]:
        return (self.preprocess_callback,)

    @property
    def num_layers(self) -> int:
        return num_causal_layers(self.module.module)

    @property
    def running_blocks(self) -> tuple[str, int]:
        return causal_paths(self.module.module).blocks, self.num_layers - 2

    @property
    def entry_layers(self) -> tuple[int, ...]:
        """The layers at which encoder outputs enter: the embedding, or those with cross-attention."""
        return cross_attention_layers(self.module.module) if self.merge == "cross_attention" else (0,)

    def make_stage(self, layers: LayerRange, *, packing: bool = False) -> LanguageModelStage:
        return LanguageModelStage(
            self.name,
            self.module.module,
            layers,
            packing=packing,
            media_attention=self.media_attention,
            preprocess_callback=self.preprocess_callback,
            router_aux_loss=self.router_aux_loss,
            counts_experts=self.counts_experts,
        )

    def workload(self, *, packing: bool = False) -> ModuleWorkload:
        workload = module_workload(self.module.module.config, role="language_model", packing=packing)
        if packing and self.media_attention == "causal":
            workload = packed_by_sample(workload, "auto")
        return replace(workload, tied=((0, workload.num_layers - 1),) if is_tied(self.module.module) else ())

    def typical_layout(self, sources: Layouts) -> tuple[Segment, ...]:
        """Returns a layout of the encoders' outputs and then some text."""
        merged: list[Segment] = []
        if self.merge != "cross_attention":
            merged = [Segment(segments[0].outputs, source=name) for name, segments in sources.items()]
        return (*merged, Segment(TYPICAL_TEXT_TOKENS))


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderNode(ModuleNode):
    """A caption decoder, which attends to the features of one tower."""

    decoder: nn.Module
    reads: str
    """The tower."""

    @property
    def num_typical_loss_tokens(self) -> int:
        return TYPICAL_CAPTION_TOKENS - 1

    @property
    def parts(self) -> dict[str, nn.Module]:
        return {"module": self.decoder}

    @property
    def num_layers(self) -> int:
        return num_causal_layers(self.decoder)

    def make_stage(self, layers: LayerRange, *, packing: bool = False) -> CaptionDecoderStage:
        return CaptionDecoderStage(self.name, self.decoder, layers)

    def workload(self, *, packing: bool = False) -> ModuleWorkload:
        workload = module_workload(self.decoder.config, role="decoder")
        return replace(workload, tied=((0, workload.num_layers - 1),) if is_tied(self.decoder) else ())

    def typical_layout(self, sources: Layouts) -> tuple[Segment, ...]:
        return (Segment(TYPICAL_CAPTION_TOKENS),)


@dataclass(frozen=True, kw_only=True, eq=False)
class LossNode(ModuleNode):
    """A contrastive loss: one layer, which every rank with features runs together with the others."""

    loss: ContrastiveLoss
    pairs: tuple[Pair, ...]
    """The pairs of towers that are compared."""
    width: int
    """Width of the features."""

    @property
    def parts(self) -> dict[str, nn.Module]:
        return {"module": self.loss}

    @property
    def num_layers(self) -> int:
        return 1

    def make_stage(self, layers: LayerRange = (0, 1), *, packing: bool = False) -> ContrastiveStage:
        return ContrastiveStage(self.loss, self.pairs, self.width)

    def workload(self, *, packing: bool = False) -> ModuleWorkload:
        return contrastive_loss(self.pairs, self.width, num_parameters=len(list(self.loss.parameters())))

    def typical_layout(self, sources: Layouts) -> tuple[Segment, ...]:
        return ()

    @property
    def num_typical_loss_tokens(self) -> int:
        return len(self.pairs)


class ModuleGraph(nn.Module, ABC):
    """A model of several modules. Runs by itself in one process; `motet.runtime.parallel_module` distributes it."""

    is_taken_over = False
    """Whether a parallel module has taken the modules out of it."""

    @property
    @abstractmethod
    def nodes(self) -> Mapping[str, ModuleNode]:
        """Nodes by name, each after those whose output enters it."""

    @property
    @abstractmethod
    def edges(self) -> tuple[Edge, ...]: ...

    @abstractmethod
    def read_batch(self, batch: Mapping[str, Any]) -> Batch:
        """Reads a batch as HuggingFace processors return it (`motet.models.batch`). Reads configurations, callbacks and
        settings only, no weights. Raises `UserError` naming the key that is missing, unknown or does not fit the
        others."""

    @abstractmethod
    def run(self, batch: Batch) -> ModelOutput:
        """`loss`, and the outputs that users of the model ask for."""

    def forward(self, **batch: Any) -> ModelOutput:
        """Runs in one process: `run` of what HuggingFace processors return."""
        if self.is_taken_over:
            raise UserError(
                f"this {type(self).__name__} was given to a parallel module, which now owns its modules; call the "
                "parallel module's execute"
            )
        if self.training:
            self.freeze_eval_parts()
        return self.run(self.read_batch(batch))

    def parts(self) -> dict[str, nn.Module]:
        """Parts by name: `vision.module`, `vision.projector`, ..., `language_model.module`."""
        return {f"{name}.{part}": module for name, node in self.nodes.items() for part, module in node.parts.items()}

    def freeze_eval_parts(self) -> None:
        """Parts in evaluation mode stop requiring gradients. Called when the model is parallelized and, in training,
        at every forward."""
        for part in self.parts().values():
            if not part.training:
                part.requires_grad_(False)

    def frozen_parts(self) -> set[str]:
        return {
            name
            for name, part in self.parts().items()
            if not any(parameter.requires_grad for parameter in part.parameters())
        }

    def train(self, mode: bool = True) -> Self:
        """Sets training mode as usual, but frozen parts stay in evaluation mode."""
        if self.training:
            self.freeze_eval_parts()
        super().train(mode)
        parts = self.parts()
        for name in self.frozen_parts():
            parts[name].eval()
        return self

    def typical_sample(self) -> Sample:
        """The sample that stages are balanced for: one item of native size for each encoder or tower, and some text."""
        layouts: dict[str, tuple[Segment, ...]] = {}
        for name, node in self.nodes.items():
            sources = {edge.source: layouts[edge.source] for edge in self.edges if edge.target == name}
            layout = node.typical_layout(sources)
            if layout:
                layouts[name] = layout
        num_loss_tokens = {
            name: node.num_typical_loss_tokens for name, node in self.nodes.items() if node.num_typical_loss_tokens
        }
        return Sample("typical", layouts, num_loss_tokens)

    def run_node(self, name: str, batch: Batch, outputs: Mapping[str, Tensor]) -> StageOutput:
        """The output of a node for all samples that have a layout in it, in one process; empty if there is none.

        Args:
            outputs: of the previous nodes, by name: [output tokens of all samples, width].
        """
        members = [i for i, sample in enumerate(batch.samples) if sample.has(name)]
        if not members:
            return StageOutput()
        node = self.nodes[name]
        stage = node.make_stage((0, node.num_layers))
        inputs = StageInput(
            samples=[batch.samples[i] for i in members],
            features=[batch.features(name, i) for i in members],
            incoming=self.incoming(name, batch, members, outputs),
        )
        return cast(StageOutput, stage(inputs))

    def incoming(
        self, name: str, batch: Batch, members: Sequence[int], outputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns the inputs of a node for the samples `members`, by source."""
        found = {}
        for source in (edge.source for edge in self.edges if edge.target == name and edge.source in outputs):
            rows = outputs[source].split([sample.num_outputs(source) for sample in batch.samples])
            found[source] = torch.cat([rows[i][batch.samples[i].output_places(source, name)] for i in members])
        return found


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
