"""A run of a language model's layers as a pipeline stage: embed | n blocks | head (docs/architecture.md).

Any causal model of transformers (`motet.families.discovery.language_model_parts`). Between stages travels [rows,
columns, hidden_size] (see `motet.models.stages.causal.SequenceLayout`).

Cross-attention (Mllama): every token of a sample sees all encoder outputs of that sample and of no other. A row of
zeros is put before them: tokens of samples without an image see only it, and its value is zero because the projections
have no bias, so those samples pass the layer as they would alone.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from motet.assignment.sample import IGNORED_LABEL, Sample
from motet.attention.masks.distribution import Rows, rule_of_text, tokens_of_members
from motet.attention.masks.token_layout import Document
from motet.devices import to_device
from motet.errors import UserError
from motet.families.capabilities import WITH_OTHER_MASKS, attends_by_sample, attends_causally, is_causal
from motet.families.family_features import check_feature
from motet.families.language_models import cross_attention_layers
from motet.models.stages.causal import (
    CausalStage,
    SequenceLayout,
    all_tokens,
    labelled,
    labels_of,
    layout_of,
    merge,
    places_of_outputs,
    token_ids,
)
from motet.models.stages.routers import ExpertCounts, RouterLoss, find_routers
from motet.models.stages.stage import StageInput, StageOutput
from motet.parallel.context.context_attention import ContextParallel
from motet.parallel.context.context_sequence import (
    ATTENTION,
    ContextSequence,
    attention_rules,
    check_shared,
    context_sequence,
    num_rows,
    reach_of,
    set_attention,
)
from motet.parallel.context.packed_attention import PACKED_ATTENTION, PackedRow
from motet.parallel.tensor.sequence_parallel import hand_on_shares
from motet.parallel.tensor.tensor_collectives import reduce_from_group, scale_gradient
from motet.parallel.tensor.tensor_parallel import tensor_parallel_layout
from motet.plan import ContextOptions, LayerRange

PreprocessCallback = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]
"""(encoder outputs, inputs) -> inputs; see `MultimodalModule`."""


KNOWN_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Of transformers' kinds of layers, those whose masks are rules of motet's."""


class LanguageModelStage(CausalStage):
    """Layers [first, last) of a causal language model.

    Takes over `model`: its other layers are dropped.

    Args:
        name: the module whose layouts are read.
        model: an HF `...ForCausalLM`.
        layers: half-open.
        packing: samples of a microbatch stand in one row, one after the other, instead of one row each.
        media_attention: what tokens of images and clips see, or a registered mask's name; other than causal, samples
            are packed.
        preprocess_callback: merges encoder outputs in the stage's stead, sample by sample.
        router_aux_loss: weight of the auxiliary loss of a mixture of experts, of which each stage has its part.
        counts_experts: whether the tokens of each expert are counted.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        layers: LayerRange,
        *,
        packing: bool = False,
        media_attention: str = "causal",
        preprocess_callback: PreprocessCallback | None = None,
        router_aux_loss: float = 0.0,
        counts_experts: bool = False,
    ) -> None:
        counts = ExpertCounts(model) if counts_experts else None
        router_loss = RouterLoss(model, router_aux_loss) if router_aux_loss else None
        super().__init__(name, model, layers)
        self._router_loss = router_loss if find_routers(model) else None
        self.expert_counts = counts
        """The tokens of each expert; None: they are not counted."""
        self.observers += [counts] if counts is not None else []
        self.computes_loss = self.is_last or self._router_loss is not None
        """Whether its output has a loss."""
        if packing:
            check_feature(model.config, "packing", "leave packing false")
        self.packing = packing
        self._preprocess = preprocess_callback
        self.cross_attends = bool(cross_attention_layers(model))
        self._rules = attention_rules(model.config, media_attention)
        self._reaches = {reach_of(self._rules[block]) for block in self.own_blocks}
        """Sliding windows and chunks of the stage's blocks."""
        self._masks_padding = not attends_causally(model.config)
        """Whether padding, which stands behind its sample, has to be masked."""
        self._context: ContextParallel | None = None
        self._takes_share = False
        self._attends_by_sample = False
        if media_attention != "causal":
            alone = ContextOptions(media_attention=media_attention)
            self.enable_context_parallel(ContextParallel(group=None, rank=0, size=1, options=alone))

    def enable_context_parallel(self, cp: ContextParallel) -> None:
        """From now on this rank holds its share of every sequence only; samples are packed, and see each other as the
        rules say.

        Raises `UserError` for what that attention cannot do."""
        if self._preprocess is not None:
            raise UserError(
                f"parallel: {self.name} has a preprocess_callback, which needs whole samples; use cp 1, or merge by "
                "placeholder or prepend"
            )
        self._check_own_attention(cp)
        self._context, self.packing, self._attends_by_sample = cp, True, False
        set_attention(self.module, ATTENTION)

    def _check_own_attention(self, cp: ContextParallel) -> None:
        """Raises `UserError` for models that attention of motet's own does not support."""
        config = self.module.config
        if not is_causal(config):
            raise UserError(
                f"parallel: {self.name} is not causal by its configuration, which context parallelism, media_attention "
                "and packed_attention of motet's own do not support; use cp 1, causal and sdpa"
            )
        if self.cross_attends:
            raise UserError(
                f"parallel: {self.name} has cross-attention, which context parallelism and media_attention do not "
                "support; use cp 1 and media_attention causal"
            )
        unknown = set(getattr(config, "layer_types", None) or ()) - KNOWN_ATTENTION
        if unknown:
            raise UserError(
                f"parallel: {self.name} has layers of {min(unknown)}, which context parallelism and "
                "media_attention do not support; use cp 1 and media_attention causal"
            )
        method = "ulysses" if cp.options.method in ("ulysses", "hybrid") else "context_parallel"
        check_feature(config, method, "use cp 1 and media_attention causal")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        check_shared(self.name, self.module, config, cp, config.num_attention_heads, head_dim)

    def attend_by_sample(self, how: str) -> None:
        """Sets the attention of packed samples, by a value of `parallel.packed_attention`.

        Raises `UserError` for what the chosen one cannot do."""
        if self._context is not None or not attends_by_sample(self.module.config.model_type, how):
            return
        backends: dict[str, Literal["auto", "flex"]] = {"motet": "auto", "flex": "flex"}
        options = ContextOptions(backend=backends.get(how, "dense"))
        alone = ContextParallel(group=None, rank=0, size=1, options=options)
        try:
            if how == "varlen" and self.module.config.model_type in WITH_OTHER_MASKS:
                raise UserError(
                    f"parallel.packed_attention: varlen does not support the sinks or chunks of {self.name}; use sdpa"
                )
            self._check_own_attention(alone)
        except UserError:
            if how == "auto":
                return
            raise
        if how in backends:
            self.enable_context_parallel(alone)
        else:
            self._attends_by_sample = True
            set_attention(self.module, PACKED_ATTENTION)

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        return (*self._rows_and_columns(samples), self.width(self.layers[0]))

    def output_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        return (*self._rows_and_columns(samples), self.width(self.layers[1]))

    def _rows_and_columns(self, samples: Sequence[Sample]) -> tuple[int, int]:
        if self._context is not None:
            return 1, num_rows(self._documents(samples), self._rules, self._context)
        return layout_of(samples, self.name, packed=self.packing).shape

    def can_hand_on_shares(self, border: int) -> bool:
        """Whether each rank of a tensor-parallel group may get its share of the rows of a layer's input alone. All
        stages of a model answer alike."""
        return not self.cross_attends and self.crosses_alone(border)

    def hand_on_shares(self, *, takes_share: bool, gives_share: bool) -> None:
        """Under sequence parallelism, makes the stage take, or output, this rank's share of the rows."""
        layout = tensor_parallel_layout(self)
        assert layout is not None
        assert layout.running is not None
        hand_on_shares(layout.running, takes_share=takes_share, gives_share=gives_share)
        self._takes_share = takes_share

    def prepare(self, samples: Sequence[Sample]) -> ContextSequence | None:
        if not self.has_own_attention:
            return None
        context = self._share(samples, self.device)
        context.prepare(self._reaches)
        return context

    def _share(self, samples: Sequence[Sample], device: torch.device) -> ContextSequence:
        assert self._context is not None
        return context_sequence(self._documents(samples), self._rules, self._context, device)

    def held_tokens(
        self, border: int, samples: Sequence[Sample], options: ContextOptions, cp_size: int
    ) -> list[Rows] | None:
        """Returns the packed tokens that each member of a group of this size holds of the input of layer `border`."""
        return tokens_of_members(self._documents(samples), rule_of_text(options), options, cp_size)

    def num_entering(self, samples: Sequence[Sample], source: str) -> int:
        """Of shared tokens, those that this rank holds."""
        if self._context is None or self._context.size == 1:
            return super().num_entering(samples, source)
        sequences = layout_of(samples, self.name, packed=True)
        places = places_of_outputs(samples, self.name, source, sequences)
        return len(self._share(samples, self.device).own(places))

    def _documents(self, samples: Sequence[Sample]) -> tuple[Document, ...]:
        return tuple(Document(tuple(sample.layouts[self.name])) for sample in samples)

    @property
    def has_own_attention(self) -> bool:
        """Whether attention is ours, for its masks or for shares of the tokens."""
        return self._context is not None

    def forward(self, inputs: StageInput) -> StageOutput:
        """The hidden states [rows, columns, hidden_size]; on the last stage the sum of the token losses and, for other
        modules that read them, the hidden states of all tokens [sum of tokens, hidden_size], sample after sample."""
        sequences, context = self._sequences(inputs)
        device = self.device if inputs.hidden is None else inputs.hidden.device
        rows, labels = self._labelled(inputs.features, sequences, context, device) if self.is_last else (None, None)
        recording = nullcontext() if self._router_loss is None else self._router_loss.recording()
        held = None if context is None else context.host_tokens.masked_fill(~context.host_held, -1)
        with recording, self.observed(inputs.samples, sequences, held):
            states, logits = self._run(inputs, sequences, context, rows, device)
        parts = [] if logits is None or labels is None else [self.loss_sum(logits, labels)]
        shared = self._context is not None and self._context.size > 1
        if self._router_loss is not None:
            group = self._context.as_group() if self._context is not None and shared else None
            owners = _sample_of_row(sequences, context)
            parts.append(self._router_loss.loss(owners, inputs.samples, self.name, group, self.device))
        loss = torch.stack(parts).sum() if len(parts) > 1 else next(iter(parts), None)
        if loss is not None and self._context is not None and shared:
            loss = reduce_from_group(loss, self._context.as_group())
        if logits is None:
            return StageOutput(states, loss)
        return StageOutput(self._all_tokens(states, sequences, context) if inputs.hands_on else None, loss)

    def forward_whole(self, inputs: StageInput, *, has_labels: bool) -> tuple[Tensor, Tensor | None]:
        """Runs a stage that is the whole model. Returns the logits of all tokens [samples, longest sequence,
        vocabulary], padded on the right, and the sum of the token losses."""
        sequences, context = self._sequences(inputs)
        _, logits = self._run(inputs, sequences, context, None, self.device)
        assert logits is not None
        loss = None
        if has_labels:
            rows, labels = self._labelled(inputs.features, sequences, context, self.device)
            loss = self.loss_sum(logits if rows is None else logits.index_select(0, rows), labels)
        if sequences.packed:
            return pad_sequence(logits.split(sequences.lengths), batch_first=True), loss
        return logits.unflatten(0, sequences.shape), loss

    def _sequences(self, inputs: StageInput) -> tuple[SequenceLayout, ContextSequence | None]:
        sequences = layout_of(inputs.samples, self.name, packed=self.packing)
        return sequences, None if self._context is None else self._share(inputs.samples, self.device)

    def _run(
        self,
        inputs: StageInput,
        sequences: SequenceLayout,
        context: ContextSequence | None,
        rows: Tensor | None,
        device: torch.device,
    ) -> tuple[Tensor, Tensor | None]:
        positions = None
        options: dict[str, Any]
        if context is None:
            mask = sequences.attention_mask() if self._masks_padding else None
            options = {"attention_mask": None if mask is None else to_device(mask, device)}
            if self.packing:  # Else the model's own, which need not begin at 0 (RoBERTa).
                positions = sequences.position_ids()
                options["position_ids"] = to_device(positions, device)
        else:
            positions = sequences.position_ids()
            options = {"context": context, "position_ids": to_device(positions[:, context.host_tokens], device)}
        if self.cross_attends:
            options |= self._cross_attention(inputs.incoming, inputs.samples, sequences, device)
        lengths = sequences.length_of_token() if self.reads_lengths else None
        if self._attends_by_sample:
            options["context"] = PackedRow(sequences.lengths, device)
        own_attention: ContextSequence | PackedRow | None = options.get("context")
        num_calls = 0 if own_attention is None else own_attention.num_calls
        if self._takes_share and self._handover is not None:
            self._handover.whole_length = self._rows_and_columns(inputs.samples)[1]
        is_merged = bool(inputs.incoming) or self._preprocess is not None
        made = self.run_layers(
            self._token_ids(inputs, sequences, context, device),
            inputs.hidden,
            enter=(lambda embedded: self._enter(embedded, inputs, sequences, context)) if is_merged else None,
            rows=rows,
            lengths=lengths if lengths is None or context is None else lengths[:, context.host_tokens],
            packed_positions=positions if own_attention is None else None,
            options=options,
        )
        assert own_attention is None or own_attention.num_calls - num_calls == len(self.own_blocks)
        return made

    def _token_ids(
        self, inputs: StageInput, sequences: SequenceLayout, context: ContextSequence | None, device: torch.device
    ) -> Tensor:
        if inputs.hidden is not None:
            shape = sequences.shape if context is None else self._rows_and_columns(inputs.samples)
            return torch.zeros(shape, dtype=torch.long, device=device)
        if context is None:
            return to_device(token_ids(inputs.features, sequences), device)
        own = torch.cat([f["input_ids"] for f in inputs.features])[context.host_tokens][None]
        return to_device(own, device)

    def _labelled(
        self,
        features: Sequence[Mapping[str, Tensor]],
        sequences: SequenceLayout,
        context: ContextSequence | None,
        device: torch.device,
    ) -> tuple[Tensor | None, Tensor]:
        """As `labelled`; each token predicts the next of its own sample."""
        labels = labels_of(features)
        places = sequences.places_of_tokens()
        if context is not None:
            labels = labels[context.host_tokens].masked_fill(~context.host_held, IGNORED_LABEL)
            places = None
        return labelled(labels, places, device)

    def _all_tokens(self, states: Tensor, sequences: SequenceLayout, context: ContextSequence | None) -> Tensor:
        if context is None or self._context is None or self._context.size == 1:
            return all_tokens(states, sequences)
        # Each member of the context-parallel group outputs all tokens, and gradients of the members are added up.
        return scale_gradient(context.gather(states[0]), 1 / self._context.size)

    def _enter(
        self, embedded: Tensor, inputs: StageInput, sequences: SequenceLayout, context: ContextSequence | None
    ) -> Tensor:
        """Embedded tokens [rows, columns, H], with encoder outputs where the layouts have them. Of shared tokens, those
        that this rank holds have come in."""
        if self._preprocess is not None:
            merged = self._merged_by_callback(embedded, inputs.incoming, inputs.features, inputs.samples, sequences)
            return merge(embedded, merged, sequences.places())
        for source, tokens in inputs.incoming.items():
            at = places_of_outputs(inputs.samples, self.name, source, sequences)
            if context is not None:
                at = context.own(at)
            if len(at) or context is not None:
                embedded = merge(embedded, tokens, at)
        return embedded

    def _merged_by_callback(
        self,
        embedded: Tensor,
        incoming: Mapping[str, Tensor],
        features: Sequence[Mapping[str, Tensor]],
        samples: Sequence[Sample],
        sequences: SequenceLayout,
    ) -> Tensor:
        """[sum of T, H]: what the callback makes of every sample's embedded tokens and encoder outputs."""
        assert self._preprocess is not None
        own = embedded.flatten(0, 1)[to_device(sequences.places(), embedded.device)].split(sequences.lengths)
        outputs = {
            source: tokens.split([sample.num_outputs(source) for sample in samples])
            for source, tokens in incoming.items()
        }
        merged = []
        for i, (sample, tokens) in enumerate(zip(samples, own, strict=True)):
            encoder_outputs = {source: parts[i] for source, parts in outputs.items() if sample.has(source)}
            inputs = {"input_ids": to_device(features[i]["input_ids"], self.device), "inputs_embeds": tokens}
            merged.append(self._preprocess(encoder_outputs, inputs)["inputs_embeds"])
            if merged[-1].shape != tokens.shape:
                raise UserError(
                    f"preprocess_callback: returned inputs_embeds {list(merged[-1].shape)} for sample {sample.id!r}; "
                    f"its layout needs {list(tokens.shape)}"
                )
        return torch.cat(merged)

    def _cross_attention(
        self, incoming: Mapping[str, Tensor], samples: Sequence[Sample], sequences: SequenceLayout, device: torch.device
    ) -> dict[str, Any]:
        """Keys and values: a row of zeros, then every sample's encoder outputs (padded: a row per sample)."""
        sources = [source for source in incoming if not self._is_merged(source, samples)]
        if not sources:
            return {}
        owners = to_device(torch.cat([_owners(samples, source) for source in sources]), device)
        dtype = next(self.parameters()).dtype
        tokens = torch.cat([incoming[source] for source in sources]).to(dtype)
        owner_of_row = to_device(sequences.sample_of_token(), device)
        states = torch.cat([tokens.new_zeros(1, tokens.shape[1]), tokens])[None].expand(sequences.shape[0], -1, -1)
        sees = owner_of_row[:, :, None] == owners[None, None, :]
        has_image = sees.any(-1, keepdim=True)
        visible = torch.cat([~has_image, sees], dim=-1)[:, None]
        lowest = torch.finfo(dtype).min
        return {
            "cross_attention_states": states,
            "cross_attention_mask": torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, lowest),
            "full_text_row_masked_out_mask": has_image[:, None].to(dtype),
        }

    def _is_merged(self, source: str, samples: Sequence[Sample]) -> bool:
        """Whether the source's outputs stand in the sequence itself."""
        return any(segment.source == source for sample in samples for segment in sample.layouts[self.name])


def _sample_of_row(sequences: SequenceLayout, context: ContextSequence | None) -> Tensor:
    """[rows * columns] of this rank, on the host: which sample of the microbatch stands there; -1 where none does."""
    samples = sequences.sample_of_token().flatten()
    return samples if context is None else samples[context.host_tokens].masked_fill(~context.host_held, -1)


def _owners(samples: Sequence[Sample], source: str) -> Tensor:
    """Returns the sample's index in the microbatch for each output token of `source`, in the order (sample, item)."""
    return torch.repeat_interleave(torch.tensor([sample.num_outputs(source) for sample in samples]))
