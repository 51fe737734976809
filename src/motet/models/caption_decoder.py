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

from motet.data.sample import Sample
from motet.models.language_models import IGNORED_LABEL, is_tied, next_labels
from motet.models.merge import SequenceLayout, layout_of
from motet.models.stage import keep_frozen_in_eval_mode
from motet.plan import LayerRange
from motet.runtime.vocab_parallel import cross_entropy_sum, vocabulary_group


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
class DecoderFamily:
    """Where the parts of a family's model are: paths in it."""

    model_class: str
    """In transformers."""
    base: str
    """The model under the head."""
    words: str
    """The table of tokens."""
    blocks: str
    embed_parts: tuple[str, ...]
    head_parts: tuple[str, ...]
    logits: str
    """From hidden states to logits."""
    output: str
    """The linear onto the vocabulary."""
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
    """embed, the blocks, and the head."""
    return _num_blocks(model) + 2


def decoder_layer_parts(model: nn.Module, layer: int) -> tuple[str, ...]:
    """The paths of the sub-modules that make up one layer."""
    family = decoder_family(model)
    if 1 <= layer <= _num_blocks(model):
        return (f"{family.blocks}.{layer - 1}",)
    return family.embed_parts if layer == 0 else family.head_parts


def is_added(model: nn.Module, name: str) -> bool:
    """Whether the parameter called `name` is one that a stored model without cross-attention lacks."""
    return any(f".{part}." in name for part in decoder_family(model).added_parts)


def _num_blocks(model: nn.Module) -> int:
    return len(list(model.get_submodule(decoder_family(model).blocks).children()))


class CaptionDecoderStage(nn.Module):
    """Layers [first, last) of a caption decoder. Takes over `model`: its other layers are dropped.

    Args:
        name: the module whose layouts are read.
        model: one for which `is_caption_decoder` holds.
        layers: half-open.
        recompute: whether blocks are run again in the backward pass instead of keeping what is inside them.
    """

    def __init__(self, name: str, model: Any, layers: LayerRange, *, recompute: bool = False) -> None:
        super().__init__()
        self.name, self.layers, self.module = name, layers, model
        self._family = decoder_family(model)
        self._num_layers = num_decoder_layers(model)
        assert 0 <= layers[0] < layers[1] <= self._num_layers, layers
        self.is_first, self.is_last = layers[0] == 0, layers[1] == self._num_layers
        self.needs_features = self.is_first or self.is_last
        self.is_tied = is_tied(model)
        self.hidden_size = self.output_size = int(model.config.hidden_size)
        self._first_block = max(0, layers[0] - 1)
        if layers != (0, self._num_layers):
            self._keep_own_layers()
        if recompute:
            model.activation_checkpointing_enable()
            self.train(self.training)

    def _keep_own_layers(self) -> None:
        blocks = list(self.module.get_submodule(self._family.blocks).children())
        own = blocks[self._first_block : max(0, min(self.layers[1], self._num_layers - 1) - 1)]
        self.module.set_submodule(self._family.blocks, nn.ModuleList(own))
        if not self.is_first:
            for path, stand_in in self._family.after_embedding.items():
                self.module.set_submodule(path, stand_in())
        if not self.is_last:
            for path in self._family.head_parts:
                self.module.set_submodule(path, nn.Identity())

    def train(self, mode: bool = True) -> "CaptionDecoderStage":
        super().train(mode)
        keep_frozen_in_eval_mode(self.module)
        # transformers recomputes in training mode only; dropout is decided by the modules inside.
        for block in self.module.get_submodule(self._family.blocks).children():
            block.training = block.training or getattr(block, "gradient_checkpointing", False)
        return self

    def canonical_name(self, local_name: str) -> str:
        """The parameter's name in the whole module; of a tied head, the embedding's."""
        if self.is_tied and local_name == f"module.{self._family.output}.weight":
            return f"module.{self._family.words}.weight"
        blocks = f"module.{self._family.blocks}."
        if not local_name.startswith(blocks):
            return local_name
        block, _, rest = local_name.removeprefix(blocks).partition(".")
        return f"{blocks}{int(block) + self._first_block}.{rest}"

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        """The layer that the parameter belongs to, or the two that share it."""
        name = self.canonical_name(local_name)
        blocks = f"module.{self._family.blocks}."
        if name.startswith(blocks):
            return (1 + int(name.removeprefix(blocks).partition(".")[0]),)
        if self.is_tied and name == f"module.{self._family.words}.weight":
            return (0, self._num_layers - 1)
        in_embedding = any(name.startswith(f"module.{part}.") for part in self._family.embed_parts)
        return (0,) if in_embedding else (self._num_layers - 1,)

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        return (*layout_of(samples, self.name, packed=False).shape, self.hidden_size)

    output_shape = input_shape

    def forward(
        self,
        hidden: Tensor | None,
        incoming: Mapping[str, Tensor],
        features: Sequence[Mapping[str, Tensor]],
        samples: Sequence[Sample],
    ) -> Tensor:
        """[rows, columns, hidden_size]; of the last stage, the sum of the losses of all tokens with a label.

        `incoming`: the image tower's outputs, where the stage has a block."""
        sequences = layout_of(samples, self.name, packed=False)
        if hidden is None:
            ids = features[0]["input_ids"].new_zeros(sequences.shape[0] * sequences.shape[1])
            ids[sequences.places().to(ids.device)] = torch.cat([f["input_ids"] for f in features])
            hidden = self.module.get_submodule(self._family.words)(ids.view(sequences.shape))
        assert hidden is not None
        mask = sequences.attention_mask()
        output: Tensor = self.module.get_submodule(self._family.base)(
            inputs_embeds=hidden,
            attention_mask=None if mask is None else mask.to(hidden.device),
            position_ids=sequences.position_ids().to(hidden.device),
            use_cache=False,
            **self._encoder_states(incoming, samples, hidden),
        ).last_hidden_state
        return self._loss_sum(output, features, sequences) if self.is_last else output

    def _encoder_states(
        self, incoming: Mapping[str, Tensor], samples: Sequence[Sample], hidden: Tensor
    ) -> dict[str, Tensor]:
        """The features of each sample's image, a row for each sample, without the pooled vector."""
        if not incoming:
            return {}
        ((source, tokens),) = incoming.items()
        counts = [sample.num_outputs(source) for sample in samples]
        rows = [own[1:].to(hidden.dtype) for own in tokens.split(counts)]
        states = {"encoder_hidden_states": pad_sequence(rows, batch_first=True)}
        if len(set(counts)) > 1:
            lengths = torch.tensor(counts)[:, None] - 1
            states["encoder_attention_mask"] = (torch.arange(max(counts) - 1) < lengths).long().to(hidden.device)
        return states

    def _loss_sum(self, hidden: Tensor, features: Sequence[Mapping[str, Tensor]], sequences: SequenceLayout) -> Tensor:
        """Each token predicts the next of its own sample."""
        labels = torch.cat([next_labels(f["labels"]) for f in features])
        counted = labels != IGNORED_LABEL
        rows = hidden.flatten(0, 1).index_select(0, sequences.places().to(hidden.device)[counted])
        logits = self.module.get_submodule(self._family.logits)(rows)
        vocabulary = vocabulary_group(self.module.get_submodule(self._family.output))
        return cross_entropy_sum(logits, labels[counted], vocabulary)
