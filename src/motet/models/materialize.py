"""A module from its description in the run file, with weights in some of its layers only.

The whole model is built on the meta device, where it takes no memory; the layers that a stage holds are then given
memory and either drawn at random or read from safetensors, tensor by tensor. So no rank ever holds more than its own.

Random weights depend on (seed, module name, layer) alone, so every cut of a model begins with the same weights, to the
bit. transformers' own `initialize_weights` draws them. It skips what is marked `_is_hf_initialized`, a private name of
transformers (docs/decisions/materialize.md); a test pins it.

Cross-attention of a caption decoder that was stored without it is drawn.

Limits: safetensors only; weights that transformers computes from several stored tensors (quantised ones) are refused.
"""

import hashlib
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from motet.config import PartConfig, TowerConfig
from motet.errors import UserError
from motet.families.caption_decoders import decoder_layer_parts, is_added, num_decoder_layers
from motet.families.classes import Kind, config_class_named, model_class_of, part_type
from motet.families.hf_config import tower_family
from motet.families.language_models import language_model_layer_parts, num_language_model_layers
from motet.models.stages.encoder import encoder_layer_parts, num_encoder_layers
from motet.plan import LayerRange

FLOAT32 = torch.float32


@contextmanager
def dtypes_by_name() -> Iterator[None]:
    """Restores torch's names within `float64_throughout`, for readers of files that know dtypes by these names."""
    with patch.object(torch, "float32", FLOAT32), patch.object(torch, "float", FLOAT32):
        yield


@contextmanager
def float64_throughout() -> Iterator[None]:
    """For verification: a cast to float32 gives float64, so that a comparison shows differences of 1e-12 and not the
    rounding of a norm (transformers' norms and rotary positions compute in float32 whatever the model's dtype).

    Replaces names of torch for the whole process, because a mode of torch's would not reach what is recomputed in a
    backward pass. Both sides of a comparison run in it."""
    # When torch first pickles a tensor it makes tables of the dtypes by these names, and keeps them.
    pickle.loads(pickle.dumps(torch.empty(0)))
    with (
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
    ):
        yield


LAYERS: Mapping[Kind, tuple[Callable[[nn.Module], int], Callable[[nn.Module, int], tuple[str, ...]]]] = {
    "encoder": (lambda model: num_encoder_layers(model, None), encoder_layer_parts),
    "language_model": (num_language_model_layers, language_model_layer_parts),
    "decoder": (num_decoder_layers, decoder_layer_parts),
}
"""By kind: how many layers a model has, and the paths of a layer's sub-modules."""

Parts = Mapping[int, tuple[str, ...]]
"""For every layer that is held, the paths of its sub-modules."""


def read_part_config(part: PartConfig, kind: Kind, *, where: str) -> PretrainedConfig:
    """The transformers configuration of an encoder, a language model or a caption decoder.

    `where`: its key in the run file. Raises `ValueError` naming the key and what is wrong.
    """
    try:
        if part.config is not None:
            config = config_class_named(part.config)(**part.values)
            model_class_of(config.model_type, kind)
            return config
        model_type = stored_model_type(part)
        family = tower_family(model_type, part.part) if isinstance(part, TowerConfig) else part_type(model_type, kind)
        return model_class_of(family, kind).config_class.from_pretrained(_folder_of(part), **part.values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except FileNotFoundError as error:
        raise UserError(f"{where}.path: {error.filename} is missing; give a folder with config.json") from None
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        key = "values" if part.values or part.config else "path"
        raise UserError(f"{where}.{key}: {' '.join(str(error).split())}") from None


def stored_model_type(part: PartConfig) -> str:
    """Of what `hub` or `path` holds, which may be a model of several parts."""
    return str(json.loads((_folder_of(part) / "config.json").read_text()).get("model_type", ""))


def materialize(
    part: PartConfig,
    kind: Kind,
    *,
    name: str,
    where: str,
    layers: LayerRange | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The transformers model, on the CPU, with weights in `layers` and the rest on the meta device.

    Args:
        name: the module's; its random weights depend on it.
        where: its key in the run file, for messages.
        layers: half-open, without the projector's; None: all.

    Raises `ValueError` if configuration or weights are missing or do not fit each other.
    """
    config = read_part_config(part, kind, where=where)
    model = _build_on_meta(model_class_of(config.model_type, kind), config, dtype, where)
    num_layers = num_module_layers(model, kind)
    first, last = (0, num_layers) if layers is None else (layers[0], min(layers[1], num_layers))
    own = set(range(first, last))
    is_tied = kind != "encoder" and bool(config.tie_word_embeddings)
    if is_tied and num_layers - 1 in own:
        own.add(0)  # The head's weight is the embedding's.
    parts = {layer: layer_parts(model, kind, layer) for layer in sorted(own)}
    outside = _outside_layers(model, [path for layer in range(num_layers) for path in layer_parts(model, kind, layer)])
    _give_memory(model, parts, outside)
    has_weights = part.config is None
    added = (
        {n for n, _ in model.named_parameters() if kind == "decoder" and is_added(model, n)} if has_weights else set()
    )
    if has_weights:
        for key, parameter in model.named_parameters():
            parameter._is_hf_initialized = key not in added
    _draw(model, parts, outside, seed=part.seed, name=name)
    if is_tied and num_layers - 1 in own:
        model.tie_weights()
    if has_weights:
        _read_weights(model, parts, _folder_of(part), where, may_lack=added)
    return model


def stored_tensor(part: PartConfig, key: str, *, where: str) -> torch.Tensor | None:
    """A tensor beside the module's own in its hub repository or folder; None if it is not there."""
    if part.config is not None:
        return None
    for file in sorted(_folder_of(part).glob("*.safetensors")):
        if key in _names_in(file, where):
            with safe_open(file, framework="pt") as tensors, dtypes_by_name():
                return tensors.get_tensor(key)
    return None


def num_module_layers(model: nn.Module, kind: Kind) -> int:
    """Without the projector's."""
    return LAYERS[kind][0](model)


def layer_parts(model: nn.Module, kind: Kind, layer: int) -> tuple[str, ...]:
    """The paths of the sub-modules that make up one layer; none for a projector's."""
    return LAYERS[kind][1](model, layer)


def _folder_of(part: PartConfig) -> Path:
    if part.path is not None:
        return Path(part.path)
    assert part.hub is not None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(part.hub, allow_patterns=["*.json", "*.safetensors"]))
    except OSError as error:
        raise UserError(f"hub: {part.hub!r} cannot be had ({' '.join(str(error).split())}); use path") from None


def _build_on_meta(model_class: Any, config: PretrainedConfig, dtype: torch.dtype, where: str) -> Any:
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), default_dtype(dtype):
            return model_class(config)
    except (ValueError, TypeError, AssertionError, ZeroDivisionError, RuntimeError) as error:
        raise UserError(f"{where}: {model_class.__name__} cannot be built: {' '.join(str(error).split())}") from None


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _outside_layers(model: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """What belongs to no layer (rotary frequencies, and the modules that hold others). It has no parameters."""
    return [
        module
        for name, module in model.named_modules()
        if not any(name == path or name.startswith(f"{path}.") for path in paths)
    ]


def _give_memory(model: nn.Module, parts: Parts, outside: Sequence[nn.Module]) -> None:
    for path in (path for paths in parts.values() for path in paths):
        model.get_submodule(path).to_empty(device="cpu")
    for module in outside:
        assert not any(True for _ in module.parameters(recurse=False)), type(module)
        module.to_empty(device="cpu", recurse=False)


def _draw(model: Any, parts: Parts, outside: Sequence[nn.Module], *, seed: int, name: str) -> None:
    """Initializes every layer that is held under a seed of its own. Parameters marked as initialized stay."""
    for module in model.modules():
        module._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        _initialize(model, outside, seed=0)  # Nothing random is in there.
        for layer, paths in parts.items():
            modules = [inner for path in paths for inner in model.get_submodule(path).modules()]
            _initialize(model, modules, layer_seed(seed, name, layer))


def _initialize(model: Any, modules: Sequence[nn.Module], seed: int) -> None:
    for module in modules:
        module._is_hf_initialized = False  # type: ignore[assignment]
    torch.manual_seed(seed)
    model.initialize_weights()


def layer_seed(seed: int, name: str, layer: int) -> int:
    """Of the random weights of the module `name`'s layer, which may be its projector."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/{layer}".encode()).digest()[:7])


@torch.no_grad()
def _read_weights(model: Any, parts: Parts, folder: Path, where: str, *, may_lack: Set[str]) -> None:
    """Copies what the parts need out of the folder's safetensors, and reads nothing else. Of `may_lack`, all or nothing
    is stored; what is not stays as it was drawn."""
    wanted = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if any(name.startswith(f"{path}.") for paths in parts.values() for path in paths)
    }
    stored = _stored_names(model, folder, where)
    tied = model.all_tied_weights_keys
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name in wanted:
        source = name if name in stored else tied.get(name, name)
        if name in may_lack and may_lack.isdisjoint(stored):
            continue
        if source not in stored:
            raise UserError(f"{where}: {folder} has no weights for {name}; is it of another model?")
        file, key = stored[source]
        by_file.setdefault(file, []).append((name, key))
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as tensors, dtypes_by_name():
            for name, key in names:
                value = tensors.get_tensor(key)
                if value.shape != wanted[name].shape:
                    raise UserError(
                        f"{where}: {key} in {file} has shape {list(value.shape)}, the configuration makes it "
                        f"{list(wanted[name].shape)}; values that replace stored ones must keep shapes"
                    )
                wanted[name].copy_(value)


def _stored_names(model: Any, folder: Path, where: str) -> dict[str, tuple[Path, str]]:
    """By name in the model: the file and the name in it, as transformers' own loading translates them."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{where}.path: {folder} has no .safetensors file; save the model with save_pretrained")
    renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    names = model.state_dict(keep_vars=True)
    found = {}
    for file in files:
        for key in _names_in(file, where):
            name, _ = rename_source_key(key, renamings, [], model.base_model_prefix, names)
            found[name] = (file, key)
    prefix = _prefix_of(names, found)
    return {name.removeprefix(prefix): place for name, place in found.items() if name.startswith(prefix)}


def _prefix_of(names: Iterable[str], stored: Iterable[str]) -> str:
    """What stands before every name in a folder of a model that contains this one (`encoder.` for Whisper)."""
    stored, (first, *others) = set(stored), names
    if first in stored:
        return ""
    candidates = [name.removesuffix(first) for name in stored if name.endswith(f".{first}")]
    fitting = [prefix for prefix in candidates if all(prefix + name in stored for name in others)]
    return fitting[0] if len(fitting) == 1 else ""


def _names_in(file: Path, where: str) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise UserError(f"{where}: {file} is damaged ({error}); copy it again") from None
