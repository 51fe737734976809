"""The transformers classes of each model, found by name and imported when they are first needed.

A family is named by the `model_type` of its configuration. Its layers are described where they are run: encoders in
`motet.families.encoders.encoder_families`, language models in `motet.families.language_models`, caption decoders in
`motet.families.caption_decoders`, the cut of their linears in `motet.parallel.tensor.tensor_plans`.
"""

import difflib
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import transformers
from transformers import PretrainedConfig

from motet.errors import UserError, one_line
from motet.families.caption_decoders import DECODER_FAMILIES
from motet.families.encoders.encoder_families import ENCODER_FAMILIES
from motet.families.language_models import LANGUAGE_MODELS, exceptional_families, registered_class
from motet.families.stored_weights import keep_corrections_wide

Kind = Literal["encoder", "language_model", "decoder"]

MODEL_CLASSES: dict[Kind, dict[str, str]] = {
    "encoder": {model_type: family.model_class for model_type, family in ENCODER_FAMILIES.items()},
    "language_model": dict(LANGUAGE_MODELS),
    "decoder": {model_type: family.model_class for model_type, family in DECODER_FAMILIES.items()},
}
"""By kind and `model_type`: the class in transformers."""

_NOT_EXPORTED = {
    "WhisperEncoder": "whisper.modeling_whisper",
    "MllamaTextConfig": "mllama.configuration_mllama",
    "Qwen2_5_VLVisionConfig": "qwen2_5_vl.configuration_qwen2_5_vl",
}
"""Public classes that `import transformers` does not offer: the module under `transformers.models`."""


def transformers_class(name: str) -> Any:
    """Raises `ValueError` for a name that transformers does not have."""
    if name in _NOT_EXPORTED:
        return getattr(importlib.import_module(f"transformers.models.{_NOT_EXPORTED[name]}"), name)
    found = getattr(transformers, name, None)
    if found is None:
        raise UserError(f"transformers has no class {name!r}; give a class's exact name, as in transformers' manual")
    return found


def config_class_named(name: str) -> type[PretrainedConfig]:
    """Raises `ValueError` unless it is the name of a configuration class."""
    exceptional_families()
    of_packages = {own.__name__: own for own in transformers.CONFIG_MAPPING._extra_content.values()}
    is_known = name in _NOT_EXPORTED or (name.endswith("Config") and hasattr(transformers, name))
    if name not in of_packages and not is_known:
        # transformers takes a third of a second to list its names.
        near = difflib.get_close_matches(name, [known for known in dir(transformers) if known.endswith("Config")], n=1)
        raise UserError(
            f"{name} is not known; {f'did you mean {near[0]}?' if near else 'give one, such as LlamaConfig'}"
        )
    found = of_packages.get(name) or transformers_class(name)
    if not (isinstance(found, type) and issubclass(found, PretrainedConfig)):
        raise UserError(f"{name} is not a configuration class of transformers; give one, such as LlamaConfig")
    return found


def model_class_of(model_type: str, kind: Kind) -> Any:
    """The class in transformers that a module of this family is.

    Raises `ValueError` if motet knows no such family of this kind."""
    known = MODEL_CLASSES[kind]
    if kind == "language_model" and (own := registered_class(model_type)) is not None:
        return own
    if model_type not in known:
        choice = "AutoModelForCausalLM's" if kind == "language_model" else ", ".join(known)
        raise UserError(f"model_type {model_type!r} is not a known {kind.replace('_', ' ')}; known are {choice}")
    return transformers_class(known[model_type])


def part_of(config: Any, kind: Kind | None) -> Any:
    """The language model's or an encoder's configuration, of a model with several parts; else the whole one."""
    if kind == "language_model":
        return config.get_text_config()
    parts = [getattr(config, key, None) for key in ("audio_config", "vision_config")] if kind == "encoder" else []
    return next((part for part in parts if isinstance(part, PretrainedConfig)), config)


def config_class_of(model_type: str) -> Any:
    """The configuration class of a family, or of a model with several parts. Raises `UserError` for another type."""
    exceptional_families()  # Packages may have registered it.
    if model_type in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[model_type]
    for kind, known in MODEL_CLASSES.items():
        if model_type in known:
            return model_class_of(model_type, kind).config_class
    raise UserError(f"model_type {model_type!r} is not known to the installed transformers")


def compute_experts_in(config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Chooses the eager implementation of experts for float64, in which transformers' kernels do not compute."""
    if dtype == torch.float64:
        config._experts_implementation = "eager"


def model_on_meta(model_class: Any, config: PretrainedConfig, dtype: torch.dtype, where: str) -> Any:
    """The model without memory. `where`: its key in the run file. Raises `UserError` where it cannot be built."""
    compute_experts_in(config, dtype)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), default_dtype(dtype):
            model = model_class(config)
            keep_corrections_wide(model)
            return model
    except (ValueError, TypeError, AssertionError, ZeroDivisionError, RuntimeError) as error:
        raise UserError(f"{where}: {model_class.__name__} cannot be built: {one_line(error)}") from None


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
