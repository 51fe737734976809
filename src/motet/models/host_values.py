"""Small integers that the host knows while a model's own forward runs on a device: token ids, grids, sizes of images.

Forwards of whole multimodal models ask for such values all the time (`tolist`, `item`, boolean indices, sums that are
compared), and the host would wait for the device each time. `HostValues` say that they are on the device, and compute
on the host as long as they meet nothing that is there. Where they do, a copy goes to the device from pinned memory, and
nobody waits. `values_known` does the same for what a forward makes of Python's numbers, or moves to the device itself.

Limits: functions of autograd and vmap do not see what such a tensor is. To them it is one on the host, which a device
refuses. transformers makes masks of models' own rules under vmap; here it gives the rule indices that broadcast.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import masking_utils

from motet.devices import has_own_memory, to_device

INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
REPEATING = {torch.repeat_interleave, Tensor.repeat_interleave}
MAKING = {torch.tensor, torch.as_tensor, torch.arange}
OPERATORS = "add sub mul div truediv floordiv mod pow and or xor lshift rshift"
IN_PLACE = {f"__i{name}__" for name in OPERATORS.split()}
FILLED_LATER = {
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty),
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
}
"""Functions whose results are made on the device: values of the device may be written into them."""


class HostValues(Tensor):
    """Values on the host, of a tensor that is to be on a device."""

    target: torch.device

    @staticmethod
    def of(values: Tensor, target: torch.device) -> Tensor:
        """The values as a tensor of `target`. Of a CPU they are themselves."""
        if not has_own_memory(target):
            return values
        made = values.as_subclass(HostValues)
        made.target = target
        return made

    def on_host(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = next(tensor.target for tensor in tensors if isinstance(tensor, HostValues))
        if func == Tensor.device.__get__:
            return target
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return target.type == "cuda"
        if func is Tensor.to:
            return _moved(*args, **kwargs)
        if func is Tensor.expand_as and isinstance(args[0], HostValues):  # Of the other, its shape is enough.
            return args[0].expand(args[1].shape)
        if func is Tensor.cuda:
            return args[0].clone()  # Already there, as far as a model can tell.
        if func is Tensor.cpu:
            return args[0].on_host().clone()
        if func in FILLED_LATER or any(has_own_memory(tensor.device) for tensor in tensors if _is_plain(tensor)):
            if _writes_into(func) and isinstance(args[0], HostValues):
                raise RuntimeError(f"{_name(func)}: cannot write values of the device into values that the host knows")
            return _on_device(func, args, kwargs, target)
        kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        if isinstance(made, Tensor):
            return args[0] if _writes_into(func) else HostValues.of(made, target)
        if isinstance(made, tuple | list) and any(isinstance(each, Tensor) for each in made):
            parts = [HostValues.of(each, target) if isinstance(each, Tensor) else each for each in made]
            return type(made)(parts) if type(made) in (tuple, list) else type(made)(*parts)
        return made


class _Knowing(TorchFunctionMode):
    """Makes copies of the host's tensors to the device without a wait."""

    def __init__(self, target: torch.device) -> None:
        super().__init__()
        self._target = target

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        of_numbers = func in MAKING and not any(isinstance(each, Tensor) for each in (*args, *kwargs.values()))
        if of_numbers and self._is_target(kwargs.get("device")):
            return self._there(func(*args, **{**kwargs, "device": torch.device("cpu")}))
        if func is Tensor.cuda and _is_plain(args[0]) and not has_own_memory(args[0].device):
            return self._there(args[0].clone())
        if func is Tensor.to and _is_plain(args[0]) and not has_own_memory(args[0].device):
            device, dtype = _destination(*args[1:], **kwargs)
            if self._is_target(device):
                return self._there(args[0].clone() if dtype is None else args[0].to(dtype, copy=True))
        if func in INDEXING and _is_plain(args[0]) and has_own_memory(args[0].device):
            return _on_device(func, args, kwargs, self._target)
        return func(*args, **kwargs)

    def _there(self, values: Tensor) -> Tensor:
        return to_device(values, self._target) if values.is_floating_point() else HostValues.of(values, self._target)

    def _is_target(self, device: Any) -> bool:
        return device is not None and torch.device(device).type == self._target.type


@contextmanager
def values_known(target: torch.device) -> Iterator[None]:
    """Around a forward of a model on `target`."""
    if not has_own_memory(target):
        yield
        return
    with _Knowing(target):
        yield


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, computing on the host where the host knows all of the tensors that it is given."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [tensor for tensor in tensors if isinstance(tensor, HostValues)]
        if not known or len(known) < len(tensors):
            return function(*args, **kwargs)
        target = known[0].target
        made = function(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        return tree_map(lambda leaf: HostValues.of(leaf, target) if isinstance(leaf, Tensor) else leaf, made)

    return call


_expand_by_vmap: Any = masking_utils._vmap_expansion_sdpa


def _expand(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The mask of a rule for (sample, head, query, key), from the places in each of these dimensions."""

    def mask(*places: Tensor) -> Tensor:
        first = places[0]
        if not isinstance(first, HostValues):
            return cast(Tensor, _expand_by_vmap(rule)(*places))
        sizes = [len(own) for own in places]
        with torch._C.DisableTorchFunction():  # transformers' indices are made for vmap.
            spread = [
                to_device(own.as_subclass(Tensor), first.target).view([-1 if i == axis else 1 for i in range(4)])
                for axis, own in enumerate(places)
            ]
            return rule(*spread).expand(sizes)

    return mask


# The module's functions find it by this name.
masking_utils._vmap_expansion_sdpa = _expand


def _on_device(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.device) -> Any:
    """Calls the function with copies of what is on the host."""
    if func in REPEATING and len(args) > 1 and isinstance(args[1], HostValues):
        kwargs = {"output_size": int(args[1].on_host().sum()), **kwargs}
    if func is Tensor.__getitem__ and isinstance(args[1], HostValues):
        mask = _on_host(args[1])
        if (rows := _without_expanded(mask)).dim() < mask.dim() and mask.dtype == torch.bool:
            return _on_device(func, (args[0], HostValues.of(rows, target)), kwargs, target).flatten()
    if func in INDEXING:
        args = (args[0], _index(args[1]), *args[2:])
    move = _mover(target, func in INDEXING)
    return func(*tree_map(move, args), **tree_map(move, kwargs))


def _mover(target: torch.device, moves_all: bool) -> Callable[[Any], Any]:
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not (isinstance(leaf, HostValues) or moves_all):
            return leaf
        own = _on_host(leaf)
        # Devices take one number of the host's along with their work.
        if own.dim() == 0:
            return own
        rows = _without_expanded(own)
        there = to_device(rows, target)
        return there if rows is own else there[(..., *[None] * (own.dim() - rows.dim()))].expand(own.shape)

    return move


def _without_expanded(values: Tensor) -> Tensor:
    """The values without the last dimensions, along which they are all alike, if memory has them once."""
    while values.dim() > 1 and values.shape[-1] > 1 and values.stride(-1) == 0:
        values = values[..., 0]
    return values


def _index(index: Any) -> Any:
    """An index in which no mask of the host's is left: of these the host knows which places they choose."""
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, Tensor) and part.dtype == torch.bool and part.dim() > 0
        if is_mask and (isinstance(part, HostValues) or not has_own_memory(part.device)):
            parts += _on_host(part).nonzero(as_tuple=True)
        else:
            parts.append(part)
    return tuple(parts) if isinstance(index, tuple) or len(parts) > 1 else parts[0]


def _destination(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """What the arguments of `Tensor.to` say."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    for value in (*args, kwargs.get("other")):
        if isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, str | torch.device) or (isinstance(value, int) and not isinstance(value, bool)):
            device = value
    return None if device is None else torch.device(device), dtype


def _moved(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`values.to(...)`, where either may be on the host."""
    device, dtype = _destination(*args, **kwargs)
    if not isinstance(values, HostValues):  # To the place of another tensor.
        assert device is not None
        return values.to(device=device, dtype=dtype)
    own = values.on_host() if dtype is None else values.on_host().to(dtype)
    if device is not None and device.type == "cpu":
        return own.clone()  # What came from a device shares no memory with it.
    return HostValues.of(own, values.target)


def _on_host(leaf: Any) -> Any:
    return leaf.on_host() if isinstance(leaf, HostValues) else leaf


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not isinstance(tensor, HostValues)


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "")


def _writes_into(func: Callable[..., Any]) -> bool:
    """Whether the function changes its first argument."""
    name = _name(func)
    return func is Tensor.__setitem__ or name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
