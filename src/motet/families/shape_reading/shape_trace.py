"""Records what a model computes, layer by layer, while it runs on the meta device, where tensors have no memory.

The recorder sees every operator below autograd. A product of a matrix with a parameter, or with a view or copy of one,
is a `Product`; an attention that goes through transformers' interface is an `Attend`; any other product is a `Mix` of
activations, counted as torch's `FlopCounterMode` counts it. Tensors of the CPU that meet one of the meta device are
taken there, so that what a model derives from grids and positions alone is really computed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface

ATTENTION = "motet_recorded"
"""Name of the recording attention in transformers' interface."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product of activations with a parameter."""

    parameter: str
    in_features: int
    out_features: int
    rows: int
    num_copies: int = 1
    """Matrices (experts, heads), of which each row meets one."""
    kernel_area: int = 1
    slice: int = 0
    """Offset of the matrix in the parameter."""
    reads: int
    """Identifies the tensor that it reads."""
    reads_input: bool = False
    """Whether that is what the model was given."""


@dataclass(frozen=True, kw_only=True)
class Attend:
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    value_dim: int
    num_queries: int
    num_keys: int


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A product of activations with activations."""

    flops: int


@dataclass(frozen=True, kw_only=True)
class Elementwise:
    """A norm, a scale or an activation function that saves its input."""

    elements: int
    kind: str
    """`norm`, `rms`, `scale` or `activation`."""


Event = Product | Attend | Mix | Elementwise


@dataclass(kw_only=True)
class Trace:
    embed: list[Event] = field(default_factory=list)
    blocks: list[list[Event]]
    head: list[Event] = field(default_factory=list)
    num_tokens: int = 0
    """Number of tokens of the blocks' sequence."""
    hidden_size: int = 0
    outputs: Any = None


def trace(model: nn.Module, blocks: nn.ModuleList | nn.Sequential, inputs: Mapping[str, Any]) -> Trace:
    """Runs `model(**inputs)` and records it. What runs between two blocks belongs to the second of them."""
    found = Trace(blocks=[[] for _ in blocks])
    recorder = _Recorder(model, inputs)
    recorder.events, last = found.embed, len(blocks) - 1

    def enter(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = next(x for x in (*args, *kwargs.values()) if torch.is_tensor(x) and x.is_floating_point())
            found.hidden_size, found.num_tokens = hidden.shape[-1], hidden.numel() // hidden.shape[-1]
            recorder.events = found.blocks[index]

        return hook

    def leave(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            recorder.events = found.head if index == last else found.blocks[index + 1]

        return hook

    def elementwise(kind: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if torch.is_tensor(output):
                recorder.events.append(Elementwise(elements=output.numel(), kind=kind))

        return hook

    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(enter(index), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave(index)).remove)
        for module in model.modules():
            name = type(module).__name__
            kind = "scale" if "LayerScale" in name else "norm" if "Norm" in name and not list(module.children()) else ""
            if kind == "norm" and getattr(module, "bias", None) is None and not isinstance(module, nn.LayerNorm):
                kind = "rms"
            if kind:
                stack.callback(module.register_forward_hook(elementwise(kind)).remove)
        _Recorder.running.append(recorder)
        stack.callback(_Recorder.running.pop)
        stack.enter_context(recorder)
        found.outputs = model(**inputs)
    return found


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{key.shape[1]} heads of keys do not divide {query.shape[1]} of queries")
    _Recorder.running[-1].events.append(
        Attend(
            num_heads=query.shape[1],
            num_key_value_heads=key.shape[1],
            head_dim=query.shape[-1],
            value_dim=value.shape[-1],
            num_queries=query.shape[0] * query.shape[2],
            num_keys=key.shape[2],
        )
    )
    reached = query.sum() + key.sum() + value.sum()
    return reached.expand(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]).clone(), None


AttentionInterface.register(ATTENTION, _attention)

_aten = torch.ops.aten
_ACTIVATIONS = (_aten.gelu, _aten.silu, _aten.relu, _aten.tanh)


class _Recorder(TorchDispatchMode):
    """Appends an event to `events` for every product that runs."""

    running: ClassVar[list["_Recorder"]] = []

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.owner = {_storage(p): name for name, p in model.named_parameters() if p.ndim > 1}
        """Storages of parameters and of copies of them, with the parameter's name."""
        self.given = {_storage(x) for x in inputs.values() if isinstance(x, Tensor)}
        self.kept: list[Tensor] = []
        """Keeps what was read, so that no storage is used again."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if any(t.is_meta for t in tensors) and not all(t.is_meta for t in tensors):
            args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, dict(kwargs)))
        packet = func._overloadpacket
        if packet is _aten._to_copy and tensors[0].is_meta:
            kwargs = {**kwargs, "device": torch.device("meta")}
        out = func(*args, **kwargs)
        if packet in flop_registry or packet is _aten._grouped_mm:
            self.events.append(self._product(packet, args, kwargs, out))
        elif packet in _ACTIVATIONS:
            self.events.append(Elementwise(elements=out.numel(), kind="activation"))
        elif isinstance(out, Tensor) and tensors:
            self._follow(packet, tensors, out)
        return out

    def _follow(self, packet: Any, tensors: Sequence[Tensor], out: Tensor) -> None:
        """A copy of a parameter, or a selection of its rows, is that parameter."""
        own = [self.owner.get(_storage(t)) for t in tensors]
        selects = packet in (_aten.index, _aten.index_select) and tensors[0].ndim > 2
        if own[0] is not None and (selects or all(own)) and _storage(out) not in self.owner:
            self.owner[_storage(out)] = own[0]
            self.kept.append(out)

    def _product(self, packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> Product | Mix:
        if packet is _aten.convolution:
            read, weight, _, stride = args[:4]
            if name := self.owner.get(_storage(weight)):
                kernel = tuple(weight.shape[2:])
                return self._made(
                    name,
                    read,
                    slice=weight.storage_offset(),
                    in_features=weight[0].numel(),
                    out_features=weight.shape[0],
                    rows=out.numel() // out.shape[1],
                    kernel_area=1 if tuple(stride) == kernel else math.prod(kernel),
                )
        elif packet in (_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten._grouped_mm):
            left, right = args[1:3] if packet in (_aten.addmm, _aten.baddbmm) else args[:2]
            if name := self.owner.get(_storage(right)):
                copies = right.shape[0] if right.ndim == 3 and right.stride(0) else 1
                rows = left.numel() // left.shape[-1]
                sizes = {"in_features": right.shape[-2], "out_features": right.shape[-1], "num_copies": copies}
                return self._made(name, left, slice=right.storage_offset(), rows=rows, **sizes)
            if name := self.owner.get(_storage(left)):
                copies = left.shape[0] if left.ndim == 3 and left.stride(0) else 1
                rows = right.numel() // right.shape[-2]
                sizes = {"in_features": left.shape[-1], "out_features": left.shape[-2], "num_copies": copies}
                return self._made(name, right, slice=left.storage_offset(), rows=rows, **sizes)
        return Mix(flops=flop_registry[packet](*args, **kwargs, out_val=out))

    def _made(self, name: str, read: Tensor, **sizes: int) -> Product:
        self.kept.append(read)
        reads = _storage(read)
        return Product(parameter=name, reads=reads, reads_input=reads in self.given, **sizes)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
