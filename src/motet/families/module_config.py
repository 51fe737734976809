"""The transformers configuration of a module, from its description in a run file or a config.json, and its class."""

import importlib
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PretrainedConfig, PreTrainedModel

from motet.errors import UserError, one_line
from motet.families.classes import (
    MODEL_CLASSES,
    Kind,
    config_class_named,
    config_class_of,
    model_class_of,
    part_of,
)
from motet.families.config_values import check_values
from motet.shapes.shape_card import Role, ShapeRequest

CAUSAL = MODEL_FOR_CAUSAL_LM_MAPPING
UNBUILDABLE = (
    ValueError,
    TypeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    AttributeError,
    LookupError,
    ImportError,
)
"""Exceptions that transformers raises for inconsistent sizes, and torch for operators without a meta kernel."""


def configuration_of(request: ShapeRequest) -> PretrainedConfig:
    """The configuration of the module that is asked for, which may be stored in a model of several parts.

    Raises `UserError`, to whose message belongs the module's key before it."""
    values, role = dict(request.values), request.role
    assert role != "composite"
    try:
        if request.config is not None:
            config_class = config_class_named(request.config)
            try:
                check_values(config_class, values)
            except UserError:
                if role is not None:  # A class of another kind is the larger mistake.
                    class_with_role(config_class(), role)
                raise
            return config_class(**values)
        stored = {key: value for key, value in request.stored.items() if key != "transformers_version"}
        whole = config_class_of(str(stored.pop("model_type", None))).from_dict(stored)
        config = whole if role == "tower" else part_of(whole, role)
        if values:
            check_values(type(config), values)
            config = type(config).from_dict({**config.to_dict(), **values})
        return config
    except UserError as error:
        message = str(error)
        where = "" if message.startswith((".", ":")) else ".config: " if request.config else ": "
        raise UserError(f"{where}{message}") from None
    except (*UNBUILDABLE, StrictDataclassError) as error:
        raise UserError(f"{'.values' if values else ''}: {one_line(error)}") from None


def role_of(config: PretrainedConfig) -> Role:
    """The role that a module has by its family."""
    family = config.model_type
    is_known = any(family in MODEL_CLASSES[kind] for kind in ("encoder", "language_model"))
    is_encoder = family in MODEL_CLASSES["encoder"] or not (is_known or type(config) in CAUSAL)
    return "encoder" if is_encoder else "language_model"


def class_with_role(config: PretrainedConfig, role: Role) -> Any:
    """The class in transformers of a module with this role. Raises `UserError` if it cannot have the role."""
    kind: Kind = "encoder" if role == "tower" else role
    family = config.model_type
    if family in MODEL_CLASSES[kind]:
        return model_class_of(family, kind)
    if kind == "decoder":
        raise UserError(f": {family} cannot be a caption decoder; give one of {', '.join(MODEL_CLASSES[kind])}")
    if kind == "language_model":
        if type(config) not in CAUSAL:
            raise UserError(f": {family} is an encoder; give a language model")
        return CAUSAL[type(config)]
    if type(config) in CAUSAL:
        raise UserError(f": {family} is a language model; give an encoder")
    if config.is_encoder_decoder:
        raise UserError(f": {family} is both encoder and decoder; give an encoder")
    if type(config) in MODEL_MAPPING:
        return MODEL_MAPPING[type(config)]
    # A part that transformers lists nowhere: the class for this configuration from which no other one derives.
    modeling = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    found: list[Any] = [each for each in vars(modeling).values() if isinstance(each, type)]
    found = [each for each in found if issubclass(each, PreTrainedModel)]
    own = [
        each for each in found if each.config_class is type(config) and not each.__name__.endswith("PreTrainedModel")
    ]
    if len(own) != 1:
        raise UserError(f": {family} is not an encoder of transformers; give one")
    return own[0]
