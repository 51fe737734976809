"""The stored tensors of a model, and the names and forms that they have in files.

Stored are parameters, and the buffers that belong to the weights. No gradient reaches these, but results depend on
them: corrections of routers' scores (DeepSeek-V3, GLM-4.5), scales of layers (Gemma 4). transformers keeps the
corrections in float32 whatever the dtype of the model.

Files of some families have older names, and mixtures of experts are stored with a tensor for each expert where the
model has one of all. transformers describes both by transforms (`transformers.core_model_loading`, whose private names
a test pins), and applies them when it loads and saves. The functions here apply them to single tensors, so that a model
is never in memory as a whole.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from motet.errors import UserError

CORRECTION = "e_score_correction_bias"
"""transformers' name of what a router adds to its scores when it chooses experts, and only then."""

WITHOUT_EXPORT = "set train.export to false, or call save_checkpoint: checkpoints hold all weights"
"""What to do with a model that cannot be exported."""


def is_within(name: str, paths: Iterable[str]) -> bool:
    """Whether a parameter or module is one of these paths, or lies inside one of them."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the floating-point buffers of a model that are stored beside its parameters, by name."""
    stored = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in stored and buffer.is_floating_point()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of a model, tied ones once, and its stored buffers, by name."""
    return {**dict(model.named_parameters()), **stored_buffers(model)}


def keep_corrections_wide(model: nn.Module) -> None:
    """Brings the corrections of routers' scores to float32 at least, as `from_pretrained` does."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name == CORRECTION:
                module._buffers[name] = buffer.to(torch.promote_types(buffer.dtype, torch.float32))


T = TypeVar("T")


@dataclass
class Sources(Generic[T]):
    """What a tensor of the model is made of."""

    converter: Any = None
    """Of transformers; None: of one stored tensor, as it is."""
    parts: list[tuple[str, str, T]] = field(default_factory=list)
    """Key in the file, the converter's pattern that it matches, and where it is."""

    def value(self, name: str, model: Any, read: Callable[[T, str], Tensor]) -> Tensor:
        """The tensor `name` of the model. `read`: a stored tensor, by where it is and its key."""
        if self.converter is None:
            ((key, _, place),) = self.parts
            return read(place, key)
        converter = copy.deepcopy(self.converter)
        for key, pattern, place in sorted(self.parts, key=lambda part: dot_natural_key(part[0])):
            converter.add_tensor(name, key, pattern, read(place, key))
        value = converter.convert(name, model=model, config=model.config)[name]
        made: Tensor = value[0] if isinstance(value, list) else value
        return made


def sources_of(model: Any, stored: Iterable[tuple[str, T]]) -> dict[str, Sources[T]]:
    """By name in the model, what each of its tensors is made of; names may have the prefix of a larger model.

    `stored`: keys in files, and where each is."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names = model.state_dict(keep_vars=True)
    found: dict[str, Sources[T]] = {}
    for key, place in stored:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if name not in names and key in names:  # As transformers loads it: it has the model's name already.
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, names)
        sources = Sources[T]() if pattern is None else found.get(name, Sources[T](of_pattern[pattern]))
        sources.parts.append((key, pattern or "", place))
        found[name] = sources
    return found


class StoredForm(Mapping[str, Tensor]):
    """View of a model's tensors as files have them: names, and for each expert a tensor. Read on access."""

    def __init__(self, model: Any, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """`model`: on the meta device; `weights`: its tensors by name; `tensors`: their values.

        Raises `UserError` where files have several tensors in one, and where transformers would not load a tensor again
        from the name under which it is stored."""
        self._model, self._tensors = model, tensors
        names = {id(tensor): name for name, tensor in weights.items()}
        whole = revert_weight_conversion(model, dict(weights))
        self._origins = {key: names[id(tensor)] for key, tensor in whole.items() if id(tensor) in names}
        """By name in the file, the model's tensor."""
        self._is_renamed = frozenset(self._origins)
        kept, converted = set(self._origins.values()), whole.keys() - self._origins.keys()
        origins_of_converted: dict[str, list[str]] = {}
        for name in weights:
            for key in () if name in kept else revert_weight_conversion(model, {name: weights[name]}):
                origins_of_converted.setdefault(key, []).append(name)
        joined = {
            name: key
            for key, origins in origins_of_converted.items()
            for name in origins
            if len(origins) > 1 or key not in converted
        }
        if joined:
            name, key = next(iter(joined.items()))
            raise UserError(
                f"export: transformers stores {len(joined)} of the tensors of a {type(model).__name__} together with "
                f"others ({name} in {key}), which motet does not write; {WITHOUT_EXPORT}"
            )
        self._origins |= {key: name for key, (name,) in origins_of_converted.items()}
        assert self._origins.keys() == whole.keys()
        self._check_loads_again()
        self.shapes = {key: tensor.shape for key, tensor in whole.items()}
        self._converted: dict[str, dict[str, Tensor]] = {}
        """The tensors last made, by the model's: experts are written one after the other."""

    def _check_loads_again(self) -> None:
        loaded = sources_of(self._model, self._origins.items())
        lost = {
            name: key
            for key, name in self._origins.items()
            if name not in loaded or any(origin != name for _, _, origin in loaded[name].parts)
        }
        if lost:
            (name, key), model_class = next(iter(lost.items())), type(self._model).__name__
            raise UserError(
                f"export: transformers would not load {len(lost)} of the tensors of a {model_class} again from the "
                f"names under which it stores them ({name} as {key}); {WITHOUT_EXPORT}"
            )

    def origin(self, key: str) -> str:
        """The model's tensor that a stored one is, or is a part of."""
        return self._origins[key]

    def __getitem__(self, key: str) -> Tensor:
        name = self._origins[key]
        if key in self._is_renamed:
            return self._tensors[name]
        if name not in self._converted:
            while len(self._converted) > 2:
                del self._converted[next(iter(self._converted))]
            self._converted[name] = revert_weight_conversion(self._model, {name: self._tensors[name].detach()})
        return self._converted[name][key].clone(memory_format=torch.contiguous_format)

    def __iter__(self) -> Any:
        return iter(self._origins)

    def __len__(self) -> int:
        return len(self._origins)
