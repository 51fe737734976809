"""Converts transformers' `LlavaForConditionalGeneration` to a `MultimodalModule` and back.

The two are the same function where LLaVA's architecture allows: one vision encoder, a projector linear - GELU - linear,
and a decoder-only language model, merged at placeholder tokens (Liu et al., "Improved baselines with visual instruction
tuning", section 3). LLaVA takes features from `hidden_states`, so an encoder whose head applies a last norm (SigLIP,
DINOv2) needs a `feature_layer`.

Limits: one feature layer, images of the encoder's own size, no audio.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PretrainedConfig

from motet.errors import UserError
from motet.families.classes import model_class_of
from motet.families.encoders.token_counts import FeatureSelect, token_counts
from motet.models.graph import ModalityModule
from motet.models.hub.export import (
    ModelDescription,
    PartDescription,
    describe_module,
    generation_config,
    graph_tensors,
    load_model,
    write_folder,
)
from motet.models.hub.weights import MAX_SHARD_SIZE, RenamedTensors, save_part
from motet.models.multimodal import MultimodalModule
from motet.models.stages.projector import MlpProjector
from motet.plan import LANGUAGE_MODEL

HAS_CLASS_TOKEN = {"clip_vision_model": True, "dinov2": True, "siglip_vision_model": False, "pixtral": False}
"""Whether features include a class token, for each family of vision encoder that LLaVA runs as motet does."""

HAS_NORM_IN_HEAD = ("siglip_vision_model", "dinov2")
"""Families whose output has passed a last norm, so that no entry of `hidden_states` equals it."""


def to_llava(model: MultimodalModule, folder: str | Path, **options: Any) -> None:
    """Exports a model in memory by `export_llava`."""
    export_llava(graph_tensors(model), describe_module(model), folder, **options)


def export_llava(
    tensors: Mapping[str, Tensor],
    description: ModelDescription,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    image_processor: Any = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Writes a folder that `LlavaForConditionalGeneration.from_pretrained` loads.

    With both a tokenizer and an image processor it holds a `LlavaProcessor` as well (not for Pixtral, whose processor
    puts tokens between rows). Arguments as of `motet.models.hub.export.export_parts`.

    Raises `UserError` if the model is not one that LLaVA has, or the tensors are not the model's.
    """
    config = llava_config(description)
    (encoder,) = description.encoders

    def write(partial: Path) -> None:
        renamed = _as_llava_names(tensors, encoder)
        llava = LlavaForConditionalGeneration
        save_part(partial, llava, config, renamed, where="llava", max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
            generation_config(tokenizer).save_pretrained(partial)
        if image_processor is not None:
            _processor(config, tokenizer, image_processor).save_pretrained(partial)

    write_folder(Path(folder), write, marker="config.json")


def llava_config(description: ModelDescription) -> LlavaConfig:
    """Returns the LLaVA configuration of a model. Raises `UserError` if LLaVA has no such model."""
    if len(description.encoders) != 1 or description.merge != "placeholder":
        raise UserError("llava: needs one vision encoder, merged by placeholder; use export_parts instead")
    ((name, encoder),) = description.encoders.items()
    family = encoder.config.model_type
    if family not in HAS_CLASS_TOKEN:
        raise UserError(
            f"llava: {name} is a {family}, and LLaVA's encoder is one of {', '.join(HAS_CLASS_TOKEN)}; use export_parts"
        )
    if encoder.feature_layer is None and family in HAS_NORM_IN_HEAD:
        raise UserError(
            f"llava: the output of {name} has passed a last norm, which LLaVA lacks; train with feature_layer -1 or -2"
        )
    if encoder.projector != "mlp":
        raise UserError(f"llava: {name}'s projector is {encoder.projector}, and LLaVA's is mlp; use export_parts")
    text = description.language_model
    vocabulary = text.vocab_size
    if encoder.placeholder_token_id is None or not encoder.placeholder_token_id < vocabulary:
        raise UserError(
            f"llava: {name}'s placeholder id is {encoder.placeholder_token_id}; "
            f"LLaVA needs one within the vocabulary of {vocabulary}"
        )
    if getattr(text, "cross_attention_layers", None) or getattr(text, "final_logit_softcapping", None):
        raise UserError(
            f"llava: LLaVA does not support a {text.model_type} like this as language model; use export_parts"
        )
    drops_class_token = encoder.feature_select == "patch" and HAS_CLASS_TOKEN[family]
    return LlavaConfig(
        vision_config=encoder.config,
        text_config=text,
        image_token_index=encoder.placeholder_token_id,
        image_seq_length=_tokens_per_image(encoder),
        projector_hidden_act="gelu",
        vision_feature_select_strategy="default" if drops_class_token else "full",
        vision_feature_layer=-1 if encoder.feature_layer is None else encoder.feature_layer,
        tie_word_embeddings=text.tie_word_embeddings,
    )


def from_llava(source: str | Path | LlavaForConditionalGeneration) -> MultimodalModule:
    """Makes a `MultimodalModule` of a LLaVA model; it shares the parts of a model in memory.

    Raises `UserError` if the folder is damaged or the model has something that motet does not.
    """
    if isinstance(source, (str, Path)):
        source = load_model(Path(source), _llava_class)
    model: Any = source
    config = model.config
    if config.model_type != LlavaConfig.model_type:
        raise UserError(
            f"llava: {type(model).__name__} is a {config.model_type}, not a LLaVA; a run file takes it whole, as "
            "model.path"
        )
    layer = config.vision_feature_layer
    if isinstance(layer, (list, tuple)):
        if len(layer) != 1:
            raise UserError(f"llava: vision_feature_layer is {list(layer)}; motet takes features from one layer")
        (layer,) = layer
    encoder = ModalityModule(
        model.model.vision_tower,
        _projector(model),
        feature_layer=layer,
        feature_select=_feature_select(config),
    )
    language_model = _causal_language_model(model)
    return MultimodalModule(
        {"vision": encoder}, language_model, placeholder_token_ids={"vision": config.image_token_index}
    )


def _llava_class(model_type: str) -> Any:
    if model_type != LlavaConfig.model_type:
        raise UserError(f"is a {model_type}, not a LLaVA")
    return LlavaForConditionalGeneration


def _feature_select(config: LlavaConfig) -> FeatureSelect:
    family = config.vision_config.model_type
    if family not in HAS_CLASS_TOKEN:
        raise UserError(f"llava: its vision encoder is a {family}; motet reads {', '.join(HAS_CLASS_TOKEN)}")
    drops_first = config.vision_feature_select_strategy == "default"
    if drops_first and not HAS_CLASS_TOKEN[family]:
        raise UserError(
            f"llava: vision_feature_select_strategy default drops the first patch of a {family}, which has no class "
            "token; set it to full"
        )
    return "patch" if drops_first or not HAS_CLASS_TOKEN[family] else "full"


def _projector(model: Any) -> nn.Module:
    """Returns motet's named projector if it computes the same function, else LLaVA's own module."""
    theirs = model.model.multi_modal_projector
    if model.config.projector_hidden_act != "gelu" or theirs.linear_1.bias is None:
        return theirs
    with torch.device("meta"):
        projector = MlpProjector(theirs.linear_1.in_features, theirs.linear_1.out_features)
    projector.linear_1, projector.linear_2 = theirs.linear_1, theirs.linear_2
    return projector


def _causal_language_model(model: Any) -> nn.Module:
    base = model.model.language_model
    text: PretrainedConfig = base.config
    text.tie_word_embeddings = model.lm_head.weight is base.get_input_embeddings().weight
    with torch.device("meta"):
        causal = model_class_of(text.model_type, "language_model")(text)
    causal.model, causal.lm_head = base, model.lm_head
    return causal


def _tokens_per_image(encoder: PartDescription) -> int:
    side = encoder.config.image_size // encoder.config.patch_size
    counts = token_counts(encoder.config, (side, side))
    return counts.num_full if encoder.feature_select == "full" else counts.num_patch


def _as_llava_names(tensors: Mapping[str, Tensor], encoder: str) -> RenamedTensors:
    prefixes = {
        f"{encoder}.module.": "model.vision_tower.",
        f"{encoder}.projector.": "model.multi_modal_projector.",
        f"{LANGUAGE_MODEL}.module.model.": "model.language_model.",
        f"{LANGUAGE_MODEL}.module.lm_head.": "lm_head.",
    }
    old_names = {}
    for name in tensors:
        ours = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if ours is None:
            raise UserError(f"export: the tensor {name} belongs to no part of the model")
        old_names[prefixes[ours] + name.removeprefix(ours)] = name
    return RenamedTensors(tensors, old_names)


def _processor(config: LlavaConfig, tokenizer: Any, image_processor: Any) -> Any:
    if tokenizer is None or config.vision_config.model_type == "pixtral":
        return image_processor
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=int(HAS_CLASS_TOKEN[config.vision_config.model_type]),
        image_token=tokenizer.convert_ids_to_tokens(config.image_token_index),
        chat_template=tokenizer.chat_template,
    )
