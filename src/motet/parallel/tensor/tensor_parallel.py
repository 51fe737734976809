"""Tensor parallelism of unmodified HuggingFace modules: shards of their linears, with collectives around them.

`apply_tensor_parallel` replaces the parameters that are cut (`motet.parallel.tensor.tensor_cuts`) by this rank's
shards. Column linears stay what they are; row linears become `RowLinear` (`RowConv1D`); hooks at the entries of regions
bring in the activation, once for all column linears behind them. Parameters keep their names. Losses, inputs and
outputs of a stage are alike on all ranks of the group.

Limits: dropout is right only if the ranks of a group draw the same random numbers (seed them alike).
(Shoeybi et al. 2019, "Megatron-LM", section 3.)
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from motet.errors import UserError
from motet.parallel.experts import distribute_experts
from motet.parallel.main_gradients import gradient_dtype, zero_gradient
from motet.parallel.split_backward import linear
from motet.parallel.tensor.sequence_parallel import Running, enter_regions
from motet.parallel.tensor.tensor_collectives import (
    TensorParallel,
    copy_to_group,
    gather_outputs,
    reduce_from_group,
    reduce_scatter_from_group,
    shard_parameter,
    split_inputs,
)
from motet.parallel.tensor.tensor_cuts import TensorCuts, tensor_cuts
from motet.parallel.tensor.tensor_plans import Shard, check_tp
from motet.parallel.tensor.vocab_parallel import shard_embedding, shard_head

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
    experts: Mapping[str, Shard] = field(default_factory=dict)
    """The parameters that are cut over the group `tp.experts`; they are not among `shards`."""
    running: Running | None = None
    """State of the layers under sequence parallelism."""


class RowLinear(nn.Linear):
    """A linear cut by its inputs: [..., T, in / tp] -> the sum over the group, plus the bias, once.

    The output is [..., T, out] on every rank, or under sequence parallelism this rank's shard of the sequence.
    """

    def __init__(self, shard: nn.Linear, tp: TensorParallel, *, splits_input: bool = False) -> None:
        """`shard` holds this rank's columns of the weight, and the whole bias. `splits_input`: the input is whole."""
        out_features, in_features = shard.weight.shape
        super().__init__(in_features, out_features, bias=shard.bias is not None, device="meta")
        self.weight = shard.weight
        self.bias = shard.bias
        self.tp, self.splits_input = tp, splits_input
        self.train(shard.training)

    def forward(self, x: Tensor) -> Tensor:
        reduce = reduce_scatter_from_group if self.tp.sequence_parallel else reduce_from_group
        y = reduce(linear(split_inputs(x, self.tp) if self.splits_input else x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class RowConv1D(Conv1D):
    """A `RowLinear` with a transposed weight [in / tp, out] (transformers' `Conv1D`)."""

    def __init__(self, shard: Conv1D, tp: TensorParallel) -> None:
        """`shard` holds this rank's rows of the weight, and the whole bias."""
        nn.Module.__init__(self)
        self.nx, self.nf = shard.weight.shape
        self.weight, self.bias = shard.weight, shard.bias
        self.tp = tp
        self.train(shard.training)

    def forward(self, x: Tensor) -> Tensor:
        reduce = reduce_scatter_from_group if self.tp.sequence_parallel else reduce_from_group
        y = reduce(x @ self.weight, self.tp)
        return y + self.bias.to(y.dtype)


def apply_tensor_parallel(
    module: nn.Module, tp: TensorParallel, *, idle: Collection[str] = (), cuts: TensorCuts | None = None
) -> TensorParallelLayout:
    """Cuts the module in place and returns the cuts.

    Args:
        module: a transformers model or a stage of one (layers of other stages may be absent), its weights whole, on
            any device (on meta: load the parts later, see `shard_parameter`). Parameters become new ones, with the
            same names: make optimizers after.
        idle: layers that are there but never run: none of them can gather what others have scattered.
        cuts: of its linears; None: those of a transformers model (`motet.parallel.tensor.tensor_cuts`).

    Raises `UserError` if heads or MLP do not divide, if nothing in the layers can be cut, or if the
    model's own plan asks for what is not supported.
    """
    experts: dict[str, Shard] = {}
    if tp.experts is not None:
        cuts = tensor_cuts(module, distributes_experts=True)
        experts = distribute_experts(module, cuts.experts, tp)
    if tp.size == 1:
        layout = TensorParallelLayout(tp, {}, (), experts)
    else:
        cuts = cuts or tensor_cuts(module)
        if cuts.blocks and cuts.is_whole_model and not cuts.cuts_blocks:
            raise UserError(
                f"tp_size: {tp.size}, but nothing in the layers of {type(module).__name__} can be cut: transformers "
                "has no plan for them, and their linears' names are not known (motet.parallel.tensor.tensor_cuts); "
                "use 1"
            )
        check_tp(cuts.must_divide, tp.size)
        shards = _replace_parameters(module, cuts, tp)
        partial = enter_regions(module, cuts, tp, idle=idle)
        _adapt_linears(module, cuts, shards, partial.whole_inside, tp)
        _adapt_vocabulary(module, cuts, shards, tp)
        whole = tuple(name for name in partial.parameters if name not in shards and name not in experts)
        layout = TensorParallelLayout(tp, shards, whole, experts, partial.running)
    set_tensor_parallel_layout(module, layout)
    return layout


def set_tensor_parallel_layout(module: nn.Module, layout: TensorParallelLayout) -> None:
    """Replaces what `tensor_parallel_layout` returns, when parameters have been added to a module that is cut."""
    setattr(module, _LAYOUT, layout)


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
            buckets.setdefault(gradient_dtype(parameter), []).append(parameter)
    for parameters in buckets.values():
        sum_over_group(parameters, layout.tp.group)


def sum_over_group(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sums the gradients of one dtype of these parameters; those that are missing count as zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = zero_gradient(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    bucket = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(bucket, group=group)
    for gradient, total in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _replace_parameters(module: nn.Module, cuts: TensorCuts, tp: TensorParallel) -> dict[str, Shard]:
    """Puts local shards in place of the parameters that are cut. Tied parameters stay tied."""
    named = list(module.named_parameters(remove_duplicate=False))
    found = [(p, cuts.shard_of(module, name, tuple(p.shape), tp.size)) for name, p in named]
    cut = {id(parameter): (parameter, shard) for parameter, shard in found if shard is not None}
    local = {
        key: nn.Parameter(shard_parameter(parameter.detach(), shard, tp.rank, tp.size), parameter.requires_grad)
        for key, (parameter, shard) in cut.items()
    }
    shards: dict[str, Shard] = {}
    for name, parameter in named:
        if id(parameter) in cut:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, local[id(parameter)])
            shards[name] = cut[id(parameter)][1]
    return shards


def _adapt_linears(
    module: nn.Module, cuts: TensorCuts, shards: Mapping[str, Shard], whole_inside: Collection[str], tp: TensorParallel
) -> None:
    """`whole_inside`: row linears whose output is whole on every rank under sequence parallelism too."""
    alone = replace(tp, sequence_parallel=False)
    for path, cut in cuts.linears.items():
        if f"{path}.weight" not in shards:
            continue
        owner, _, attribute = path.rpartition(".")
        shard: Any = module.get_submodule(path)
        group = alone if path in whole_inside else tp
        if cut.kind == "row":
            if isinstance(shard, Conv1D):
                row: nn.Module = RowConv1D(shard, group)
            elif type(shard).forward is nn.Linear.forward:
                row = RowLinear(shard, group, splits_input=cut.is_outside)
            else:
                raise UserError(f"tp_size: {path} is a {type(shard).__name__}, which cannot be cut by inputs; use 1")
            setattr(module.get_submodule(owner), attribute, row)
        elif isinstance(shard, Conv1D):
            shard.nf = shard.weight.shape[1]
            shard.register_forward_pre_hook(_contiguous)
        else:
            shard.out_features = shard.weight.shape[0]
        if cut.kind == "column" and cut.is_outside:
            shard.register_forward_pre_hook(lambda module, args: (copy_to_group(args[0], tp), *args[1:]))
            shard.register_forward_hook(lambda module, args, output: gather_outputs(output, tp))
    for path, attribute in cuts.counts:
        _divide_count(module.get_submodule(path), attribute.split("."), tp.size)
    for path in cuts.divided_inputs:
        module.get_submodule(path).register_forward_pre_hook(lambda module, args: (args[0] / tp.size, *args[1:]))


def _contiguous(linear: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Hook that makes an input contiguous: Conv1D views its input, which may be a slice of a padded sequence."""
    return inputs[0].contiguous()


def _divide_count(owner: Any, path: list[str], tp_size: int) -> None:
    """Divides an attribute of a module; a shared configuration on the way to it is copied first."""
    for attribute in path[:-1]:
        setattr(owner, attribute, copy.copy(getattr(owner, attribute)))
        owner = getattr(owner, attribute)
    count = getattr(owner, path[-1])
    assert count % tp_size == 0, f"{'.'.join(path)} is {count}, which {tp_size} does not divide"
    setattr(owner, path[-1], count // tp_size)


def _adapt_vocabulary(module: nn.Module, cuts: TensorCuts, shards: Mapping[str, Shard], tp: TensorParallel) -> None:
    for path in cuts.vocabulary:
        part = module.get_submodule(path)
        if f"{path}.weight" in shards and isinstance(part, nn.Embedding):
            shard_embedding(part, tp)
        elif f"{path}.weight" in shards and isinstance(part, nn.Linear):
            shard_head(part, tp)
