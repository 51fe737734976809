"""The supported families of caption decoders (causal models whose blocks attend to an encoder)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """A family of caption decoders."""

    model_class: str
    """Name of the class in transformers."""
    added_parts: tuple[str, ...] = ("crossattention",)
    """Parts of a block that models trained without cross-attention have no weights for."""


DECODER_FAMILIES: Mapping[str, DecoderFamily] = {
    "gpt2": DecoderFamily(model_class="GPT2LMHeadModel", added_parts=("crossattention", "ln_cross_attn")),
    "bert": DecoderFamily(model_class="BertLMHeadModel"),
}
"""By `model_type` of the configuration."""


def is_caption_decoder(model: nn.Module) -> bool:
    """Whether it is a causal model of a supported family whose blocks attend to an encoder."""
    config: Any = getattr(model, "config", None)
    family = DECODER_FAMILIES.get(getattr(config, "model_type", ""))
    is_causal = config is not None and getattr(config, "is_decoder", True)
    return type(model).__name__ == (family and family.model_class) and is_causal and config.add_cross_attention


def is_added(model: Any, name: str) -> bool:
    """Whether the parameter called `name` is one that a stored model without cross-attention lacks."""
    return any(f".{part}." in name for part in DECODER_FAMILIES[model.config.model_type].added_parts)
