"""A caption decoder as a pipeline stage: an unmodified GPT-2 or BERT that attends to an image tower's features.

CoCa-like models (Yu et al. 2022) train a contrastive loss and this decoder's captioning loss at once. The HuggingFace
model's own forward runs, with only the stage's blocks in it; every block attends, after its own tokens, to all features
of its sample's image. Layers: embed, the blocks, head (docs/architecture.md). Between stages travels
[rows, columns, hidden_size], a row for each sample, padded on the right.

The tower hands on its pooled vector and then its features (`ModalityModule.pooling` "first"); the decoder reads the
features alone. They are as wide as the decoder: transformers' cross-attention has no projection of another width.

Limits: samples stand in rows of their own (no packing, no context parallelism); a caption's sample has an image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from motet.assignment.sample import Sample
from motet.families.language_models import CausalPaths, causal_layer_parts, num_causal_layers
from motet.models.stages.causal import CausalStage, all_tokens, labels_of, layout_of, token_ids
from motet.models.stages.stage import StageInput, StageOutput
from motet.plan import LayerRange


class _NoPositions(nn.Module):
    """In place of GPT-2's table on stages after the first: the positions are in what comes in."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


class _PassThrough(nn.Module):
    """In place of BERT's embeddings on stages after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Identity()  # transformers asks for it where blocks are recomputed.

    def forward(self, *, inputs_embeds: Tensor, **_: Any) -> Tensor:
        return inputs_embeds


@dataclass(frozen=True, kw_only=True)
class DecoderFamily(CausalPaths):
    """Of a family of caption decoders; paths are of parts in its models."""

    model_class: str
    """In transformers."""
    logits: str
    """From hidden states to logits."""
    after_embedding: Mapping[str, type[nn.Module]]
    """What stands for parts of the embedding where it has been computed."""
    added_parts: tuple[str, ...] = ("crossattention",)
    """Parts of a block that models trained without cross-attention have no weights for."""


DECODER_FAMILIES: Mapping[str, DecoderFamily] = {
    "gpt2": DecoderFamily(
        model_class="GPT2LMHeadModel",
        base="transformer",
        words="transformer.wte",
        blocks="transformer.h",
        embed_parts=("transformer.wte", "transformer.wpe"),
        head_parts=("transformer.ln_f", "lm_head"),
        logits="lm_head",
        output="lm_head",
        after_embedding={
            "transformer.wte": nn.Identity,
            "transformer.wpe": _NoPositions,
            "transformer.drop": nn.Identity,
        },
        added_parts=("crossattention", "ln_cross_attn"),
    ),
    "bert": DecoderFamily(
        model_class="BertLMHeadModel",
        base="bert",
        words="bert.embeddings.word_embeddings",
        blocks="bert.encoder.layer",
        embed_parts=("bert.embeddings",),
        head_parts=("cls",),
        logits="cls",
        output="cls.predictions.decoder",
        after_embedding={"bert.embeddings": _PassThrough},
    ),
}
"""By `model_type` of the configuration."""


def decoder_family(model: nn.Module) -> DecoderFamily:
    return DECODER_FAMILIES[model.config.model_type]  # type: ignore[union-attr, index]


def is_caption_decoder(model: nn.Module) -> bool:
    """Whether it is a causal model of a supported family whose blocks attend to an encoder."""
    config: Any = getattr(model, "config", None)
    family = DECODER_FAMILIES.get(getattr(config, "model_type", ""))
    is_causal = config is not None and getattr(config, "is_decoder", True)
    return type(model).__name__ == (family and family.model_class) and is_causal and config.add_cross_attention


def num_decoder_layers(model: nn.Module) -> int:
    return num_causal_layers(model, decoder_family(model))


def decoder_layer_parts(model: nn.Module, layer: int) -> tuple[str, ...]:
    return causal_layer_parts(model, decoder_family(model), layer)


def is_added(model: nn.Module, name: str) -> bool:
    """Whether the parameter called `name` is one that a stored model without cross-attention lacks."""
    return any(f".{part}." in name for part in decoder_family(model).added_parts)


class CaptionDecoderStage(CausalStage):
    """Layers [first, last) of a caption decoder. Takes over `model`: its other layers are dropped.

    Args:
        name: the module whose layouts are read.
        model: one for which `is_caption_decoder` holds.
        layers: half-open.
        recompute: whether blocks are run again in the backward pass instead of keeping what is inside them.
    """

    def __init__(self, name: str, model: Any, layers: LayerRange, *, recompute: bool = False) -> None:
        self._family = decoder_family(model)
        super().__init__(name, model, layers, self._family)
        if layers != (0, self.num_layers):
            self._keep_own_layers()
        if recompute:
            self.recompute_blocks()

    def _keep_own_layers(self) -> None:
        blocks = list(self.module.get_submodule(self._family.blocks).children())
        self.module.set_submodule(self._family.blocks, nn.ModuleList(blocks[block] for block in self.own_blocks))
        if not self.is_first:
            for path, stand_in in self._family.after_embedding.items():
                self.module.set_submodule(path, stand_in())
        if not self.is_last:
            for path in self._family.head_parts:
                self.module.set_submodule(path, nn.Identity())

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        return (*layout_of(samples, self.name, packed=False).shape, self.hidden_size)

    output_shape = input_shape

    def forward(self, inputs: StageInput) -> StageOutput:
        """[rows, columns, hidden_size]; of the last stage, the sum of the losses of all tokens with a label.

        `inputs.incoming`: the image tower's outputs, where the stage has a block."""
        hidden = inputs.hidden
        sequences = layout_of(inputs.samples, self.name, packed=False)
        if hidden is None:
            hidden = self.embed_tokens(token_ids(inputs.features, sequences))
        mask = sequences.attention_mask()
        output: Tensor = self.module.get_submodule(self._family.base)(
            inputs_embeds=hidden,
            attention_mask=None if mask is None else mask.to(hidden.device),
            position_ids=sequences.position_ids().to(hidden.device),
            use_cache=False,
            **self._encoder_states(inputs.incoming, inputs.samples, hidden),
        ).last_hidden_state
        if not self.is_last:
            return StageOutput(output)
        loss = self.labelled_loss_sum(output, labels_of(inputs.features), sequences.places())
        return StageOutput(all_tokens(output, sequences) if inputs.hands_on else None, loss)

    def _encoder_states(
        self, incoming: Mapping[str, Tensor], samples: Sequence[Sample], hidden: Tensor
    ) -> dict[str, Tensor]:
        """The features of each sample's image or text, a row for each sample, without the pooled vector."""
        if not incoming:
            return {}
        ((source, tokens),) = incoming.items()
        counts = [sample.num_outputs(source) for sample in samples]
        rows = [own[1:].to(hidden.dtype) for own in tokens.split(counts)]
        states = {"encoder_hidden_states": pad_sequence(rows, batch_first=True)}
        seen = [_seen(sample, source, count - 1) for sample, count in zip(samples, counts, strict=True)]
        num_columns = max(counts) - 1
        if any(own != (0, num_columns) for own in seen):
            first, end = torch.tensor(seen).T[:, :, None]
            column = torch.arange(num_columns)
            states["encoder_attention_mask"] = ((first <= column) & (column < end)).long().to(hidden.device)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module.get_submodule(self._family.logits)(hidden)
        return logits


def _seen(sample: Sample, source: str, num_features: int) -> tuple[int, int]:
    """Which of its features a caption attends to, half-open: not those of a text's padding."""
    (segment,) = sample.layouts[source]
    if len(segment.grid) == 4:  # A text of which not all is attended to (`motet.families.token_counts`).
        return segment.grid[2], segment.grid[3]
    return 0, num_features
