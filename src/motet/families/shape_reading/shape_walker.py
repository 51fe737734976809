"""The shape of any module of transformers: its model is built on the meta device, run once, and read off.

Parameters are those of the model. Products with weights are its linears (experts and convolutions among them), in the
order in which they are computed. An attention is what goes through transformers' attention interface; other products of
activations with activations are an attention too, whose cost follows from two lengths of the sequence.
"""

import copy
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from motet.errors import UserError, one_line
from motet.families.classes import default_dtype
from motet.families.discovery.language_model_parts import CausalPaths, causal_paths
from motet.families.encoders.encoder_families import ENCODER_FAMILIES, Arrangement
from motet.families.module_config import UNBUILDABLE, class_with_role, configuration_of, role_of
from motet.families.shape_reading.shape_trace import ATTENTION, Attend, Elementwise, Event, Mix, Product, Trace, trace
from motet.parallel.tensor.tensor_cuts import TensorCuts, tensor_cuts
from motet.shapes.module_shape import Attention, LayerShape, Linear, ModuleWorkload, Part
from motet.shapes.shape_card import Role, ShapeCard, ShapeRequest

WAYS = (
    (torch.bfloat16, False, False),
    (torch.bfloat16, False, True),
    (torch.bfloat16, True, False),
    (torch.bfloat16, True, True),
    (torch.float32, False, False),
)
"""Dtype, whether a mask is given, and whether the sequence is short, in the order in which they are tried. Experts are
grouped in bfloat16 alone; some models do more with a mask than to hand it on, or have a table of few positions."""
NUM_AUDIO_SAMPLES = 16_000
NUM_TOKENS = 64
"""Length of the sequence that a language model is run on; a whole number of chunks, where it has some."""


def walk(request: ShapeRequest) -> ShapeCard:
    """Builds the module on the meta device and reads its shape. Raises `UserError` if it cannot be built or run."""
    config = configuration_of(request)
    role = request.role or role_of(config)
    assert role != "composite"
    config._experts_implementation = None  # The usual one: loops over experts ask which tokens are whose.
    model_class = class_with_role(config, role)
    reasons: list[str] = []
    for dtype, has_mask, is_short in WAYS:
        try:
            with torch.random.fork_rng(devices=[]), default_dtype(dtype):
                with torch.device("meta"):
                    model = model_class(copy.deepcopy(config)).eval()
                return ShapeCard.of(_Walk(model, config, role, has_mask, is_short).workload)
        except UserError as error:
            raise UserError(f": {error}") from None
        except UNBUILDABLE as error:
            reasons.append(one_line(error)[:200])
    raise UserError(f": {config.model_type} does not run ({reasons[0]}); change its configuration")


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList | nn.Sequential]:
    """The path and the list of a model's transformer blocks: the largest list of modules."""
    found: list[tuple[int, str, Any]] = []

    def search(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            members = list(child.children())
            is_list = isinstance(child, nn.ModuleList) or (
                isinstance(child, nn.Sequential) and len(members) > 1 and type(members[0]) is type(members[-1])
            )
            if is_list and members and all(any(True for _ in member.parameters()) for member in members):
                found.append((sum(p.numel() for p in child.parameters()), inner, child))
            elif not isinstance(child, nn.ModuleDict):
                search(child, inner)

    search(model, "")
    if not found:
        raise UserError(f"{type(model).__name__} has no list of blocks that could be cut into stages")
    _, path, blocks = max(found, key=lambda entry: entry[0])
    return path, blocks


@dataclass
class _Walk:
    model: Any
    config: PretrainedConfig
    role: Role
    has_mask: bool
    is_short: bool

    @property
    def is_causal(self) -> bool:
        return self.role in ("language_model", "decoder")

    @cached_property
    def paths(self) -> CausalPaths:
        return causal_paths(self.model)

    @cached_property
    def blocks(self) -> tuple[str, nn.ModuleList | nn.Sequential]:
        if self.is_causal:
            return self.paths.blocks, self.model.get_submodule(self.paths.blocks)
        return find_blocks(self.model)

    def run(self, num_tokens: int) -> Trace:
        for module in self.model.modules():
            if isinstance(getattr(module, "config", None), PretrainedConfig):
                module.config._attn_implementation = ATTENTION
        found = trace(self.model, self.blocks[1], self.inputs(num_tokens))
        if self.is_causal:  # Some models pass several vectors of a token from block to block.
            found.num_tokens = num_tokens
        return found

    def inputs(self, num_tokens: int) -> dict[str, Any]:
        """Makes the model's inputs: tokens, or one item of the encoder's native size."""
        config: Any = self.config
        takes = inspect.signature(self.model.forward).parameters
        if "grid_thw" in takes:
            side = 2 * max(getattr(config, "window_size", 0) // config.patch_size, 4 * config.spatial_merge_size)
            width = config.in_channels * config.temporal_patch_size * config.patch_size**2
            patches = torch.zeros(side**2, width, device="meta")
            return {next(iter(takes)): patches, "grid_thw": torch.tensor([[1, side, side]])}
        if "spatial_shapes" in takes:
            side = math.isqrt(config.num_patches)
            patches = torch.zeros(1, side**2, config.num_channels * config.patch_size**2, device="meta")
            whole = {"pixel_attention_mask", "attention_mask"} & takes.keys()
            shapes = {"spatial_shapes": torch.tensor([[side, side]])}
            return {"pixel_values": patches, **shapes, **{key: torch.ones(1, side**2).bool() for key in whole}}
        if "pixel_values" in takes:
            size = config.image_size
            height, width = (size, size) if isinstance(size, int) else size
            sizes = {"image_sizes": [(height, width)]} if "image_sizes" in takes else {}
            return {"pixel_values": torch.zeros(1, config.num_channels, height, width, device="meta"), **sizes}
        if "input_features" in takes:
            frames = 2 * config.max_source_positions
            return {"input_features": torch.zeros(1, config.num_mel_bins, frames, device="meta")}
        if "input_values" in takes:
            return {"input_values": torch.zeros(1, NUM_AUDIO_SAMPLES, device="meta")}
        given: dict[str, Any] = {"input_ids": torch.zeros(1, num_tokens, dtype=torch.long)}
        if self.is_causal:
            given["use_cache"] = False
            if self.has_mask:
                given["attention_mask"] = torch.zeros(1, 1, num_tokens, num_tokens, device="meta")
            crossing = ["cross_attention_states"] if "cross_attention_states" in takes else []
            if getattr(config, "add_cross_attention", False):
                crossing.append("encoder_hidden_states")
            states = torch.zeros(1, _incoming(num_tokens), config.hidden_size, device="meta") if crossing else None
            given |= dict.fromkeys(crossing, states)
        return given

    @cached_property
    def cuts(self) -> TensorCuts | None:
        """Cuts for tensor parallelism; None if the model cannot be cut."""
        try:
            cuts = tensor_cuts(self.model)
        except UserError:
            return None
        return cuts if cuts.must_divide else None

    @property
    def workload(self) -> ModuleWorkload:
        config: Any = self.config
        first = self._traced(self._length)
        mixes = any(isinstance(event, Mix) for block in first.blocks for event in block)
        second = self._traced(2 * self._length) if mixes and self.is_causal else None
        parameters = self._parameters(first)
        features, pooled = self._outputs(first)
        output = pooled if self.role == "tower" and pooled is not None else features
        width, reader = first.hidden_size, _LayerReader(self.model, self.config, self.role, first, self.cuts)
        blocks = [
            reader.block(f"{self.blocks[0]}.{i}", events, second.blocks[i] if second else None, parameters[1 + i])
            for i, events in enumerate(first.blocks)
        ]
        output_size = width if self.is_causal else output.shape[-1]
        head_events = first.head if self.is_causal else self._reached(first.head, output)
        embed = reader.end("embed", first.embed, parameters[0], width)
        head = reader.end("head", head_events, parameters[-1], width if self.is_causal else output_size)
        return ModuleWorkload(
            kind="language_model" if self.is_causal else "tower" if self.role == "tower" else "encoder",
            family=config.model_type,
            config=_complete(config),
            hidden_size=width,
            output_size=output_size,
            layers=(embed, *blocks, head),
            arrangement="padded" if self.is_causal else "packed" if self._is_packed else "separate",
            tied=((0, len(blocks) + 1),) if self.is_causal and self._is_tied else (),
            must_divide=None if self.cuts is None else dict(self.cuts.must_divide),
        )

    @property
    def _is_packed(self) -> bool:
        """Whether an encoder takes its items in one row, and masks attention between them."""
        family = ENCODER_FAMILIES.get(self.config.model_type)
        return family is not None and family.arrangement is Arrangement.ROW

    @property
    def _length(self) -> int:
        config: Any = self.config
        longest = min(
            getattr(config, key, None) or 2 * NUM_TOKENS for key in ("max_position_embeddings", "max_seq_len")
        )
        chunks = [getattr(config, key, 0) or 0 for key in ("chunk_size", "mamba_chunk_size")]
        return max(longest // 2 if self.is_short else NUM_TOKENS, *chunks)

    def _traced(self, num_tokens: int) -> Trace:
        with torch.set_grad_enabled(not self.is_causal):
            return self.run(num_tokens)

    @property
    def _is_tied(self) -> bool:
        head = self.model.get_output_embeddings()
        return head is not None and head.weight is self.model.get_input_embeddings().weight

    def _parameters(self, traced: Trace) -> list[int]:
        """Number of parameters of each layer. Those of an encoder outside of the blocks belong to the head if it alone
        uses them, or if nothing does and they stand behind the blocks."""
        path, blocks = self.blocks
        counts = [0] * (len(blocks) + 2)
        used = [
            {e.parameter for e in events if isinstance(e, Product)}
            for events in (traced.embed, *traced.blocks, traced.head)
        ]
        before_blocks = True
        table = self.model.get_input_embeddings().weight if self.is_causal else None
        for name, parameter in self.model.named_parameters():
            if name.startswith(f"{path}."):
                before_blocks = False
                counts[1 + int(name[len(path) + 1 :].partition(".")[0])] += parameter.numel()
                continue
            elsewhere = any(name in each for each in used[:-1])
            in_head = not elsewhere and (name in used[-1] or not before_blocks)
            if self.is_causal:
                in_head = parameter is not table and any(name.startswith(part) for part in self.paths.head_parts)
            counts[-1 if in_head else 0] += parameter.numel()
        if table is not None and self._is_tied and table.shape[1] == traced.hidden_size:
            counts[-1] += table.numel()
        return counts

    def _outputs(self, traced: Trace) -> tuple[Tensor, Tensor | None]:
        """The features of an encoder, and the pooled ones."""
        outputs = traced.outputs
        if self.is_causal:
            return outputs.logits, None
        features, pooled = outputs[0], getattr(outputs, "pooler_output", None)
        # Where features are merged, transformers gives these as the pooled ones.
        if (pooled is not None and pooled.shape[0] > features.shape[0] and features.ndim == 2) or (
            pooled is not None and features.ndim == 2 and pooled.ndim == 2
        ):
            return pooled, None
        return features, pooled

    def _reached(self, events: Sequence[Event], output: Tensor) -> list[Event]:
        """Events of the head without products that the output does not depend on."""
        own = dict(self.model.named_parameters())
        names = sorted({event.parameter for event in events if isinstance(event, Product)})
        if not names:
            return list(events)
        gradients = torch.autograd.grad(output.sum(), [own[name] for name in names], allow_unused=True)
        unused = {name for name, gradient in zip(names, gradients, strict=True) if gradient is None}
        return [event for event in events if not (isinstance(event, Product) and event.parameter in unused)]


def _complete(config: PretrainedConfig) -> dict[str, Any]:
    """Every setting, also under the common names of those that the family calls otherwise."""
    values = config.to_dict()
    return {**{name: values.get(own) for name, own in config.attribute_map.items()}, **values}


@dataclass
class _LayerReader:
    model: Any
    config: PretrainedConfig
    role: Role
    traced: Trace
    cuts: TensorCuts | None

    def __post_init__(self) -> None:
        self.names = {name for name, _ in self.model.named_parameters()}

    @property
    def num_tokens(self) -> int:
        return self.traced.num_tokens

    def block(
        self, path: str, events: Sequence[Event], longer: Sequence[Event] | None, num_parameters: int
    ) -> LayerShape:
        """`path`: of the block in the model."""
        width = self.traced.hidden_size
        attentions, inside = self._attentions(events, longer)
        linears = self._linears(events, "block", path)
        norms = [e for e in events if isinstance(e, Elementwise) and id(e) not in inside]
        saved = self._vectors(e for e in norms if e.kind in ("norm", "rms"))
        return LayerShape(
            "block",
            width,
            linears,
            *attentions,
            other_parameters=num_parameters - sum(linear.num_parameters for linear in linears),
            saved_vectors=saved,
            saved_vectors_for_weights=self._vectors(e for e in norms if e.kind in ("rms", "scale")),
            float32_vectors=self._vectors(e for e in norms if e.kind == "rms"),
            gated=_is_gated(events),
        )

    def end(self, part: Part, events: Sequence[Event], num_parameters: int, hidden_size: int) -> LayerShape:
        """The embedding or the head."""
        is_causal = self.role in ("language_model", "decoder")
        linears = self._linears(events, part)
        vocabulary = 0
        if part == "embed" and is_causal:
            table = self.model.get_input_embeddings().weight
            vocabulary = table.shape[0] if table.shape[1] == hidden_size else 0
        others = num_parameters - sum(linear.num_parameters for linear in linears) - vocabulary * hidden_size
        saved = [e for e in events if isinstance(e, Elementwise)]
        return LayerShape(
            part,
            hidden_size,
            linears,
            other_parameters=others,
            vocabulary=vocabulary,
            saved_vectors=self._vectors(saved),
            saved_vectors_for_weights=self._vectors(e for e in saved if e.kind == "rms"),
            float32_vectors=self._vectors(e for e in saved if e.kind == "rms"),
        )

    def _vectors(self, events: Any) -> int:
        """Number of hidden vectors with as many elements as the events' tensors, rounded half up."""
        return int(sum(event.elements for event in events) / (self.num_tokens * self.traced.hidden_size) + 0.5)

    def _linears(self, events: Sequence[Event], part: Part, path: str = "") -> tuple[Linear, ...]:
        rows: dict[tuple[str, int, int, int], int] = {}
        first: dict[tuple[str, int, int, int], Product] = {}
        for event in events:
            if isinstance(event, Product):
                key = (event.parameter, event.slice, event.in_features, event.out_features)
                rows[key] = rows.get(key, 0) + event.rows
                first.setdefault(key, event)
        return tuple(self._linear(product, rows[key], part, path) for key, product in first.items())

    def _linear(self, product: Product, rows: int, part: Part, path: str) -> Linear:
        name = product.parameter
        is_causal = self.role in ("language_model", "decoder")
        linear = Linear(
            product.in_features,
            product.out_features,
            bias=name.removesuffix("weight") + "bias" in self.names and name.endswith("weight"),
            rows_per_token=rows / self.num_tokens,
            cut=self._cut(name),
            kernel_area=product.kernel_area,
            num_copies=product.num_copies,
            name=self._name(name, path),
        )
        if part == "head" and is_causal:
            is_output = product.out_features == self.model.get_output_embeddings().weight.shape[0]
            return replace(linear, rows="outputs", cut="column" if is_output else None)
        if part == "head" and rows == 1:
            return replace(linear, rows="outputs", rows_per_token=1.0)
        if part == "embed" and not is_causal:
            return replace(linear, reads_layer_input=product.reads_input)
        if is_causal and rows == _incoming(self.num_tokens):
            return replace(linear, rows="incoming", rows_per_token=1.0)
        return linear

    def _name(self, parameter: str, block: str) -> str:
        """The path in its block of the linear layer that a weight belongs to."""
        path, _, key = parameter.rpartition(".")
        is_layer = block and key == "weight" and isinstance(self.model.get_submodule(path), nn.Linear | Conv1D)
        return path.removeprefix(f"{block}.") if is_layer else ""

    def _cut(self, name: str) -> Literal["column", "row"] | None:
        if self.cuts is None:
            return None
        shard = self.cuts.parameters.get(name)
        if shard is not None:  # Of experts.
            return "row" if shard.dim == self.model.get_parameter(name).ndim - 1 else "column"
        return self.cuts.cut_of(name.rpartition(".")[0])

    def _attentions(
        self, events: Sequence[Event], longer: Sequence[Event] | None
    ) -> tuple[tuple[Attention | None, Attention | None], set[int]]:
        """The attentions of a block, and the norms within them."""
        found: list[Attention] = []
        inside: set[int] = set()
        products, norms = 0, []
        before_mix = 0
        for is_attention, group in groupby(events, key=lambda event: isinstance(event, Attend)):
            members = list(group)
            if not is_attention:
                for event in members:
                    if isinstance(event, Product):
                        products += 1
                    elif isinstance(event, Mix):
                        before_mix = products
                    elif products > 0 and isinstance(event, Elementwise) and event.kind != "activation":
                        norms.append(event)
                continue
            calls = [event for event in members if isinstance(event, Attend)]
            pairs = sum(call.num_queries * call.num_keys for call in calls)
            num_keys, call = max(call.num_keys for call in calls), calls[0]
            of_heads = 2 * call.num_heads * (call.head_dim + call.value_dim)
            is_whole = num_keys >= self.num_tokens
            reads_encoder = self.role in ("language_model", "decoder") and num_keys == _incoming(self.num_tokens)
            found.append(
                Attention(
                    call.num_heads,
                    call.num_key_value_heads,
                    call.head_dim,
                    value_dim=None if call.value_dim == call.head_dim else call.value_dim,
                    window=None if reads_encoder or is_whole else num_keys,
                    reads_encoder=reads_encoder,
                    normalizes=bool(norms),
                    num_linears=products + 1,
                    # Some models compute several attentions of one layer, one after the other.
                    flops_per_pair=(pairs / self.num_tokens**2 - 1) * of_heads if is_whole else 0.0,
                )
            )
            inside |= {id(norm) for norm in norms}
            products, norms = -1, []
        per_pair, per_token = self._mixed(events, longer)
        if found:
            of_calls = found[0].flops_per_pair
            found[0] = replace(found[0], flops_per_pair=of_calls + per_pair, flops_per_token=per_token)
        elif per_pair or per_token:
            heads = getattr(self.config, "num_attention_heads", None) or 1
            exact = per_pair / (4 * heads)
            head_dim = int(exact) if exact and exact.is_integer() else self.traced.hidden_size // heads
            found = [
                Attention(
                    heads,
                    heads,
                    head_dim,
                    window=None if per_pair else 0,
                    num_linears=before_mix + 1,
                    flops_per_pair=per_pair - 4 * heads * head_dim if per_pair else 0.0,
                    flops_per_token=per_token,
                )
            ]
        return (found[0] if found else None, found[1] if len(found) > 1 else None), inside

    def _mixed(self, events: Sequence[Event], longer: Sequence[Event] | None) -> tuple[float, float]:
        """FLOPs for each pair of tokens, and for each token, of products of activations outside of the interface."""
        length, flops = self.num_tokens, sum(event.flops for event in events if isinstance(event, Mix))
        if longer is None:
            return flops / length**2, 0.0
        double = sum(event.flops for event in longer if isinstance(event, Mix))
        per_pair = max(0.0, (double - 2 * flops) / (2 * length**2))
        return per_pair, max(0.0, flops / length - per_pair * length)


def _incoming(num_tokens: int) -> int:
    """Length of what cross-attention reads, unlike that of the tokens."""
    return 3 * num_tokens // 4 + 1


def _is_gated(events: Sequence[Event]) -> bool:
    """Whether what the last linear reads is a product of two branches."""
    products = [event for event in events if isinstance(event, Product)]
    if len(products) < 2:
        return False
    *before, last = products
    together = [product for product in before if product.reads == before[-1].reads]
    return sum(product.out_features for product in together) == 2 * last.in_features
