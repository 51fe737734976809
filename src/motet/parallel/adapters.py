"""Adapters (LoRA) on the linear layers of a model's blocks, put in by peft after the model was cut for its stage.

An adapter adds `B(A(x)) * alpha / rank` to what a linear layer gives (Hu et al. 2021, "LoRA"). Its two matrices are cut
as the linear is, so it needs no collective of its own but one over `rank` columns:

* of a column linear, A is whole and B is cut by its outputs; each rank has a part of A's gradient;
* of a row linear, A is cut by its inputs and its output is summed over the group (`RowLinear`), B is whole; under
  sequence parallelism each rank has the part of B's gradient that its tokens bring;
* of a linear that is whole, both are whole, and their gradients are what the linear's own would be.

Hooks of the linear, which bring in what the group shares, go to peft's layer around it, so that the adapter reads the
same input. Initial values depend on a seed and the linear's path alone, not on how the model was cut.

Limits: adapters of linear layers and transformers' `Conv1D` only; no variants of LoRA (DoRA, rsLoRA).
"""

import hashlib
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from motet.errors import UserError
from motet.parallel.tensor.tensor_collectives import shard_parameter
from motet.parallel.tensor.tensor_parallel import (
    RowConv1D,
    RowLinear,
    TensorParallelLayout,
    set_tensor_parallel_layout,
    tensor_parallel_layout,
)
from motet.shapes.module_shape import is_target

ADAPTER = "default"
"""peft's name of a model's only adapter."""
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of one module."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...] | None
    """Ends of the paths, in a block, of the linear layers that get one; None: all do."""
    seed: int
    """Of the initial values."""

    def peft_config(self, **options: Any) -> Any:
        """peft's `LoraConfig`. Raises `UserError` if peft is not installed."""
        try:
            from peft import LoraConfig
        except ImportError:
            raise UserError("train.lora: needs the package peft; install it with: pip install 'motet[lora]'") from None
        return LoraConfig(r=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout, **options)


def is_second_matrix(name: str) -> bool:
    """Whether a parameter is the B of an adapter, which is zero at first."""
    return name.endswith(f".lora_B.{ADAPTER}.weight")


def adapted_linears(root: nn.Module, blocks: str, num_blocks: int, targets: Sequence[str] | None) -> list[str]:
    """Paths, in the list of blocks, of the linears that get an adapter; of blocks that are elsewhere there are none."""
    found = []
    for path, module in root.get_submodule(blocks).named_modules():
        index, _, name = path.partition(".")
        if name and isinstance(module, nn.Linear | Conv1D) and int(index) < num_blocks and is_target(name, targets):
            found.append(path)
    return found


def add_adapters(root: nn.Module, blocks: str, num_blocks: int, adapters: Adapters) -> None:
    """Puts adapters into a stage, after `apply_tensor_parallel`, or into a whole model. They require gradients.

    Args:
        blocks: the path of the list of blocks in it.
        num_blocks: so many of its members run; those behind them get none.
    """
    from peft import inject_adapter_in_model

    paths = adapted_linears(root, blocks, num_blocks, adapters.targets)
    if not paths:
        return
    members = root.get_submodule(blocks)
    linears = {path: members.get_submodule(path) for path in paths}
    options = {
        "target_modules": "|".join(map(re.escape, paths)),
        "fan_in_fan_out": any(isinstance(linear, Conv1D) for linear in linears.values()),
    }
    requires_grad = {parameter: parameter.requires_grad for parameter in members.parameters()}
    layout = tensor_parallel_layout(root)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of what Conv1D is called.
        inject_adapter_in_model(adapters.peft_config(**options), members, ADAPTER)
    for parameter, is_trained in requires_grad.items():
        parameter.requires_grad_(is_trained)
    if layout is not None:
        layout = _renamed(layout, {f"{blocks}.{path}" for path in paths})
    for path, linear in linears.items():
        wrapper: Any = members.get_submodule(path)
        for hooks in _HOOKS:
            setattr(wrapper, hooks, getattr(linear, hooks))
            setattr(linear, hooks, type(getattr(linear, hooks))())
        if layout is not None:
            layout = _cut(wrapper, linear, f"{blocks}.{path}", layout)
        _draw(wrapper.lora_A[ADAPTER].weight, f"{blocks}.{path}.lora_A", adapters.seed, layout)
    if layout is not None:
        set_tensor_parallel_layout(root, layout)


def _renamed(layout: TensorParallelLayout, adapted: set[str]) -> TensorParallelLayout:
    """With the names that parameters of adapted linears have within peft's layers."""

    def name(old: str) -> str:
        path, _, key = old.rpartition(".")
        return f"{path}.base_layer.{key}" if path in adapted else old

    return replace(
        layout,
        shards={name(old): shard for old, shard in layout.shards.items()},
        partial_gradients=tuple(map(name, layout.partial_gradients)),
    )


def _cut(wrapper: Any, linear: nn.Module, path: str, layout: TensorParallelLayout) -> TensorParallelLayout:
    """Makes the adapter's matrices those of the linear's cut, and notes how they are cut."""
    base, first, second = (f"{path}.{part}.weight" for part in ("base_layer", f"lora_A.{ADAPTER}", f"lora_B.{ADAPTER}"))
    shard = layout.shards.get(base)
    partial: tuple[str, ...]
    if isinstance(linear, RowLinear | RowConv1D):
        assert shard is not None
        splits_input = isinstance(linear, RowLinear) and linear.splits_input
        wrapper.lora_A[ADAPTER] = RowLinear(wrapper.lora_A[ADAPTER], linear.tp, splits_input=splits_input)
        shards, partial = {first: replace(shard, dim=1)}, (second,) if linear.tp.sequence_parallel else ()
    elif shard is not None:
        shards, partial = {second: replace(shard, dim=0)}, (first,)
    else:
        shards, partial = {}, (first, second) if base in layout.partial_gradients else ()
    return replace(layout, shards={**layout.shards, **shards}, partial_gradients=(*layout.partial_gradients, *partial))


@torch.no_grad()
def _draw(parameter: nn.Parameter, path: str, seed: int, layout: TensorParallelLayout | None) -> None:
    """The first matrix as peft draws it, uniform within 1 / sqrt(inputs), but the same under every cut."""
    shard = None if layout is None else layout.shards.get(f"{path}.{ADAPTER}.weight")
    rows, columns = parameter.shape
    if layout is not None and shard is not None:
        columns *= layout.tp.size
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    bound = 1 / math.sqrt(columns)
    whole = torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)
    if layout is not None:
        whole = shard_parameter(whole, shard, layout.tp.rank, layout.tp.size)
    parameter.copy_(whole)
