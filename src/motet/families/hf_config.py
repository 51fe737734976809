"""Reads the configuration of each part of a run file's model, without transformers and without weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from motet.config import (
    AutoencoderConfig,
    CodecConfig,
    DecoderConfig,
    GeneratorConfig,
    LanguageModelConfig,
    PartConfig,
    TowerConfig,
)
from motet.errors import UserError, closest, one_line
from motet.shapes.codes import EDGE, Codec, read_codec
from motet.shapes.diffusion import GENERATORS, UNET_DEFAULTS, unet_workload
from motet.shapes.diffusion_transformers import TRANSFORMERS, Connection, transformer_workload
from motet.shapes.module_shape import ModuleWorkload
from motet.shapes.shape_card import Role, ShapeRequest

TowerPart = Literal["image", "text"]


@dataclass(frozen=True)
class CompositeTowers:
    loss: Literal["softmax", "sigmoid"]
    """Loss that the stored `logit_scale` and `logit_bias` belong to."""
    families: Mapping[TowerPart, str]
    """The `model_type` of each tower."""


COMPOSITE_TOWERS: Mapping[str, CompositeTowers] = {
    "clip": CompositeTowers("softmax", {"image": "clip_vision_model", "text": "clip_text_model"}),
    "siglip": CompositeTowers("sigmoid", {"image": "siglip_vision_model", "text": "siglip_text_model"}),
}
"""By `model_type`."""

STORED_PROJECTIONS: Mapping[str, str] = {
    "clip_vision_model": "visual_projection.weight",
    "clip_text_model": "text_projection.weight",
}
"""By a tower's family: the projection matrix beside its weights, in a CLIPModel or a model "WithProjection"."""

_CONFIGS: Mapping[TowerPart, str] = {"image": "vision_config", "text": "text_config"}
DEFAULT_PROJECTION_DIM = 512


def tower_family(model_type: str, part: TowerPart | None) -> str:
    """The family of a tower stored in a model of this type: of a model that is one encoder, its own.

    Raises `UserError` if `part` is missing, or says something of a model that has no parts."""
    composite = COMPOSITE_TOWERS.get(model_type)
    if composite is None:
        if part is not None:
            raise UserError(f"part: is {part}, but what is stored is one {model_type} without parts; leave it out")
        return model_type
    if part is None:
        raise UserError(f"part: is missing, but what is stored is a {model_type} of two towers; give image or text")
    return composite.families[part]


def tower_values(stored: Mapping[str, Any], part: TowerPart | None) -> dict[str, Any]:
    """The configuration of a tower from that of the model in which it is stored. Raises as `tower_family`."""
    model_type = str(stored.get("model_type"))
    family = tower_family(model_type, part)
    if part is None:
        return dict(stored)
    own = stored.get(_CONFIGS[part]) or {}
    width = stored.get("projection_dim", DEFAULT_PROJECTION_DIM)
    return {**own, "model_type": family, **({} if model_type == "siglip" else {"projection_dim": width})}


def shape_request(part: PartConfig, where: str) -> ShapeRequest:
    """Returns the request for the shape of a part. Raises `UserError` if its configuration cannot be read."""
    role: Role = "encoder"
    if isinstance(part, LanguageModelConfig):
        role = "language_model"
    elif isinstance(part, TowerConfig):
        role = "tower"
    elif isinstance(part, DecoderConfig | GeneratorConfig):
        role = "decoder"
    if isinstance(part, GeneratorConfig):
        return ShapeRequest(role=role, config=part.config, values=code_decoder_values(part, where))
    if part.config is not None:
        return ShapeRequest(role=role, config=part.config, values=part.values)
    stored = stored_values(part, where)
    if isinstance(part, TowerConfig):
        try:
            stored = tower_values(stored, part.part)
        except UserError as error:
            raise UserError(f"{where}.{error}") from None
    return ShapeRequest(role=role, stored=stored, values=part.values)


def stored_values(part: PartConfig | AutoencoderConfig | CodecConfig, where: str) -> dict[str, Any]:
    """Returns the content of a part's config.json. Raises `UserError` if it cannot be read or downloaded."""
    path = config_file(part, where)
    try:
        stored = json.loads(path.read_text())
    except OSError as error:
        raise UserError(
            f"{where}.path: {path} cannot be read ({error.strerror}); give a folder that save_pretrained wrote"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}.path: {path} is not JSON ({error}); save the model again") from None
    if not isinstance(stored, dict):
        raise UserError(f"{where}.path: {path} is not a mapping; save the model again")
    return stored


def config_file(part: PartConfig | AutoencoderConfig | CodecConfig, where: str) -> Path:
    """The path of a part's config.json, which is fetched from the hub without weights. Raises `UserError`."""
    if part.path is not None:
        return Path(part.path) / "config.json"
    assert part.hub is not None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(part.hub, "config.json"))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{where}.hub: {part.hub} cannot be downloaded ({reason}); give a hub id or a path") from None


def stored_folder(part: PartConfig | AutoencoderConfig | CodecConfig) -> Path:
    """The local folder of a part's weights; those on the hub are fetched. Raises `UserError`."""
    if part.path is not None:
        return Path(part.path)
    assert part.hub is not None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(part.hub, allow_patterns=["*.json", "*.safetensors"]))
    except OSError as error:
        raise UserError(f"hub: {part.hub!r} cannot be downloaded ({one_line(error)}); use path") from None


def codec_of(part: GeneratorConfig, where: str) -> Codec:
    """The codec of a decoder of codes. `where`: the generator's key. Raises `UserError` if it cannot be used."""
    assert part.codec is not None
    return read_codec(stored_values(part.codec, f"{where}.codec"), part.codec.num_codebooks, f"{where}.codec")


def code_decoder_values(part: GeneratorConfig, where: str) -> dict[str, Any]:
    """Arguments of the configuration class of a decoder of codes. Raises `UserError` if its codec cannot be used."""
    own = {"vocab_size": codec_of(part, where).vocabulary, "bos_token_id": EDGE, "eos_token_id": EDGE}
    return {**part.values, **own, "is_decoder": True, "add_cross_attention": True, "tie_word_embeddings": False}


CLASS_CONDITIONAL = ("DiTTransformer2DModel", "Transformer2DModel")
"""Classes of diffusers that nothing but a class label conditions."""


OF_VIDEOS = (
    "WanTransformer3DModel",
    "CogVideoXTransformer3DModel",
    "HunyuanVideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
)
"""Classes of diffusers that generate videos."""


def read_generator(part: GeneratorConfig, name: str, incoming_size: int) -> ModuleWorkload:
    """A diffusion model's shape, from its class's name in diffusers or from its config.json. `incoming_size`: of what
    conditions it."""
    where = f"model.generators.{name}"
    if part.config in CLASS_CONDITIONAL:
        raise UserError(
            f"{where}.config: a {part.config} takes class labels and no hidden states, so it cannot read a language "
            f"model; give {' or '.join(TRANSFORMERS)}"
        )
    if part.config in OF_VIDEOS:
        raise UserError(
            f"{where}.config: a {part.config} generates videos, which is not supported; give a model of images, such "
            "as SD3Transformer2DModel"
        )
    if part.config is not None and part.config not in (known := (*TRANSFORMERS, *GENERATORS)):
        near = closest(part.config, known, "give one of")
        raise UserError(f"{where}.config: {part.config!r} is not known; {near}")
    stored = stored_values(part, where) if part.config is None else {"_class_name": part.config}
    known_keys = {*UNET_DEFAULTS, *(key for each in TRANSFORMERS.values() for key in each.defaults)}
    for key, value in part.values.items():
        if key in known_keys and isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UserError(f"{where}.values.{key}: is {value}; give a whole number of at least 1")
    try:
        connection = Connection(incoming_size=incoming_size, projector=part.projector, guidance=part.guidance)
        if stored["_class_name"] not in (classes := (*TRANSFORMERS, *GENERATORS)):
            raise UserError(f"_class_name {stored['_class_name']!r} is not known; known are {', '.join(classes)}")
        make = transformer_workload if stored["_class_name"] in TRANSFORMERS else unet_workload
        return make({**stored, **part.values}, connection)
    except UserError as error:
        message = str(error).removeprefix("model: ")
        is_key = message.startswith(("values.", "guidance:"))
        raise UserError(f"{where}{'.' if is_key else ': '}{message}") from None
    except (TypeError, ValueError, KeyError, ZeroDivisionError, IndexError, AttributeError) as error:
        raise UserError(f"{where}.values: do not make a {stored['_class_name']} ({error}); see diffusers") from None
