"""A run of a language model's layers as a pipeline stage: embed | n blocks | head (docs/architecture.md).

The HuggingFace base model's own forward runs, with only the stage's blocks in its list of layers, so masks, rotary
positions and sliding windows are transformers' own. Between stages travels [rows, columns, hidden_size] (see
`motet.models.stages.causal.SequenceLayout`).

Cross-attention (Mllama): every token of a sample sees all encoder outputs of that sample and of no other. A row of
zeros is put before them: tokens of samples without an image see only it, and its value is zero because the projections
have no bias, so those samples pass the layer as they would alone.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from motet.assignment.sample import IGNORED_LABEL, Sample
from motet.attention.masks.distribution import Rows, rule_of_text, tokens_of_members
from motet.attention.masks.token_layout import Document
from motet.errors import UserError
from motet.families.language_models import (
    LANGUAGE_MODEL_PATHS,
    base_model,
    cross_attention_layers,
)
from motet.models.stages.causal import (
    CausalStage,
    SequenceLayout,
    all_tokens,
    labels_of,
    layout_of,
    merge,
    places_of_outputs,
    token_ids,
)
from motet.models.stages.stage import StageInput, StageOutput
from motet.parallel.context_attention import ContextParallel
from motet.parallel.context_sequence import (
    ATTENTION,
    ContextSequence,
    attention_rules,
    check_shared,
    context_sequence,
    num_rows,
    set_attention,
)
from motet.parallel.tensor_collectives import reduce_from_group, scale_gradient
from motet.plan import ContextOptions, LayerRange

PreprocessCallback = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]
"""(encoder outputs, inputs) -> inputs; see `MultimodalModule`."""


class LanguageModelStage(CausalStage):
    """Layers [first, last) of a causal language model.

    Takes over `model`: its other layers are dropped.

    Args:
        name: the module whose layouts are read.
        model: an HF `...ForCausalLM`.
        layers: half-open.
        packing: samples of a microbatch stand in one row, one after the other, instead of one row each.
        recompute: whether blocks are run again in the backward pass instead of keeping what is inside them.
        media_attention: what tokens of images and clips see, or a registered mask's name; other than causal, samples
            are packed.
        preprocess_callback: merges encoder outputs in the stage's stead, sample by sample.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        layers: LayerRange,
        *,
        packing: bool = False,
        recompute: bool = False,
        media_attention: str = "causal",
        preprocess_callback: PreprocessCallback | None = None,
    ) -> None:
        super().__init__(name, model, layers, LANGUAGE_MODEL_PATHS)
        self.packing = packing
        self._preprocess = preprocess_callback
        self.cross_attends = bool(cross_attention_layers(model))
        self._rules = attention_rules(model.config, media_attention)
        self._windows = {self._rules[block].window for block in self.own_blocks}
        """Of the blocks that the stage holds."""
        self._context: ContextParallel | None = None
        if layers != (0, self.num_layers):
            self._keep_own_layers()
        if recompute:
            self.recompute_blocks()
        if media_attention != "causal":
            alone = ContextOptions(media_attention=media_attention)
            self.enable_context_parallel(ContextParallel(group=None, rank=0, size=1, options=alone))

    def _keep_own_layers(self) -> None:
        base, blocks = base_model(self.module), self.own_blocks
        config = copy.deepcopy(base.config)
        config.num_hidden_layers = len(blocks)
        config.use_cache = False
        if getattr(config, "layer_types", None):
            config.layer_types = [base.config.layer_types[block] for block in blocks]
        if self.cross_attends:
            base.cross_attention_layers = [
                block - blocks.start for block in base.config.cross_attention_layers if block in blocks
            ]
        base.config = config
        base.layers = nn.ModuleList([base.layers[block] for block in blocks])
        if not self.is_last:
            base.norm = nn.Identity()
            self.module.lm_head = nn.Identity()
        if not self.is_first:
            base.embed_tokens = nn.Identity()

    def enable_context_parallel(self, cp: ContextParallel) -> None:
        """From now on this rank holds its share of every sequence only; samples are packed, and see each other as the
        rules say.

        Raises `UserError` for what that attention cannot do."""
        config = self.module.config
        if self.cross_attends:
            raise UserError(
                f"parallel: {self.name} has cross-attention, which context parallelism and media_attention do not "
                "support; use cp 1 and media_attention causal"
            )
        if self._preprocess is not None:
            raise UserError(
                f"parallel: {self.name} has a preprocess_callback, which needs whole samples; use cp 1, or merge by "
                "placeholder or prepend"
            )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        check_shared(self.name, self.module, config, cp, config.num_attention_heads, head_dim)
        self._context, self.packing = cp, True
        set_attention(self.module, ATTENTION)

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        if self._context is not None:
            return (1, num_rows(self._documents(samples), self._rules, self._context), self.hidden_size)
        return (*layout_of(samples, self.name, packed=self.packing).shape, self.hidden_size)

    output_shape = input_shape

    def prepare(self, samples: Sequence[Sample]) -> ContextSequence:
        """Derives what the attention of a coming microbatch needs, where it is ours; to be held as long as it is."""
        context = self._share(samples, next(self.parameters()).device)
        context.prepare(self._windows)
        return context

    def _share(self, samples: Sequence[Sample], device: torch.device) -> ContextSequence:
        assert self._context is not None
        return context_sequence(self._documents(samples), self._rules, self._context, device)

    def held_tokens(
        self, border: int, samples: Sequence[Sample], options: ContextOptions, cp_size: int
    ) -> list[Rows] | None:
        """Of what enters the layer `border`: which of the packed tokens each member of a group of this size holds."""
        return tokens_of_members(self._documents(samples), rule_of_text(options), options, cp_size)

    def _documents(self, samples: Sequence[Sample]) -> tuple[Document, ...]:
        return tuple(Document(tuple(sample.layouts[self.name])) for sample in samples)

    @property
    def has_own_attention(self) -> bool:
        """Whether attention is ours, for its masks or for shares of the tokens."""
        return self._context is not None

    def forward(self, inputs: StageInput) -> StageOutput:
        """The hidden states [rows, columns, hidden_size]; on the last stage the sum of the token losses and, for other
        modules that read them, the hidden states of all tokens [sum of tokens, hidden_size], sample after sample."""
        hidden, sequences, context = self.hidden_states(inputs)
        if not self.is_last:
            return StageOutput(hidden)
        loss = self.loss_sum(hidden, inputs.features, sequences, context)
        return StageOutput(self._all_tokens(hidden, sequences, context) if inputs.hands_on else None, loss)

    def _all_tokens(self, hidden: Tensor, sequences: SequenceLayout, context: ContextSequence | None) -> Tensor:
        if context is None or self._context is None or self._context.size == 1:
            return all_tokens(hidden, sequences)
        # Each member of the context-parallel group hands on all tokens, and gradients of the members are added up.
        return scale_gradient(context.gather(hidden[0]), 1 / self._context.size)

    def hidden_states(self, inputs: StageInput) -> tuple[Tensor, SequenceLayout, ContextSequence | None]:
        """[rows, columns, hidden_size] after the stage's blocks and, on the last stage, the last norm; how the
        microbatch's sequences lie in it, and with attention of our own which tokens this rank holds: [1, held,
        hidden_size] then."""
        hidden, incoming, samples = inputs.hidden, inputs.incoming, inputs.samples
        sequences = layout_of(samples, self.name, packed=self.packing)
        context = None
        if self._context is not None:
            device = inputs.features[0]["input_ids"].device if hidden is None else hidden.device
            context = self._share(samples, device)
        if hidden is None:
            hidden = self._embed(incoming, inputs.features, samples, sequences, context)
        device = hidden.device
        if context is not None:
            num_calls = context.num_calls
            output: Tensor = base_model(self.module)(
                inputs_embeds=hidden,
                position_ids=sequences.position_ids().to(device)[:, context.tokens],
                use_cache=False,
                context=context,
            ).last_hidden_state
            assert context.num_calls - num_calls == len(base_model(self.module).layers)
            return output, sequences, context
        mask = sequences.attention_mask()
        output = base_model(self.module)(
            inputs_embeds=hidden,
            attention_mask=None if mask is None else mask.to(device),
            position_ids=sequences.position_ids().to(device),
            use_cache=False,
            **(self._cross_attention(incoming, samples, sequences, hidden) if self.cross_attends else {}),
        ).last_hidden_state
        return output, sequences, None

    def _embed(
        self,
        incoming: Mapping[str, Tensor],
        features: Sequence[Mapping[str, Tensor]],
        samples: Sequence[Sample],
        sequences: SequenceLayout,
        context: ContextSequence | None,
    ) -> Tensor:
        """[rows, columns, H]: own tokens embedded, encoder outputs merged where the layouts have them."""
        if context is not None:
            return self._embed_held(incoming, features, samples, sequences, context)
        embedded = self.embed_tokens(token_ids(features, sequences))
        if self._preprocess is not None:
            merged = self._merged_by_callback(embedded, incoming, features, samples, sequences)
            return merge(embedded, merged, sequences.places())
        for source, tokens in incoming.items():
            at = places_of_outputs(samples, self.name, source, sequences)
            if len(at):
                embedded = merge(embedded, tokens, at)
        return embedded

    def _embed_held(
        self,
        incoming: Mapping[str, Tensor],
        features: Sequence[Mapping[str, Tensor]],
        samples: Sequence[Sample],
        sequences: SequenceLayout,
        context: ContextSequence,
    ) -> Tensor:
        """[1, held, H]. Of encoder outputs, those that this rank holds have come in."""
        ids = torch.cat([f["input_ids"] for f in features])
        embedded = self.embed_tokens(ids[context.tokens][None])
        for source, tokens in incoming.items():
            at = context.own(places_of_outputs(samples, self.name, source, sequences))
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
        own = embedded.flatten(0, 1)[sequences.places().to(embedded.device)].split(sequences.lengths)
        outputs = {
            source: tokens.split([sample.num_outputs(source) for sample in samples])
            for source, tokens in incoming.items()
        }
        merged = []
        for i, (sample, tokens) in enumerate(zip(samples, own, strict=True)):
            encoder_outputs = {source: parts[i] for source, parts in outputs.items() if sample.has(source)}
            inputs = {"input_ids": features[i]["input_ids"], "inputs_embeds": tokens}
            merged.append(self._preprocess(encoder_outputs, inputs)["inputs_embeds"])
            if merged[-1].shape != tokens.shape:
                raise UserError(
                    f"preprocess_callback: returned inputs_embeds {list(merged[-1].shape)} for sample {sample.id!r}; "
                    f"its layout needs {list(tokens.shape)}"
                )
        return torch.cat(merged)

    def _cross_attention(
        self, incoming: Mapping[str, Tensor], samples: Sequence[Sample], sequences: SequenceLayout, hidden: Tensor
    ) -> dict[str, Any]:
        """Keys and values: a row of zeros, then every sample's encoder outputs (padded: a row per sample)."""
        sources = [source for source in incoming if not self._is_merged(source, samples)]
        if not sources:
            return {}
        owners = torch.cat([_owners(samples, source) for source in sources]).to(hidden.device)
        tokens = torch.cat([incoming[source] for source in sources]).to(hidden.dtype)
        owner_of_row = sequences.sample_of_token().to(hidden.device)
        states = torch.cat([tokens.new_zeros(1, tokens.shape[1]), tokens])[None].expand(sequences.shape[0], -1, -1)
        sees = owner_of_row[:, :, None] == owners[None, None, :]
        has_image = sees.any(-1, keepdim=True)
        visible = torch.cat([~has_image, sees], dim=-1)[:, None]
        lowest = torch.finfo(hidden.dtype).min
        return {
            "cross_attention_states": states,
            "cross_attention_mask": torch.zeros_like(visible, dtype=hidden.dtype).masked_fill(~visible, lowest),
            "full_text_row_masked_out_mask": has_image[:, None].to(hidden.dtype),
        }

    def _is_merged(self, source: str, samples: Sequence[Sample]) -> bool:
        """Whether the source's outputs stand in the sequence itself."""
        return any(segment.source == source for sample in samples for segment in sample.layouts[self.name])

    def loss_sum(
        self,
        hidden: Tensor,
        features: Sequence[Mapping[str, Tensor]],
        sequences: SequenceLayout,
        context: ContextSequence | None = None,
    ) -> Tensor:
        """The sum of the losses of all tokens with a label; each token predicts the next of its own sample."""
        labels, places = labels_of(features), sequences.places()
        if context is not None:
            labels = labels[context.tokens].masked_fill(~context.held, IGNORED_LABEL)
            places = torch.arange(hidden.shape[1])
        loss = self.labelled_loss_sum(hidden, labels, places)
        if self._context is None or self._context.size == 1:
            return loss
        return reduce_from_group(loss, self._context.as_group())

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.module.lm_head(hidden)
        cap = getattr(self.module.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _owners(samples: Sequence[Sample], source: str) -> Tensor:
    """Of each output token of `source`, in the order (sample, item): the sample's place in the microbatch."""
    return torch.repeat_interleave(torch.tensor([sample.num_outputs(source) for sample in samples]))
