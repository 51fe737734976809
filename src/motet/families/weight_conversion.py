"""Names and forms of stored weights, as transformers' own loading and saving change them.

Files of some families have older names, and mixtures of experts are stored with a tensor for each expert where the
model has one of all. transformers describes both by transforms (`transformers.core_model_loading`, whose private names
a test pins); these functions apply them to single tensors, so that a model is never in memory as a whole.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

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
        sources = Sources[T]() if pattern is None else found.get(name, Sources[T](of_pattern[pattern]))
        sources.parts.append((key, pattern or "", place))
        found[name] = sources
    return found


class StoredForm(Mapping[str, Tensor]):
    """View of a model's tensors as files have them: names, and for each expert a tensor. Read on access."""

    def __init__(self, model: Any, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """`model`: on the meta device; `weights`: its tensors by name; `tensors`: their values."""
        self._model, self._tensors = model, tensors
        names = {id(tensor): name for name, tensor in weights.items()}
        whole = revert_weight_conversion(model, dict(weights))
        self._origins = {key: names[id(tensor)] for key, tensor in whole.items() if id(tensor) in names}
        """By name in the file, the model's tensor."""
        self._is_renamed = frozenset(self._origins)
        for name in weights.keys() - set(self._origins.values()):
            for key in revert_weight_conversion(model, {name: weights[name]}):
                assert key in whole.keys() - self._origins.keys(), "transformers makes one stored tensor of several"
                self._origins[key] = name
        assert self._origins.keys() == whole.keys()
        self.shapes = {key: tensor.shape for key, tensor in whole.items()}
        self._converted: dict[str, dict[str, Tensor]] = {}
        """The tensors last made, by the model's: experts are written one after the other."""

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
