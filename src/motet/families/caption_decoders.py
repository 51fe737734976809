"""The supported families of caption decoders (causal models whose blocks attend to an encoder) and their parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motet.families.language_models import CausalPaths, causal_layer_parts, num_causal_layers


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
