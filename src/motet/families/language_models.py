"""Properties of every supported causal language model: its family, its cross-attention, its labels."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from motet.errors import UserError
from motet.families.entry_points import loaded

LANGUAGE_MODELS: Mapping[str, str] = {
    model_type: names[0] if isinstance(names, tuple) else names
    for model_type, names in {
        **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "mllama_text_model": "MllamaForCausalLM",
    }.items()
}
"""By `model_type` of the configuration: the class in transformers."""


_ENCODERS_TOO = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()


def cross_attention_layers(model: nn.Module) -> tuple[int, ...]:
    """The layers, in motet's numbering, at which encoder output enters by cross-attention."""
    return tuple(1 + block for block in getattr(model.config, "cross_attention_layers", ()))


def exceptional_families() -> Mapping[str, Callable[[Any], Any]]:
    """By `model_type`: functions of installed packages from a model to its `CausalPaths`
    (`motet.families.discovery.language_model_parts`)."""
    return loaded("motet.language_models")


def registered_class(model_type: str) -> Any:
    """The causal model that an installed package has registered with transformers' `AutoConfig` and
    `AutoModelForCausalLM`; None."""
    exceptional_families()  # Imported, packages register.
    known = {config.model_type: model for config, model in MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.items()}
    return known.get(model_type)


def is_language_model(model: nn.Module) -> bool:
    """Whether it is a causal language model of transformers, or of a package that registers with it."""
    return type(model).__name__ in LANGUAGE_MODELS.values() or type(model) is registered_class(
        getattr(model.config, "model_type", "")
    )


def check_causal(config: Any) -> None:
    """Raises `UserError` for a configuration with which each token would see those after it."""
    if getattr(config, "is_decoder", True) is False and config.model_type in _ENCODERS_TOO:
        raise UserError(f"{config.model_type} is an encoder unless its is_decoder is true; set it in values")


def is_tied(model: Any) -> bool:
    """Whether embedding and head share their weight."""
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if head.is_meta == embedding.is_meta:
        return head is embedding
    # One of them is another stage's. Some classes do not tie, whatever their configuration says (BigBird-Pegasus).
    both = {name for name, p in model.named_parameters(remove_duplicate=False) if p is head or p is embedding}
    return any(name in both and source in both for name, source in model.all_tied_weights_keys.items())
