"""Sequence parallelism inside a tensor-parallel group: between parallel regions each rank holds a share of the tokens.

(Korthikanti et al. 2022, section 4.2.2.) The first layer of a stage scatters the sequence, the last one gathers it. A
stage of a language model whose neighbour is cut alike passes its share instead (`hand_on_shares`). Inside a layer,
norms, residuals and dropout see a share; attention and MLP gather their input, since HF attentions take the sequence
length from it, and their row linears sum and scatter.

The length of the whole sequence cannot be read off a share. It travels from layer to layer on the activation itself, as
an attribute, and not in some variable: a layer may be recomputed in the backward pass, when other microbatches have run
since. transformers recomputes a layer's `forward` without the layer's hooks, so the length is read again by the first
part of the layer that is given the activation. Where hooks on saved tensors are in force (`save_less`), autograd gives
another tensor with the same memory, so the length is noted on the memory too. Limits: nothing but layers may touch the
activations between them, and checkpointing must be the non-reentrant kind without offloading. Else the length is lost,
and the next gather ends with an `AssertionError`. Each share has memory of its own, so one length for each is enough.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from motet.parallel.tensor.tensor_collectives import (
    TensorParallel,
    copy_to_group,
    gather_sequence,
    gather_to_group,
    reduce_from_group,
    scatter_sequence,
    sequence_shard,
)
from motet.parallel.tensor.tensor_cuts import Region, TensorCuts

_LENGTH, _VERSION = "whole_sequence_length", "version_of_share"
SEQUENCE_INPUTS = ("full_text_row_masked_out_mask",)
"""Keyword inputs of blocks that are multiplied with the hidden states: [..., T, 1]."""
SKIPPABLE_PARTS = ("cross_attn",)
"""Parts of blocks that a forward may skip (cross-attention without encoder output)."""
TOKENWISE = re.compile(r"norm|scale|dropout|identity|activation", re.IGNORECASE)
"""Names of classes with parameters that compute each token independently."""


@dataclass
class Partial:
    """Parameters and linears of a block that see different shares of the sequence on different ranks."""

    parameters: list[str]
    """Names of parameters, cut or whole, whose gradients on each rank are partial sums."""
    whole_inside: set[str] = field(default_factory=set)
    """Row linears in parts whose inputs and outputs are whole sequences."""
    running: "Running | None" = None
    """State of the layers under sequence parallelism."""


def enter_regions(module: nn.Module, cuts: TensorCuts, tp: TensorParallel, *, idle: Collection[str] = ()) -> Partial:
    """Makes the parallel regions take their inputs from the group, and cuts the sequence between them."""
    blocks = {path: module.get_submodule(path) for path in cuts.blocks}
    partial = Partial([name for region in cuts.regions for name in _inside(module, region)])
    units: list[str] = []
    running: Running | None = None
    if tp.sequence_parallel:
        for path, block in blocks.items():
            units += _whole_units(block, path, cuts)
        within = [f"{unit}." for unit in units]
        partial.whole_inside = {path for path in cuts.linears if f"{path}.".startswith(tuple(within))}
        partial.parameters += [
            f"{path}.{name}"
            for path, block in blocks.items()
            for name, _ in block.named_parameters()
            if not f"{path}.{name}".startswith(tuple(within))
        ]
        running = partial.running = Running()
        lists: dict[str, list[nn.Module]] = {}
        for path, block in blocks.items():
            if path not in idle:
                lists.setdefault(path.rpartition(".")[0], []).append(block)
        for layers in lists.values():
            _attach_to_layers(layers, running, tp)
        running.has_one_list = len(lists) == 1
        for unit in units:
            _run_whole(module.get_submodule(unit), running, tp)
    for region in cuts.regions:
        is_whole = any(f"{region.entries[0]}.".startswith(f"{unit}.") for unit in units)
        for entry in region.entries:
            take = _take_from_group(None if is_whole else running, tp)
            module.get_submodule(entry).register_forward_pre_hook(take, with_kwargs=True)
        if region.summed is not None:
            module.get_submodule(region.summed).register_forward_hook(
                lambda part, args, output: _replace_first(output, lambda y: reduce_from_group(y, tp))
            )
    partial.parameters = list(dict.fromkeys(partial.parameters))
    return partial


def _inside(module: nn.Module, region: Region) -> Iterator[str]:
    """The parameters between a region's ends: all behind its entries, but not biases that are added to the sums, and
    not an entry's own ones, which scale or shift its result (Inkling's `global_scale`)."""
    for entry in region.entries:
        for name, _ in module.get_submodule(entry).named_parameters():
            owner = f"{entry}.{name}".rpartition(".")[0]
            if owner != entry and owner not in region.rows:
                yield f"{entry}.{name}"


def _take_from_group(running: "Running | None", tp: TensorParallel) -> Callable[..., Any]:
    """Makes a hook for a region's entry, which gathers a share of the sequence and sums the gradients of its input."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad and torch.is_floating_point(value):
            return copy_to_group(value, tp)
        return value

    def take(entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if running is None:
            return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}
        length = running.length
        assert length is not None, "the activation inside a layer lost its sequence length"
        others, args = tuple(map(copied, args[1:])), args[:1]
        kwargs = {n: value if n == "hidden_states" and not args else copied(value) for n, value in kwargs.items()}
        args, kwargs = _replace_hidden(args, kwargs, lambda hidden: gather_to_group(hidden, length, tp))
        return (*args, *others), kwargs

    return take


def _whole_units(part: nn.Module, path: str, cuts: TensorCuts) -> list[str]:
    """The parts of a block that need the whole sequence and are not regions: routers with their experts, convolutions,
    linears that are not cut. Norms and the like compute on a share."""
    entries = {entry for region in cuts.regions if region.summed is None for entry in region.entries}
    rows = {row for region in cuts.regions for row in region.rows}
    units: list[str] = []
    for name, child in part.named_children():
        inner = f"{path}.{name}"
        if inner in entries or inner in rows:
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            units += _whole_units(child, inner, cuts)
        elif any(region_part.startswith(f"{inner}.") for region_part in entries | rows):
            units += [inner] if _whole_units(child, inner, cuts) else []
        elif not _is_tokenwise(child):
            units.append(inner)
    return units


def _is_tokenwise(module: nn.Module) -> bool:
    holders = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    return all(TOKENWISE.search(type(holder).__name__) for holder in holders)


def _run_whole(unit: nn.Module, running: "Running", tp: TensorParallel) -> None:
    """Gathers the sequence before a part and cuts it after, so that all ranks compute the same."""

    def gather(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        length = running.length
        assert length is not None, "the activation inside a layer lost its sequence length"
        # Contiguous: routers view it as one row of tokens.
        return _replace_hidden(args, kwargs, lambda hidden: gather_sequence(hidden, length, tp).contiguous())

    def scatter(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]

        def share(whole: Tensor) -> Tensor:
            if whole.dim() == given.dim():
                return scatter_sequence(whole, tp)
            # Llama 4's experts return the tokens of all samples as one row; each sample is cut by itself.
            return scatter_sequence(whole.view(*given.shape[:-1], whole.shape[-1]), tp).flatten(0, -2)

        return _replace_first(output, share)

    unit.register_forward_pre_hook(gather, with_kwargs=True)
    unit.register_forward_hook(scatter, with_kwargs=True)


@dataclass
class Running:
    """State of the running layer, and what the stage's neighbours expect."""

    length: int | None = None
    """Length of the layer's whole sequence; None between layers."""
    takes_share: bool = False
    """Whether the first layer's input is a share already, with its length noted (`note_length`)."""
    gives_share: bool = False
    """Whether the last layer's output stays a share."""
    has_one_list: bool = True
    """Whether all layers stand in one list, so that there is one first and one last layer."""


def hand_on_shares(running: Running, *, takes_share: bool, gives_share: bool) -> None:
    """Skips the scatter before the first layer, or the gather after the last one, of a module of one list of layers."""
    assert running.has_one_list
    running.takes_share, running.gives_share = takes_share, gives_share


def _attach_to_layers(layers: Sequence[nn.Module], running: Running, tp: TensorParallel) -> None:
    """Scatters before the first layer, gathers after the last."""
    skippable = [any(hasattr(layer, part) for part in SKIPPABLE_PARTS) for layer in layers]
    # A layer that may be left out cannot be relied on to gather, so those at the end scatter and gather by themselves.
    gathers = [all(skippable[index + 1 :]) for index in range(len(layers))]
    may_get_whole = [all(skippable[:index]) or any(gathers[:index]) for index in range(len(layers))]

    def scatter_before(may_get_whole: bool) -> Callable[..., Any]:
        def scatter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def cut(hidden: Tensor) -> Tensor:
                known = getattr(hidden, _LENGTH, None)
                assert known is not None or (may_get_whole and not running.takes_share), (
                    "the activation between two layers lost its sequence length: something else than a layer touched it"
                )
                assert known is None or hidden._version == getattr(hidden, _VERSION), (
                    "something else than a layer wrote into the activation between two layers"
                )
                running.length = hidden.shape[-2] if known is None else known
                return note_length(scatter_sequence(hidden, tp) if known is None else hidden, running.length)

            args, kwargs = _replace_hidden(args, kwargs, cut)
            for name in SEQUENCE_INPUTS:
                if kwargs.get(name) is not None:
                    kwargs[name] = sequence_shard(kwargs[name], tp)
            return args, kwargs

        return scatter

    def read_again(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor):
            return
        known = getattr(hidden, _LENGTH, None)
        running.length = getattr(hidden.untyped_storage(), _LENGTH, running.length) if known is None else known

    def mark(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        note_length(output if isinstance(output, Tensor) else output[0], running.length)
        running.length = None

    def gather(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if running.gives_share:
            return mark(layer, args, output)
        length, running.length = running.length, None
        assert length is not None
        return _replace_first(output, lambda hidden: gather_sequence(hidden, length, tp))

    for layer, gets_whole, gives_whole in zip(layers, may_get_whole, gathers, strict=True):
        layer.register_forward_pre_hook(scatter_before(gets_whole), with_kwargs=True)
        for part in layer.children():
            part.register_forward_pre_hook(read_again, with_kwargs=True)
        layer.register_forward_hook(gather if gives_whole else mark)


def note_length(shard: Tensor, length: int | None) -> Tensor:
    """Notes the length of the whole sequence on a share of it, and how often the share has been written to."""
    setattr(shard, _LENGTH, length)
    setattr(shard.untyped_storage(), _LENGTH, length)
    setattr(shard, _VERSION, shard._version)
    return shard


def _replace_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], replace: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces a module's hidden states, which are its first argument or the keyword `hidden_states`."""
    if args:
        return (replace(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": replace(kwargs["hidden_states"])}


def _replace_first(output: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Replaces the hidden states in a module's output: the output itself, or the first of a tuple."""
    return replace(output) if isinstance(output, Tensor) else (replace(output[0]), *output[1:])
