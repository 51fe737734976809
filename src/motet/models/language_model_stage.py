"""A run of a language model's layers as a pipeline stage: embed | n blocks | head (docs/architecture.md).

The HuggingFace base model's own forward runs, with only the stage's blocks in its list of layers, so masks, rotary
positions and sliding windows are transformers' own. Between stages travels [rows, columns, hidden_size] (see
`motet.models.merge.SequenceLayout`).

Cross-attention (Mllama): every token of a sample sees all encoder outputs of that sample and of no other. A row of
zeros is put before them: tokens of samples without an image see only it, and its value is zero because the projections
have no bias, so those samples pass the layer as they would alone.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from motet.attention.context_parallel import ContextParallel
from motet.attention.layout import Document
from motet.data.sample import Sample
from motet.errors import UserError
from motet.models.context_sequence import (
    ATTENTION,
    ContextSequence,
    attention_rules,
    check_shared,
    context_sequence,
    num_rows,
    set_attention,
)
from motet.models.language_models import (
    IGNORED_LABEL,
    base_model,
    is_tied,
    next_labels,
    num_language_model_layers,
)
from motet.models.merge import SequenceLayout, layout_of, merge, places_of_outputs
from motet.models.stage import keep_frozen_in_eval_mode
from motet.plan import ContextOptions, LayerRange
from motet.runtime.tensor_collectives import reduce_from_group
from motet.runtime.vocab_parallel import cross_entropy_sum, vocabulary_group

PreprocessCallback = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]
"""(encoder outputs, inputs) -> inputs; see `MultimodalModule`."""


class LanguageModelStage(nn.Module):
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
        super().__init__()
        self.name, self.layers, self.packing = name, layers, packing
        self._preprocess = preprocess_callback
        num_layers = num_language_model_layers(model)
        assert 0 <= layers[0] < layers[1] <= num_layers, layers
        self.is_first, self.is_last = layers[0] == 0, layers[1] == num_layers
        self.needs_features = self.is_first or self.is_last
        self.is_tied = is_tied(model)
        self._num_layers = num_layers
        self._first_block = max(0, layers[0] - 1)
        self.hidden_size: int = model.config.hidden_size
        self.output_size = self.hidden_size
        self.cross_attends = bool(getattr(model.config, "cross_attention_layers", ()))
        self._rules = attention_rules(model.config, media_attention)
        own = self._rules[self._first_block : min(layers[1] - 1, len(self._rules))]
        self._windows = {rule.window for rule in own}
        """Of the blocks that the stage holds."""
        self._context: ContextParallel | None = None
        self.module = model
        if layers != (0, num_layers):
            self._keep_own_layers(num_layers)
        if recompute:
            self._recompute_blocks()
        if media_attention != "causal":
            alone = ContextOptions(media_attention=media_attention)
            self.share_context(ContextParallel(group=None, rank=0, size=1, options=alone))

    def _keep_own_layers(self, num_layers: int) -> None:
        base = base_model(self.module)
        blocks = range(self._first_block, min(self.layers[1], num_layers - 1) - 1)
        config = copy.deepcopy(base.config)
        config.num_hidden_layers = len(blocks)
        config.use_cache = False
        if getattr(config, "layer_types", None):
            config.layer_types = [base.config.layer_types[block] for block in blocks]
        if self.cross_attends:
            base.cross_attention_layers = [
                block - self._first_block for block in base.config.cross_attention_layers if block in blocks
            ]
        base.config = config
        base.layers = nn.ModuleList([base.layers[block] for block in blocks])
        if not self.is_last:
            base.norm = nn.Identity()
            self.module.lm_head = nn.Identity()
        if not self.is_first:
            base.embed_tokens = nn.Identity()

    def _recompute_blocks(self) -> None:
        self.module.activation_checkpointing_enable()
        self.train(self.training)

    def share_context(self, cp: ContextParallel) -> None:
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

    def train(self, mode: bool = True) -> "LanguageModelStage":
        super().train(mode)
        keep_frozen_in_eval_mode(self.module)
        # transformers recomputes in training mode only; dropout is decided by the modules inside.
        for block in base_model(self.module).layers:
            block.training = block.training or getattr(block, "gradient_checkpointing", False)
        return self

    def canonical_name(self, local_name: str) -> str:
        """The parameter's name in the whole module; of a tied head, the embedding's."""
        head, _, tail = local_name.partition("model.layers.")
        if tail:
            block, _, rest = tail.partition(".")
            return f"{head}model.layers.{int(block) + self._first_block}.{rest}"
        if self.is_tied and local_name == "module.lm_head.weight":
            return "module.model.embed_tokens.weight"
        return local_name

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        """The layer that the parameter belongs to, or the two that share it."""
        name = self.canonical_name(local_name)
        if name.startswith("module.model.layers."):
            return (1 + int(name.split(".")[3]),)
        if name.startswith("module.model.embed_tokens."):
            return (0, self._num_layers - 1) if self.is_tied else (0,)
        return (self._num_layers - 1,)

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        if self._context is not None:
            return (1, num_rows(self._documents(samples), self._rules, self._context), self.hidden_size)
        return (*layout_of(samples, self.name, packed=self.packing).shape, self.hidden_size)

    output_shape = input_shape

    def prepare(self, samples: Sequence[Sample]) -> ContextSequence:
        """Derives what the attention of a coming microbatch needs, where it is ours; to be held as long as it is."""
        context = self.shared(samples, next(self.parameters()).device)
        context.prepare(self._windows)
        return context

    def shared(self, samples: Sequence[Sample], device: torch.device) -> ContextSequence:
        """The microbatch as the ranks of the group share it; only where `has_own_attention`."""
        assert self._context is not None
        return context_sequence(self._documents(samples), self._rules, self._context, device)

    def _documents(self, samples: Sequence[Sample]) -> tuple[Document, ...]:
        return tuple(Document(tuple(sample.layouts[self.name])) for sample in samples)

    @property
    def has_own_attention(self) -> bool:
        """Whether attention is ours, for its masks or for shares of the tokens."""
        return self._context is not None

    def forward(
        self,
        hidden: Tensor | None,
        incoming: Mapping[str, Tensor],
        features: Sequence[Mapping[str, Tensor]],
        samples: Sequence[Sample],
    ) -> Tensor:
        sequences = layout_of(samples, self.name, packed=self.packing)
        context = None
        if self._context is not None:
            device = features[0]["input_ids"].device if hidden is None else hidden.device
            context = self.shared(samples, device)
        output = self.hidden_states(hidden, incoming, features, samples, sequences, context)
        return self.loss_sum(output, features, sequences, context) if self.is_last else output

    def hidden_states(
        self,
        hidden: Tensor | None,
        incoming: Mapping[str, Tensor],
        features: Sequence[Mapping[str, Tensor]],
        samples: Sequence[Sample],
        sequences: SequenceLayout,
        context: ContextSequence | None = None,
    ) -> Tensor:
        """[rows, columns, hidden_size] after the stage's blocks and, on the last stage, the last norm.

        `context`: where only a share of the tokens is held, which; [1, held, hidden_size] then."""
        if hidden is None:
            hidden = self._embed(incoming, features, samples, sequences, context)
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
            return output
        mask = sequences.attention_mask()
        return base_model(self.module)(
            inputs_embeds=hidden,
            attention_mask=None if mask is None else mask.to(device),
            position_ids=sequences.position_ids().to(device),
            use_cache=False,
            **(self._cross_attention(incoming, samples, sequences, hidden) if self.cross_attends else {}),
        ).last_hidden_state

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
        flat = features[0]["input_ids"].new_zeros(sequences.shape[0] * sequences.shape[1])
        places = sequences.places().to(flat.device)
        flat[places] = torch.cat([f["input_ids"] for f in features])
        embedded = base_model(self.module).embed_tokens(flat.view(sequences.shape))
        if self._preprocess is not None:
            merged = merge(embedded, self._merged_by_callback(embedded, incoming, features, samples, sequences), places)
            return merged
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
        embedded = base_model(self.module).embed_tokens(ids[context.tokens][None])
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
        labels = torch.cat([next_labels(f["labels"]) for f in features])
        places = sequences.places().to(hidden.device)
        if context is not None:
            labels = labels[context.tokens].masked_fill(~context.held, IGNORED_LABEL)
            places = torch.arange(hidden.shape[1], device=hidden.device)
        counted = labels != IGNORED_LABEL
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places[counted])
        loss = cross_entropy_sum(self.logits(rows), labels[counted], vocabulary_group(self.module.lm_head))
        if self._context is None or self._context.size == 1:
            return loss
        return reduce_from_group(loss, self._context.as_group())

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., vocabulary], of this rank's share of the vocabulary."""
        logits = self.module.lm_head(hidden)
        cap = getattr(self.module.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _owners(samples: Sequence[Sample], source: str) -> Tensor:
    """Of each output token of `source`, in the order (sample, item): the sample's place in the microbatch."""
    return torch.repeat_interleave(torch.tensor([sample.num_outputs(source) for sample in samples]))
