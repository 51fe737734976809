"""Adapters (LoRA) as peft stores them: written beside a module's weights, added to them, and read.

A module's tensors have the names that they have within peft's layers: `<linear>.base_layer.weight`,
`<linear>.lora_A.default.weight` and `<linear>.lora_B.default.weight`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from motet.errors import UserError, one_line
from motet.models.hub.weights import RenamedTensors, save_tensors
from motet.parallel.adapters import ADAPTER, Adapters

_BASE, _MATRICES = ".base_layer.", (f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight")


class AdaptedPart(Protocol):
    """A module with adapters."""

    @property
    def config(self) -> Any:
        """The module's transformers configuration."""

    @property
    def kind(self) -> str: ...

    @property
    def adapters(self) -> Adapters | None: ...

    @property
    def base(self) -> str | None:
        """Where its own weights came from."""


def without_adapters(tensors: Mapping[str, Tensor]) -> RenamedTensors:
    """A module's own weights, by their names in the plain model."""
    own = (name for name in tensors if not name.endswith(_MATRICES))
    return RenamedTensors(tensors, {name.replace(_BASE, "."): name for name in own})


class MergedTensors(Mapping[str, Tensor]):
    """A module's weights with its adapters added to them, by their names in the plain model; made when asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], model_class: Any, part: AdaptedPart) -> None:
        """`tensors`: with those of adapters."""
        assert part.adapters is not None
        self._tensors, self._own = tensors, without_adapters(tensors)
        self._scale = part.adapters.alpha / part.adapters.rank
        self._transposed = {path for path, module in _skeleton(model_class, part).items() if isinstance(module, Conv1D)}

    def __getitem__(self, name: str) -> Tensor:
        weight = self._own[name]
        path = name.removesuffix(".weight")
        first, second = (path + matrix for matrix in _MATRICES)
        if first not in self._tensors:
            return weight
        added = self._scale * (self._tensors[second].double() @ self._tensors[first].double())
        return (weight.double() + (added.T if path in self._transposed else added)).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def save_adapters(folder: Path, model_class: Any, part: AdaptedPart, tensors: Mapping[str, Tensor]) -> None:
    """Writes adapter_config.json and adapter_model.safetensors for `peft.PeftModel.from_pretrained`."""
    assert part.adapters is not None
    first, _ = _MATRICES
    paths = sorted(name.removesuffix(first) for name in tensors if name.endswith(first))
    linears = _skeleton(model_class, part)
    config = part.adapters.peft_config(
        target_modules=_shortest(paths, linears),
        fan_in_fan_out=any(isinstance(linears[path], Conv1D) for path in paths),
        task_type="CAUSAL_LM" if part.kind == "language_model" else None,
        base_model_name_or_path=part.base,
        inference_mode=True,
    )
    config.save_pretrained(folder)
    names = {
        f"base_model.model.{path}{matrix.replace(f'.{ADAPTER}', '')}": path + matrix
        for path in paths
        for matrix in _MATRICES
    }
    save_tensors(folder / "adapter_model.safetensors", RenamedTensors(tensors, names))


def load_adapters(model: Any, folder: Path) -> Any:
    """The model with the stored adapters added to its weights. Raises `UserError` if they cannot be read."""
    try:
        from peft import PeftModel
    except ImportError:
        raise UserError(f"{folder}: needs the package peft; install it with: pip install 'motet[lora]'") from None
    try:
        return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{folder}: cannot be loaded ({one_line(error)}); export it again") from None


def _skeleton(model_class: Any, part: AdaptedPart) -> dict[str, nn.Module]:
    """The linear layers of the plain model, by path."""
    with torch.device("meta"):
        model = model_class(part.config)
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def _shortest(paths: list[str], linears: Mapping[str, nn.Module]) -> list[str]:
    """The last parts of the paths, if peft takes them for these linears and for no others; else the paths."""
    ends = {path.rpartition(".")[2] for path in paths}
    return sorted(ends) if {path for path in linears if path.rpartition(".")[2] in ends} == set(paths) else paths
