"""Tensor parallelism of unmodified HuggingFace modules: local shards of their linears, collectives around them.

`apply_tensor_parallel` replaces the parameters that the family's rules name (`motet.parallel.tensor_plans`) by this
rank's shards. Column linears stay what they are; row linears become `RowLinear` (`RowConv1D`); hooks at the entry of
attention and MLP bring in the activation, once for all column linears behind it. Parameters keep their names. Losses,
inputs and outputs of a stage are alike on all ranks of the group.

Limits: dropout is right only if the ranks of a group draw the same random numbers (seed them alike).
(Shoeybi et al. 2019, "Megatron-LM", section 3.)
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from motet.errors import UserError
from motet.parallel.sequence_parallel import enter_regions, has_submodule
from motet.parallel.split_backward import linear, shared_weight
from motet.parallel.tensor_collectives import (
    TensorParallel,
    reduce_from_group,
    reduce_scatter_from_group,
    shard_parameter,
)
from motet.parallel.tensor_plans import (
    Config,
    FamilyShards,
    Shard,
    check_tp,
    family_shards,
    layer_pattern,
    parameter_shard,
)
from motet.parallel.vocab_parallel import shard_embedding, shard_head

__all__ = [
    "RowLinear",
    "TensorParallel",
    "TensorParallelLayout",
    "apply_tensor_parallel",
    "partial_gradient_parameters",
    "tensor_parallel_layout",
    "tp_reduce_gradients",
]

_LAYOUT = "tensor_parallel_layout"


@dataclass(frozen=True)
class TensorParallelLayout:
    """The cuts of a module's parameters, by their names in it (tied ones under each of their names)."""

    tp: TensorParallel
    shards: Mapping[str, Shard]
    """The parameters that are cut; all others are whole on every rank."""
    partial_gradients: tuple[str, ...]
    """The whole parameters whose gradients must be summed over the group; those of all others are complete."""


class RowLinear(nn.Linear):
    """A linear cut by its inputs: [..., T, in / tp] -> the sum over the group, plus the bias, once.

    The output is [..., T, out] on every rank, or under sequence parallelism this rank's shard of the sequence.
    """

    def __init__(self, shard: nn.Linear, tp: TensorParallel) -> None:
        """`shard` holds this rank's columns of the weight, and the whole bias."""
        out_features, in_features = shard.weight.shape
        super().__init__(in_features, out_features, bias=shard.bias is not None, device="meta")
        self.weight = shard.weight
        self.bias = shard.bias
        self.tp = tp
        self.train(shard.training)

    def forward(self, x: Tensor) -> Tensor:
        reduce = reduce_scatter_from_group if self.tp.sequence_parallel else reduce_from_group
        y = reduce(linear(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class RowConv1D(Conv1D):
    """`RowLinear` of a weight [in / tp, out]."""

    def __init__(self, shard: Conv1D, tp: TensorParallel) -> None:
        """`shard` holds this rank's rows of the weight, and the whole bias."""
        nn.Module.__init__(self)
        self.nx, self.nf = shard.weight.shape
        self.weight, self.bias = shard.weight, shard.bias
        self.tp = tp
        self.train(shard.training)

    def forward(self, x: Tensor) -> Tensor:
        reduce = reduce_scatter_from_group if self.tp.sequence_parallel else reduce_from_group
        y = reduce(x @ shared_weight(self.weight, x), self.tp)
        return y + self.bias.to(y.dtype)


def apply_tensor_parallel(
    module: nn.Module, family: str, tp: TensorParallel, *, idle: Collection[str] = ()
) -> TensorParallelLayout:
    """Cuts the module in place and returns what was cut where.

    Args:
        module: a model of the family or a stage of one (layers of other stages may be absent), its weights whole, on
            any device (on meta: load the parts later, see `shard_parameter`). Parameters become new ones, with the
            same names: make optimizers after.
        family: the `model_type` of its transformers configuration.
        idle: layers that are there but never run: none of them can gather what others have scattered.

    Raises `ValueError` if heads or MLP do not divide, or if a layer has a linear that the family's rules do not name.
    """
    rules = family_shards(family)
    pattern = layer_pattern(family)
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if (match := pattern.fullmatch(name)) and match.group(2) is None and _linears(layer)
    }
    if tp.size == 1:
        layout = TensorParallelLayout(tp, {}, ())
    else:
        config = _configuration(layers.values())
        if config is not None:
            check_tp(family, config, tp.size)
        shards = _replace_parameters(module, family, config, tp)
        for layer in layers.values():
            _adapt_layer(layer, rules, tp)
        enter_regions([layer for name, layer in layers.items() if name not in idle], rules, tp)
        _adapt_vocabulary(module, rules, shards, tp)
        layout = TensorParallelLayout(tp, shards, _partial_gradients(layers, shards, rules, tp))
    setattr(module, _LAYOUT, layout)
    return layout


def tensor_parallel_layout(module: nn.Module) -> TensorParallelLayout | None:
    """The result of `apply_tensor_parallel` for this module; None if it was not applied."""
    return getattr(module, _LAYOUT, None)


def partial_gradient_parameters(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters whose gradients must be summed over the group before the optimizer's step."""
    layout = tensor_parallel_layout(module)
    return layout.partial_gradients if layout else ()


@torch.no_grad()
def tp_reduce_gradients(module: nn.Module) -> None:
    """Sums the partial gradients over the group, once a step, in one flat bucket per dtype.

    What takes part depends on the layout and `requires_grad` alone: a gradient that is missing counts as zero.
    """
    layout = tensor_parallel_layout(module)
    if layout is None:
        return
    buckets: dict[torch.dtype, list[nn.Parameter]] = {}
    for name in layout.partial_gradients:
        parameter = module.get_parameter(name)
        if parameter.requires_grad:
            buckets.setdefault(parameter.dtype, []).append(parameter)
    for parameters in buckets.values():
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        bucket = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(bucket, group=layout.tp.group)
        for gradient, total in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _linears(layer: nn.Module) -> dict[str, nn.Linear | Conv1D]:
    return {name: linear for name, linear in layer.named_modules() if isinstance(linear, nn.Linear | Conv1D)}


def _configuration(layers: Any) -> Config | None:
    """The layers' configuration: any of their modules that has one; None if there are no layers."""
    return next((part.config for layer in layers for part in layer.modules() if hasattr(part, "config")), None)


def _replace_parameters(module: nn.Module, family: str, config: Config | None, tp: TensorParallel) -> dict[str, Shard]:
    """Puts local shards in place of the parameters that are cut. Tied parameters stay tied."""
    shards: dict[str, Shard] = {}
    replaced: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        shard = parameter_shard(family, config, name, parameter.shape, tp.size)
        if shard is None:
            continue
        shards[name] = shard
        if id(parameter) not in replaced:
            local = shard_parameter(parameter.detach(), shard, tp.rank, tp.size)
            replaced[id(parameter)] = nn.Parameter(local, parameter.requires_grad)
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, replaced[id(parameter)])
    return shards


def _adapt_layer(layer: nn.Module, rules: FamilyShards, tp: TensorParallel) -> None:
    for path, shard in _linears(layer).items():
        if path in rules.column:
            if isinstance(shard, Conv1D):
                shard.nf = shard.weight.shape[1]
                shard.register_forward_pre_hook(_contiguous)
            else:
                shard.out_features = shard.weight.shape[0]
        elif path in rules.row:
            owner, _, attribute = path.rpartition(".")
            row = RowConv1D(shard, tp) if isinstance(shard, Conv1D) else RowLinear(shard, tp)
            setattr(layer.get_submodule(owner), attribute, row)
        else:
            raise UserError(
                f"tp_size: {type(layer).__name__} has a linear {path} that no rule in "
                "motet.parallel.tensor_plans names; use 1, or add a rule"
            )
    for path in rules.counts:
        _divide_count(layer, path.split("."), tp.size)


def _contiguous(linear: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Conv1D views what it gets, which may be cut out of a gathered and padded sequence."""
    return inputs[0].contiguous()


def _partial_gradients(
    layers: Mapping[str, nn.Module], shards: Mapping[str, Shard], rules: FamilyShards, tp: TensorParallel
) -> tuple[str, ...]:
    """Whole parameters that a rank applies to its own heads only, or to its own share of the sequence."""
    return tuple(
        f"{name}.{parameter}"
        for name, layer in layers.items()
        for parameter, _ in layer.named_parameters()
        if f"{name}.{parameter}" not in shards
        and (tp.sequence_parallel or parameter.rpartition(".")[0] in rules.local_heads)
    )


def _divide_count(layer: nn.Module, path: list[str], tp_size: int) -> None:
    """Divides an attribute of a submodule; an object that is not a module (a shared configuration) is copied first."""
    if not has_submodule(layer, path[0]):
        return
    owner: Any = layer.get_submodule(path[0])
    for attribute in path[1:-1]:
        setattr(owner, attribute, copy.copy(getattr(owner, attribute)))
        owner = getattr(owner, attribute)
    count = getattr(owner, path[-1])
    assert count % tp_size == 0, f"{'.'.join(path)} is {count}, which {tp_size} does not divide"
    setattr(owner, path[-1], count // tp_size)


def _adapt_vocabulary(module: nn.Module, rules: FamilyShards, shards: Mapping[str, Shard], tp: TensorParallel) -> None:
    for name, part in module.named_modules():
        if f"{name}.weight" in shards and name.rpartition(".")[2] in rules.vocabulary:
            if isinstance(part, nn.Embedding):
                shard_embedding(part, tp)
            elif isinstance(part, nn.Linear):
                shard_head(part, tp)
