"""Sequence parallelism inside a tensor-parallel group: between parallel regions each rank holds a share of the tokens.

(Korthikanti et al. 2022, section 4.2.2.) The first layer of a stage scatters the sequence, the last one gathers it, so
stages exchange whole sequences. Inside a layer, norms, residuals and dropout see a share; attention and MLP gather
their input, since HF attentions take the sequence length from it, and their row linears sum and scatter.

The length of the whole sequence cannot be read off a share. It travels from layer to layer on the activation itself, as
an attribute, and not in some variable: a layer may be recomputed in the backward pass, when other microbatches have run
since. transformers recomputes a layer's `forward` without the layer's hooks, so the length is read again by the first
part of the layer that is given the activation. Limits: nothing but layers may touch the activations between them, and
checkpointing must be the non-reentrant kind without hooks on saved tensors (offloading). Else the attribute is lost: an
`AssertionError`, never a wrong result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from motet.parallel.tensor_collectives import (
    TensorParallel,
    copy_to_group,
    gather_sequence,
    gather_to_group,
    scatter_sequence,
    sequence_shard,
)
from motet.parallel.tensor_plans import FamilyShards

_LENGTH = "whole_sequence_length"


def enter_regions(layers: Sequence[nn.Module], rules: FamilyShards, tp: TensorParallel) -> None:
    """Makes the parallel regions of the layers take their inputs from the group, and cuts the sequence between them."""
    running = _attach_to_layers(layers, rules, tp) if tp.sequence_parallel else None

    def take_from_group(region: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for name in rules.region_inputs:
            if kwargs.get(name) is not None:
                kwargs[name] = copy_to_group(kwargs[name], tp)
        if running is None:
            return _replace_hidden(args, kwargs, lambda hidden: copy_to_group(hidden, tp))
        length = running.length
        assert length is not None, "the activation inside a layer lost its sequence length"
        return _replace_hidden(args, kwargs, lambda hidden: gather_to_group(hidden, length, tp))

    for layer in layers:
        for path in rules.regions:
            if has_submodule(layer, path):
                layer.get_submodule(path).register_forward_pre_hook(take_from_group, with_kwargs=True)


def has_submodule(module: nn.Module, path: str) -> bool:
    return any(name == path for name, _ in module.named_modules())


@dataclass
class _Running:
    """State of the layer that is running."""

    length: int | None = None
    """Length of its whole sequence; None between layers."""


def _attach_to_layers(layers: Sequence[nn.Module], rules: FamilyShards, tp: TensorParallel) -> _Running:
    """Scatters before the first layer, gathers after the last."""
    running = _Running()
    skippable = [any(has_submodule(layer, path) for path in rules.skippable) for layer in layers]
    # A layer that may be left out cannot be relied on to gather, so those at the end scatter and gather by themselves.
    gathers = [all(skippable[index + 1 :]) for index in range(len(layers))]
    may_get_whole = [all(skippable[:index]) or any(gathers[:index]) for index in range(len(layers))]

    def scatter_before(may_get_whole: bool) -> Callable[..., Any]:
        def scatter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def cut(hidden: Tensor) -> Tensor:
                known = getattr(hidden, _LENGTH, None)
                assert known is not None or may_get_whole, (
                    "the activation between two layers lost its sequence length: something else than a layer touched it"
                )
                running.length = hidden.shape[-2] if known is None else known
                shard = scatter_sequence(hidden, tp) if known is None else hidden
                setattr(shard, _LENGTH, running.length)
                return shard

            args, kwargs = _replace_hidden(args, kwargs, cut)
            for name in rules.sequence_inputs:
                if kwargs.get(name) is not None:
                    kwargs[name] = sequence_shard(kwargs[name], tp)
            return args, kwargs

        return scatter

    def read_again(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.length = getattr(args[0] if args else kwargs.get("hidden_states"), _LENGTH, running.length)

    def mark(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        setattr(output, _LENGTH, running.length)
        running.length = None

    def gather(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        assert running.length is not None
        whole = gather_sequence(output, running.length, tp)
        running.length = None
        return whole

    for layer, gets_whole, gives_whole in zip(layers, may_get_whole, gathers, strict=True):
        layer.register_forward_pre_hook(scatter_before(gets_whole), with_kwargs=True)
        for part in layer.children():
            part.register_forward_pre_hook(read_again, with_kwargs=True)
        layer.register_forward_hook(gather if gives_whole else mark)
    return running


def _replace_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], replace: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """HF modules get their hidden states first, or by the name `hidden_states`."""
    if args:
        return (replace(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": replace(kwargs["hidden_states"])}
