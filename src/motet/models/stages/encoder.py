"""A run of an encoder's layers as a pipeline stage: embed | n blocks | head | projector (docs/architecture.md).

All items of a microbatch's samples run together. Between stages they are [sum of num_tokens, hidden_size], sample after
sample and item after item; what a stage derives from grids it derives again, so nothing but that tensor is sent.

Callbacks (Cornstarch section 5.1, listing 2) are called once for each sample, so that what they see does not depend on
how the batch was cut. In call order:

* `preprocess_callback(inputs) -> inputs`: the sample's features, before the embedding. If it splits images (AnyRes),
  the layout's `num_tokens` is the multiple of what one tile of `grid` makes.
* `postprocess_module_callback(inputs, output) -> output`: after the head.
* `postprocess_projector_callback(inputs, output) -> output`: after the projector.

`inputs` is what `preprocess_callback` returned; `output` is a 1-tuple, as listing 2 has it: (the sample's features
[num_outputs, size],). A tuple, a tensor or a transformers `ModelOutput` may be returned. Every callback must be a pure
function: a stage that holds a later one calls `preprocess_callback` too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from motet.assignment.sample import Sample, Segment
from motet.attention.masks.distribution import FULL, Rows, tokens_of_members
from motet.attention.masks.token_layout import Document
from motet.errors import UserError
from motet.families.encoders.encoder_families import (
    Arrangement,
    EncoderFamily,
    Grids,
    family_of,
    num_blocks,
    num_running_blocks,
)
from motet.families.encoders.own_encoders import emptied, encoder_config, own_config
from motet.families.encoders.token_counts import Selection, selection_of
from motet.models.stages.projector import PROJECTORS, projected_size
from motet.models.stages.stage import StageBase, StageInput, StageOutput
from motet.models.stages.stand_ins import StandIn
from motet.parallel.context.context_attention import ContextParallel
from motet.parallel.context.context_sequence import (
    ITEM_ATTENTION,
    ContextSequence,
    Holder,
    check_shared,
    context_sequence,
    num_rows,
    set_attention,
)
from motet.parallel.tensor.tensor_collectives import scale_gradient
from motet.plan import ContextOptions, LayerRange


def num_encoder_layers(module: nn.Module, projector: nn.Module | None) -> int:
    """embed, the blocks, the head, and the projector if there is one."""
    return num_blocks(module) + (2 if projector is None else 3)


def encoder_layer_parts(module: nn.Module, layer: int) -> tuple[str, ...]:
    """The paths of the sub-modules of the transformers model that make up one layer (the projector's layer: none)."""
    family = family_of(module)
    head_layer = num_blocks(module) + 1
    if 1 <= layer < head_layer:
        return (f"{family.blocks}.{layer - 1}",)
    parts = {0: family.embed_parts, head_layer: family.head_parts}.get(layer, ())
    present = {name for name, _ in module.named_modules()}  # "" is the module itself.
    return tuple(part for part in parts if part in present)


class EncoderStage(StageBase):
    """Layers [first, last) of an encoder and its projector.

    Takes over `modality_module.module`: parts of other layers are replaced by pass-throughs, the rest stays as it is.

    Args:
        name: the module whose layouts are read.
        modality_module: has `module`, `projector` (None: there is none), the three callbacks (None: none) and, if the
            features are not those of the last block after the head, a `feature_layer` (`num_running_blocks`). Blocks
            behind it stay where they are in the count of layers, but do not run, and neither does the head.
        layers: half-open.
    """

    def __init__(self, name: str, modality_module: Any, layers: LayerRange) -> None:
        super().__init__()
        self.name = name
        self.layers = layers
        self.family: EncoderFamily = family_of(modality_module.module)
        self.config = encoder_config(modality_module.module)
        num_layers = num_encoder_layers(modality_module.module, modality_module.projector)
        assert 0 <= layers[0] < layers[1] <= num_layers, layers
        self._head_layer = num_blocks(modality_module.module) + 1
        feature_layer = getattr(modality_module, "feature_layer", None)
        self._num_running_blocks = num_running_blocks(modality_module.module, feature_layer)
        self._runs_head = feature_layer is None
        self._pooling = getattr(modality_module, "pooling", None)
        if self._pooling is not None and self.family.pool is None:
            raise UserError(f"towers: {self.family.model_class} has no pooled output; use another encoder")
        self._is_last = layers[1] == num_layers
        projector = modality_module.projector
        self._preprocess = modality_module.preprocess_callback
        self._postprocess_module = modality_module.postprocess_module_callback
        self._postprocess_projector = modality_module.postprocess_projector_callback
        self._widths = [self.config.hidden_size] * (self._head_layer + 1)
        """Of what enters each layer, and of what leaves the last one."""
        self._widths.append(getattr(self.config, self.family.output_size))
        if projector is not None:
            self._widths.append(projected_size(projector))
        for layer in range(num_layers):
            if not self.holds(layer):
                for part in encoder_layer_parts(modality_module.module, layer):
                    if part and layer == 0 and own_config(modality_module.module) is not None:
                        module = modality_module.module
                        module.set_submodule(part, StandIn(module.get_submodule(part)))
                    elif part:
                        modality_module.module.set_submodule(part, nn.Identity())
                    else:
                        modality_module.module = emptied(modality_module.module)
        self.module = modality_module.module
        self.hidden_size = self._widths[layers[0]]
        self.output_size = self._widths[layers[1]]
        # The embedding reads features, and so do the callbacks after the head and after the projector.
        self.needs_features = (
            self.holds(0)
            or (self.holds(self._head_layer) and self._postprocess_module is not None)
            or (self._is_last and self._postprocess_projector is not None)
        )
        self.projector = projector if self.holds(self._head_layer + 1) else None
        self._context: ContextParallel | None = None
        self._holder = Holder()

    def enable_context_parallel(self, cp: ContextParallel) -> None:
        """From now on this rank's blocks have its share of the tokens only. What stands before and after the blocks is
        computed alike on all ranks of the group; gradients are such that the sum over the group is right for both.

        Raises `UserError` for encoders whose attention is not simply that within each item."""
        if not self.family.has_full_attention:
            raise UserError(
                f"parallel: {self.name} is a {self.family.model_class}, which context parallelism does not support; "
                "use cp 1"
            )
        heads = getattr(self.config, "num_attention_heads", None) or self.config.encoder_attention_heads
        check_shared(self.name, self.module, self.config, cp, heads, self._widths[0] // heads)
        self._context = cp
        set_attention(self.module, ITEM_ATTENTION)
        for part in self.module.get_submodule(self.family.blocks).modules():
            part.motet_holder = self._holder

    @property
    def has_own_attention(self) -> bool:
        """Whether attention is ours, for shares of the tokens."""
        return self._context is not None

    def prepare(self, samples: Sequence[Sample]) -> ContextSequence | None:
        if not self.has_own_attention:
            return None
        context = self._shared(samples, self.device)
        context.prepare(((None, None),))
        return context

    def _shared(self, samples: Sequence[Sample], device: torch.device) -> ContextSequence:
        assert self._context is not None
        return context_sequence(self._documents(samples), (FULL,), self._context, device)

    def held_tokens(
        self, border: int, samples: Sequence[Sample], options: ContextOptions, cp_size: int
    ) -> list[Rows] | None:
        """Returns the tokens that each member of a group of this size holds of the input of layer `border`. None: each
        holds all, as behind the head."""
        return tokens_of_members(self._documents(samples), FULL, options, cp_size) if self._is_shared(border) else None

    def _is_shared(self, border: int) -> bool:
        return border <= self._head_layer

    def _documents(self, samples: Sequence[Sample]) -> tuple[Document, ...]:
        return tuple(Document((Segment(num_tokens),)) for _, num_tokens in self._tiles(samples))

    def holds(self, layer: int) -> bool:
        return self.layers[0] <= layer < self.layers[1]

    @cached_property
    def _parts_of_layers(self) -> dict[int, tuple[str, ...]]:
        return {layer: encoder_layer_parts(self.module, layer) for layer in range(*self.layers)}

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        """The layer that the parameter belongs to."""
        where, _, path = local_name.partition(".")
        if where == "projector":
            return (self._head_layer + 1,)
        for layer, parts in self._parts_of_layers.items():
            if any(not part or path.startswith(f"{part}.") for part in parts):
                return (layer,)
        raise AssertionError(f"{local_name} belongs to none of the layers {self.layers}")

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns the shape of `hidden`, from metadata alone; not for the first stage."""
        return self._boundary_shape(self.layers[0], samples)

    def output_shape(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns the shape of the result of `forward`, from metadata alone."""
        return self._boundary_shape(self.layers[1], samples)

    def forward(self, inputs: StageInput) -> StageOutput:
        """Returns [sum of num_tokens, hidden_size]; after the last layer [sum of num_outputs, output_size].

        Raises `ValueError` if features or callbacks do not fit the samples' layouts.
        """
        assert not inputs.incoming, f"{self.name} is an encoder, but {', '.join(inputs.incoming)} was sent to it"
        samples, hidden = inputs.samples, inputs.hidden
        preprocess = self._preprocess or dict
        features = [preprocess(dict(sample)) for sample in inputs.features] if self.needs_features else []
        if self.holds(0):
            tensors = self._raw_features(features, samples)
            hidden = self.family.embed(self.module, tensors, [grid for grid, _ in self._tiles(samples)])
            self._check_num_tokens(hidden, tensors, samples)
        assert hidden is not None
        if self._context is not None and self._is_shared(self.layers[0]):
            context = self._shared(samples, hidden.device)
            hidden = self._run_shared_blocks(context.take(hidden) if self.holds(0) else hidden, context)
            hidden = self._run_head(context.gather(hidden), samples) if self.holds(self._head_layer) else hidden
        else:
            hidden = self._run_blocks_and_head(hidden, samples)
        if self.layers[1] <= self._head_layer:
            return StageOutput(hidden)
        output = self._hand_on(hidden, features, samples)
        if self._context is not None and self._is_last:
            # All ranks compute it alike, and the group adds up their gradients.
            output = scale_gradient(output, 1 / self._context.size)
        return StageOutput(output)

    def _raw_features(self, inputs: Sequence[Mapping[str, Tensor]], samples: Sequence[Sample]) -> list[Tensor]:
        key = self.family.feature
        for sample, sample_inputs in zip(samples, inputs, strict=True):
            if key not in sample_inputs:
                raise UserError(f"features: sample {sample.id!r} has no {key} for {self.name}")
            items = [segment.item for segment in sample.layouts[self.name]]
            if items != sorted(items):
                raise UserError(f"layout: sample {sample.id!r} has {self.name}'s items as {items}; put them in order")
        return [sample_inputs[key] for sample_inputs in inputs]

    def _check_num_tokens(self, hidden: Tensor, tensors: Sequence[Tensor], samples: Sequence[Sample]) -> None:
        expected = sum(sample.num_tokens(self.name) for sample in samples)
        if hidden.shape[0] != expected:
            ids = ", ".join(repr(sample.id) for sample in samples)
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise UserError(
                f"features: {self.family.feature} of samples {ids} ({shapes}) makes {hidden.shape[0]} tokens in "
                f"{self.name}, but the layouts have {expected}"
            )

    @property
    def idle_blocks(self) -> tuple[str, ...]:
        """Blocks after the layer whose features are the output: they have weights and do not run."""
        held = range(max(self.layers[0], 1) - 1, min(self.layers[1], self._head_layer) - 1)
        return tuple(f"module.{self.family.blocks}.{index}" for index in held if index >= self._num_running_blocks)

    @property
    def _blocks(self) -> range:
        """The blocks of this stage that run."""
        return range(max(self.layers[0], 1) - 1, min(self.layers[1] - 1, self._num_running_blocks))

    @property
    def running_blocks(self) -> dict[int, nn.Module]:
        """The stage's blocks that run, by their numbers in the whole encoder."""
        return {index: self.module.get_submodule(f"{self.family.blocks}.{index}") for index in self._blocks}

    def carry_state(self) -> Callable[[], None]:
        """Returns what gives the blocks' attention the microbatch that it has now."""
        if self._context is None:
            return lambda: None
        context = self._holder.context

        def put_back() -> None:
            self._holder.context = context

        return put_back

    def _run_shared_blocks(self, hidden: Tensor, context: ContextSequence) -> Tensor:
        """[num_rows, hidden_size] -> the same, all of this rank's tokens in one row."""
        self._holder.context = context
        row, num_calls = hidden[None], context.num_calls
        for block in self.running_blocks.values():
            row = _tensor(block(row, attention_mask=None))
        assert context.num_calls - num_calls == len(self._blocks)
        return row[0]

    def _run_head(self, hidden: Tensor, samples: Sequence[Sample]) -> Tensor:
        """[sum of num_tokens, hidden_size] -> the rows that the layouts list as outputs."""
        if self._runs_head:
            groups = self._groups(hidden, samples)
            finished = [
                self._pooled(self.family.finish(self.module, self._arrange(r, len(g)), g), g) for g, r in groups
            ]
            hidden = torch.cat([group.reshape(-1, group.shape[-1]) for group in finished])
        return self._select(hidden, samples)

    def _run_blocks_and_head(self, hidden: Tensor, samples: Sequence[Sample]) -> Tensor:
        blocks = self._blocks
        if not blocks and not self.holds(self._head_layer):
            return hidden
        outputs = []
        for grids, rows in self._groups(hidden, samples):
            group = self._arrange(rows, len(grids))
            if blocks:
                arguments = self.family.block_arguments(self.module, group, grids)
            for index in blocks:
                block = self.module.get_submodule(f"{self.family.blocks}.{index}")
                group = block(group, **arguments(index))
            if self.holds(self._head_layer) and self._runs_head:
                group = self._pooled(self.family.finish(self.module, group, grids), grids)
            outputs.append(group.reshape(-1, group.shape[-1]))
        hidden = torch.cat(outputs)
        return self._select(hidden, samples) if self.holds(self._head_layer) else hidden

    def _pooled(self, group: Tensor, grids: Grids) -> Tensor:
        """Returns a tower's output for its items: a vector of each item, or that and then all its features."""
        if self._pooling is None:
            return group
        assert self.family.pool is not None
        pooled = self.family.pool(self.module, group, grids)[:, None]
        return pooled if self._pooling == "alone" else torch.cat([pooled, group], dim=1)

    def _hand_on(self, hidden: Tensor, inputs: Sequence[Mapping[str, Tensor]], samples: Sequence[Sample]) -> Tensor:
        """The callbacks after the head and after the projector, and the projector between them, sample by sample."""
        is_selected = self.holds(self._head_layer) or self._postprocess_module is None
        entering = self._selected_tokens(samples) if is_selected else self._final_tokens(samples)
        outputs = list(hidden.split(entering))
        if self.holds(self._head_layer) and self._postprocess_module is not None:
            outputs = [_tensor(self._postprocess_module(i, (o,))) for i, o in zip(inputs, outputs, strict=True)]
        if self.projector is not None:
            outputs = self._project(outputs)
        if self._is_last and self._postprocess_projector is not None:
            outputs = [_tensor(self._postprocess_projector(i, (o,))) for i, o in zip(inputs, outputs, strict=True)]
        expected = self._num_tokens(self.layers[1], samples)
        for sample, output, num_outputs in zip(samples, outputs, expected, strict=True):
            if output.shape[0] != num_outputs:
                raise UserError(
                    f"layout: sample {sample.id!r} says that {self.name} outputs {num_outputs} tokens, "
                    f"but its layers {list(self.layers)} made {output.shape[0]}"
                )
        return torch.cat(outputs)

    def _project(self, outputs: list[Tensor]) -> list[Tensor]:
        """The user's own projectors may mix a sample's tokens, so they see one sample at a time."""
        assert self.projector is not None
        if type(self.projector) in PROJECTORS.values() or isinstance(self.projector, nn.Linear):
            return list(self.projector(torch.cat(outputs)).split([len(output) for output in outputs]))
        return [_tensor(self.projector(output)) for output in outputs]

    # What crosses the boundaries of layers, from configuration and layouts alone: shapes are known before anything is
    # computed.

    def _boundary_shape(self, layer: int, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns the shape of the input of `layer` (past the last layer, of its output)."""
        width = self._widths[layer]
        if self._context is not None and self._is_shared(layer):
            return num_rows(self._documents(samples), (FULL,), self._context), width
        return sum(self._num_tokens(layer, samples)), width

    def _num_tokens(self, layer: int, samples: Sequence[Sample]) -> list[int]:
        """Returns each sample's number of tokens at the input of `layer` (past the last layer, at its output)."""
        if layer <= self._head_layer:
            return [sample.num_tokens(self.name) for sample in samples]
        is_before_projector = layer == self._head_layer + 1 and layer < len(self._widths) - 1
        # A callback after the head makes what the layout says: else the shape would not be known from metadata.
        if is_before_projector and self._postprocess_module is None:
            return self._selected_tokens(samples)
        return self._final_tokens(samples)

    def _final_tokens(self, samples: Sequence[Sample]) -> list[int]:
        return [sample.num_outputs(self.name) for sample in samples]

    def _selected_tokens(self, samples: Sequence[Sample]) -> list[int]:
        """Returns each sample's number of tokens after the head, before the callback."""
        if self._pooling is not None:
            return self._final_tokens(samples)
        return [sum(selection.num_outputs for selection in self._selections([sample])) for sample in samples]

    def _select(self, hidden: Tensor, samples: Sequence[Sample]) -> Tensor:
        """Selects the features of each tile, after the head, that the layout lists as outputs."""
        if self._pooling is not None:
            return hidden
        selections = self._selections(samples)
        if all(selection.num_tokens == selection.num_full for selection in selections):
            return hidden
        items = hidden.split([selection.num_tiles * selection.num_full for selection in selections])
        return torch.cat(
            [
                item.unflatten(0, (selection.num_tiles, selection.num_full))
                .narrow(1, selection.first, selection.num_tokens)
                .flatten(0, 1)
                for item, selection in zip(items, selections, strict=True)
            ]
        )

    def _selections(self, samples: Sequence[Sample]) -> list[Selection]:
        return [selection_of(self.config, segment) for sample in samples for segment in sample.layouts[self.name]]

    def _tiles(self, samples: Sequence[Sample]) -> list[tuple[tuple[int, ...], int]]:
        """(grid, number of tokens) of every image or clip in order."""
        segments = [segment for sample in samples for segment in sample.layouts[self.name]]
        tiles = []
        for segment, selection in zip(segments, self._selections(samples), strict=True):
            tiles += [(segment.grid, segment.num_tokens // selection.num_tiles)] * selection.num_tiles
        return tiles

    def _groups(self, hidden: Tensor, samples: Sequence[Sample]) -> Iterator[tuple[Grids, Tensor]]:
        """Returns the tiles that run together, in order: all, or runs of equal length where blocks take a batch."""
        tiles = self._tiles(samples)
        if self.family.arrangement is not Arrangement.BATCH:
            yield [grid for grid, _ in tiles], hidden
            return
        first = 0
        for num_tokens, run in groupby(tiles, key=lambda tile: tile[1]):
            grids = [grid for grid, _ in run]
            yield grids, hidden[first : first + num_tokens * len(grids)]
            first += num_tokens * len(grids)

    def _arrange(self, rows: Tensor, num_tiles: int) -> Tensor:
        if self.family.arrangement is Arrangement.BATCH:
            return rows.unflatten(0, (num_tiles, -1))
        return rows.unsqueeze(0) if self.family.arrangement is Arrangement.ROW else rows


def _tensor(output: Any) -> Tensor:
    """Returns the tensor of a block's output: the output itself, or the first of a tuple or `ModelOutput`."""
    return output if isinstance(output, Tensor) else output[0]
