"""Builds a module from its description in the run file, with weights in some of its layers only.

The whole model is built on the meta device, where it takes no memory; the layers that a stage holds are then given
memory and either drawn at random or read from safetensors, tensor by tensor. So no rank ever holds more than its own.

Random weights depend on (seed, module name, layer) only, so every cut of a model starts with bitwise equal weights.
transformers' own `initialize_weights` draws them. It skips tensors that are marked `_is_hf_initialized`, a private name
of transformers (docs/decisions/materialize.md); a test pins it.

Cross-attention of a caption decoder that was stored without it is drawn at random.

Limits: safetensors only; quantised weights, and stored tensors that transformers splits into several, are refused.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PretrainedConfig

from motet.config import PartConfig
from motet.errors import UserError
from motet.families.caption_decoders import is_added
from motet.families.classes import Kind, model_class_of, model_on_meta
from motet.families.discovery.composite import Composite, composite_class_of, find_parts, read_composite_config
from motet.families.discovery.language_model_parts import causal_layer_parts, num_causal_layers
from motet.families.encoders.own_encoders import build, build_on_meta
from motet.families.hf_config import shape_request, stored_folder
from motet.families.language_models import check_causal, is_tied
from motet.families.module_config import configuration_of
from motet.families.stored_weights import Sources, is_within, sources_of
from motet.models.stages.encoder import encoder_layer_parts, num_encoder_layers
from motet.plan import LANGUAGE_MODEL, LayerRange

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
    "language_model": (num_causal_layers, causal_layer_parts),
    "decoder": (num_causal_layers, causal_layer_parts),
}
"""Functions that return a model's number of layers and the paths of a layer's sub-modules, by kind."""

Parts = Mapping[int, tuple[str, ...]]
"""For every layer that is held, the paths of its sub-modules."""


def read_part_config(part: PartConfig, kind: Kind, *, where: str) -> PretrainedConfig:
    """The transformers configuration of an encoder, a language model or a caption decoder.

    `where`: its key in the run file. Raises `ValueError` naming the key and what is wrong.
    """
    if getattr(part, "module", None) is not None:
        return build_on_meta(part.module, part.values, where)  # type: ignore[attr-defined]
    request = shape_request(part, where)
    try:
        config = configuration_of(request)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    try:
        model_class_of(config.model_type, kind)
        if kind == "language_model":
            check_causal(config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return config


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
    if getattr(part, "module", None) is not None:
        return build_own(part, name=name, where=where, dtype=dtype)
    config = read_part_config(part, kind, where=where)
    model = model_on_meta(model_class_of(config.model_type, kind), config, dtype, where)
    all_parts = [layer_parts(model, kind, layer) for layer in range(num_module_layers(model, kind))]
    added = {n for n, _ in model.named_parameters() if kind == "decoder" and is_added(model, n)}
    tied = kind != "encoder" and is_tied(model)
    _fill(model, all_parts, layers, part, name=name, where=where, is_tied=tied, may_lack=added)
    return model


def materialize_composite(
    part: PartConfig, module: str, *, layers: LayerRange | None = None, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Composite]:
    """The transformers model of several modalities, on the CPU, with weights in `layers` of its part `module` and the
    rest on the meta device; and where its parts are.

    Raises `ValueError` if configuration or weights are missing or do not fit each other."""
    config = read_composite_config(part)
    model = model_on_meta(composite_class_of(config), config, dtype, "model")
    composite = find_parts(model)
    elsewhere = [path for other in composite.modules.values() if other.name != module for path in other.paths]
    _fill(
        model,
        composite.modules[module].layers,
        layers,
        part,
        name=module,
        where="model",
        is_tied=module == LANGUAGE_MODEL and composite.is_tied,
        elsewhere=elsewhere,
    )
    return model, composite


def _fill(
    model: Any,
    all_parts: Sequence[tuple[str, ...]],
    layers: LayerRange | None,
    part: PartConfig,
    *,
    name: str,
    where: str,
    is_tied: bool,
    may_lack: Set[str] = frozenset(),
    elsewhere: Sequence[str] = (),
) -> None:
    """Gives weights to the layers [first, last) of `all_parts`. `elsewhere`: paths of other modules' layers."""
    num_layers = len(all_parts)
    first, last = (0, num_layers) if layers is None else (layers[0], min(layers[1], num_layers))
    own = set(range(first, last))
    if is_tied and num_layers - 1 in own:
        own.add(0)  # The head's weight is the embedding's.
    parts = {layer: all_parts[layer] for layer in sorted(own)}
    outside = _outside_layers(model, [*(path for paths in all_parts for path in paths), *elsewhere])
    _give_memory(model, parts, outside)
    has_weights = part.config is None
    if has_weights:
        for key, parameter in model.named_parameters():
            parameter._is_hf_initialized = key not in may_lack
    _draw(model, parts, outside, seed=part.seed, name=name)
    if is_tied and num_layers - 1 in own:
        model.tie_weights()
    if has_weights:
        try:
            folder = stored_folder(part)
        except UserError as error:
            raise UserError(f"{where}.{error}") from None
        _read_weights(model, parts, folder, where, may_lack=may_lack)
    left = [key for key, tensor in _tensors_of(model, parts, outside) if _is_left(tensor)]
    if left:
        raise UserError(
            f"{where}: {type(model).__name__} sets {left[0]} in its constructor only, which does not run "
            "when a model is built without memory; "
            + ("it is not supported" if has_weights else "give a folder with weights (path or hub)")
        )


def stored_tensor(part: PartConfig, key: str, *, where: str) -> torch.Tensor | None:
    """A tensor beside the module's own in its hub repository or folder; None if it is not there."""
    if part.config is not None:
        return None
    for file in sorted(stored_folder(part).glob("*.safetensors")):
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


def build_own(part: Any, *, name: str, where: str, dtype: torch.dtype) -> nn.Module:
    """An encoder of the user's own, whole, as its constructor makes it. Arguments as those of `materialize`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(layer_seed(part.seed, name, 0))
        return build(part.module, part.values, where).to(dtype)


def _outside_layers(model: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """Returns the modules that belong to no layer (rotary frequencies, containers). They have no parameters."""
    return [module for name, module in model.named_modules() if not is_within(name, paths)]


def _give_memory(model: nn.Module, parts: Parts, outside: Sequence[nn.Module]) -> None:
    single = dict(model.named_parameters(remove_duplicate=False))
    for path in (path for paths in parts.values() for path in paths):
        if path in single:
            owner, _, key = path.rpartition(".")
            empty = torch.empty_like(single[path], device="cpu")
            setattr(model.get_submodule(owner), key, nn.Parameter(empty))
        else:
            model.get_submodule(path).to_empty(device="cpu")
    for module in outside:
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = torch.empty_like(buffer, device="cpu")
    for _, tensor in _tensors_of(model, parts, outside):
        _mark(tensor)


def _tensors_of(model: nn.Module, parts: Parts, outside: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that was given memory, by name."""
    paths = [path for paths in parts.values() for path in paths]
    others = {id(buffer) for module in outside for buffer in module.buffers(recurse=False)}
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) in others or is_within(key, paths):
            yield key, tensor


@torch.no_grad()
def _mark(tensor: torch.Tensor) -> None:
    """Marks fresh memory with a value, by which it is recognized if it is never written."""
    if tensor.numel() and tensor.dtype != torch.bool:
        tensor.view(-1)[0] = _mark_of(tensor)


def _is_left(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or tensor.dtype == torch.bool:
        return False
    first, mark = tensor.detach().view(-1)[0], _mark_of(tensor)
    return bool(first.isnan()) if mark != mark else bool(first == mark)


def _mark_of(tensor: torch.Tensor) -> float | int:
    return float("nan") if tensor.is_floating_point() or tensor.is_complex() else torch.iinfo(tensor.dtype).max - 5


def _draw(model: Any, parts: Parts, outside: Sequence[nn.Module], *, seed: int, name: str) -> None:
    """Initializes every layer that is held under a seed of its own. Parameters marked as initialized stay."""
    for module in model.modules():
        module._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        _initialize(model, outside, seed=0)  # Nothing random is in there.
        for layer, paths in parts.items():
            modules = [inner for path in paths for inner in _modules_at(model, path)]
            _initialize(model, modules, layer_seed(seed, name, layer))


def _modules_at(model: nn.Module, path: str) -> list[nn.Module]:
    """The module and those inside it; of a single parameter, its owner."""
    owner, _, name = path.rpartition(".")
    if name in model.get_submodule(owner)._parameters:
        return [model.get_submodule(owner)]
    return list(model.get_submodule(path).modules())


def _initialize(model: Any, modules: Sequence[nn.Module], seed: int) -> None:
    for module in modules:
        module._is_hf_initialized = False  # type: ignore[assignment]
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would visit every kind of device.
    model.initialize_weights()


def compute_constants(model: Any) -> None:
    """Computes the constant buffers of a model again, in torch's default dtype, as `materialize` and `from_pretrained`
    do. Constructors run in the dtype of the model, in which constants such as GPT-J's table of positions round
    otherwise."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        _initialize(model, list(model.modules()), seed=0)


def layer_seed(seed: int, name: str, layer: int) -> int:
    """Returns the seed of the random weights of a layer of the module `name`, or of its projector."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/{layer}".encode()).digest()[:7])


@torch.no_grad()
def _read_weights(model: Any, parts: Parts, folder: Path, where: str, *, may_lack: Set[str]) -> None:
    """Copies what the parts need out of the folder's safetensors, and reads nothing else. Of `may_lack`, all or nothing
    is stored; what is not stays as it was drawn."""
    wanted = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if any(is_within(name, paths) for paths in parts.values())
    }
    stored, prefix = _stored_sources(model, folder, where)
    tied = model.all_tied_weights_keys
    sources: dict[str, str] = {}
    for name in wanted:
        source = name if name in stored else tied.get(name, name)
        if name in may_lack and may_lack.isdisjoint(stored):
            continue
        if source not in stored:
            raise UserError(f"{where}: {folder} has no weights for {name}; is it the folder of another model?")
        sources[name] = source
    with ExitStack() as opened, dtypes_by_name():
        files: dict[Path, Any] = {}

        def read(file: Path, key: str) -> torch.Tensor:
            if file not in files:
                files[file] = opened.enter_context(safe_open(file, framework="pt"))
            tensor: torch.Tensor = files[file].get_tensor(key)
            return tensor

        for name, source in sorted(sources.items(), key=lambda item: stored[item[1]].parts[0][2]):
            value = stored[source].value(prefix + source, model, read)
            if value.shape != wanted[name].shape:
                key, _, file = stored[source].parts[0]
                raise UserError(
                    f"{where}: {key} in {file} has shape {list(value.shape)}, the configuration makes it "
                    f"{list(wanted[name].shape)}; values that replace stored ones must keep the shapes"
                )
            wanted[name].copy_(value)


def _stored_sources(model: Any, folder: Path, where: str) -> tuple[dict[str, Sources[Path]], str]:
    """Returns what each tensor of the model is made of, and the prefix of its name in the folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{where}.path: {folder} has no .safetensors file; save the model with save_pretrained")
    found = sources_of(model, ((key, file) for file in files for key in _names_in(file, where)))
    prefix = _prefix_of(model.state_dict(keep_vars=True), found)
    return {name.removeprefix(prefix): own for name, own in found.items() if name.startswith(prefix)}, prefix


def _prefix_of(names: Iterable[str], stored: Iterable[str]) -> str:
    """Returns the prefix of all names in a folder of a model that contains this one (`encoder.` for Whisper)."""
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
