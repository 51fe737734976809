"""The shape of a module without torch: which linears, attention and parameters each layer has.

Shapes come from modules themselves (`motet.families.shape_reading.module_shapes`); `projector_layer` describes what
`motet.models.stages.projector` builds. Costs and memory derive everything from these shapes. Layers are numbered as
docs/architecture.md says.

Limits: what is neither a product of matrices (a convolution over patches or mel frames counts as one) nor attention has
parameters and saved activations, but no FLOPs: norms, activation functions and rotary positions are memory traffic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from motet.errors import UserError
from motet.plan import LayerRange, ModuleKind
from motet.recomputation import BlockTreatment, treatment

Part = Literal["embed", "block", "head", "projector", "loss"]
Arrangement = Literal["separate", "padded", "packed"]
"""How a microbatch's sequences are laid out: each by its own length; all padded to the longest; all in one row, where
attention is computed over the whole row and masked."""

Rows = Literal["tokens", "outputs", "incoming", "joint", "sequences"]
"""The rows that a linear is applied to: the module's own tokens; those that it outputs (an encoder's projector) or that
carry loss (a language model's head); those that come from an encoder (keys and values of cross-attention); the own
tokens and the incoming ones together (Flux's single blocks); one vector for each sequence (a diffusion model's time
step)."""

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix product with weights."""

    in_features: int
    out_features: int
    bias: bool = False
    rows_per_token: float = 1.0
    """Rows for each token of the layer's sequence (a patch merger has a quarter, a first convolution two)."""
    cut: Literal["column", "row"] | None = None
    """Cut by tensor parallelism: along its outputs, along its inputs, or not at all."""
    reads_layer_input: bool = False
    """Its input is the layer's input (no norm between), so that only earlier layers need its input gradient."""
    rows: Rows = "tokens"
    kernel_area: int = 1
    """Pixels under a convolution's kernel, each counted in `in_features`. It reads each pixel once."""
    num_copies: int = 1
    """Weights of equal size (experts), of which each row meets one; `rows_per_token` of them for a token."""
    name: str = field(default="", compare=False)
    """Path in its block of the linear layer; "": it is no module of its own, and can have no adapter."""
    adapter_rank: int = 0
    """Rank of its adapter (LoRA); 0: it has none."""

    @property
    def num_weights(self) -> int:
        return self.num_copies * self.in_features * self.out_features

    def num_adapter_parameters(self, tp_size: int = 1) -> int:
        """On each rank of a tensor-parallel group: of a column-cut linear the second matrix is cut by its outputs, of a
        row-cut one the first by its inputs."""
        inputs = self.in_features // (tp_size if self.cut == "row" else 1)
        outputs = self.out_features // (tp_size if self.cut == "column" else 1)
        return self.adapter_rank * (inputs + outputs)

    @property
    def num_parameters(self) -> int:
        return self.num_weights + (self.out_features if self.bias else 0)


@dataclass(frozen=True, slots=True)
class Attention:
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    window: int | None = None
    """Sequences are cut into windows of so many tokens, and each attends within itself."""
    reads_encoder: bool = False
    normalizes: bool = False
    """Queries and keys pass a norm."""
    num_linears: int = 4
    """Number of the layer's linears that belong to the attention; the last of them follows it."""
    value_dim: int | None = None
    """Width of a head's values; None: `head_dim`."""
    flops_per_pair: float = 0.0
    """Beside those of the heads."""
    flops_per_token: float = 0.0
    """Beside those of pairs (recurrent and linear attention, which has a `window` of 0)."""

    @property
    def mean_dim(self) -> float:
        """Mean of the widths of keys and values."""
        return (self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)) / 2


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Layers of equal shape share their costs."""

    part: Part
    hidden_size: int
    """Width of the layer's output."""
    linears: tuple[Linear, ...] = ()
    attention: Attention | None = None
    crossing: Attention | None = None
    """A second attention of the same block, to what comes from an encoder; its linears follow the first one's."""
    other_parameters: int = 0
    """Norms, biases, positions: whole on every rank."""
    vocabulary: int = 0
    """Rows of an embedding table of `hidden_size` columns; a linear onto the vocabulary stands in `linears`."""
    saved_vectors: int = 0
    """Vectors of `hidden_size` that a token leaves for the backward pass beside the linears' inputs: one a norm."""
    saved_vectors_for_weights: int = 0
    """More of them if the layer's weights have a gradient: one a root-mean-square norm or a scale."""
    float32_vectors: int = 0
    """Of `saved_vectors`, those that root-mean-square norms leave, which compute in float32."""
    gated: bool = False
    """The MLP multiplies two branches."""
    runs: bool = True
    """False: it has parameters, but computes nothing."""
    resolution: float = 1.0
    """Length of the layer's sequence over that of the module's (a U-Net's inner levels: a quarter each)."""
    num_comparisons: int = 0
    """Number of comparisons between two towers' features in a contrastive loss, both directions counted."""
    treatment: BlockTreatment = "kept"
    """What becomes of the activations that its forward would save (`ModuleWorkload.treated`)."""

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Linears in the order in which they are computed."""
        return tuple(attention for attention in (self.attention, self.crossing) if attention is not None)

    @property
    def num_own_parameters(self) -> int:
        """Without those of adapters."""
        return (
            sum(linear.num_parameters for linear in self.linears)
            + self.other_parameters
            + self.vocabulary * self.hidden_size
        )

    @property
    def num_parameters(self) -> int:
        return self.num_own_parameters + self.num_adapter_parameters()

    def num_adapter_parameters(self, tp_size: int = 1) -> int:
        """On each rank of a tensor-parallel group."""
        return sum(linear.num_adapter_parameters(tp_size) for linear in self.linears)

    @property
    def trained_linears(self) -> tuple[Linear, ...]:
        """The linears with weight gradients, their own or their adapters', if the layer is trainable."""
        return tuple(linear for linear in self.linears if linear.adapter_rank) or self.linears

    @property
    def num_expert_weights(self) -> int:
        return sum(linear.num_weights for linear in self.linears if linear.num_copies > 1)

    @property
    def experts_per_token(self) -> float:
        """Experts that compute a token; 0: the layer is no mixture."""
        return max((linear.rows_per_token for linear in self.linears if linear.num_copies > 1), default=0.0)

    def num_parameters_per_rank(self, tp_size: int, ep: int = 1) -> int:
        """On each rank of a tensor-parallel group, whose experts `ep` ranks share. Column-cut biases are cut too;
        counted whole here, they are few."""
        experts = self.num_expert_weights if ep > 1 else 0
        sharded = sum(
            linear.num_weights for linear in self.linears if linear.cut and not (experts and linear.num_copies > 1)
        )
        if self.vocabulary % tp_size == 0:
            sharded += self.vocabulary * self.hidden_size
        own = self.num_own_parameters - sharded - experts + sharded // tp_size + experts // ep
        return own + self.num_adapter_parameters(tp_size)

    def num_trained_per_rank(self, tp_size: int, ep: int = 1) -> int:
        """Parameters with a gradient on each rank of a tensor-parallel group, if the layer is trainable: those of its
        adapters, where it has any."""
        return self.num_adapter_parameters(tp_size) or self.num_parameters_per_rank(tp_size, ep)


@dataclass(frozen=True, kw_only=True)
class ModuleWorkload:
    """One module of the model."""

    kind: ModuleKind
    family: str
    """The `model_type` of its configuration."""
    config: Config = field(repr=False)
    hidden_size: int
    output_size: int
    """Width of its output."""
    layers: tuple[LayerShape, ...]
    arrangement: Arrangement = "separate"
    tied: tuple[tuple[int, int], ...] = ()
    """Pairs of layers that share a parameter. It is counted in both layers."""
    must_divide: Mapping[str, int] | None = None
    """What the tensor-parallel size must divide, by its name in the configuration; None: linears cannot be cut."""
    max_stages: int | None = None
    """Into how many stages it can be cut; None: into as many as it has layers."""
    shares_tokens: bool = True
    """Whether ranks can share its tokens (context parallelism)."""
    is_averaged: bool = False
    """Whether the optimizer keeps a moving average of the parameters."""
    num_time_vectors: int = 0
    """Generators: vectors of the time step that travel between stages with each image's places and conditions; 0: its
    places travel alone."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def shares_sequences(self) -> bool:
        """Whether a tensor-parallel group can share its tokens between regions (sequence parallelism)."""
        return self.kind != "generator"

    def treated(self, recompute: str | None) -> "ModuleWorkload":
        """With blocks whose activations are treated as this kind of recomputation says; None: all are kept."""
        if recompute is None:
            return self
        known: dict[tuple[int, BlockTreatment], LayerShape] = {}
        layers = list(self.layers)
        for number, index in enumerate(self.blocks):
            layer = layers[index]
            if layer.runs:  # Layers of equal shape stay one object.
                own = treatment(recompute, number)
                layers[index] = known.setdefault((id(layer), own), replace(layer, treatment=own))
        return replace(self, layers=tuple(layers))

    def packed(self) -> "ModuleWorkload":
        """With a language model's samples in one row, as context-parallel ranks have them."""
        return replace(self, arrangement="packed") if self.kind == "language_model" else self

    @property
    def num_blocks(self) -> int:
        return sum(layer.part == "block" for layer in self.layers)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indices of the transformer blocks."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.part == "block")

    @property
    def numbers_of_experts(self) -> set[int]:
        """Numbers of experts of the layers that are mixtures of experts."""
        return {linear.num_copies for layer in self.layers for linear in layer.linears if linear.num_copies > 1}

    def has_block(self, layers: LayerRange) -> bool:
        """Whether a transformer block runs among these layers."""
        return any(layer.part == "block" and layer.runs for layer in self.layers[slice(*layers)])

    def is_shared(self, layer: LayerShape) -> bool:
        """Whether the ranks of a context-parallel group share a layer's tokens. Before and behind an encoder's blocks
        each of them computes all."""
        return not self.encodes_items or layer.part == "block"

    @property
    def encodes_items(self) -> bool:
        """Encoders and towers: items (images, clips, texts) are sequences of their own."""
        return self.kind in ("encoder", "tower")

    @cached_property
    def cross_attends(self) -> bool:
        return any(attention.reads_encoder for layer in self.layers for attention in layer.attentions)

    @property
    def sees_own_items(self) -> bool:
        """Whether cross-attention computes each sample's row with what comes from its own items alone."""
        return any(layer.crossing is not None for layer in self.layers)

    def boundary(self, layer: int) -> tuple[Rows, int]:
        """Rows and width of the tensor that crosses the boundary before `layer` (after the last one)."""
        part = self.layers[layer - 1].part if layer else "embed"
        if self.encodes_items and part in ("head", "projector"):
            return "outputs", self.layers[layer - 1].hidden_size
        return "tokens", self.hidden_size

    def is_frozen_beside_adapters(self, layer: LayerShape) -> bool:
        """Whether a layer has nothing to train because adapters of other layers are trained in place of the module's
        own weights."""
        has_own = layer.part == "projector" or layer.num_adapter_parameters() > 0
        return not has_own and any(other.num_adapter_parameters() for other in self.layers)

    @property
    def num_parameters(self) -> int:
        """Shared parameters are counted once."""
        shared = sum(self.layers[first].vocabulary * self.layers[first].hidden_size for first, _ in self.tied)
        return sum(layer.num_parameters for layer in self.layers) - shared

    def layer_classes(self) -> list[int]:
        """First layer of the same shape, for each layer."""
        first: dict[LayerShape, int] = {}
        return [first.setdefault(layer, i) for i, layer in enumerate(self.layers)]


def projector_layer(projector: str, in_features: int, out_features: int) -> LayerShape:
    """The last layer of an encoder. Raises `ValueError` for a projector of the user's own, which has no known shape."""
    first = Linear(in_features, out_features, bias=True, reads_layer_input=True, rows="outputs")
    if projector == "linear":
        return LayerShape("projector", out_features, (first,))
    if projector == "mlp":
        second = Linear(out_features, out_features, bias=True, rows="outputs")
        # The GELU keeps its input.
        return LayerShape("projector", out_features, (first, second), saved_vectors=1)
    if projector == "projection":
        return LayerShape("projector", out_features, (replace(first, bias=False),))
    raise UserError(f"projector: the shape of {projector!r} is not known; known are linear, mlp, projection")


def with_projector(encoder: ModuleWorkload, projector: str, out_features: int) -> ModuleWorkload:
    """The encoder with its projector as one more layer."""
    layer = projector_layer(projector, encoder.output_size, out_features)
    return replace(encoder, layers=(*encoder.layers, layer), output_size=out_features)


def with_adapters(module: ModuleWorkload, rank: int, targets: Sequence[str] | None) -> ModuleWorkload:
    """The module with adapters on linears of its blocks: on those whose path ends in one of `targets`; None: on all.

    Raises `UserError` for a target that no block has."""
    names = dict.fromkeys(linear.name for layer in module.layers for linear in layer.linears if layer.part == "block")
    known = [name for name in names if name]
    for target in targets or ():
        if not any(is_target(name, (target,)) for name in known):
            raise UserError(f"targets: no block of {module.family} has a linear {target}; give {', '.join(known)}")
    if not known:
        raise UserError(
            f"no block of {module.family} has linear layers of its own, so it takes no adapters; leave it out"
        )

    def adapted(linear: Linear) -> Linear:
        return replace(linear, adapter_rank=rank) if linear.name and is_target(linear.name, targets) else linear

    layers = tuple(
        replace(layer, linears=tuple(map(adapted, layer.linears))) if layer.part == "block" else layer
        for layer in module.layers
    )
    return replace(module, layers=layers)


def is_target(name: str, targets: Sequence[str] | None) -> bool:
    """Whether the linear at a path in a block gets an adapter. `targets`: ends of paths; None: all do."""
    return targets is None or any(name == target or name.endswith(f".{target}") for target in targets)


def contrastive_loss(pairs: Sequence[tuple[str, str]], feature_size: int, *, num_parameters: int = 1) -> ModuleWorkload:
    """The loss that compares towers. `pairs`: of their names; `num_parameters`: the logit scale, and a bias."""
    layer = LayerShape("loss", feature_size, other_parameters=num_parameters, num_comparisons=2 * len(pairs))
    return ModuleWorkload(
        kind="loss",
        family="contrastive",
        config={"pairs": [list(pair) for pair in pairs], "feature_size": feature_size},
        hidden_size=feature_size,
        output_size=feature_size,
        layers=(layer,),
    )


QUERY_TOKENS = "query_tokens"
"""`family` of a generator's query tokens."""


def query_tokens(number: int, width: int) -> ModuleWorkload:
    """The learned rows that condition a generator, as a source module of one layer."""
    return ModuleWorkload(
        kind="encoder",
        family=QUERY_TOKENS,
        config={"model_type": QUERY_TOKENS, "num_queries": number, "modalities": []},
        hidden_size=width,
        output_size=width,
        layers=(LayerShape("embed", width, other_parameters=number * width),),
        shares_tokens=False,
    )


WITHOUT_INNER_FEATURES = ("whisper", "qwen2_audio_encoder", "qwen2_5_vl_vision")
"""Encoder families whose features are those of their head, by `model_type`: it merges or pools, or (Whisper's)
transformers gives the normed features for the last of `hidden_states`."""


def blocks_before_features(family: str, num_blocks: int, feature_layer: int) -> int:
    """The number of blocks before an encoder's features with this index in transformers' `hidden_states` (0: the
    embeddings), as LLaVA's `vision_feature_layer`. Raises `UserError` for one that the encoder does not have."""
    if family in WITHOUT_INNER_FEATURES:
        raise UserError(f"feature_layer: {family} has no features before its head; leave it out")
    if not -num_blocks - 1 <= feature_layer <= num_blocks:
        raise UserError(f"feature_layer: {feature_layer} is not within {-num_blocks - 1} to {num_blocks}")
    return feature_layer if feature_layer >= 0 else feature_layer + num_blocks + 1


def with_feature_layer(encoder: ModuleWorkload, feature_layer: int) -> ModuleWorkload:
    """The encoder whose output is the features before its head: blocks behind them, and the head, have parameters but
    do not run. `feature_layer`: as of `blocks_before_features`."""
    num_running = blocks_before_features(encoder.family, encoder.num_blocks, feature_layer)
    layers = tuple(
        LayerShape(layer.part, layer.hidden_size, other_parameters=layer.num_parameters, runs=False)
        if index > num_running and layer.part in ("block", "head")
        else layer
        for index, layer in enumerate(encoder.layers)
    )
    return replace(encoder, layers=layers)
